"""transformers' own stage with one piece exchanged, as a kernel or a fusion is tried."""

import pytest
from test_port import SETTINGS, failures, run
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from layerproof.errors import StageError
from layerproof.failures import as_stage_error
from layerproof.tensors import hdf5

pytestmark = pytest.mark.slow

NORM = '''
import torch

class Norm(torch.nn.Module):
    """A norm of one's own with the weight of the model's."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

def patch(model, part, stage):
    assert stage.layer == 1 and stage.name == "layer_001" and stage.options == {"eps": EPS}
    assert part is model.model.layers[1]
    part.input_layernorm = Norm(part.input_layernorm.weight, stage.options["eps"])
'''


def patched(golden, tmp_path, source, options=None):
    """Reason of every tap of layer 1 that does not pass, of the model that this patch changes."""
    (tmp_path / "patch.py").write_text(source)
    settings = SETTINGS | {"backend": "transformers", "module": str(tmp_path / "patch.py"), "options": options or {}}
    run(golden / "model", golden, tmp_path, settings, ["layer_001"])
    return failures(golden, tmp_path, "layer_001")


@pytest.fixture(scope="module")
def golden(golden_of):
    return golden_of("qwen3")


def test_a_patch_that_does_nothing_leaves_the_model_as_it_is(golden, tmp_path):
    assert patched(golden, tmp_path, "def patch(model, part, stage):\n    pass\n") == {}


@pytest.mark.parametrize(
    "body",
    [
        "own = torch.nn.SiLU(); part.mlp.act_fn = own",
        "own = torch.nn.SiLU(); part.mlp.act_fn.forward = own.forward",
        "own = torch.nn.SiLU(); part.mlp.forward = lambda x: m(part.mlp, own, x)",
        "own = torch.nn.SiLU(); from transformers.models.qwen3 import modeling_qwen3 as file; "
        "file.Qwen3MLP.forward = lambda self, x: m(self, own, x)",
    ],
    ids=["module", "forward of a module", "function", "function of the class"],
)
def test_a_module_that_a_patch_makes_may_come_in_any_way(golden, tmp_path, monkeypatch, body):
    monkeypatch.setattr(Qwen3MLP, "forward", Qwen3MLP.forward)  # is put back
    mlp = "def m(self, act, x):\n    return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))\n"
    assert patched(golden, tmp_path, f"import torch\n{mlp}def patch(model, part, stage):\n    {body}\n") == {}


@pytest.mark.parametrize("change", ["weight.data.mul_(2)", "weight.data = own(part.mlp.down_proj.weight.data * 2)"])
def test_a_module_that_a_patch_makes_may_only_help_to_change_weights(golden, tmp_path, change):
    body = f"own = torch.nn.Identity(); part.mlp.down_proj.{change}"
    found = patched(golden, tmp_path, f"import torch\ndef patch(model, part, stage):\n    {body}\n")
    assert next(iter(found)) == "mlp.out"


def test_a_kernel_that_computes_the_same_passes(golden, tmp_path):
    assert patched(golden, tmp_path, NORM.replace("EPS", "1e-06"), {"eps": 1e-6}) == {}


def test_a_kernel_that_does_not_fails_at_its_own_tap(golden, tmp_path):
    found = patched(golden, tmp_path, NORM.replace("EPS", "0.01"), {"eps": 0.01})
    assert next(iter(found)) == "input_norm"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("part.more = torch.nn.Linear(2, 2, device='meta')", "layer_001: patch() leaves more.weight without a value"),
        (
            "import copy; model.model.layers[1] = copy.deepcopy(part).to('meta')",
            "layer_001: patch() leaves self_attn.q_proj.weight without a value",
        ),
        ("part.no_such_module.weight", "no_such_module"),
        ("return torch.nn.Identity()", "layer_001: patch() returns a Identity, which nothing uses. Change part itself"),
        ("part = torch.nn.Identity()", "layer_001: patch() makes a Identity, but changes nothing in the model"),
    ],
)
def test_a_patch_that_goes_wrong_is_told(golden, tmp_path, body, message):
    with pytest.raises((StageError, AttributeError), match=message.replace("(", r"\(").replace(")", r"\)")):
        patched(golden, tmp_path, f"import torch\ndef patch(model, part, stage):\n    {body}\n")


def test_an_error_behind_a_patch_has_the_line_of_the_model(golden, tmp_path):
    with pytest.raises(TypeError) as raised:
        patched(golden, tmp_path, "def patch(model, part, stage):\n    part.mlp = None\n")
    trace = raised.value.__traceback__
    while trace and "site-packages" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next  # the frames of this test would be a user's
    assert str(as_stage_error(raised.value.with_traceback(trace))).startswith("TypeError at modeling_qwen3.py:")


def test_what_a_patch_changed_is_looked_for_in_the_patch(golden, tmp_path):
    patched(golden, tmp_path, NORM.replace("EPS", "0.01"), {"eps": 0.01})
    with hdf5.reading(tmp_path / "layer_001.h5") as file:
        places = hdf5.document_if_there(file, hdf5.PLACES)
    file = str(tmp_path / "patch.py")
    assert places["input_norm"] == {"file": file, "function": "Norm.forward"}, "of a module of its own"
    assert places["attn.q"] == {"file": file, "function": "patch"}, "of the model's own"
