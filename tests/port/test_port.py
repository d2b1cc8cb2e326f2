"""A port stage on XLA: right where the port is right, clear where it is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs import config_with
from layerproof.compare import stage as compare_stages
from layerproof.errors import StageError
from layerproof.measure.rule import LIMIT
from layerproof.model import checkpoint, handed, loading
from layerproof.model.stages import all_stages, previous_stage
from layerproof.port import prepare
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner, load_module
from layerproof.tensors import hdf5
from models import CONFIGS, save
from streaming import TOKENS, stream

pytestmark = pytest.mark.slow

SETTINGS = {"backend": "xla", "module": "workflow/ports/minimax_m2.py", "device": "CPU", "dtype": "bfloat16"}
"""The config's `port`."""


def run(model, results, out, settings, stages=None):
    """Runs port stages fed with the golden's inputs, in one process; returns the facts by stage."""
    layers = checkpoint.num_layers(checkpoint.read_config(model))
    stages = stages or all_stages(layers)
    descriptions, _ = loading.describe_stages(model, stages, trust_remote_code=False)
    runner = Runner.start(model, TOKENS, config_with(port=settings))
    facts = {}
    for stage in stages:
        previous = previous_stage(stage, layers)
        fed = handed.stage_input(results / f"{previous}.h5" if previous else None, stage)
        facts[stage] = port_stage.make_stage(runner, stage, descriptions[stage], fed, out / f"{stage}.h5")
    return facts


def failures(results, out, stage):
    """Reason of every tap that does not pass."""
    golden = results / f"{stage}.h5", results / f"{stage}.noise.h5"
    result = compare_stages.compare_stage(stage, *golden, out / f"{stage}.h5", TOKENS.valid, LIMIT)
    assert result["taps"], result
    return {name: tap["reason"] for name, tap in result["taps"].items() if tap["status"] != "pass"}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_unmodified_transformers_stages_pass_on_xla(model_type, golden_of, tmp_path):
    golden = golden_of(model_type)
    stages = run(golden / "model", golden, tmp_path, SETTINGS | {"backend": "transformers", "module": None})
    for stage in stages:
        failed = failures(golden, tmp_path, stage)
        assert failed == {}, stage


def test_a_port_of_its_own_needs_no_more_packages_than_its_image_has():
    """The Neuron SDK's image has no transformers: `requirements/port.in` says what is added to it."""
    needed = {
        name: set(re.findall(r"^[\w-]+", Path(f"requirements/{name}.in").read_text(), re.MULTILINE))
        for name in ("run", "port")
    }
    missing = {name.replace("-", "_") for name in needed["run"] - needed["port"] - {"torch", "torch-xla", "numpy"}}
    assert "transformers" in missing
    program = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({missing}))
import layerproof.__main__, layerproof.port
for module in pkgutil.iter_modules(layerproof.port.__path__, "layerproof.port."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_of_the_port_says_which_function_hands_each_tap_over(golden_of, tmp_path):
    golden = golden_of("minimax_m2")
    run(golden / "model", golden, tmp_path, SETTINGS, ["layer_001", "norm"])
    places = hdf5.read_document(tmp_path / "layer_001.h5", hdf5.PLACES)
    port = "workflow/ports/minimax_m2.py"
    assert places["router.scores"] == {"file": port, "function": "MoE.route"}
    assert places["attn.q"] == {"file": port, "function": "Attention.forward"}, "a module's output: who calls it"
    assert places["mlp.out"] == {"file": port, "function": "MoE.forward"}, "but of a module of the port itself"
    assert places["out"] == {"file": port, "function": "Layer.forward"}
    assert hdf5.read_document(tmp_path / "norm.h5", hdf5.PLACES)["out"]["function"] == "FinalNorm.forward"


def test_a_port_may_change_the_options_that_it_is_given(golden_of, tmp_path):
    """As NxD Inference does: a record of the job could not be written otherwise."""
    source = tmp_path / "changes.py"
    change = "    stage.options['router']['dtype'] = torch.float32\n    config, dtype ="
    source.write_text(Path(SETTINGS["module"]).read_text().replace("    config, dtype =", change))
    model = golden_of("minimax_m2") / "model"
    options = {"router": {"dtype": "float32"}}
    runner = Runner.start(model, TOKENS, config_with(port=SETTINGS | {"module": str(source), "options": options}))
    descriptions, _ = loading.describe_stages(model, ["embed"], trust_remote_code=False)
    port_stage.make_stage(runner, "embed", descriptions["embed"], None, tmp_path / "embed.h5")
    assert runner.settings.port.options == {"router": {"dtype": "float32"}}


def test_a_port_finds_torch_as_its_import_left_it(tmp_path):
    """Whatever an earlier stage of the same process did."""
    source = tmp_path / "with_default.py"
    source.write_text(Path(SETTINGS["module"]).read_text() + "\ntorch.set_default_dtype(torch.bfloat16)\n")
    settings = config_with(port=SETTINGS | {"module": str(source)})
    before = torch.get_default_dtype()
    try:
        found = []
        for left in (torch.float32, torch.float64):
            torch.set_default_dtype(left)
            runner = Runner.start(tmp_path, TOKENS, settings)
            found.append((runner.port, torch.get_default_dtype()))
        assert found[0] == found[1] and found[0][1] == torch.bfloat16
        source.write_text(source.read_text() + "EDITED = True\n")
        assert Runner.start(tmp_path, TOKENS, settings).port.EDITED
        Runner.start(tmp_path, TOKENS, config_with(port=SETTINGS))
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "gone_package.port",
            None,
            r"No module named 'gone_package'\). Install gone_package, or add its directory to PYTHONPATH.",
        ),
        ("gone_module", None, r"No module named 'gone_module'\). Correct port.module."),
        ("uses.py", "import gone_package", r"Install gone_package, or add its directory to PYTHONPATH."),
        ("breaks.py", "1 / 0", r"ZeroDivisionError: division by zero\). Correct port.module."),
    ],
)
def test_a_port_that_cannot_be_imported_says_why(name, text, message, tmp_path):
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(StageError, match=message):
        load_module(str(tmp_path / name) if text else name)


OWN = """
import torch

class Own(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, stage.config["hidden_size"], dtype=stage.dtype))
        self.register_buffer("drawn", torch.rand(1), persistent=False)

    def forward(self, x, positions, valid):
        return (valid[..., None] * self.drawn * self.weight.sum(0) + torch.rand_like(self.drawn)).to(self.weight.dtype)

def build(stage):
    return Own(stage)

def convert(stage, weights):
    {line}
"""


def own_port(tmp_path, line):
    save("minimax_m2", tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN.format(line=line))
    return tmp_path / "model", SETTINGS | {"module": str(tmp_path / "own.py")}


def test_what_a_port_draws_does_not_depend_on_the_stages_before(tmp_path):
    model, settings = own_port(
        tmp_path, "return {'weight': torch.ones(2, stage.config['hidden_size'], dtype=stage.dtype)}"
    )
    stream(model, tmp_path)
    description, _ = loading.describe_stages(model, ["layer_000"], trust_remote_code=False)
    fed = handed.stage_input(tmp_path / "embed.h5", "layer_000")
    found = []
    for drawn in (0, 3):
        runner = Runner.start(model, TOKENS, config_with(port=settings))
        torch.rand(drawn), torch.rand(drawn, device=runner.environment.device).cpu()
        port_stage.chain_stage(runner, "layer_000", description["layer_000"], fed, tmp_path / f"{drawn}.h5")
        found.append(hdf5.to_torch(hdf5.read(tmp_path / f"{drawn}.h5", "port/out")))
    assert torch.equal(*found)


def test_memory_that_convert_yields_again_after_it_wrote_into_it_is_told(tmp_path):
    """XLA on the CPU takes it where it is, so that the first parameter would have the second one's values."""
    lines = (
        "held = torch.zeros(2, stage.config['hidden_size'], dtype=stage.dtype)",
        "yield 'weight', held",
        "yield 'again', held.fill_(1.0)",
    )
    model, settings = own_port(tmp_path, "\n    ".join(lines))
    stream(model, tmp_path)
    with pytest.raises(StageError, match="reused the buffer of a tensor it had already yielded"):
        run(model, tmp_path, tmp_path / "port", settings, ["embed"])


def test_shipped_port_passes_and_compiles_once_a_kind(tmp_path, monkeypatch):
    # No other test's size, whose graphs this process may have compiled.
    monkeypatch.setitem(CONFIGS, "minimax_m2", CONFIGS["minimax_m2"] | {"vocab_size": 89, "hidden_size": 56})
    save("minimax_m2", tmp_path / "model")
    stages = stream(tmp_path / "model", tmp_path / "golden")
    facts = run(tmp_path / "model", tmp_path / "golden", tmp_path / "port", SETTINGS)
    for stage in stages:
        assert failures(tmp_path / "golden", tmp_path / "port", stage) == {}, stage
    assert len({fact["kind"] for fact in facts.values()}) == 4
    by_stage = {stage: fact["compilations"] for stage, fact in facts.items()}
    # Of a layer two graphs, without taps and with them; the others have no tap besides their output.
    assert by_stage == {"embed": 1, "layer_000": 2, "layer_001": 0, "layer_002": 0, "norm": 1, "lm_head": 1}


@pytest.fixture
def golden(golden_of):
    """A small MiniMax-M2 and its golden stages."""
    return golden_of("minimax_m2")


def run_edited(golden, tmp_path, old, new):
    """Reason of every tap of layer 1 that does not pass, with a line of the shipped port replaced."""
    source = Path(SETTINGS["module"]).read_text()
    assert source.count(old) == 1, old
    (tmp_path / "edited.py").write_text(source.replace(old, new))
    settings = SETTINGS | {"module": str(tmp_path / "edited.py")}
    run(golden / "model", golden, tmp_path, settings, ["layer_001"])
    return failures(golden, tmp_path, "layer_001")


MOE_OUT = "        return x + self.moe(self.post_attention_norm(x))\n"


def then(statement):
    """The end of the shipped layer, with a statement between the MoE and the return."""
    return f"        out = x + self.moe(self.post_attention_norm(x))\n        {statement}\n        return out\n"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x[0, 0, 0]", "shape"),
        ("x[0, 0]", "shape"),
        ("x.flatten(0, 1)[1:]", "shape"),
        ("torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))", "times what is allowed"),
        ("x.to(torch.float8_e4m3fn)", "times what is allowed"),
        ("x.double()", "times what is allowed"),
        ("x.to(torch.int16)", "is int64 where"),
        ("x.to(torch.uint8)", "is int64 where"),
        ("x > 0", "is bool where"),
        ("x[:0]", "shape"),
    ],
)
def test_a_tap_of_any_shape_and_dtype_ends_as_a_verdict(golden, tmp_path, value, reason):
    reshaped = "context.reshape(batch, seq, self.heads * self.head_dim)"
    handed = f'context = {reshaped}\n        x = 2 * context\n        tap("attn.context", {value})'
    failed = run_edited(golden, tmp_path, f'context = tap("attn.context", {reshaped})', handed)
    assert failed.keys() == {"attn.context"} and reason in failed["attn.context"]


def test_a_port_may_be_called_like_a_library(golden, tmp_path):
    (tmp_path / "torch.py").write_text(Path(SETTINGS["module"]).read_text())
    settings = SETTINGS | {"module": str(tmp_path / "torch.py")}
    run(golden / "model", golden, tmp_path, settings, ["layer_001"])
    assert failures(golden, tmp_path, "layer_001") == {}


def test_a_port_that_gives_another_output_each_time_is_told(golden, tmp_path):
    with pytest.raises(StageError, match="the port is not deterministic"):
        run_edited(golden, tmp_path, MOE_OUT, then("out = out + torch.randn_like(out)"))


@pytest.mark.parametrize(
    ("change", "by_what"),
    [
        ("out * (1 + (MoE.calls % 2 == 0))", "relative L2 1"),
        ("out * torch.full_like(out, 1 if MoE.calls % 2 else torch.nan)", "its shape, or where it is NaN or Inf"),
    ],
)
def test_taps_that_change_the_output_are_told(golden, tmp_path, change, by_what):
    with pytest.raises(StageError, match=rf"taps change the stage's output \({by_what}\)"):
        run_edited(golden, tmp_path, MOE_OUT, then(f"MoE.calls = getattr(MoE, 'calls', 0) + 1; out = {change}"))


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_tokens_that_seem_to_go_to_other_experts_with_taps_must_be_near_ties(golden, tmp_path, tokens):
    """Two graphs round differently, and a near-tie then is decided otherwise; five tokens are too many for that."""
    where = f"torch.arange(out.numel(), device=out.device).reshape(out.shape) < {tokens} * out.shape[-1]"
    edit = then(f"MoE.calls = getattr(MoE, 'calls', 0) + 1; out = out * (1 + 2.0 * (MoE.calls % 2) * ({where}))")
    if tokens == 5:
        with pytest.raises(StageError, match="taps change the stage's output"):
            run_edited(golden, tmp_path, MOE_OUT, edit)
        return
    said = run_edited(golden, tmp_path, MOE_OUT, edit)
    assert f"taps change the stage's output for {tokens} of 37 tokens at which no choice is nearly tied" in said["out"]
    with hdf5.reading(tmp_path / "layer_001.h5") as file:
        assert hdf5.attributes(file)["other_choices"] == list(range(tokens))


def test_an_output_of_flat_tokens_is_told_by_its_shape(golden, tmp_path):
    line = "        return x + self.moe(self.post_attention_norm(x))\n"
    flat = line.replace("return x +", "return (x +").replace("\n", ").flatten(0, 1)\n")
    assert "the port has shape" in run_edited(golden, tmp_path, line, flat)["out"]


def test_a_choice_in_small_integers_is_as_good(golden, tmp_path):
    choice = 'tap("router.choice", choice.sort(-1).values.int())'
    assert run_edited(golden, tmp_path, choice, choice.replace("int()", "to(torch.uint8)")) == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"attn.v": "attention.v_proj"', '"attn.v": "attention"', None),
        (MOE_OUT, then('tap("mlp.out", (x, x))'), 'tap: "mlp.out" is a tuple, not a tensor. Write tap'),
        (MOE_OUT, then('tap("mlp.outs", x)'), 'tap: "mlp.outs" is not a tap. '),
        (
            MOE_OUT,
            "        return (x, None)\n",
            "layer_001: the port returns tuple, neither one tensor nor",
        ),
        (
            "        return Layer(config, dtype)\n",
            "        return None\n",
            "layer_001: build() returns NoneType, not a",
        ),
        (
            "def convert(",
            "def convert(stage, weights):\n    return None\n\n\ndef unused(",
            "convert() must return the module's",
        ),
        ("TAPS = {", "TAPS = []\nUNUSED = {", "TAPS must map taps to submodules"),
        ('"attn.v": ', '"attn.vv": ', 'TAPS: "attn.vv" is not a tap. '),
    ],
)
def test_what_is_no_tap_is_told(golden, tmp_path, old, new, message):
    if message is None:
        assert run_edited(golden, tmp_path, old, new).keys() == {"attn.v"}
        return
    with pytest.raises(StageError) as error:
        run_edited(golden, tmp_path, old, new)
    assert message in str(error.value)


def test_products_of_float16_on_the_cpu_are_summed_in_float32():
    """XLA sums them in fp16, and those of bf16 not; when that part fails, the port need not do it."""
    import torch_xla

    device, random = torch_xla.device(), torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 64, 256, generator=random), torch.randn(3, 256, 64, generator=random) / 16

    def error(dtype, multiply):
        """In units of one rounding of the exact product."""
        exact = left.to(dtype).double() @ right.to(dtype).double()
        found = multiply(left.to(dtype).to(device), right.to(dtype).to(device)).cpu().double()
        return float((found - exact).norm() / (exact.to(dtype).double() - exact).norm())

    def bias(like):
        return torch.zeros(64, dtype=like.dtype, device=like.device)

    def convolved(x, weight):
        return torch.nn.functional.conv1d(x.T[None], weight.T[..., None])[0].T

    products = (
        torch.bmm,
        lambda a, b: torch.stack([torch.mm(*pair) for pair in zip(a, b, strict=True)]),
        lambda a, b: torch.stack([torch.addmm(bias(a), *pair) for pair in zip(a, b, strict=True)]),
        lambda a, b: torch.baddbmm(bias(a), a, b),
        torch.matmul,
        lambda a, b: a @ b,
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        lambda a, b: torch.stack([torch.nn.functional.linear(x, w.T) for x, w in zip(a, b, strict=True)]),
        torch.ops.aten.bmm.default,
        lambda a, b: torch.stack([convolved(*pair) for pair in zip(a, b, strict=True)]),
    )
    assert error(torch.float16, torch.bmm) > 5 and error(torch.bfloat16, torch.bmm) < 2
    for multiply in products:
        with prepare._WideSums():
            assert error(torch.float16, multiply) < 2


def test_a_port_in_float16_may_write_into_parts_of_a_new_tensor():
    """As linear attention does, step by step."""
    import torch_xla

    device = torch_xla.device()
    with prepare._WideSums():
        parts = torch.zeros(3, 2, dtype=torch.float16, device=device)
        parts[:, 1] = torch.ones(3, device=device)
    assert parts.cpu().tolist() == [[0, 1]] * 3
