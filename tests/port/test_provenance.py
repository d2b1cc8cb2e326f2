"""Which tensors on disk went into a converted one, whatever torch did with them on the way."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layerproof.errors import StageError
from layerproof.failures import as_stage_error
from layerproof.port.provenance import Tracing, Watched

A, B = torch.randn(4, 4), torch.randn(4, 4)


def traced(convert):
    """Sources and transposition of what `convert` makes of the weights a and b."""
    tracing = Tracing()
    weights = Watched({"a": A.clone(), "b": B.clone()}, tracing)
    with tracing:
        made = convert(weights)
    return tracing.sources(made), tracing.is_transposed(made)


def into(weights):
    made = torch.empty(2, 4, 4)
    made[0] = weights["a"]
    made[1].copy_(weights["b"])
    return made


def module(weights):
    linear = torch.nn.Linear(4, 4, bias=False)
    linear.load_state_dict({"weight": weights["a"]})
    return linear.state_dict()["weight"]


@pytest.mark.parametrize(
    ("convert", "sources"),
    [
        (lambda w: w["a"], {"a"}),
        (lambda w: w["a"].to(torch.bfloat16).clone(), {"a"}),
        (lambda w: torch.nn.Parameter(w["a"]).detach(), {"a"}),
        (lambda w: w["a"][1:3].contiguous(), {"a"}),
        (lambda w: torch.stack([w["a"], w["b"]]), {"a", "b"}),
        (lambda w: torch.cat([w["a"], w["b"]], out=torch.empty(8, 4)), {"a", "b"}),
        (lambda w: w["a"] * w["b"], {"a", "b"}),
        (into, {"a", "b"}),
        (module, {"a"}),
        (lambda w: torch.zeros_like(w["a"]), set()),
        (lambda w: w["a"].new_ones(3), set()),
        (lambda w: torch.from_numpy(w["a"].numpy().copy()), set()),
        (lambda w: torch.ones(4), set()),
    ],
)
def test_sources(convert, sources):
    assert traced(convert) == (sources, False)


@pytest.mark.parametrize(
    ("convert", "transposed"),
    [
        (lambda w: w["a"].T, True),
        (lambda w: w["a"].t().contiguous(), True),
        (lambda w: w["a"].mT.T, False),
        (lambda w: w["a"].transpose(dim0=0, dim1=1), True),
        (lambda w: torch.permute(w["a"], dims=(1, 0)), True),
        (lambda w: torch.movedim(w["a"], 0, 1), True),
        (lambda w: w["a"].moveaxis(0, 1).clone(), True),
        (lambda w: torch.einsum("ij->ji", w["a"]), True),
        (lambda w: w["a"].as_strided((4, 4), (1, 4)), True),
        (lambda w: w["a"][:, ::2], False),
        (lambda w: w["a"].unsqueeze(-1), False),
        (lambda w: w["a"].view(torch.int16), False),
        (lambda w: w["a"].transpose(-1, 0).bfloat16(), True),
        (lambda w: w["a"].permute(1, 0), True),
        (lambda w: torch.permute(w["a"], (0, 1)), False),
        (lambda w: w["a"].view(2, 2, 4).transpose(0, 1).reshape(4, 4), False),  # as RoPE is reordered
        (lambda w: torch.stack([w["a"], w["b"]]).transpose(1, 2), True),
        (lambda w: torch.empty(1, 4, 4).index_copy_(0, torch.tensor([0]), w["a"].T[None]), True),
    ],
)
def test_transposition(convert, transposed):
    sources, found = traced(convert)
    assert sources and found == transposed


@pytest.mark.parametrize(
    ("convert", "constant"),
    [
        (lambda w: torch.ones_like(w["a"]), True),
        (lambda w: 1 / torch.arange(0, 4, 2).float(), True),
        (lambda w: w["a"].new_ones(3).to(torch.bfloat16), True),
        (lambda w: w["a"] * 0, False),
        (lambda w: torch.from_numpy(w["a"].numpy().copy()), False),
        (lambda w: torch.tensor(w["a"].tolist()) + 1, False),
        (lambda w: torch.empty(4, 4).copy_(w["a"]), False),
        (lambda w: (made := torch.empty(4, 4), made.numpy().fill(3))[0], False),
        (lambda w: torch.empty(4, 4).copy_(torch.from_numpy(w["a"].numpy().copy())), False),
        (lambda w: (made := torch.empty(2, 4, 4), made[1].copy_(torch.from_numpy(w["a"].numpy().copy())))[0], False),
        (lambda w: (made := torch.empty(4, 4), made[0].numpy().fill(3))[0], False),
    ],
)
def test_what_is_made_of_nothing_on_disk(convert, constant):
    tracing = Tracing()
    with tracing:
        made = convert(Watched({"a": A.clone()}, tracing))
    assert tracing.is_constant(made) == constant


def test_memory_that_is_used_again_has_no_past():
    tracing = Tracing()
    weights = Watched({"a": A}, tracing)
    gc.freeze()  # or each collection looks through all that the tests have imported
    try:
        with tracing:
            for _ in range(50):
                weights["a"].clone()
                gc.collect()
                assert not tracing.sources(torch.empty(4, 4))
    finally:
        gc.unfreeze()


def test_looking_for_a_name_reads_nothing():
    weights = Watched({"a": A, "b": B}, Tracing())
    assert "a" in weights and "c" not in weights and list(weights) == ["a", "b"] and len(weights) == 2
    assert weights.reads == {"a": 0, "b": 0}
    assert weights["a"] is A and weights.get("c") is None
    assert weights.reads == {"a": 1, "b": 0}


def test_a_tensor_that_the_stage_does_not_have_is_named_with_those_that_it_has():
    tied = Watched({"model.embed_tokens.weight": A}, Tracing())
    with pytest.raises(StageError) as error:
        tied["lm_head.weight"]
    assert isinstance(error.value, KeyError)
    assert str(as_stage_error(error.value)) == (
        'convert() reads "lm_head.weight", which this stage does not have on disk. It has model.embed_tokens.weight.'
    )
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
    layer = Watched({f"model.layers.3.{part}.weight": A for part in parts}, Tracing())
    with pytest.raises(StageError, match=r"It has model\.layers\.3\.self_attn\.q_proj\.weight, .* and 2 others\.$"):
        layer["model.layers.3.attention.q_proj.weight"]


FREED = """
import torch
from layerproof.port.provenance import Tracing, Watched

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

tracing = Tracing()
weights = Watched({str(number): torch.ones(1000, 1000, dtype=torch.bfloat16) for number in range(100)}, tracing)
before = resident()
with tracing:
    for name in weights:
        weights[name].float()
print((resident() - before) / 4e6)
"""


@pytest.mark.slow
def test_memory_of_what_a_conversion_dropped_is_used_again():
    command = [sys.executable, "-c", FREED]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "workflow")}
    copies = float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert copies < 30  # of the hundred that were made
