"""What feeds what is measured from the model, and taps of one's own take part in comparison and report's order."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import config_with
from layerproof.compare import stage as compare_stages
from layerproof.errors import StageError, UserError
from layerproof.golden import feeds
from layerproof.golden import stage as golden_stage
from layerproof.golden.transformers_stage import check_submodules, run_stage
from layerproof.model import loading
from layerproof.model.handed import StageInput
from layerproof.model.resolve import resolve
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.taps import merged
from layerproof.tensors import hdf5
from models import save
from streaming import TOKENS

pytestmark = pytest.mark.slow

OWN = {"mlp.experts": "mlp.experts"}


def measured(name, directory, stage, own_taps=None):
    save(name, directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32, attn_implementation="eager")
    ids, x = torch.randint(3, 90, (2, 12)), torch.randn(2, 12, model.config.hidden_size)
    inputs = model.eval(), stage, x, ids, torch.ones_like(ids, dtype=torch.bool)
    taps = run_stage(*inputs, own_taps=own_taps or {})
    return {fed.name: set(fed.fed_by) for fed in feeds.measure(*inputs, merged([list(taps)]), own_taps or {})}


def test_a_dense_layer(tmp_path):
    fed = measured("qwen3", tmp_path, "layer_000")
    assert fed["attn.context"] == {"attn.q_rot", "attn.k_rot", "attn.v"}
    assert fed["mlp.gate"] == {"post_attn_norm"} and fed["out"] == {"attn.out", "mlp.out"}
    assert fed["input_norm"] == set()


def test_attention_and_mlp_side_by_side(tmp_path):
    fed = measured("cohere2", tmp_path, "layer_000")
    assert fed["mlp.gate"] == fed["attn.q"] == {"input_norm"}


def test_an_own_tap_lies_between_those_that_feed_it_and_those_that_it_feeds(tmp_path):
    fed = measured("minimax_m2", tmp_path, "layer_001", OWN)
    assert list(fed).index("router.weights") < list(fed).index("mlp.experts") < list(fed).index("mlp.out")
    assert fed["mlp.experts"] == {"post_attn_norm", "router.choice", "router.weights"}
    assert fed["mlp.out"] == {"mlp.experts"}


def test_marks_pass_through_views_and_what_is_written_in_place():
    flow = feeds._Flow()
    with flow:
        both = torch.ones(2, 4)
        q = flow.mark("q")(both[:, :2], {})
        k = flow.mark("k")(both[:, 2:], {})
        buffer = torch.zeros(3)
        buffer[1:].copy_(k[0])
        flow.mark("from k")(buffer, {})
        flow.mark("from q")(torch.stack([q, q]).sum(), {})
    assert flow.fed_by == {"q": set(), "k": set(), "from k": {"k"}, "from q": {"q"}}


@pytest.mark.parametrize(("path", "near"), [("mlp.expert", "mlp.experts"), ("attn.q_proj", "self_attn.q_proj")])
def test_a_submodule_that_no_layer_has_is_refused(tmp_path, path, near):
    save("minimax_m2", tmp_path / "model")
    model = loading.meta_model(tmp_path / "model", False, torch.float32)
    check_submodules(model, OWN)
    with pytest.raises(UserError, match=f'golden.taps: mine: no layer has a submodule "{path}".*{near}'):
        check_submodules(model, {"mine": path})


def test_a_name_that_is_canonical_already_is_refused(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"golden\.taps: attn\.q is a canonical tap already"):
        resolve({"inputs": {"prompts": "prompts.txt"}, "golden": {"taps": {"attn.q": "self_attn"}}})


@pytest.mark.parametrize("declared", [OWN, {}], ids=["in golden.taps", "by its module's name"])
def test_an_own_tap_of_golden_and_port_is_compared(declared, tmp_path):
    save("minimax_m2", tmp_path / "model")
    description = loading.describe_stages(tmp_path / "model", ["layer_001"], trust_remote_code=False)[0]["layer_001"]
    source = Path("workflow/ports/minimax_m2.py").read_text()
    old = '"mlp.out": "moe"'
    assert source.count(old) == 1
    (tmp_path / "port.py").write_text(source.replace(old, f'"mlp.experts": "moe", {old}'))
    port = {"module": str(tmp_path / "port.py"), "device": "CPU"}
    settings = config_with(port=port, golden={"device": "cpu", "taps": declared})
    x = hdf5.to_array(torch.randn(*TOKENS.ids.shape, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    hdf5.write(tmp_path / "before.h5", {"golden": {"out": x}})
    files = tmp_path / "golden.h5", tmp_path / "noise.h5"
    golden_stage.make_stage(
        "layer_001", tmp_path / "model", description, TOKENS, tmp_path / "before.h5", None, *files, settings
    )
    runner = Runner.start(tmp_path / "model", TOKENS, settings)
    port_stage.make_stage(runner, "layer_001", description, StageInput(x), tmp_path / "port.h5")
    result = compare_stages.compare_stage("layer_001", *files, tmp_path / "port.h5", TOKENS.valid, 1.5)
    assert result["status"] == "pass" and result["taps"]["mlp.experts"]["status"] == "pass"
    names = list(result["taps"])
    assert names.index("router.weights") < names.index("mlp.experts") < names.index("mlp.out")


def test_a_name_that_is_nearly_a_tap_is_refused(tmp_path):
    save("minimax_m2", tmp_path / "model")
    source = Path("workflow/ports/minimax_m2.py").read_text()
    (tmp_path / "port.py").write_text(source.replace('"mlp.out": "moe"', '"mlp.outt": "moe"'))
    settings = config_with(port={"module": str(tmp_path / "port.py"), "device": "CPU"})
    with pytest.raises(StageError, match=r'"mlp\.outt" is not a tap\. Did you mean "mlp\.out"'):
        Runner.start(tmp_path / "model", TOKENS, settings)
