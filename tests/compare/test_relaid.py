"""Taps in layouts that are not the golden's: recognised by their shape, read and written back without a doubt."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerproof.compare.relaid import PADDED_LEFT, as_golden, at_last_tokens, can_be_forced
from layerproof.layouts import layouts
from layerproof.taps import collecting, tap
from layerproof.tensors.tensor import Tensor

BATCH, SEQ, HEADS, DIM = 3, 30, 4, 16
FLAT, APART = (BATCH, SEQ, HEADS * DIM), (BATCH, SEQ, HEADS, DIM)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fp32(tensor):
    return Tensor(tensor.contiguous().numpy(), "float32")


def padded(tensor, positions=128):
    more = torch.full((tensor.shape[0], positions - tensor.shape[1], *tensor.shape[2:]), 7.0)
    return torch.cat([tensor, more], 1)


LAYOUTS = {
    "[batch, seq, heads, head_dim]": (FLAT, lambda x: x.reshape(APART)),
    "[batch, seq, features]": (APART, lambda x: x.reshape(FLAT)),
    "[batch, heads, seq, head_dim]": (APART, lambda x: x.transpose(1, 2)),
    "[batch, heads, seq, head_dim] of a projection": (FLAT, lambda x: x.reshape(APART).transpose(1, 2)),
    "[batch, features, seq]": (FLAT, lambda x: x.transpose(1, 2)),
    "[seq, batch, features]": (FLAT, lambda x: x.transpose(0, 1)),
    "[tokens, features]": (FLAT, lambda x: x.reshape(BATCH * SEQ, -1)),
    "[tokens, heads, head_dim]": (APART, lambda x: x.reshape(BATCH * SEQ, HEADS, DIM)),
    "[batch, 128 positions, features]": (FLAT, padded),
    "[batch, 128 positions, heads, head_dim]": (APART, padded),
    "[batch, heads, seq, head_dim] of a longer prompt": (APART, lambda x: padded(x).transpose(1, 2)),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_another_layout_is_read_as_the_golden_and_written_back(text):
    shape, lay_out = LAYOUTS[text]
    golden = numbers(*shape)
    port = lay_out(golden)
    taps, texts = as_golden({"attn.q": fp32(port)}, {"attn.q": fp32(golden)})
    assert texts == {"attn.q": text.split(" of a ")[0]}
    assert np.array_equal(taps["attn.q"].data, golden.numpy())
    assert can_be_forced("attn.q", fp32(port), {"attn.q": fp32(golden)})
    with collecting({"attn.q": golden * 2}):
        forced = tap("attn.q", port)
    assert torch.equal(forced, torch.where(port == 7, port, port * 2)), "padding stays as it is"


@pytest.mark.parametrize("lay_out", [lambda x: x, lambda x: x.transpose(1, 2)])
def test_a_tap_that_is_padded_on_the_left_is_not_read(lay_out):
    """The shorter prompts of a batch begin further to the right."""
    golden = numbers(*APART)
    port = torch.zeros(BATCH, 128, HEADS, DIM)
    for row, length in enumerate((SEQ, 12, 5)):
        port[row, 128 - length :] = golden[row, :length]
    port = fp32(lay_out(port))
    assert as_golden({"attn.q": port}, {"attn.q": fp32(golden)}) == ({"attn.q": port}, {"attn.q": PADDED_LEFT})


@pytest.mark.parametrize("factor", [0, 3, 30, -1, torch.nan])
def test_wrong_numbers_are_not_taken_for_padding_on_the_left(factor):
    golden = numbers(*APART)
    taps, texts = as_golden({"attn.q": fp32(padded(golden * factor))}, {"attn.q": fp32(golden)})
    assert taps["attn.q"].shape == APART and texts == {"attn.q": "[batch, 128 positions, heads, head_dim]"}


@pytest.mark.parametrize("seq", [1, 4])
def test_logits_of_the_last_token_alone_are_put_in_its_place(seq):
    golden = numbers(2, seq, 5)
    valid = np.ones((2, seq), bool)
    placed, counted = at_last_tokens("lm_head", fp32(golden[:, -1]), fp32(golden), valid)
    assert placed.shape == golden.shape and np.array_equal(placed.data[:, -1], golden[:, -1].numpy())
    assert counted.sum() == 2 and counted[:, -1].all()


@pytest.mark.parametrize(
    "shape",
    [
        (BATCH, SEQ - 1, HEADS * DIM),  # too short
        (BATCH, SEQ, HEADS * DIM - 1),
        (BATCH, SEQ, HEADS * DIM + 1),  # no other dim is ever cut
        (BATCH + 1, SEQ, HEADS * DIM),
        (BATCH * SEQ * HEADS * DIM,),
        (BATCH, SEQ),
        (HEADS, BATCH, SEQ, DIM),
    ],
)
def test_what_does_not_hold_the_same_numbers_stays_as_it_is(shape):
    port = fp32(numbers(*shape))
    assert as_golden({"attn.out": port}, {"attn.out": fp32(numbers(*FLAT))}) == ({"attn.out": port}, {})


@given(st.permutations(range(3)))
def test_a_tap_of_the_golden_s_shape_is_never_re_ordered(order):
    golden = numbers(8, 8, 8)
    port = fp32(golden.permute(order))
    taps, texts = as_golden({"attn.out": port}, {"attn.out": fp32(golden)})
    assert taps["attn.out"] is port and not texts


def test_outputs_are_read_by_later_stages_and_stay_as_they_are():
    port = {"out": fp32(numbers(*APART)), "out/shared_kv": fp32(numbers(*APART))}
    golden = dict.fromkeys(port, fp32(numbers(*FLAT)))
    assert as_golden(port, golden) == (port, {})


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("wrap", [lambda x: x, padded, lambda x: x.reshape(BATCH * SEQ, -1)])
def test_q_k_and_v_in_one_tensor_are_taken_apart(grouped, wrap):
    key_heads = 2
    golden = {
        "attn.q": numbers(*APART),
        "attn.k": numbers(BATCH, SEQ, key_heads, DIM),
        "attn.v": numbers(BATCH, SEQ, key_heads, DIM) + 1,
    }
    if grouped:
        q = golden["attn.q"].reshape(BATCH, SEQ, key_heads, 2, DIM)
        parts = [q, golden["attn.k"][:, :, :, None], golden["attn.v"][:, :, :, None]]
        fused = torch.cat(parts, 3).flatten(2)
    else:
        fused = torch.cat([tensor.flatten(2) for tensor in golden.values()], 2)
    wanted = {name: fp32(tensor.flatten(2)) for name, tensor in golden.items()} | {"attn.q_rot": fp32(golden["attn.q"])}
    taps, texts = as_golden(dict.fromkeys(golden, fp32(wrap(fused))), wanted)
    assert set(texts.values()) == {"[batch, seq, key heads, (q, k, v)]" if grouped else "[batch, seq, q + k + v]"}
    for name in golden:
        assert np.array_equal(taps[name].data, wanted[name].data), name
    assert not can_be_forced("attn.q", fp32(wrap(fused)), wanted), "which of the two it is only numbers can tell"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.lists(st.integers(1, 6), min_size=3, max_size=4))
def test_every_layout_takes_each_number_once(shape, golden):
    port = np.arange(math.prod(shape)).reshape(shape)
    for one in layouts("attn.out", shape, {"attn.out": golden}):
        read = one.read(port, golden)
        assert read.shape == tuple(golden)
        assert len(np.unique(read)) == read.size, "no number twice"
