"""Agreement of logits against a plain computation, token by token, in Python floats."""

import math

import numpy as np
import pytest

from layerproof.measure import logits
from layerproof.measure.logits import TOP_K, compare_logits
from layerproof.tensors.tensor import Tensor

SHAPE = (3, 7, 11)


def tensor(values):
    return Tensor(np.asarray(values, np.float32), "float32")


def draw(seed, near=None):
    random = np.random.default_rng(seed)
    values = random.standard_normal(SHAPE) * 3 if near is None else near + random.standard_normal(SHAPE)
    return values.astype(np.float32)


@pytest.fixture
def sides():
    """Port, golden and validity: padding on the right, one token only in the last prompt."""
    golden = draw(0)
    valid = np.ones(SHAPE[:2], bool)
    valid[1, 4:] = False
    valid[2, 1:] = False
    return draw(1, near=golden), golden, valid


def softmax(row):
    weights = [math.exp(value - max(row)) for value in map(float, row)]
    return [weight / sum(weights) for weight in weights]


def plain(port, golden, valid):
    tokens = [(row, column) for row in range(SHAPE[0]) for column in range(SHAPE[1]) if valid[row, column]]
    kl, shared, equal = [], [], []
    greedy = {"golden": {}, "port": {}}
    for token in tokens:
        p, q = softmax(golden[token]), softmax(port[token])
        kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        ranked = {
            side: sorted(range(SHAPE[2]), key=lambda index, of=of: -of[index])
            for side, of in (("golden", golden[token]), ("port", port[token]))
        }
        shared.append(len(set(ranked["golden"][:TOP_K]) & set(ranked["port"][:TOP_K])) / TOP_K)
        equal.append(ranked["golden"][0] == ranked["port"][0])
        for side in greedy:
            greedy[side][token[0]] = ranked[side][0]
    sequences = {side: list(tokens.values()) for side, tokens in greedy.items()}
    return {
        "kl": {"mean": pytest.approx(sum(kl) / len(kl)), "max": pytest.approx(max(kl))},
        "top_k": {"k": TOP_K, "shared": pytest.approx(sum(shared) / len(shared))},
        "argmax": pytest.approx(sum(equal) / len(equal)),
        "greedy": sequences | {"equal": sequences["golden"] == sequences["port"]},
    }


@pytest.mark.parametrize("chunk", [1, 11, 33, 1 << 20])
def test_against_a_plain_computation(sides, chunk, monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", chunk)
    port, golden, valid = sides
    result = compare_logits(tensor(port), tensor(golden), valid)
    assert result == plain(port, golden, valid)
    assert 0 < result["argmax"] < 1 and 0 < result["top_k"]["shared"] < 1, "the example must tell right from wrong"


def test_gaps_in_the_valid_tokens(sides, monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 22)
    port, golden, valid = sides
    valid[0, [0, 2, 3]] = False
    port[0, [0, 2, 3]] = np.nan
    assert compare_logits(tensor(port), tensor(golden), valid) == plain(port, golden, valid)


def test_equal_logits(sides):
    _, golden, valid = sides
    result = compare_logits(tensor(golden), tensor(golden), valid)
    assert result["kl"] == {"mean": 0, "max": 0}
    assert result["top_k"]["shared"] == result["argmax"] == 1 and result["greedy"]["equal"]


def test_an_offset_is_no_difference_and_large_logits_do_not_overflow(sides):
    _, golden, valid = sides
    result = compare_logits(tensor(golden + 8192), tensor(golden), valid)
    assert result["kl"]["max"] == pytest.approx(0, abs=1e-5)
    assert compare_logits(tensor(golden * 1e4), tensor(golden), valid)["kl"]["max"] > 1


def test_kl_is_of_the_golden_to_the_port():
    golden, port = [math.log(0.9), math.log(0.1)], [math.log(0.5), math.log(0.5)]
    result = compare_logits(tensor([[port]]), tensor([[golden]]), np.ones((1, 1), bool))
    assert result["kl"]["mean"] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-6)
    assert result["top_k"]["shared"] == 1, "of a vocabulary smaller than the k"


def test_greedy_is_the_token_after_each_prompt(sides):
    port, golden, valid = sides
    port[:] = golden
    last = (1, 3)
    port[last] = 0
    port[last][10] = golden[last].max() + 1
    result = compare_logits(tensor(port), tensor(golden), valid)
    assert result["greedy"]["port"][1] == 10
    assert result["greedy"]["equal"] == (golden[last].argmax() == 10)
    assert result["greedy"]["golden"] == [
        int(golden[0, 6].argmax()),
        int(golden[1, 3].argmax()),
        int(golden[2, 0].argmax()),
    ]


def test_prompt_without_a_token_is_left_out(sides):
    port, golden, valid = sides
    valid[1] = False
    assert len(compare_logits(tensor(port), tensor(golden), valid)["greedy"]["port"]) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_has_no_agreement(sides, value, side):
    sides[side][2, 0, 3] = value
    port, golden, valid = sides
    assert compare_logits(tensor(port), tensor(golden), valid) is None
    valid[2, 0] = False
    assert compare_logits(tensor(port), tensor(golden), valid) is not None, "padding does not count"


def test_nothing_to_compare(sides):
    port, golden, valid = sides
    assert compare_logits(tensor(port), tensor(golden), np.zeros_like(valid)) is None
    assert compare_logits(tensor(port[:, :, :-1]), tensor(golden), valid) is None
