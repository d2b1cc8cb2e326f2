"""Two runs side by side, from folders, archives and git."""

import subprocess
import zipfile
from dataclasses import replace

import pytest

import reports
from layerproof import cli
from layerproof.errors import UserError
from layerproof.files import write_json
from layerproof.report import diff
from layerproof.rerun.records import Record
from recorded import JOB


def leave(folder, comparisons, started="2026-01-01", digest="a", torch="2.9.1", **settings):
    """Leaves a run in a folder, with the records of two jobs."""
    write_json(folder / "verdicts.json", reports.collect(comparisons))
    for name in ("port/layer_000", "report"):
        outputs = {f"results/{name}": {"sha256": digest, "size": 1, "mtime_ns": 0}}
        run = {"started": started, "packages": {"torch": torch}}
        Record(replace(JOB, name=name, settings=settings), {}, outputs, {}, None, run).write(
            folder / f"records/{name}.json"
        )
    return folder


@pytest.fixture
def runs(tmp_path):
    """A run in which a stage is wrong, and one in which another is."""
    stages = "embed", "layer_000", "layer_001"
    before = [reports.compared(stage, wrong=("out",) if stage == "layer_000" else ()) for stage in stages]
    after = [reports.compared(stage, wrong=("out",) if stage == "layer_001" else ()) for stage in stages]
    one = leave(tmp_path / "one", before, port={"dtype": "bfloat16"})
    other = leave(tmp_path / "two", after, "2026-01-02", "b", "2.10.0", port={"dtype": "float32"})
    return one, other


def test_what_turned_and_what_differs_is_said(runs):
    found = diff.difference(*map(diff.read, map(str, runs)))
    assert found.turned == {("fail", "pass"): ["layer_000"], ("pass", "fail"): ["layer_001"]}
    assert {(change.stage, change.tap) for change in found.taps} == {("layer_000", "out"), ("layer_001", "out")}
    assert found.settings == {"port.dtype": ("bfloat16", "float32")}
    assert found.versions == {"torch": ("2.9.1", "2.10.0")}
    assert set(found.ran_again) == set(found.other_outputs) == {"port/layer_000", "report"}
    lines = list(found.lines())
    assert "layer_000: fail to pass" in lines and "layer_001: pass to fail" in lines
    assert "settings: port.dtype bfloat16 to float32" in lines and "versions: torch 2.9.1 to 2.10.0" in lines
    assert lines[-1] == "2 of 2 jobs ran between the two, 2 of them with another output"


def test_a_run_does_not_differ_from_itself(runs, capsys):
    assert cli.run(["diff", str(runs[0]), str(runs[0])]) == 0
    said = capsys.readouterr().out
    assert "No verdict turned, and no error grew or shrank." in said and "0 of 2 jobs ran between the two" in said


def test_an_error_that_grew_without_a_turn_is_listed(tmp_path):
    right = [reports.compared("layer_000", wrong=("out",))]
    worse = [reports.compared("layer_000", wrong=("out",))]
    worse[0]["taps"]["out"]["excess"] *= 3
    found = diff.difference(
        *(diff.read(str(leave(tmp_path / name, one))) for name, one in (("a", right), ("b", worse)))
    )
    (change,) = found.taps
    assert found.turned == {} and change.factor == pytest.approx(3)
    assert change.text().startswith("layer_000 out: ") and change.text().endswith(" times what is allowed")


def test_runs_come_from_archives_and_from_git_too(runs, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        for file in runs[0].rglob("*.json"):
            archive.write(file, f"results/{file.relative_to(runs[0])}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").rename(tmp_path / "results")
    commit = ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "a run"]
    for command in (["init", "-q"], ["add", "results"], commit):
        subprocess.run(["git", *command], check=True)
    found = diff.difference(diff.read("one.zip"), diff.read("HEAD"))
    assert found.turned == {("fail", "pass"): ["layer_000"], ("pass", "fail"): ["layer_001"]}
    assert set(found.ran_again) == {"port/layer_000", "report"}


@pytest.mark.parametrize("content", [None, "{", '{"schema_version": 1}'], ids=["none", "cut", "other schema"])
def test_what_is_no_run_is_refused_in_a_line(tmp_path, content, capsys):
    if content:
        (tmp_path / "verdicts.json").write_text(content)
    assert cli.run(["diff", str(tmp_path), str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}: ")
    with pytest.raises(UserError, match="neither a folder of results"):
        diff.read("no-such-revision")


def test_the_page_has_it_all_and_escapes_it(runs, tmp_path):
    (runs[0] / "x").mkdir()
    page = tmp_path / "diff.html"
    assert cli.run(["diff", str(runs[0]), str(runs[1]), "--page", str(page)]) == 1
    text = page.read_text()
    assert "<h2>Verdicts that turned</h2>" in text and "port.dtype" in text and "layer_001" in text
    found = diff.difference(*map(diff.read, map(str, runs)))
    nasty = replace(found, settings={"<script>": ("a", "b")})
    assert "<script>" not in nasty.page()
