"""Flips of the expert choice: near-ties are excused, mistakes are not."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layerproof.measure.routing import FLIP_SIGMAS, compare_choices, is_in_order, reached
from layerproof.tensors.tensor import Tensor

ERROR = 0.001  # of every selection value of the golden
NOISE = FLIP_SIGMAS * np.sqrt(2) * ERROR
TOKENS, EXPERTS = 4, 6


def floats(values):
    return Tensor(np.asarray(values, np.float32), "float32")


def choice(values, dtype=np.int32):
    return Tensor(np.asarray(values, dtype), np.dtype(dtype).name)


class Stage:
    """One prompt of four tokens, six experts, top 2: expert 0 leads, and 1 is ahead of 2 by `gap` at token 1."""

    def __init__(self, gap=0.0):
        self.selection = np.tile([3.0, 2.0, 1.0, 0.5, 0.25, 0.125], (1, TOKENS, 1))
        self.selection[0, 1, 2] = 2.0 - gap
        signs = np.where(np.arange(self.selection.size) % 2, 1, -1).reshape(self.selection.shape)
        self.golden_selection = self.selection + ERROR * signs
        self.truth = np.tile([0, 1], (1, TOKENS, 1))
        self.golden, self.port = self.truth.copy(), self.truth.copy()
        self.valid = np.ones((1, TOKENS), bool)

    def compare(self):
        return compare_choices(
            choice(self.port),
            choice(self.golden),
            choice(self.truth),
            floats(self.golden_selection),
            floats(self.selection),
            self.valid,
        )


def test_equal_choices():
    routing = Stage().compare()
    assert routing.reason() is None and not routing.left_out.any()
    summary = routing.summary()
    assert summary == {
        **{"tokens": TOKENS, "flips": 0, "excused": 0, "golden_flips": 0, "left_out": 0, "largest_margin": 0.0},
        "noise_margin": pytest.approx(NOISE, rel=1e-3),
    }


def test_order_of_the_choice_does_not_matter():
    stage = Stage()
    stage.port = stage.port[..., ::-1].copy()
    assert not stage.compare().flips.any()


@pytest.mark.parametrize(("share", "excused"), [(0.0, True), (0.9, True), (1.1, False), (10, False)])
def test_a_flip_is_excused_up_to_the_noise(share, excused):
    stage = Stage(gap=share * NOISE)
    stage.port[0, 1] = [0, 2]
    routing = stage.compare()
    assert routing.flips.tolist() == [[False, True, False, False]]
    assert (routing.reason() is None) == excused
    assert routing.left_out[0, 1] == excused
    assert routing.largest_margin == pytest.approx(share * NOISE, abs=1e-6)
    if not excused:
        assert "1 of 4 tokens, first [0,1]" in routing.reason()


def test_one_excused_flip_does_not_excuse_another():
    stage = Stage()
    stage.port[0, 1] = [0, 2]
    stage.port[0, 3] = [0, 5]
    routing = stage.compare()
    assert "1 of 4 tokens, first [0,3]" in routing.reason()
    assert routing.summary()["flips"] == 2 and routing.summary()["excused"] == 1
    assert routing.left_out.tolist() == [[False, True, False, False]]


def test_the_widest_gap_of_a_token_counts():
    """The near-tie of 1 and 2 does not excuse that expert 0 is left out too."""
    stage = Stage()
    stage.port[0, 1] = [2, 3]
    assert stage.compare().largest_margin == pytest.approx(3.0 - 0.5)
    assert stage.compare().reason() is not None


@pytest.mark.parametrize("chosen", [[0, 0], [1, 1], [0, EXPERTS], [0, -1], [0, 1 << 20]])
def test_same_expert_twice_or_no_expert_fails(chosen):
    stage = Stage()
    stage.port[0, 1] = chosen
    routing = stage.compare()
    assert "right number of different experts for 1 of 4 tokens, first [0,1]" in routing.reason()
    assert not routing.excused.any() and not routing.left_out.any()
    assert np.isfinite(routing.largest_margin)


def test_flip_of_the_golden_is_left_out_and_no_fault_of_the_port():
    stage = Stage(gap=0.5)
    stage.golden[0, 1] = [0, 2]
    routing = stage.compare()
    assert routing.reason() is None and not routing.flips.any()
    assert routing.left_out.tolist() == [[False, True, False, False]]
    assert routing.summary()["golden_flips"] == routing.summary()["left_out"] == 1


def test_flip_of_the_golden_does_not_excuse_the_same_flip_of_the_port():
    stage = Stage(gap=0.5)
    stage.golden[0, 1] = stage.port[0, 1] = [0, 2]
    assert stage.compare().reason() is not None


@pytest.mark.parametrize("unknown", ["port", "selection"])
def test_flip_of_the_golden_is_left_out_though_the_choice_of_the_port_is_not_known(unknown):
    stage = Stage(gap=0.5)
    stage.golden[0, 1] = [2, 0]
    stage.golden[0, 2] = [1, 0]
    routing = compare_choices(
        None if unknown == "port" else choice(stage.port),
        choice(stage.golden),
        choice(stage.truth),
        None if unknown == "selection" else floats(stage.golden_selection),
        None if unknown == "selection" else floats(stage.selection),
        stage.valid,
    )
    assert routing.left_out.tolist() == [[False, True, False, False]]
    summary = routing.summary()
    assert summary["golden_flips"] == summary["left_out"] == 1 and summary["flips"] is summary["excused"] is None


def test_padding_does_not_count():
    stage = Stage(gap=0.5)
    stage.port[0, 3] = [5, 5]
    stage.golden[0, 3] = [4, 5]
    stage.golden_selection[0, 3] += 100
    stage.valid[0, 3] = False
    routing = stage.compare()
    assert routing.reason() is None and not routing.left_out.any()
    stage.port[0, 1] = [0, 2]
    assert "chooses other experts" in stage.compare().reason(), "malformed padding is not what is wrong"
    assert routing.tokens == 3 and routing.noise_margin == pytest.approx(NOISE, rel=1e-3)


def test_nothing_but_padding():
    stage = Stage()
    stage.valid[:] = False
    assert stage.compare().summary()["tokens"] == 0 and stage.compare().reason() is None


def test_exact_golden_excuses_exact_ties_alone():
    for gap, excused in ((0.0, True), (1e-3, False)):
        stage = Stage(gap)
        stage.golden_selection = stage.selection
        stage.port[0, 1] = [0, 2]
        assert (stage.compare().reason() is None) == excused


@pytest.mark.parametrize("port", [choice(np.zeros((1, TOKENS, 3))), floats(np.zeros((1, TOKENS, 2)))])
def test_other_shape_or_dtype_is_left_to_the_tap(port):
    stage = Stage()
    selection = floats(stage.selection)
    routing = compare_choices(port, choice(stage.golden), choice(stage.truth), selection, selection, stage.valid)
    assert not routing.compared and routing.reason() is None and not routing.flips.any()


def test_another_width_of_integers_is_no_difference():
    stage = Stage()
    stage.port = stage.port.astype(np.int64)
    selection = floats(stage.selection)
    routing = compare_choices(
        *(choice(stage.port, np.int64), choice(stage.golden), choice(stage.truth), selection, selection, stage.valid)
    )
    assert routing.reason() is None


def test_selections_that_are_no_numbers_excuse_nothing_and_stay_json():
    import json

    choice = np.array([[[0, 1], [0, 1]]], np.int32)
    flipped = np.array([[[0, 1], [0, 2]]], np.int32)
    selection = np.full((1, 2, 3), np.nan, np.float32)
    routing = compare_choices(
        Tensor(flipped, "int32"),
        Tensor(choice, "int32"),
        Tensor(choice, "int32"),
        Tensor(selection, "float32"),
        Tensor(selection, "float32"),
        np.ones((1, 2), bool),
    )
    assert routing is not None and routing.reason() is not None
    json.dumps(routing.summary(), allow_nan=False)


@pytest.mark.parametrize(("reach", "row"), [(0, "0100010"), (1, "0110011"), (3, "0111111"), (1 << 30, "0111111")])
def test_a_flip_reaches_the_tokens_behind_it(reach, row):
    flips = np.array([[False] * 7, [place in (1, 5) for place in range(7)]])
    assert reached(flips, reach).tolist() == [[False] * 7, [mark == "1" for mark in row]]


@given(st.integers(0, 2**32 - 1), st.floats(0, 0.5))
def test_values_are_in_order_if_no_two_that_lie_apart_are_exchanged(seed, margin):
    random = np.random.default_rng(seed)
    exact, mine = random.standard_normal((2, 1, 2, 5)).round(1)
    wrong = ((exact[..., :, None] > exact[..., None, :] + margin) & (mine[..., :, None] < mine[..., None, :])).any()
    port, truth = (Tensor(values.astype(np.float32), "float32") for values in (mine, exact.astype(np.float32)))
    exact_gaps = np.abs(exact[..., :, None] - exact[..., None, :])
    assume((np.abs(exact_gaps - margin) > 1e-6).all())  # which of two roundings is larger is not the question
    assert is_in_order(port, truth, np.ones((1, 2), bool), margin) == (not wrong)
    assert is_in_order(Tensor(np.exp(truth.data), "float32"), truth, np.ones((1, 2), bool), margin)


def test_near_ties_that_are_too_many_for_chance_fail():
    """A small systematic error of the router flips near-ties alone, but more of them than any variant."""
    tokens = 300
    selection = np.tile(np.array([0.9, 0.5, 0.5001, 0.1]), (1, tokens, 1))
    truth = np.tile(np.array([0, 2], np.int32), (1, tokens, 1))
    noisy = selection + np.random.default_rng(0).normal(0, 0.001, selection.shape)

    known = np.zeros((1, tokens), bool)

    def routing(flipped):
        port = truth.copy()
        port[0, :flipped] = [0, 1]
        choices = (Tensor(choice, "int32") for choice in (port, truth, truth))
        selections = (Tensor(of.astype(np.float32), "float32") for of in (noisy, selection))
        return compare_choices(*choices, *selections, np.ones((1, tokens), bool), known)

    assert routing(3).excused.sum() == 3 and routing(3).reason() is None, "one in a hundred"
    assert "no variant of the golden does so for 4 of them" in routing(4).reason()
    known[0, 100:110] = True
    assert routing(13).reason() is None
    assert "too many for chance" in routing(14).reason()
    assert routing(13).summary()["left_out"] == 23
