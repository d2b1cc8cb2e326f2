"""Stages as compiled graphs: the same numbers, and what tracing made a constant is told."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from configs import config_with
from layerproof.compare import audit
from layerproof.model import handed, loading
from layerproof.model.checkpoint import num_layers, read_config
from layerproof.model.stages import all_stages
from layerproof.port import compiled
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5
from models import save
from port.test_port import SETTINGS, failures, run
from streaming import TOKENS, stream

pytestmark = pytest.mark.slow

COMPILED = SETTINGS | {"compile": "xla", "compiler_flags": []}


@pytest.fixture(scope="module")
def minimax(tmp_path_factory):
    """A checkpoint, and the golden's results for it."""
    folder = tmp_path_factory.mktemp("minimax")
    save("minimax_m2", folder / "model")
    stream(folder / "model", folder / "golden")
    return folder


def found(folder, out, stage):
    """The kinds of findings of a stage that its compiled graph gave, with their texts."""
    descriptions, _ = loading.describe_stages(folder / "model", [stage], trust_remote_code=False)
    books = audit.audit_stage(
        descriptions[stage], folder / "golden" / f"{stage}.h5", out / f"{stage}.h5", SETTINGS["dtype"]
    )
    kinds = ("value baked in", "constant baked in", "compiled", "compiled dtype")
    return {one["kind"]: one["text"] for one in books["findings"] if one["kind"] in kinds}


def edited(folder, *replacements):
    source = Path(SETTINGS["module"]).read_text()
    for old, new in replacements:
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = folder / "edited_port.py"
    path.write_text(source)
    return COMPILED | {"module": str(path)}


@pytest.mark.parametrize("backend", ["xla", "transformers"])
def test_a_right_port_passes_compiled_and_nothing_is_found(minimax, tmp_path, backend):
    settings = COMPILED | {"backend": backend}
    run(minimax / "model", minimax / "golden", tmp_path, settings)
    for stage in all_stages(num_layers(read_config(minimax / "model"))):
        assert failures(minimax / "golden", tmp_path, stage) == {}, stage
        assert found(minimax, tmp_path, stage) == {}, stage
        document = hdf5.read_document(tmp_path / f"{stage}.h5", hdf5.COMPILED)
        taps = hdf5.read_group(tmp_path / f"{stage}.h5", "port")
        assert set(document["change"]) == {name for name, tap in taps.items() if name != "router.choice"}


def test_without_compile_a_port_is_run_as_it_is(minimax, tmp_path):
    run(minimax / "model", minimax / "golden", tmp_path, SETTINGS, ["layer_001"])
    with hdf5.reading(tmp_path / "layer_001.h5") as file:
        assert hdf5.COMPILED not in file


def test_a_number_that_is_read_while_tracing_is_told(minimax, tmp_path):
    """As it is the port is right, since it is traced anew for each input."""
    settings = edited(
        tmp_path,
        ("wide = x.float()\n", "wide = x.float()\n        scale = x[0, 0, 0].item()\n"),
        ("return wide.to(x.dtype) * self.weight", "return wide.to(x.dtype) * self.weight / (x[0, 0, 0] / scale)"),
    )
    run(minimax / "model", minimax / "golden", tmp_path / "as_it_is", settings | {"compile": None}, ["layer_001"])
    assert failures(minimax / "golden", tmp_path / "as_it_is", "layer_001") == {}
    run(minimax / "model", minimax / "golden", tmp_path / "port", settings, ["layer_001"])
    assert "input_norm" in failures(minimax / "golden", tmp_path / "port", "layer_001")
    told = found(minimax, tmp_path / "port", "layer_001")
    assert ".item()" in told["value baked in"]
    assert "first at input_norm" in told["compiled"]


def test_a_tensor_that_is_no_buffer_is_told_by_its_name(minimax, tmp_path):
    settings = edited(
        tmp_path,
        (
            "self.weight = nn.Parameter(torch.empty(size, dtype=dtype))\n",
            "self.weight = nn.Parameter(torch.empty(size, dtype=dtype))\n"
            "        self.scale = torch.linspace(1, 2, size, device='cpu')\n",
        ),
        (
            "return wide.to(x.dtype) * self.weight",
            "return (wide * (self.scale.to(x.device) * 0 + 1)).to(x.dtype) * self.weight",
        ),
    )
    run(minimax / "model", minimax / "golden", tmp_path / "port", settings, ["norm"])
    assert failures(minimax / "golden", tmp_path / "port", "norm") == {}
    told = found(minimax, tmp_path / "port", "norm")
    assert set(told) == {"constant baked in"}
    assert "scale (float32, [64]): a constant of the compiled graph" in told["constant baked in"]


def test_chains_run_compiled(minimax, tmp_path):
    model = minimax / "model"
    descriptions, _ = loading.describe_stages(model, ["layer_001"], trust_remote_code=False)
    settings = edited(
        tmp_path, ("weights = self.route(x).to(x.dtype)", "weights = self.route(x).to(x.dtype) * x[0, 0, 0].item()")
    )
    fed = handed.stage_input(minimax / "golden" / "layer_000.h5", "layer_001")
    outputs = []
    for how in (None, "xla"):
        runner = Runner.start(model, TOKENS, config_with(port=settings | {"compile": how}))
        port_stage.chain_stage(runner, "layer_001", descriptions["layer_001"], fed, tmp_path / f"{how}.h5")
        outputs.append(hdf5.to_torch(hdf5.read(tmp_path / f"{how}.h5", "port/out")))
    assert not torch.equal(*outputs)


def test_neuron_gets_weights_and_inputs_its_flags_and_a_folder(minimax, tmp_path, monkeypatch):
    """By a stand-in for torch_neuronx: tensors on the host, and a tensor in place of a tuple of one."""
    calls = []

    def trace(function, example_inputs, compiler_workdir, compiler_args):
        calls.append((example_inputs, compiler_workdir, compiler_args))
        graph = compiled.trace_xla(function, [tensor.to("xla") for tensor in example_inputs], "graph")

        def run(*tensors):
            assert {tensor.device.type for tensor in tensors} == {"cpu"}
            outputs = tuple(tensor.cpu() for tensor in graph.run([tensor.to("xla") for tensor in tensors]))
            return outputs if len(outputs) > 1 else outputs[0]

        return run

    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(trace=trace))
    monkeypatch.setattr(port_stage, "COMPILER_FILES", tmp_path / "neuron")
    settings = COMPILED | {"compile": "neuron", "compiler_flags": ["--auto-cast=none", "--model-type=transformer"]}
    run(minimax / "model", minimax / "golden", tmp_path / "port", settings, ["layer_001"])
    assert failures(minimax / "golden", tmp_path / "port", "layer_001") == {}
    assert found(minimax, tmp_path / "port", "layer_001") == {}

    plain, tapped = calls
    for example_inputs, folder, flags in calls:
        assert flags == ["--auto-cast=none", "--model-type=transformer"]
        assert Path(folder).parent == tmp_path / "neuron" / "port" / "layer_001" and Path(folder).is_dir()
        assert {tensor.device.type for tensor in example_inputs} == {"cpu"}
        *weights, x, positions, valid = example_inputs
        assert len(weights) == 13 and valid.all()
        assert x.shape[:2] == valid.shape and positions.shape == valid.shape[1:]
    assert plain[1] != tapped[1]


class Cache(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("kept", torch.zeros(size))

    def forward(self, x):
        self.kept[:, : x.shape[1]] = x
        return self.kept * 2


def test_a_buffer_that_is_written_in_place_is_no_constant():
    inputs = [torch.rand(2, 3).to("xla")]
    module = Cache((2, 5)).to("xla")
    stage = compiled.Stage(module, inputs, [inputs[0].flip(1)], lambda inputs, with_taps: {"out": module(*inputs)})
    found = {name: tensor.cpu() for name, tensor in stage.compiled(compiled.trace_xla, False).items()}
    torch.testing.assert_close(found["out"][:, :3], inputs[0].cpu() * 2)
    document = compiled.describe(stage, found, found)
    assert document == {"change": {"out": 0.0}, "dtypes": {}, "constants": [], "depends_on_values": False}
    assert not module.kept.cpu().any(), "tracing left its values in the module"


def test_what_is_not_finite_on_both_sides_is_no_change():
    infinite, nan = float("inf"), float("nan")
    one = torch.tensor([1.0, infinite, -infinite, nan])

    def change(other):
        taps = {"out": torch.tensor(other)}
        stage = compiled.Stage(
            nn.Identity(), [one.to("xla")], [one.to("xla")], lambda inputs, with_taps: {"out": inputs[0] * 1}
        )
        return compiled.describe(stage, taps, {"out": one})["change"]["out"]

    assert change([1.0, infinite, -infinite, nan]) == 0
    assert change([2.0, infinite, -infinite, nan]) == 1
    assert change([1.0, -infinite, -infinite, nan]) is None
    assert change([1.0, infinite, -infinite, 0.0]) is None
