"""The audit trail: every file is listed, and whatever is changed, removed or added afterwards is found."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from layerproof.errors import UserError
from layerproof.files import sha256
from layerproof.report import manifest
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.records import Record, described

CONFIG = {"model": {"checkpoint": "models/small"}, "compare": {"limit": 1.5}}
CODE = "layerproof/model/stages.py"
FUNCTION = f"{CODE}::all_stages"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A small results/ as a run leaves it, with the manifest written."""
    monkeypatch.chdir(tmp_path)
    results = Path("results")
    for name, text in {
        "report.html": "<h1>pass</h1>",
        "verdicts.json": "{}",
        "golden/embed.h5": "golden",
        "weights/embed.json": json.dumps({"digest": "d" * 64}),
        "weights/unused.json": "[]",
        "weights/norm.json": json.dumps({"error": "norm: shard is gone."}),
        "logs/golden/embed.log": "done",
        "logs/chain/all/embed.log": "done",
        "benchmarks/golden/embed.tsv": "s\n1.5",
        "benchmarks/chain/all.tsv": "s\n1.5",
        "chain/all/embed.h5": "chained",
        "golden/layer_009.h5": "left by a run of more layers",
        "logs/golden/layer_009.log": "done then",
        "logs/manifest.log": "being written",
        "archive/old.zip": "older",
        "README.md": "ships with the repository",
        "golden/norm.h5.tmp": "left by a killed job",
    }.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(text)
    Path("prompts.txt").write_text("Once")
    code = {FUNCTION: fingerprint.current(FUNCTION)}
    for name, inputs, outputs in (
        ("golden/embed", ["prompts.txt"], ["golden/embed.h5"]),
        ("golden/layer_009", ["results/golden/embed.h5"], ["golden/layer_009.h5"]),
        ("chain/all/embed", ["results/golden/embed.h5"], ["chain/all/embed.h5"]),
        ("verdicts", ["results/golden/embed.h5", "results/chain/all/embed.h5"], ["verdicts.json"]),
        ("report", ["results/verdicts.json"], ["report.html"]),
    ):
        settings = CONFIG if name == "report" else {"compare": {"limit": 1.5}}
        job = Job(name, settings, {"of": name}, {"numpy": "2.0"}, "new", "it has not run before", "new")
        Record(
            job,
            inputs={path: sha256(Path(path)) for path in inputs},
            outputs=described([results / path for path in outputs]),
            code=code,
            error=None,
            run={"wall_s": 1.5, "command": f"layerproof {name}"},
        ).write(job.record)
    manifest.write(results / "manifest.json")
    return results


def content(results):
    return json.loads((results / "manifest.json").read_text())


def verified(path, capsys):
    """What `verify` prints, line by line, and returns."""
    capsys.readouterr()
    code = manifest.verify(path)
    return code, capsys.readouterr().out.splitlines()


def test_an_unchanged_run_passes(results, capsys):
    path = results / "manifest.json"
    assert verified(path, capsys) == (0, [f"{path}: every file is as it was"])


def test_every_file_of_the_run_is_listed_with_its_digest(results):
    listed = content(results)
    assert set(listed["outputs"]) == {
        "report.html",
        "verdicts.json",
        "golden/embed.h5",
        "chain/all/embed.h5",
        "logs/golden/embed.log",
        "logs/chain/all/embed.log",
        "benchmarks/golden/embed.tsv",
        "benchmarks/chain/all.tsv",
        *(f"records/{job}.json" for job in ("golden/embed", "chain/all/embed", "verdicts", "report")),
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
    assert set(written["jobs"]) == {"golden/embed", "chain/all/embed", "verdicts", "report"}
    job = written["jobs"]["golden/embed"]
    assert job["settings"] == {"compare": {"limit": 1.5}}
    assert job["arguments"] == {"of": "golden/embed"} and job["versions"] == {"numpy": "2.0"}
    assert job["inputs"] == {"prompts.txt": hashlib.sha256(b"Once").hexdigest()}
    assert job["outputs"] == {"results/golden/embed.h5": hashlib.sha256(b"golden").hexdigest()}
    assert job["functions"] == 1 and job["error"] is None
    assert job["wall_s"] == 1.5 and job["command"] == "layerproof golden/embed"
    assert written["checkpoint"] == {"embed": "d" * 64, "norm": "norm: shard is gone."}
    assert set(written["inputs"]) == {"prompts.txt"}, "what is not under results/"
    assert written["inputs"]["prompts.txt"]["sha256"] == hashlib.sha256(b"Once").hexdigest()
    assert set(written["code"]) == {CODE}
    assert written["packages"]["numpy"] and written["host"]["python"] and set(written["git"]) == {"commit", "dirty"}


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
        manifest.archive(results / "manifest.json", results / "archive/run.zip")


def test_an_input_that_is_not_what_was_read_is_not_archived(results):
    Path("prompts.txt").write_text("Twice")
    with pytest.raises(UserError, match=r"changed: prompts\.txt \(1 in all\)"):
        manifest.archive(results / "manifest.json", results / "archive/run.zip")


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
def test_what_changed_is_found_and_not_archived(results, capsys, change, problem):
    change(results)
    path = results / "manifest.json"
    assert verified(path, capsys) == (1, [problem, f"{path}: 1 files differ"])
    with pytest.raises(UserError, match=rf"{problem} \(1 in all\)\. Renew it: layerproof run"):
        manifest.archive(path, results / "archive/run.zip")
    assert not (results / "archive/run.zip").exists()


def test_every_difference_is_told(results, capsys):
    (results / "report.html").unlink()
    (results / "verdicts.json").write_text("{ }")
    (results / "note.txt").write_text("mine")
    code, lines = verified(results / "manifest.json", capsys)
    assert code == 1
    assert lines[:-1] == ["missing: report.html", "added: note.txt", "changed: verdicts.json"]


def test_a_list_of_outputs_that_was_edited_is_found(results):
    (results / "report.html").write_text("<h1>forged</h1>")
    edited = content(results)
    edited["outputs"]["report.html"] = manifest._describe(results / "report.html")
    (results / "manifest.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match="changed by hand"):
        manifest.verify(results / "manifest.json")


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1}', "\xff"])
def test_an_unusable_manifest_is_told_in_one_line(results, text):
    path = results / "manifest.json"
    path.unlink() if text is None else path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"^results/manifest\.json: ") as error:
        manifest.verify(path)
    assert "\n" not in str(error.value)


@pytest.fixture
def archive(results):
    path = results / "archive/run.zip"
    manifest.archive(results / "manifest.json", path)
    return path


def repacked(archive, change):
    """The archive with its members changed in place by `change(members)`."""
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    change(members)
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return archive


def test_an_archive_holds_the_run_and_verifies_anywhere(results, archive, capsys, tmp_path):
    with zipfile.ZipFile(archive) as file:
        held = {name: file.read(name) for name in file.namelist()}
    files = {f"results/{name}": results / name for name in [*content(results)["outputs"], "manifest.json"]}
    files |= {f"code/{CODE}": fingerprint.path_of(CODE), "inputs/prompts.txt": Path("prompts.txt")}
    assert json.loads(held.pop("archive.json"))["files"].keys() == files.keys()
    assert held == {name: path.read_bytes() for name, path in files.items()}
    elsewhere = archive.rename(tmp_path / "elsewhere.zip")
    (results / "report.html").unlink()
    assert verified(elsewhere, capsys) == (0, [f"{elsewhere}: every file is as it was"])


def test_an_archive_inside_results_is_no_added_file(results, archive, capsys):
    assert verified(results / "manifest.json", capsys)[0] == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda members: members.update({"results/report.html": b"forged"}), "changed: results/report.html"),
        (lambda members: members.update({f"code/{CODE}": b"forged"}), f"changed: code/{CODE}"),
        (lambda members: members.update({"inputs/prompts.txt": b"forged"}), "changed: inputs/prompts.txt"),
        (lambda members: members.pop("results/golden/embed.h5"), "missing: results/golden/embed.h5"),
        (lambda members: members.pop("inputs/prompts.txt"), "missing: inputs/prompts.txt"),
        (lambda members: members.update({"results/more.txt": b"new"}), "added: results/more.txt"),
    ],
)
def test_a_changed_archive_is_found(archive, capsys, change, problem):
    assert verified(repacked(archive, change), capsys) == (1, [problem, f"{archive}: 1 files differ"])


def test_an_archive_with_a_damaged_byte_is_found(archive, capsys):
    with zipfile.ZipFile(archive) as file:
        info = file.getinfo(f"code/{CODE}")
    data = bytearray(archive.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 0x10
    archive.write_bytes(data)
    assert verified(archive, capsys) == (1, [f"changed: code/{CODE}", f"{archive}: 1 files differ"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"no zip"),
        lambda path: path.unlink(),
        lambda path: repacked(path, lambda members: members.pop("archive.json")),
        lambda path: repacked(path, lambda members: members.update({"archive.json": b"{"})),
    ],
    ids=["cut", "no zip", "gone", "no contents", "broken contents"],
)
def test_an_unusable_archive_is_told_in_one_line(archive, damage):
    damage(archive)
    with pytest.raises(UserError, match=r"is not an archive of a run") as error:
        manifest.verify(archive)
    assert "\n" not in str(error.value)


def test_no_damaged_byte_of_a_member_goes_unnoticed(archive):
    """Some make the compressed data wrong and some make it impossible to unpack. The last one is left out: it marks the
    end, and without it the content is the same.
    """
    with zipfile.ZipFile(archive) as file:
        info = file.getinfo(f"code/{CODE}")
    start = info.header_offset + 30 + len(info.filename)
    whole = archive.read_bytes()
    for position in range(start, start + info.compress_size - 1, 7):
        archive.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        assert manifest.verify(archive) == 1, position - start
