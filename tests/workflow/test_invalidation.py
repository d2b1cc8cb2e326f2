"""After an edit, exactly those jobs run that the edit touches: none too many, none missing.

One workflow lives through the whole table. A job counts as run if it replaced its output; jobs that Snakemake may start
and that return at once do not. The model has a dense layer 0 and two MoE layers. The port passes up to the edit of its
router. From then on each run diagnoses the failing stages that it touches.
"""

import json
import os
import zipfile

import pytest
from runs import dense_and_moe
from safetensors.torch import load_file, save_file

from layerproof import cli
from layerproof.files import sha256
from layerproof.tensors import pruning

pytestmark = pytest.mark.workflow

STAGES = ["embed", "layer_000", "layer_001", "layer_002", "norm", "lm_head"]
MOE = ["layer_001", "layer_002"]
LAYERS = ["layer_000", *MOE]
FROM_1 = STAGES[2:]
MANIFEST = {"manifest.json", "MANIFEST.sha256"}
TOLD = {"report.html", *MANIFEST}
TELLING = {"audit.json", "verdicts.json", "plots/map.svg", "plots/depth.svg", *TOLD}


def golden(stages):
    return {f"{side}/{stage}.h5" for side in ("golden", "noise") for stage in stages}


def isolated(stages):
    return {f"port/{stage}.h5" for stage in stages}


def chained(stages):
    return {f"chain/all/{stage}.h5" for stage in stages}


def compared(stages):
    return {f"compare/{stage}.json" for stage in stages} | {"compare/chain/all.json"}


def forced(stages):
    return {f"forced/{stage}.h5" for stage in stages}


def diagnosed(stages):
    """Made once for a stage that passes, and left alone as long as it does."""
    return forced(stages) | {f"diagnosis/{stage}.json" for stage in stages}


def plotted(stages):
    return {f"plots/{stage}.svg" for stage in stages}


EVERYTHING = {
    *("tokens.json", "prediction.json", "preflight/golden.json", "preflight/port.json", *TELLING),
    *(f"weights/{name}.json" for name in (*STAGES, "unused")),
    *golden(STAGES),
    *isolated(STAGES),
    *chained(STAGES),
    *compared(STAGES),
    *diagnosed(STAGES),
    *plotted(STAGES),
}


def test_tokens_read_every_file_of_the_tokenizer(tmp_path):
    """Those whose names end like the model's own, too."""
    workflow = dense_and_moe(tmp_path)
    (tmp_path / "model/tokenizer_config.json").write_text("{}")
    planned = workflow.run("-n", target="results/tokens.json results/weights/embed.json").text
    tokens, weights = (
        next(part for part in planned.split("rule ") if part.startswith(f"{name}:")) for name in ("tokens", "weights")
    )
    assert "model/tokenizer_config.json" in tokens and "model/config.json" in tokens
    assert "tokenizer_config" not in weights and "model/config.json" in weights


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    directory = tmp_path_factory.mktemp("invalidation")
    workflow = dense_and_moe(directory)
    assert run(workflow) == EVERYTHING
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["overall"] == "pass", json.dumps(verdicts, indent=1)[:4000]
    return workflow


def run(workflow, *arguments):
    return set(workflow.run(*arguments, target="all").made)


def started(workflow):
    return workflow.run(target="all").started


def test_nothing_changed(workflow):
    outcome = workflow.run(target="all")
    assert outcome.started == 0 and not outcome.made
    assert "Everything is up to date." in outcome.text


def test_a_dry_run_changes_nothing(workflow):
    """Nor what the next run does, also one that was planned with other settings or to run what is up to date."""
    (workflow.directory / "other.yaml").write_text("compare: {limit: 2}\n")
    before = everything_in(workflow.results)
    planned = workflow.run("-n", target="all")
    assert "Nothing to be done" in planned.text
    for arguments in (
        ("-n", "--configfile", "other.yaml"),
        ("-n", "--config", "stages_per_job=1"),
        ("-n", "--forceall"),
        ("-n", "--forcerun", "port_stage", "results/golden/layer_001.h5"),
    ):
        assert "Job stats:" in workflow.run(*arguments, target="all").text, arguments
    assert everything_in(workflow.results) == before
    assert started(workflow) == 0

    source = (workflow.directory / "port.py").read_text()
    workflow.edit("port.py", ("return x * 1.0", "return x * 1.01"))
    assert "port_stage" in workflow.run("-n", target="all").text
    (workflow.directory / "port.py").write_text(source)
    assert started(workflow) == 0
    assert everything_in(workflow.results) == before

    (workflow.results / "plots/norm.svg").unlink()
    workflow.run("-n", target="all")
    assert not (workflow.results / "plots/norm.svg").exists()
    assert run(workflow) - MANIFEST == plotted(["norm"])


def everything_in(folder):
    """Identity, size and time of each file, journals included."""
    files = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (status.st_ino, status.st_size, status.st_mtime_ns) for path, status in files.items()}


def test_snakemake_looks_for_jobs_when_one_has_ended_and_not_all_the_time(workflow):
    workflow.configure(stages_per_job=1)
    outcome = workflow.run("--verbose", "--forcerun", "compare_stage", "plot_stage", target="all")
    assert outcome.started > 2 * len(STAGES)
    assert outcome.text.count("Ready jobs:") <= outcome.started + 1
    workflow.configure(stages_per_job=16)
    assert run(workflow) == TOLD


def test_touched_files(workflow):
    for path in [
        *workflow.directory.glob("*"),
        *workflow.directory.rglob("workflow/**/*"),
        *workflow.results.rglob("*"),
    ]:
        if ".snakemake" not in path.parts:
            os.utime(path)
    assert run(workflow) <= MANIFEST
    assert started(workflow) == 0


def test_comments_docstrings_and_formatting(workflow):
    workflow.edit(
        "port.py",
        (
            '"""Softmax over all experts, then the top ones, normalised."""',
            '"""Another docstring."""\n    # and a comment',
        ),
        ("def rotate(x, positions, theta):", "def rotate(\n    x,\n    positions,\n    theta,\n):"),
    )
    workflow.edit(
        "workflow/layerproof/compare/stage.py", ('"""Compares the two sides', '"""Now compares the two sides')
    )
    assert started(workflow) == 0


def test_compare_edited(workflow):
    workflow.edit(
        "workflow/layerproof/measure/groups.py",
        ("CLOSE_ABSOLUTE, CLOSE_RELATIVE = 1e-3,", "CLOSE_ABSOLUTE, CLOSE_RELATIVE = 2e-3,"),
    )
    made = run(workflow)
    assert made >= compared(STAGES)
    assert not made & (golden(STAGES) | isolated(STAGES) | chained(STAGES))


def test_report_template_edited(workflow):
    workflow.edit("workflow/layerproof/report/templates/report.html.j2", ("</body>", "<!-- edited --></body>"))
    assert run(workflow) == TOLD


def test_setting_that_also_concerns_the_checks_of_the_host(workflow):
    """Jobs that wait for the checks run in the same call."""
    workflow.configure(port={"dtype": "float32"})
    made = run(workflow)
    assert made >= {"prediction.json", "preflight/port.json", *isolated(STAGES), *chained(STAGES), *compared(LAYERS)}
    assert not made & golden(STAGES)
    assert started(workflow) == 0
    workflow.configure(port={"dtype": "bfloat16"})
    assert run(workflow) >= isolated(STAGES)


def test_fewer_layers_and_all_again(workflow):
    """The golden's files are as good as they were."""
    workflow.configure(layers="2", chains=[])
    assert not run(workflow) & golden(STAGES)
    workflow.configure(layers="all", chains=["all"])
    assert not run(workflow) & golden(STAGES)
    assert started(workflow) == 0


def test_golden_forced_with_equal_result(workflow):
    assert run(workflow, "--forcerun", "results/golden/layer_001.h5") - MANIFEST == golden(["layer_001"])
    assert "up to date" in workflow.log("port/layer_002")
    assert started(workflow) == 0


def test_results_deleted_and_corrupted(workflow):
    """None of them is made from another one of them, and what is made from them stays as it is."""
    for name in ("golden/lm_head.h5", "port/norm.h5"):
        (workflow.results / name).unlink()
    before = {}
    for name in ("golden/layer_001.h5", "port/layer_000.h5", "chain/all/norm.h5", "compare/embed.json"):
        path = workflow.results / name
        before[path] = path.read_bytes()
        damaged = bytearray(before[path])
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(bytes(damaged))
    assert run(workflow) - MANIFEST == {
        *golden(["layer_001", "lm_head"]),
        *isolated(["layer_000", "norm"]),
        *("chain/all/norm.h5", "compare/embed.json"),
    }
    assert {path: path.read_bytes() for path in before} == before
    (workflow.results / "report.html").unlink()
    assert run(workflow) == TOLD
    assert started(workflow) == 0


def test_router_edited(workflow):
    workflow.edit("port.py", ("logits.float().softmax(-1)", "logits.float().sigmoid()"))
    assert run(workflow) == {
        *isolated(MOE),
        *chained(FROM_1),
        *compared(MOE),
        *diagnosed(MOE),  # they fail
        *plotted(MOE),
        *TELLING,
    } | compared(FROM_1) - {f"compare/{stage}.json" for stage in ("norm", "lm_head")}
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["first_culprit"] == {
        "stage": "layer_001",
        "tap": "router.scores",
        "cause": "router_sigmoid",
        "rank": None,
    }
    report = (workflow.results / "report.html").read_text()
    assert "it behaves as if the port had a sigmoid in place of the softmax over the experts" in report
    assert "layer_002 fails in the same way." in report


def test_attention_edited_with_equal_results_reruns_the_layers_and_stops_there(workflow):
    workflow.edit("port.py", (".softmax(-1).to(x.dtype)", ".softmax(dim=-1).to(x.dtype)"))
    assert run(workflow) - MANIFEST == {
        *isolated(LAYERS),
        *chained(LAYERS),
        *forced(MOE),
    }


def test_attention_edited(workflow):
    workflow.edit("port.py", ("* dim**-0.5", "* dim**-0.25"))
    assert run(workflow) == {
        *isolated(LAYERS),
        *chained(STAGES[1:]),
        *compared(LAYERS),
        *diagnosed(LAYERS),
        *plotted(LAYERS),
        *TELLING,
    }


def test_helper_of_the_norm_edited(workflow):
    workflow.edit("port.py", ("return x * 1.0", "return x * 1.01"))
    assert run(workflow) == {
        *isolated(["norm"]),
        *chained(["norm", "lm_head"]),
        *compared(["norm"]),
        *diagnosed(["norm"]),
        *plotted(["norm"]),
        *TELLING,
    }


def test_one_tensor_of_layer_2_changed(workflow):
    changed = False
    for shard in (workflow.directory / "model").glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name == "model.layers.2.self_attn.o_proj.weight":
                tensors[name][0, 0] += 1
                changed = True
        save_file(tensors, shard, metadata={"format": "pt"})
    assert changed
    after = ["layer_002", "norm", "lm_head"]
    assert run(workflow) == {
        *("weights/layer_002.json", "prediction.json"),
        *golden(after),
        *isolated(after),
        *chained(after),
        *compared(after),
        *diagnosed(["layer_002", "norm"]),
        "diagnosis/layer_001.json",  # the next layer's weights are what it may have loaded
        *plotted(after),
        *TELLING,
    }


def test_one_prompt_added(workflow):
    (workflow.directory / "ids.json").write_text(json.dumps([list(range(3, 20)), [5, 9, 2, 40, 41], [60, 61]]))
    same = {f"weights/{name}.json" for name in (*STAGES, "unused")} | diagnosed(["embed", "lm_head"])
    assert run(workflow) == EVERYTHING - same


def test_option_of_the_port_changed(workflow):
    workflow.configure(port={"options": {"level": 2}})
    made = run(workflow)
    failing = [*LAYERS, "norm"]
    assert made == {*isolated(STAGES), *chained(STAGES), *forced(failing), *TOLD}


def test_any_target_alone(workflow):
    targets = ("compare/layer_001.json", "diagnosis/layer_001.json", "bisect.json", "port/norm.h5", "archive/alone.zip")
    for target in targets:
        assert workflow.run(target=f"results/{target}").returncode == 0
    bisection = json.loads((workflow.results / "bisect.json").read_text())
    assert (bisection["first_wrong"], bisection["last_right"]) == ("layer_000", "embed"), "attention was edited above"
    with zipfile.ZipFile(workflow.results / "archive/alone.zip") as archive:
        assert "results/bisect.json" in archive.namelist(), "asked for, so part of the run"


def test_taps_of_stages_that_pass_are_dropped_and_made_again_for_a_job_that_reads_them(workflow, capsys):
    """Nothing else runs for it, and they are what they were."""
    workflow.edit(
        "port.py", ("logits.float().sigmoid()", "logits.float().softmax(-1)"), ("* dim**-0.25", "* dim**-0.5")
    )
    workflow.edit("port.py", ("return x * 1.01", "return x * 1.0"))
    run(workflow)
    files = [workflow.results / f"{side}/{stage}.h5" for side in ("golden", "port") for stage in STAGES]
    whole = {path: sha256(path) for path in files}
    dropped = {f"golden/{stage}.h5" for stage in STAGES} | isolated(STAGES)

    workflow.configure(compare={"taps": "auto"})
    trimmed = {f"trimmed/{stage}.json" for stage in STAGES}
    assert run(workflow) == {*trimmed, *dropped, *TOLD}
    layer = workflow.results / "golden/layer_001.h5"
    assert layer.stat().st_size < pruning.read(layer).original_bytes
    assert {path: pruning.digest(path) for path in files} == whole
    assert started(workflow) == 0

    workflow.edit("port.py", ("* dim**-0.5", "* dim**-0.25"))
    made = run(workflow)
    again = {*golden(LAYERS), *isolated(LAYERS), *compared(LAYERS), *diagnosed(LAYERS), *plotted(LAYERS)}
    kept_up_to_date = {"bisect.json", *(f"trimmed/{stage}.json" for stage in LAYERS)}  # bisected by the test above
    assert made == {*again, *chained(STAGES[1:]), *TELLING, *kept_up_to_date}
    assert all((pruning.read(path) is None) == (path.stem in LAYERS) for path in files), "suspects have all taps"
    assert {path: pruning.digest(path) for path in files if "golden" in path.parts} == {
        path: digest for path, digest in whole.items() if "golden" in path.parts
    }
    assert started(workflow) == 0

    workflow.run(target="results/archive/pruned.zip")
    assert cli.run(["rerun", str(workflow.results / "archive/pruned.zip")]) == 0
    told = capsys.readouterr().out
    assert "because their taps were pruned: embed, lm_head, norm" in told and "verdicts: the same" in told

    workflow.configure(compare={"taps": "all"})
    passing = [stage for stage in STAGES if stage not in LAYERS]
    assert run(workflow) == {*golden(passing), *isolated(passing), *TOLD}
    assert {path: sha256(path) for path in files if path.stem not in LAYERS} == {
        path: digest for path, digest in whole.items() if path.stem not in LAYERS
    }
    assert started(workflow) == 0
