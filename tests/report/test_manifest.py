"""The audit trail: every file is listed, and whatever is changed, removed or added afterwards is found."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from archives import CODE, CONFIG, FUNCTION
from layerproof import __version__
from layerproof.errors import UserError
from layerproof.files import sha256
from layerproof.report import archive, manifest
from layerproof.rerun import fingerprint
from layerproof.rerun.records import described

JOBS = {"preflight/port", "golden/embed", "chain/all/embed", "verdicts", "report"}
"""Those that the report rests on."""


def content(results):
    return json.loads((results / "manifest.json").read_text())


def test_an_unchanged_run_passes(results, verified):
    path = results / "manifest.json"
    assert verified(path) == (0, [f"{path}: every file is as it was"])


def test_every_file_of_the_run_is_listed_with_its_digest(results):
    listed = content(results)
    assert set(listed["outputs"]) == {
        "report.html",
        "verdicts.json",
        "preflight/port.json",
        "golden/embed.h5",
        "chain/all/embed.h5",
        "logs/golden/embed.log",
        "logs/chain/all/embed.log",
        "benchmarks/golden/embed.tsv",
        "benchmarks/chain/all.tsv",
        *(f"records/{job}.json" for job in JOBS),
    }
    assert set(listed["others"]) == {
        "golden/layer_009.h5",
        "logs/golden/layer_009.log",
        "records/golden/layer_009.json",
        "weights/embed.json",
        "weights/norm.json",
        "weights/unused.json",
    }, "what the report does not rest on is no part of the run, and is watched all the same"
    for name, entry in (listed["outputs"] | listed["others"]).items():
        data = (results / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_the_files_can_be_checked_without_layerproof(results):
    listed = content(results)
    command = ["sha256sum", "--check", "--strict", "MANIFEST.sha256"]
    lines = subprocess.run(command, cwd=results, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [f"{name}: OK" for name in sorted({*listed["outputs"], *listed["others"], "manifest.json"})]
    (results / "report.html").write_text("<h1>forged</h1>")
    checked = subprocess.run(command, cwd=results, capture_output=True, text=True)
    assert checked.returncode == 1 and "report.html: FAILED" in checked.stdout


def test_a_bisection_is_part_of_the_run(results):
    (results / "bisect.json").write_text("{}")
    record = json.loads((results / "records/report.json").read_text())
    outputs = described([results / "bisect.json"])
    inputs = {"results/golden/layer_009.h5": sha256(results / "golden/layer_009.h5")}
    (results / "records/bisect.json").write_text(json.dumps(record | {"outputs": outputs, "inputs": inputs}))
    manifest.write(results / "manifest.json")
    assert {"bisect.json", "records/bisect.json", "golden/layer_009.h5"} <= content(results)["outputs"].keys()


def test_the_facts_of_each_job_are_told(results):
    written = content(results)
    assert written["config"] == CONFIG
    assert set(written["jobs"]) == JOBS
    job = written["jobs"]["golden/embed"]
    assert job["settings"] == {"compare": {"limit": 1.5}}
    assert job["arguments"] == {"of": "golden/embed"} and job["versions"] == {"numpy": "2.0"}
    assert job["inputs"]["prompts.txt"] == hashlib.sha256(b"Once").hexdigest()
    assert job["outputs"] == {"results/golden/embed.h5": hashlib.sha256(b"golden").hexdigest()}
    assert job["functions"] == 1 and job["error"] is None
    assert job["wall_s"] == 1.5 and job["command"] == "layerproof golden results/golden/embed.h5"
    assert written["checkpoint"] == {"embed": "d" * 64, "norm": "norm: shard is gone."}
    assert set(written["inputs"]) == {"prompts.txt", "../shared/tokenizer.json"}, "what is not under results/"
    assert written["inputs"]["prompts.txt"]["sha256"] == hashlib.sha256(b"Once").hexdigest()
    assert set(written["code"]) == {CODE}
    assert written["packages"]["numpy"] and written["packages"]["layerproof"] == __version__
    assert written["host"]["python"]
    assert {"Snakefile", "workflow/rules/common.smk"} <= set(written["workflow"])


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of the workflow with one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "port.py").write_text("scale = 1\n")
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"]):
        subprocess.run(["git", "-C", folder, *command], check=True, capture_output=True)
    monkeypatch.setattr(manifest, "WORKFLOW", folder)
    monkeypatch.setattr(manifest, "workflow_files", dict)
    return folder


def test_what_was_not_committed_is_kept_and_can_be_applied(results, repository):
    manifest.write(results / "manifest.json")
    assert content(results)["git"] | {"commit": ""} == {"commit": "", "dirty": False, "diff": "", "untracked": []}
    changed = "größe = 2\n".encode("latin-1")
    (repository / "port.py").write_bytes(changed)
    (repository / "new.py").write_text("")
    (repository / ".git/config").open("a").write("[color]\n\tui = always\n[diff]\n\tnoprefix = true\n")
    manifest.write(results / "manifest.json")
    git = content(results)["git"]
    assert git["dirty"] and git["untracked"] == ["new.py"]
    subprocess.run(["git", "-C", repository, "checkout", "port.py"], check=True, capture_output=True)
    diff = git["diff"].encode("utf-8", "surrogateescape")
    subprocess.run(["git", "-C", repository, "apply"], input=diff, check=True)
    assert (repository / "port.py").read_bytes() == changed


def test_no_commit_is_known_without_a_repository(results, repository):
    (repository / ".git").rename(repository / "git")
    manifest.write(results / "manifest.json")
    assert content(results)["git"] == {"commit": "unknown", "dirty": None, "diff": None, "untracked": None}


def edit_record(results, job, old, new):
    path = results / f"records/{job}.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    manifest.write(results / "manifest.json")


def test_other_code_of_a_job_is_another_digest(results):
    before = content(results)
    edit_record(results, "golden/embed", fingerprint.current(FUNCTION), "0" * 64)
    assert content(results)["jobs"]["golden/embed"]["code"] != before["jobs"]["golden/embed"]["code"]
    assert content(results)["code"][CODE] != before["code"][CODE]


def test_code_that_is_not_what_ran_is_not_archived(results):
    edit_record(results, "golden/embed", fingerprint.current(FUNCTION), "0" * 64)
    with pytest.raises(UserError, match=rf"changed: {FUNCTION} \(1 in all\)"):
        archive.write(results / "manifest.json", results / "archive/run.zip")


def test_an_input_that_is_not_what_was_read_is_not_archived(results):
    Path("prompts.txt").write_text("Twice")
    with pytest.raises(UserError, match=r"changed: prompts\.txt \(1 in all\)"):
        archive.write(results / "manifest.json", results / "archive/run.zip")


def test_no_manifest_without_a_report(results):
    (results / "records/report.json").unlink()
    with pytest.raises(UserError, match=r"^results/records/report\.json: does not exist\. Run layerproof run"):
        manifest.write(results / "manifest.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda results: (results / "report.html").write_text("<h1>PASS</h1>"), "changed: report.html"),
        (lambda results: (results / "golden/embed.h5").write_text("goldeN"), "changed: golden/embed.h5"),
        (lambda results: (results / "golden/layer_009.h5").write_text("goldeN"), "changed: golden/layer_009.h5"),
        (lambda results: (results / "golden/embed.h5").unlink(), "missing: golden/embed.h5"),
        (lambda results: (results / "golden/norm.h5").write_text("new"), "added: golden/norm.h5"),
        (lambda results: (results / "logs/chain/all/embed.log").write_text("new"), "changed: logs/chain/all/embed.log"),
    ],
)
def test_what_changed_is_found_and_not_archived(results, verified, change, problem):
    change(results)
    path = results / "manifest.json"
    assert verified(path) == (1, [problem, f"{path}: 1 files differ"])
    with pytest.raises(UserError, match=rf"{problem} \(1 in all\)\. Renew it: layerproof run"):
        archive.write(path, results / "archive/run.zip")
    assert not (results / "archive/run.zip").exists()


def test_every_difference_is_told(results, verified):
    (results / "report.html").unlink()
    (results / "verdicts.json").write_text("{ }")
    (results / "note.txt").write_text("mine")
    code, lines = verified(results / "manifest.json")
    assert code == 1
    assert lines[:-1] == ["missing: report.html", "added: note.txt", "changed: verdicts.json"]


def test_a_list_of_outputs_that_was_edited_is_found(results):
    (results / "report.html").write_text("<h1>forged</h1>")
    edited = content(results)
    edited["outputs"]["report.html"] = manifest._describe(results / "report.html")
    (results / "manifest.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match="changed by hand"):
        archive.verify(results / "manifest.json")


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1}', "\xff"])
def test_an_unusable_manifest_is_told_in_one_line(results, text):
    path = results / "manifest.json"
    path.unlink() if text is None else path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"^results/manifest\.json: ") as error:
        archive.verify(path)
    assert "\n" not in str(error.value)
