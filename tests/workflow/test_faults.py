"""What goes wrong ends in a message that names it; the other stages go on; nothing half-written is believed."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from runs import REPOSITORY, Workflow, at_work, change_tensor, running
from safetensors.torch import load_file, save_file

from layerproof.files import sha256
from layerproof.rerun.records import Record
from models import save
from programs import write_program

pytestmark = pytest.mark.workflow

STAGES = ["embed", "layer_000", "layer_001", "layer_002", "norm", "lm_head"]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A small model and a finished run of the shipped port on it."""
    directory = tmp_path_factory.mktemp("healthy")
    save("minimax_m2", directory / "model")
    return make(directory)


def make(directory):
    (directory / "ids.json").write_text(json.dumps([list(range(3, 20)), [5, 9, 2, 40, 41]]))
    workflow = Workflow(
        directory, model={"checkpoint": "model"}, inputs={"prompts": None, "token_ids": "ids.json"}, chains=["0-2"]
    )
    workflow.run()
    return workflow


@pytest.fixture
def workflow(healthy, tmp_path):
    """A copy of the finished run, to be broken."""
    shutil.copytree(healthy.directory, tmp_path / "copy", symlinks=True)
    copy = Workflow.__new__(Workflow)
    copy.directory, copy.results, copy.config = tmp_path / "copy", tmp_path / "copy/results", dict(healthy.config)
    return copy


def verdicts(workflow):
    return json.loads((workflow.results / "verdicts.json").read_text())


def statuses(workflow):
    return {stage: entry["status"] for stage, entry in verdicts(workflow)["stages"].items()}


def reason(workflow, stage):
    return verdicts(workflow)["stages"][stage]["reason"]


def in_report(workflow, text):
    import html

    return text in html.unescape((workflow.results / "report.html").read_text())


def digests(workflow):
    """Digest of every result that does not state times."""
    return {
        str(path.relative_to(workflow.results)): sha256(path)
        for folder in ("golden", "noise", "port", "chain", "compare", "forced", "diagnosis", "weights", "plots")
        for path in (workflow.results / folder).rglob("*")
        if path.is_file()
    }


def gate(workflow):
    command = [sys.executable, "-m", "layerproof", "gate"]
    return subprocess.run(command, cwd=workflow.directory, env=os.environ | {"PYTHONPATH": "workflow"}).returncode


def test_killed_jobs_run_again_to_the_same_results(workflow):
    """Each run makes what the job that was killed before left unmade, and its own is killed in turn."""
    before = digests(workflow)
    for verb, output, log in (
        ("weights", "weights/layer_001.json", "weights"),
        ("golden", "golden/layer_001.h5", "golden/layer_001"),
        ("port", "port/layer_001.h5", "port/layer_001"),
        ("chain", "chain/0-2/layer_001.h5", "chain/0-2/layer_001"),
        ("compare", "compare/layer_001.json", "compare/layer_001"),
        ("plot-stage", "plots/layer_001.svg", "plots/layer_001"),
        ("report", "report.html", "report"),
    ):
        (workflow.results / output).unlink(missing_ok=True)  # a run that fails sets the report aside
        process = workflow.start(warm_jobs=verb != "port")
        words = f"layerproof {verb} results/{output.split('/layer_001')[0]}"
        at_work(workflow, process, words, workflow.results / f"logs/{log}.log").kill()
        assert process.wait() != 0, workflow.printed()
        assert not (workflow.results / output).exists(), output
    workflow.run()
    assert digests(workflow) == before
    assert not list(workflow.results.rglob("*.tmp"))
    assert workflow.run().started == 0


def test_a_stage_whose_process_is_killed_ends_as_an_error_and_the_others_of_its_job_go_on(workflow):
    """As the kernel kills a process when memory runs out: not the one that snakemake started but the one at work."""
    before = digests(workflow)
    stages = ["layer_000", "layer_001", "layer_002"]
    for stage in stages:
        (workflow.results / f"port/{stage}.h5").unlink()
    process = workflow.start()
    job = at_work(
        workflow, process, "layerproof port results/port/layer_000", workflow.results / "logs/port/layer_000.log"
    )
    (at_a_stage,) = job.children()
    at_a_stage.kill()
    assert process.wait() == 0, workflow.printed()
    told = "killed by SIGKILL (out of memory, or killed by hand)"
    assert told in reason(workflow, "layer_000") and told in workflow.log("port/layer_000")
    assert statuses(workflow) == dict.fromkeys(STAGES, "pass") | {"layer_000": "error"}
    workflow.run()
    assert digests(workflow) == before


def test_everything_killed_is_gone_on_with(workflow):
    before = digests(workflow)
    (workflow.results / "port/layer_002.h5").unlink()
    process = workflow.start(workflow.command(cold=True), start_new_session=True)
    deadline = time.monotonic() + 120
    while not running(workflow, "layerproof port"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = [one for one in psutil.process_iter() if works_in(one, workflow.directory)]
    assert not psutil.wait_procs(left, timeout=10)[1]
    locked = workflow.run(check=False)
    assert locked.returncode == 1 and locked.text.endswith("layerproof run, or snakemake --unlock.\n")
    resumed = layerproof(workflow, "run", "--cores", "1")
    assert resumed.stdout.startswith(f"The run before was killed (process {process.pid} on ")
    assert resumed.returncode == 0 and "PASS: All 6 stages" in resumed.stdout
    assert digests(workflow) == before
    assert not list(workflow.results.rglob("*.tmp"))


def layerproof(workflow, *arguments):
    command = [sys.executable, "-m", "layerproof", *arguments]
    options = workflow.options() | {"stderr": subprocess.PIPE}
    return subprocess.run(command, **options | {"env": options["env"] | {"PYTHONPATH": "workflow"}})


def works_in(process, directory):
    with contextlib.suppress(psutil.Error):
        return process.cwd() == str(directory)
    return False


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
AFTER_LAYER_1 = {"layer_002": "missing", "norm": "missing", "lm_head": "missing"}


def test_missing_tensor(workflow):
    shard = change_tensor(workflow, EXPERT, lambda tensor: None)
    workflow.run()
    assert statuses(workflow) == {"embed": "pass", "layer_000": "pass", "layer_001": "error"} | AFTER_LAYER_1
    assert shard in reason(workflow, "layer_001") and EXPERT in reason(workflow, "layer_001")
    assert EXPERT in reason(workflow, "lm_head"), "what is missing says what it waits for"
    assert in_report(workflow, EXPERT)
    assert gate(workflow) == 2
    # put right again, the stages that waited run
    shutil.rmtree(workflow.directory / "model")
    save("minimax_m2", workflow.directory / "model")
    workflow.run()
    assert set(statuses(workflow).values()) == {"pass"}


def test_wrong_shape(workflow):
    change_tensor(workflow, EXPERT, lambda tensor: tensor[:, :-1].contiguous())
    workflow.run()
    assert statuses(workflow) == {"embed": "pass", "layer_000": "pass", "layer_001": "error"} | AFTER_LAYER_1
    assert "experts.down_proj: expert 3 has shape [64, 95]" in reason(workflow, "layer_001")


def test_nan_weights_fail_where_they_are(workflow):
    def spoil(tensor):
        tensor[0, 0] = float("nan")
        return tensor

    change_tensor(workflow, "model.layers.1.self_attn.v_proj.weight", spoil)
    workflow.run()
    found = statuses(workflow)
    assert found["embed"] == found["layer_000"] == "pass"
    assert found["layer_001"] == "fail" and "error" not in found.values() and "missing" not in found.values()


def test_truncated_shard(workflow):
    shard = change_tensor(workflow, EXPERT, lambda tensor: tensor)
    path = workflow.directory / "model" / shard
    path.write_bytes(path.read_bytes()[:-100])
    workflow.run()
    assert "error" in statuses(workflow).values()
    assert any(shard in (entry["reason"] or "") for entry in verdicts(workflow)["stages"].values())
    assert (workflow.results / "report.html").exists()


def test_extra_tensor_is_told_and_harmless(workflow):
    before = digests(workflow)
    for shard in sorted((workflow.directory / "model").glob("*.safetensors"))[:1]:
        save_file(load_file(shard) | {"rotary.of.the.past": torch.ones(3)}, shard, metadata={"format": "pt"})
    workflow.run()
    assert {name for name, digest in digests(workflow).items() if digest != before[name]} == {"weights/unused.json"}
    assert "rotary.of.the.past: is in the checkpoint, but no stage loads it" in workflow.log("weights")
    assert in_report(workflow, "No stage loads 1 tensor of the checkpoint: rotary.of.the.past.")
    assert set(statuses(workflow).values()) == {"pass"}


def port_of(workflow, *replacements):
    source = (REPOSITORY / "workflow/ports/minimax_m2.py").read_text()
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (workflow.directory / "port.py").write_text(source)
    workflow.configure(port={"module": "port.py"})


def test_port_that_crashes_is_an_error_and_hides_no_mistake(workflow):
    """A finished run lies there; the port is now wrong on layer 0, ends as if all were well on 1, and aborts on 2."""
    port_of(
        workflow,
        (
            "        return Layer(config, dtype)\n",
            "        layer = Layer(config, dtype)\n        layer.index = stage.layer\n        return layer\n",
        ),
        (
            "        return x + self.moe(self.post_attention_norm(x))\n",
            "        import os\n        if self.index == 1:\n            os._exit(0)\n"
            "        if self.index == 2:\n            os.abort()\n"
            "        return x - self.moe(self.post_attention_norm(x))\n",
        ),
    )
    assert workflow.run().returncode == 0
    assert statuses(workflow) == {
        **{"embed": "pass", "layer_000": "fail", "layer_001": "error", "layer_002": "error"},
        **{"norm": "pass", "lm_head": "pass"},
    }
    assert "exit code 0 before its output was written" in reason(workflow, "layer_001")
    assert "killed by SIGABRT" in reason(workflow, "layer_002")
    chain = verdicts(workflow)["chains"]["0-2"]
    assert chain["status"] == "error"
    assert "Current thread" in workflow.log("port/layer_002"), "where it crashed is in the log"
    assert gate(workflow) == 2


def test_faulty_stages_of_a_port(workflow):
    """It raises on layer 0, returns another shape on layer 1, and hands over too few taps on layer 2."""
    port_of(
        workflow,
        (
            "        return Layer(config, dtype)\n",
            "        layer = Layer(config, dtype)\n        layer.index = stage.layer\n        return layer\n",
        ),
        (
            "        return x + self.moe(self.post_attention_norm(x))\n",
            "        if self.index == 0:\n            raise IndexError('no such head')\n"
            "        return (x + self.moe(self.post_attention_norm(x)))[:, :, : -1 if self.index == 1 else None]\n",
        ),
        ('    "attn.v": "attention.v_proj",\n', ""),
    )
    workflow.run()
    found = verdicts(workflow)["stages"]
    assert {stage: entry["status"] for stage, entry in found.items()} == {
        **{"embed": "pass", "layer_000": "error", "layer_001": "fail", "layer_002": "pass"},
        **{"norm": "pass", "lm_head": "pass"},
    }
    assert "IndexError" in found["layer_000"]["reason"] and "port.py" in found["layer_000"]["reason"]
    assert "shape" in found["layer_001"]["reason"] and "63" in found["layer_001"]["reason"]
    assert found["layer_002"]["isolated"]["taps"]["attn.v"]["status"] == "missing"
    assert verdicts(workflow)["overall"] == "error"
    assert in_report(workflow, "no such head") and in_report(workflow, "attn.v")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("def rotate(x: torch.Tensor", "def rotate(x torch.Tensor"), "port.py: line {line}: "),
        (("def build(", "def built("), "port.py: the function build is missing."),
    ],
    ids=["syntax", "no build"],
)
def test_a_port_that_cannot_be_one_is_refused_in_one_line(workflow, edit, said):
    port_of(workflow, edit)
    text = (workflow.directory / "port.py").read_text()
    outcome = workflow.run(check=False)
    assert outcome.returncode == 1 and not outcome.made and not outcome.started
    *_, line = outcome.text.splitlines()
    assert line.startswith(f"error: {said.format(line=text[: text.index(edit[1])].count(chr(10)) + 1)}")
    gate = layerproof(workflow, "gate")
    assert gate.returncode == 2 and "port.py: " in gate.stderr, "nor does the verdict of before hold"


def test_the_gate_refuses_verdicts_of_other_code_settings_and_inputs(workflow):
    assert layerproof(workflow, "gate").returncode == 0
    port = workflow.directory / "workflow/ports/minimax_m2.py"
    port.write_text(port.read_text() + "# a comment\n")
    assert layerproof(workflow, "gate").returncode == 0, "a comment changes nothing"
    config, ids = workflow.directory / "config.yaml", workflow.directory / "ids.json"
    for file, old, new, why in (
        (port, "logits.float().sigmoid()", "logits.float().softmax(-1)", "its code changed"),
        (config, "minimax_m2.py", "minimax_m2.py\n  dtype: float32", "its settings changed (port.dtype)"),
        (ids, "[5, 9, ", "[5, 8, ", "its inputs changed (ids.json)"),
    ):
        before = file.read_text()
        assert before.count(old) == 1
        file.write_text(before.replace(old, new))
        outcome = layerproof(workflow, "gate")
        assert outcome.returncode == 2 and why in outcome.stderr, outcome
        file.write_text(before)
    assert layerproof(workflow, "gate").returncode == 0
    before = config.read_text()
    config.write_text(before.replace("- 0-2", "- 0-1"))
    assert config.read_text() != before
    outcome = layerproof(workflow, "gate")
    assert outcome.returncode == 2 and "config.yaml asks for other chains now (0-1, 0-2)" in outcome.stderr
    config.write_text(before)
    os.utime(next((workflow.directory / "model").glob("*.safetensors")))
    outcome = layerproof(workflow, "gate")
    assert outcome.returncode == 2 and "weights would run, because its checkpoint changed" in outcome.stderr


def test_a_run_does_not_die_of_what_it_can_do_without(workflow):
    workflow.edit(
        "workflow/layerproof/host/prediction.py", ("    register()\n", "    raise TypeError('meta tensors')\n")
    )
    workflow.run()
    assert set(statuses(workflow).values()) == {"pass"}
    assert in_report(workflow, "The memory of the jobs could not be predicted: TypeError at prediction.py")
    prediction = json.loads((workflow.results / "prediction.json").read_text())
    assert prediction["golden"] is None and prediction["stages"] == {}
    workflow.edit(
        "workflow/layerproof/compare/audit.py",
        ("    stages = {\n", "    raise TypeError('a tensor')\n    stages = {\n"),
    )
    workflow.run()
    assert set(statuses(workflow).values()) == {"pass"}
    assert in_report(workflow, "because the audit failed: TypeError at audit.py")
    assert layerproof(workflow, "audit").stdout.startswith("warning: What became of the weights is not known")


def test_disk_full(workflow):
    """A limit on the size of files stands in for a full disk: the same error from the same call, without a mount."""
    (workflow.directory / "long.json").write_text(json.dumps([list(range(3, 90)) * 2] * 2))
    workflow.configure(inputs={"token_ids": "long.json"})
    workflow.run()
    record = workflow.results / "records/golden/layer_001.json"
    output = workflow.results / "golden/layer_001.h5"
    assert record.stat().st_size < 0.75 * output.stat().st_size
    command = [sys.executable, "-m", *shlex.split(Record.read(record).run["command"])]

    def run(blocks: int) -> subprocess.CompletedProcess:
        output.unlink(missing_ok=True)
        script = f"ulimit -f {blocks}; export PYTHONPATH=workflow; {shlex.join(command)}"
        return subprocess.run(["bash", "-c", script], cwd=workflow.directory, capture_output=True, text=True)

    ended = run(output.stat().st_size * 7 // 8 // 1024)
    printed = workflow.log("golden/layer_001")
    assert ended.returncode == 0
    assert "golden/layer_001.h5: cannot be written" in printed and "Traceback" not in printed
    run(8)
    printed = workflow.log("golden/layer_001")
    assert "error: results/records/golden/layer_001.json: cannot be written" in printed and "Traceback" not in printed
    assert not list(workflow.results.rglob("*.tmp"))
    workflow.run("-n")
    workflow.run()
    assert set(statuses(workflow).values()) == {"pass"}


def test_empty_prompts(workflow):
    (workflow.directory / "empty.txt").write_text("\n \n")
    workflow.configure(inputs={"prompts": "empty.txt", "token_ids": None})
    outcome = workflow.run(check=False)
    assert outcome.returncode != 0
    assert not outcome.made and outcome.text.splitlines()[-1].startswith("error: empty.txt: contains no prompt")


def test_a_side_that_the_host_cannot_run_is_told_before_its_jobs(workflow):
    workflow.configure(port={"device": "NEURON"})
    outcome = workflow.run(check=False)
    assert outcome.returncode != 0
    assert "neuron-ls is not installed. Install aws-neuronx-tools" in outcome.text
    assert "NO VERDICT: the run did not finish, 1 job failed" in outcome.text
    aside = workflow.results / "previous"
    assert sorted(path.name for path in aside.iterdir()) == ["report.html", "verdicts.json"]
    assert not (workflow.results / "verdicts.json").exists(), "the verdict of before does not stand as if it were new"
    assert "Traceback" not in workflow.log("preflight/port")
    assert not [name for name in outcome.made if name.startswith(("port/", "chain/"))]
    workflow.configure(port={"device": "auto"})
    workflow.run()
    assert set(statuses(workflow).values()) == {"pass"}
    assert not aside.exists()


def test_a_slurm_that_does_not_answer_is_told_before_anything_is_submitted(tmp_path, monkeypatch):
    for name in ("sinfo", "squeue"):
        tool = tmp_path / "bin" / name
        write_program(tool, "echo Unable to contact slurm controller >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    workflow = Workflow(tmp_path / "run")
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/slurm"]
    for _ in range(2):  # nor does it leave a lock
        failed = subprocess.run(command, **workflow.options(), timeout=120)
        assert failed.returncode == 1 and "Traceback" not in failed.stdout
        assert "error: sinfo: Slurm does not answer (Unable to contact slurm controller)." in failed.stdout
