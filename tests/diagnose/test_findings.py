"""Where an error is: each sentence for an error of that form, none for noise, and no other form taken for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerproof.diagnose.findings import findings
from layerproof.measure.groups import bf16_rounding
from layerproof.tensors.tensor import Tensor

BATCH, SEQ, HEADS, DIM = 3, 24, 8, 16
VALID = np.ones((BATCH, SEQ), bool)
VALID[1, 10:] = False
LIMIT = 1.5


def said(change, seed=0, shape=(BATCH, SEQ, HEADS * DIM), head_dim=DIM, experts=None, compared=VALID):
    """The findings on a rounded tensor whose fp64 values `change` alters in place or returns anew."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal(shape).astype(np.float32)
    port = truth.astype(np.float64)
    changed = change(port)
    port = port if changed is None else changed
    with np.errstate(invalid="ignore"):
        port = np.where(np.isfinite(port), port + bf16_rounding(np.nan_to_num(port)), port).astype(np.float32)
    return findings(Tensor(port, "float32"), Tensor(truth, "float32"), compared, VALID, None, head_dim, experts, LIMIT)


def scale(at, by=1.1):
    def change(port):
        port[at] *= by

    return change


@given(st.integers(0, 10_000))
def test_of_a_rounding_there_is_nothing_to_say(seed):
    assert said(lambda port: None, seed) == []


CASES = {
    "a multiple": (lambda port: 0.5 * port, "It is 0.5 times what it should be, everywhere."),
    "a larger multiple": (lambda port: 8.0 * port, "It is 8 times what it should be, everywhere."),
    "an offset": (lambda port: port + 0.25, "It is what it should be plus 0.25, everywhere."),
    "one head": (scale(np.s_[..., 3 * DIM : 4 * DIM]), "Only head 3 of 8 is wrong."),
    "two heads": (scale(np.s_[..., 2 * DIM : 4 * DIM]), "Only heads 2 and 3 of 8 are wrong."),
    "one channel": (scale(np.s_[..., 77]), "Only channel 77 of 128 is wrong."),
    "few channels": (scale(np.s_[..., [5, 90, 91]]), "Only channels 5, 90 and 91 of 128 are wrong."),
    "half of each head": (
        lambda port: port * (1 + 0.1 * (np.arange(HEADS * DIM) % DIM < DIM // 2)),
        "Only dims 0 to 7 of the 16 of each head are wrong.",
    ),
    "some dims of each head": (
        lambda port: port * (1 + 0.1 * np.isin(np.arange(HEADS * DIM) % DIM, [0, 1, 2, 8, 9, 10])),
        "Only 6 dims between 0 and 10 of the 16 of each head are wrong.",
    ),
    "even dims": (
        lambda port: port * (1 + 0.1 * (np.arange(HEADS * DIM) % 2 == 0)),
        "Only the even dims of each head are wrong.",
    ),
    "long positions": (scale(np.s_[:, 16:]), "Positions before 16 are right, and all from there on are wrong."),
    "one position": (scale(np.s_[:, 4]), "Only position 4 is wrong, in prompts 0, 1 and 2."),
    "two prompts": (scale(np.s_[1:]), "Only prompts 1 and 2 are wrong."),
    "one prompt": (scale(np.s_[2]), "Only prompt 2 is wrong."),
    "first position right": (scale(np.s_[:, 1:]), "Only position 0 is right."),
    "one token": (scale(np.s_[0, 7]), "Only position 7 is wrong, in prompt 0."),
    "growing": (
        lambda port: port * (1 + 0.3 * (np.arange(SEQ)[:, None] / SEQ) ** 2),
        "The error grows with the position",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_said_to_be_where_it_is(case):
    change, sentence = CASES[case]
    sentences = said(change)
    assert any(found.startswith(sentence) for found in sentences), sentences


def test_the_last_token_of_each_prompt():
    def change(port):
        for row, length in enumerate(VALID.sum(axis=1)):
            port[row, length - 1] *= 1.1

    assert said(change)[0] == "Only the last token of prompts 0, 1 and 2 is wrong."


def test_a_token_that_is_left_out_does_not_move_the_last_one():
    compared = VALID.copy()
    compared[:, 5] = False
    assert said(scale(np.s_[:, 22]), compared=compared) == ["Only position 22 is wrong, in prompts 0 and 2."]


def test_a_factor_near_one_is_told_with_the_digits_that_it_takes():
    assert said(lambda port: port * 1.02) == ["It is 1.02 times what it should be, everywhere."]


def test_a_shard_of_channels_that_are_no_heads():
    assert said(scale(np.s_[..., 32:64]), head_dim=None) == [
        "Only part 1 of 4 equal parts of the channels is wrong, as if a shard were."
    ]


def test_tokens_of_an_expert():
    random = np.random.default_rng(1)
    experts = np.zeros((BATCH, SEQ, 8), bool)
    np.put_along_axis(experts, random.integers(0, 8, (BATCH, SEQ, 1)), True, axis=-1)

    def change(port):
        port[experts[..., 5]] *= 1.1

    assert "Only tokens that go to expert 5 are wrong." in said(change, head_dim=None, experts=experts)


def test_numbers_that_are_none_are_all_that_is_said():
    def change(port):
        port[0, 3, :5] = np.nan
        port[2, 1] *= 2

    assert said(change) == ["5 of its 7424 numbers are NaN or Inf, in 1 of 58 tokens, the first of them [0,3]."]


def test_padding_is_not_looked_at():
    assert said(scale(np.s_[1, 10:], 100.0)) == []


@pytest.mark.parametrize("shift", [0.004, 0.02, 0.2])
def test_of_one_token_that_is_wrong_in_all_its_channels_no_head_is_blamed(shift):
    def change(port):
        port[2, 9] += shift

    assert [sentence for sentence in said(change) if "head" in sentence or "channel" in sentence] == []


def test_of_one_token_that_is_wrong_in_one_head_the_head_is_told():
    assert "Only head 3 of 8 is wrong." in said(scale(np.s_[2, 9, 48:64], 2.0))


@pytest.mark.parametrize("kind", ["int32", "nothing valid"])
def test_of_what_cannot_be_compared_nothing_is_said(kind):
    truth = np.zeros((1, 2, 4), np.int32 if kind == "int32" else np.float32)
    dtype = "int32" if kind == "int32" else "float32"
    valid = np.full((1, 2), kind != "nothing valid")
    assert findings(*(Tensor(truth, dtype),) * 2, valid, valid, None, None, None, LIMIT) == []


def test_another_shape_is_all_that_is_said():
    truth, valid = np.zeros((1, 2, 4), np.float32), np.ones((1, 2), bool)
    port, truth = Tensor(truth[..., :3], "float32"), Tensor(truth, "float32")
    wrong = "It has shape [1, 2, 3] where the golden has [1, 2, 4]."
    assert findings(port, truth, valid, valid, None, None, None, LIMIT) == [wrong]
