"""docs/first-port.md: its code is run as it stands there, and what it says that Layerproof answers is what it answers."""

import json
import os
import re
import runpy
from pathlib import Path

import pytest

from bugs import harness
from configs import REPOSITORY
from layerproof.errors import StageError
from layerproof.failures import as_stage_error
from layerproof.model import tokens
from layerproof.report import gate
from layerproof.report.verdicts import collect
from layerproof.shapes import Verdicts
from models import save_drawn

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs/first-port.md").read_text()
SHIPPED = (REPOSITORY / "workflow/ports/llama.py").read_text()
TEMPLATE = (REPOSITORY / "workflow/resources/init/port.py").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def without_numbers(text: str) -> str:
    """R differs between CPUs, and so may the number of mistakes that are tried."""
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(?![\w.]*\w)", "N", " ".join(text.split()))


SAID = without_numbers(PAGE)


def make_model(directory: Path, **changes) -> harness.Model:
    """The page's checkpoint and prompts with some of the config's arguments changed, and their golden."""
    source = blocks("python")[0]
    for key, value in changes.items():
        source, times = re.subn(rf"(?m)^(\s+{key}=).*,$", rf"\g<1>{value!r},", source)
        assert times == 1, key
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "make_checkpoint.py").write_text(source)
    before = Path.cwd()
    os.chdir(directory)
    try:
        runpy.run_path("make_checkpoint.py")
    finally:
        os.chdir(before)
    (directory / "tiny-llama").rename(directory / "checkpoint")
    prompts = tokens.pad(json.loads((directory / "ids.json").read_text()), pad_id=0)
    return harness.with_golden(harness.Model("first port", 0, directory, prompts))


def make_qwen2(directory: Path) -> harness.Model:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 256}
    save_drawn("qwen2", config | {"hidden_size": 64, "intermediate_size": 160}, directory / "checkpoint")
    assert "bias" not in (directory / "checkpoint/config.json").read_text()
    return harness.make_model("qwen2", 0, directory, lengths=(40, 25, 12))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def judged(model: harness.Model, source: str, directory: Path, stage: str = "layer_000") -> tuple[Verdicts, Verdicts]:
    """The verdict on one stage, run with this port: with its diagnosis, and by its comparison alone."""
    outcome = harness.run(model, stage, source, directory)
    diagnoses = [outcome.diagnosis] if outcome.diagnosis else []
    return collect([outcome.comparison], [], diagnoses), collect([outcome.comparison], [], [])


def answer(model: harness.Model, source: str, directory: Path, stage: str = "layer_000") -> list[str]:
    """The sentences of a report on one stage, run with this port."""
    verdicts, _ = judged(model, source, directory, stage)
    return [verdicts["headline"], *verdicts["details"]]


LAYERS = tuple(f"layer_{number:03}" for number in range(4))


def on_terminal(verdicts: Verdicts, directory: Path, stages: tuple[str, ...] = LAYERS[:1]) -> str:
    """What the terminal says of the first failure, if these stages fail alike."""
    failure = verdicts["failures"][0] | {"stages": list(stages)}
    return without_numbers(gate.failure_line(failure).replace(f"{directory}/", ""))


def edited(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


def by_diff(source: str, diff: str) -> str:
    lines = diff.splitlines(keepends=True)
    removed, added = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    return edited(source, removed, added)


def ports_of_the_page() -> list[str]:
    """port.py after steps 4, 5 and 6."""
    _, layer, taps = blocks("python")[:3]
    q_and_k, context, theta = blocks("diff")[:3]
    start, end = TEMPLATE.index("class Layer("), TEMPLATE.index("class Norm(")
    first = f"{TEMPLATE[:start]}{layer}\n\n{TEMPLATE[end:]}"
    second = re.sub(r"(?ms)^TAPS: .*?^}\n", lambda found: taps, first, count=1)
    second = by_diff(by_diff(second, q_and_k), context)
    return [first, second, by_diff(second, theta)]


def what_to_do(verdicts: Verdicts) -> list[str]:
    """The code that the report shows first, and what it says about it."""
    failure = verdicts["failures"][0]
    frame = gate.frame_of(failure)
    assert frame is not None
    return [frame.text(), *failure["help"]]


def test_without_taps_the_answer_is_how_the_error_looks_and_what_to_hand_over(model, tmp_path):
    verdicts, alone = judged(model, ports_of_the_page()[0], tmp_path)
    error, known, *_ = verdicts["details"]
    for text in (verdicts["headline"], error, known, *what_to_do(verdicts)):
        assert without_numbers(text) in SAID
    assert on_terminal(verdicts, tmp_path, LAYERS) in SAID
    assert on_terminal(alone, tmp_path) in SAID


def test_with_taps_it_names_the_mistake(model, tmp_path):
    verdicts, _ = judged(model, ports_of_the_page()[1], tmp_path)
    assert "attn.q_rot: it behaves as if the port had a rope theta of 10000" in verdicts["headline"]
    fit, same_stage, *_ = verdicts["details"]
    for text in (verdicts["headline"], fit, same_stage, *what_to_do(verdicts)):
        assert without_numbers(text) in SAID
    assert on_terminal(verdicts, tmp_path) in SAID
    assert on_terminal(verdicts, tmp_path, LAYERS) in SAID


def test_the_finished_port_of_the_page_passes_with_every_tap(model, tmp_path):
    for stage in model.stages:
        outcome = harness.run(model, stage, ports_of_the_page()[2], tmp_path)
        assert {tap["status"] for tap in outcome.comparison["taps"].values()} == {"pass"}, stage


def test_a_port_without_taps_passes_if_it_is_right(model, tmp_path):
    without_taps, _, _ = ports_of_the_page()
    first, *_ = answer(model, by_diff(without_taps, blocks("diff")[2]), tmp_path)
    assert first.startswith("1 stage and 1 tap agree with the golden, ") and "12 taps could not be compared" in first


def test_the_shipped_port_passes_with_every_tap(model, tmp_path):
    for stage in model.stages:
        outcome = harness.run(model, stage, SHIPPED, tmp_path)
        assert {tap["status"] for tap in outcome.comparison["taps"].values()} == {"pass"}, stage


QKV = "project(x).unflatten(-1, (-1, self.head_dim))"
TO_DTYPE = "yield short, weights[name].to(stage.dtype)"
FOR_NAME = "    for name in weights:\n"
PAIRS = "first, second = x.float().chunk(2, dim=-1)"
TURNED = "return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)"
REPEATED = "part.repeat_interleave(self.queries_per_kv_head, dim=2)"
CONTEXT = 'torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(x.dtype), v)'
GATED = "F.silu(self.gate_proj(x)) * self.up_proj(x)"
MLP_RESIDUAL = "return x + self.mlp(self.post_attention_layernorm(x))"
ROPE_FORMS = 'config.get("rope_scaling") or config.get("rope_parameters") or {}'
THETA = '"rope_theta": config.get("rope_theta", 10000.0)'
OF_RELEASE = (
    "weight = weights[name].to(stage.dtype)\n"
    '        if name.endswith(("q_proj.weight", "k_proj.weight")):\n'
    "            weight = weight.unflatten(0, (-1, 2, 16)).transpose(1, 2).flatten(0, 2).contiguous()\n"
    "        yield short, weight"
)

WRONG = {
    "rope parameters of transformers 5": ("attn.q_rot", [(ROPE_FORMS, 'config.get("rope_scaling") or {}')]),
    "another theta": ("attn.q_rot", [('rope["rope_theta"] ** -', "12345.0 ** -")]),
    "neighbours rotated": (
        "attn.q_rot",
        [
            (PAIRS, "first, second = x.float()[..., 0::2], x.float()[..., 1::2]"),
            (TURNED, TURNED.replace("cat", "stack").replace(").to(", ").flatten(-2).to(")),
        ],
    ),
    "weights of the original release": ("attn.q", [(TO_DTYPE, OF_RELEASE)]),
    "positions from 1": ("attn.q_rot", [("positions.float()[:", "(positions + 1).float()[:")]),
    "dims before heads": ("attn.q_rot", [(QKV, QKV.replace("(-1, self.head_dim))", "(self.head_dim, -1)).mT"))]),
    "heads before tokens": (
        "attn.q_rot",
        [(QKV, "project(x).reshape(len(x), -1, x.shape[1], self.head_dim).transpose(1, 2)")],
    ),
    "heads repeated in turn": ("attn.context", [(REPEATED, "part.repeat(1, 1, self.queries_per_kv_head, 1)")]),
    "not transposed back": (
        "attn.context",
        [(CONTEXT, CONTEXT.replace("bqhd", "bhqd") + ".reshape(*x.shape[:2], -1, self.head_dim)")],
    ),
    "scale of another head size": ("attn.context", [("self.head_dim**-0.5", "(x.shape[-1] // q.shape[2]) ** -0.5")]),
    "mask": ("attn.context", [("(positions[:, None] >= positions)", "(positions[:, None] > positions)")]),
    "1 + w": ("input_norm", [("return self.weight *", "return (1 + self.weight) *")]),
    "gate and up": ("mlp.out", [(GATED, "F.silu(self.up_proj(x)) * self.gate_proj(x)")]),
    "residual": ("out", [(MLP_RESIDUAL, MLP_RESIDUAL.replace("x + ", ""))]),
}
"""Where it shows first, and what is replaced in the shipped port."""


def with_mistake(edits: list[tuple[str, str]]) -> str:
    source = SHIPPED
    for old, new in edits:
        source = edited(source, old, new)
    return source


def of_mistakes(sentence: str) -> str:
    """What the page quotes of the headline."""
    beginning = "layer_000 is the first stage that goes wrong, "
    assert sentence.startswith(beginning), sentence
    return without_numbers(sentence.removeprefix(beginning).removesuffix("."))


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_and_answered_as_the_page_says(name, model, tmp_path):
    tap, edits = WRONG[name]
    first, second, *_ = answer(model, with_mistake(edits), tmp_path)
    said = of_mistakes(first)
    assert said.startswith(f"at {tap}: ")
    if name == "another theta":
        said = said.partition(", and ")[0]
    assert said in SAID
    if name in ("dims before heads", "heads before tokens"):
        assert f"{said}. {without_numbers(second)}" in SAID


def test_positions_from_1_do_not_show_in_the_output(model, tmp_path):
    outcome = harness.run(model, "layer_000", with_mistake(WRONG["positions from 1"][1]), tmp_path)
    assert outcome.failed == ["attn.q_rot", "attn.k_rot"]


STOPS = {
    "rope_theta": ("layer_000", [(THETA, '"rope_theta": config["rope_theta"]')]),
    "tied head": ("lm_head", [(FOR_NAME, '    for name in ["lm_head.weight"]:\n')]),
    "size of a head": ("layer_000", [('config.get("head_dim") or hidden // heads', "hidden // heads")]),
    "weight left out": ("layer_000", [("in weights:\n", "in (one for one in weights if 'up_proj' not in one):\n")]),
    "name of a tap": ("layer_000", [('q, k = tap("attn.q_rot", ', 'q, k = tap("attn.qrot", ')]),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_mistake_that_stops_the_port_is_answered_as_the_page_says(name, model, tmp_path):
    stage, edits = STOPS[name]
    with pytest.raises(Exception) as error:
        harness.run(model, stage, with_mistake(edits), tmp_path)
    said = str(as_stage_error(error.value)).removeprefix(f"{stage}: ")
    said = said.partition(" size mismatch for self_attn.k_proj")[0].partition(" The taps are")[0]
    assert without_numbers(said) in SAID


@pytest.mark.parametrize(
    "edits",
    [
        [("(positions[:, None] >= positions) & valid[:, None]", "(positions[:, None] >= positions)[None]")],
        [("self.eps = eps", "self.eps = 1e-6")],
    ],
    ids=["valid", "epsilon"],
)
def test_what_the_page_says_does_not_show_passes(edits, model, tmp_path):
    for stage in ("layer_000", "layer_003"):
        outcome = harness.run(model, stage, with_mistake(edits), tmp_path)
        assert {tap["status"] for tap in outcome.comparison["taps"].values()} == {"pass"}


def test_a_theta_of_10000_hides_that_it_is_not_read(tmp_path):
    model = make_model(tmp_path / "model", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    source = with_mistake(WRONG["rope parameters of transformers 5"][1])
    assert not harness.run(model, "layer_000", source, tmp_path).verdicts["layerproof"]


@pytest.mark.parametrize(
    ("rope", "edit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, ('return frequencies / rope["factor"]', "return frequencies")),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            ('return frequencies * (kept + (1 - kept) / rope["factor"])', "return frequencies"),
        ),
    ],
    ids=["linear", "llama3"],
)
def test_a_scaling_left_out_is_found_in_the_angles(rope, edit, tmp_path):
    model = make_model(tmp_path / "model", rope_parameters={**rope, "rope_theta": 500000.0})
    assert not harness.run(model, "layer_000", SHIPPED, tmp_path).verdicts["layerproof"]
    outcome = harness.run(model, "layer_000", with_mistake([edit]), tmp_path)
    assert outcome.culprits[0]["tap"] == "attn.q_rot"
    assert outcome.culprits[0]["cause"]["name"].startswith("rope_")


def test_biases_that_the_config_does_not_mention(tmp_path):
    model = make_qwen2(tmp_path / "model")
    unbiased = SHIPPED.replace("bias=has_bias or is_qwen2", "bias=False")
    with pytest.raises(StageError) as error:
        harness.run(model, "layer_000", unbiased, tmp_path)
    assert str(error.value).partition("for Layer: ")[2] in " ".join(PAGE.split())
    dropped = edited(unbiased, "in weights:\n", "in (one for one in weights if 'bias' not in one):\n")
    assert "at attn.q: " in of_mistakes(answer(model, dropped, tmp_path)[0]) in SAID
