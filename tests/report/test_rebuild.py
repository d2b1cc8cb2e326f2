"""What `layerproof rerun` refuses, and what it says. tests/workflow/test_default_run.py makes a real archive again."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from archives import FUNCTION, forged, repacked
from layerproof import cli
from layerproof.errors import UserError
from layerproof.files import digest_of
from layerproof.report import manifest, rebuild
from layerproof.rerun.records import Record


@pytest.fixture(autouse=True)
def uncommitted(monkeypatch):
    monkeypatch.setattr(manifest, "_uncommitted", lambda: {"diff": "", "untracked": []})


def rerun(capsys, *arguments):
    """The exit code of `layerproof rerun`, and the last line of what it prints."""
    capsys.readouterr()
    code = cli.run(["rerun", *map(str, arguments)])
    output = capsys.readouterr()
    return code, (output.out + output.err).splitlines()[-1]


def test_an_archive_with_a_damaged_file_is_not_made_again(archive, capsys):
    repacked(archive, lambda files: files.update({"results/report.html": b"forged"}))
    code, line = rerun(capsys, archive)
    assert (code, line) == (
        2,
        f"error: {archive}: changed: results/report.html (1 in all). layerproof verify {archive} lists all.",
    )


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_what_is_no_archive_is_told_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "run.zip"
    if content is not None:
        path.write_bytes(content)
    code, line = rerun(capsys, path)
    assert code == 2 and line.startswith(f"error: {path}: is not an archive of a run")


UNSAFE = [
    "../out.txt",
    "a/../../out.txt",
    "/out.txt",
    "a\\..\\out.txt",
    "a//out.txt",
    "./out.txt",
    "folder/",
]


@pytest.mark.parametrize("name", UNSAFE)
def test_no_name_leads_out_of_the_folder(archive, tmp_path, capsys, name):
    forged(archive, lambda files: files.update({name: b""}))
    into = tmp_path / "into"
    code, line = rerun(capsys, archive, "--into", into)
    assert code == 2 and f"unsafe name {name!r}" in line
    assert not (into / "archive").exists() and not (tmp_path / "out.txt").exists()


def test_a_link_is_not_unpacked(archive, tmp_path):
    with zipfile.ZipFile(archive, "a") as file:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        file.writestr(link, "/etc")
    with pytest.raises(UserError, match="unsafe name 'link'"):
        rebuild.unpack(archive, tmp_path / "folder")


def test_an_archive_that_does_not_fit_on_the_disk_is_refused_before_it_is_unpacked(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(rebuild.shutil, "disk_usage", lambda folder: rebuild.shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(UserError, match=r"bytes are needed and 9 are free\. Name another folder with --into"):
        rebuild.unpack(archive, tmp_path / "folder")


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: (path / "mine").mkdir(parents=True)])
def test_nothing_is_written_into_what_exists(archive, tmp_path, capsys, make):
    into = tmp_path / "into"
    make(into)
    code, line = rerun(capsys, archive, "--into", into)
    assert (code, line) == (2, f"error: {into}: exists and is not an empty folder. Name another one.")


@pytest.mark.parametrize("path", ["/tmp/out.json", "results/../../out.json", "config.yaml", "results"])
def test_a_record_that_names_other_files_is_refused(archive, capsys, tmp_path, path):
    """Whoever forges an archive may write any path into its records."""
    name = "results/records/verdicts.json"

    def change(files):
        record = json.loads(files[name])
        (output,) = record["outputs"].values()
        files[name] = json.dumps(record | {"outputs": {path: output}}).encode()

    code, line = rerun(capsys, forged(archive, change))
    assert code == 2 and f"a record names {path!r}" in line


def test_a_record_of_another_job_is_refused(archive, capsys):
    name = "results/records/verdicts.json"

    def change(files):
        record = json.loads(files[name])
        record["job"]["name"] = "../../out"
        files[name] = json.dumps(record).encode()

    code, line = rerun(capsys, forged(archive, change))
    assert code == 2 and line.endswith("results/records/verdicts.json: is not a record of this version.")


def test_a_manifest_of_another_shape_ends_it(archive, capsys):
    name = "results/manifest.json"

    def change(files):
        content = json.loads(files[name])
        del content["jobs"]["verdicts"]["packages"], content["digest"]
        files[name] = json.dumps(content | {"digest": digest_of(content)}).encode()

    code, line = rerun(capsys, forged(archive, change))
    assert (code, line) == (2, f"error: {archive}: cannot be made again (KeyError('packages')).")


def test_a_verb_that_fails_on_the_files_ends_it(archive, capsys):
    code, line = rerun(capsys, archive)
    assert code == 2 and line.startswith(f"error: {archive}: layerproof verdicts fails on its files: ")


def test_packages_of_other_versions_are_named(capsys):
    jobs = {"golden/embed": {"packages": {"numpy": "1.0", "no-such-package": "3.1"}}}
    rebuild._print_packages({"packages": {"pytest": pytest.__version__, "numpy": "2.0"}, "jobs": jobs})
    numpy = rebuild._installed("numpy")
    assert capsys.readouterr().out.splitlines() == [
        "packages: 1 of 3 are installed in the recorded version",
        "  no-such-package 3.1: not installed here",
        f"  numpy 1.0, 2.0: here {numpy}",
    ]


def test_code_that_is_other_code_here_is_named(results, capsys):
    """By the records of the jobs that ran again."""
    record = Record.read(results / "records/report.json")
    again = {"report": replace(record, code={FUNCTION: "0" * 64, "layerproof/new.py::f": "1"}), "verdicts": record}
    rebuild._print_code(again, Path())
    assert capsys.readouterr().out == f"code: 0 of 1 functions and names are as they ran\n  {FUNCTION}\n"
    rebuild._print_code({"report": record, "not made again": record}, Path())
    assert capsys.readouterr().out == "code: 1 of 1 functions and names are as they ran\n"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"a": {"b": [1, 2.0]}}, {"a": {"b": [1, 2.0 + 1e-9]}}, []),
        ({"a": {"b": [1, 2.0]}}, {"a": {"b": [1, 2.001]}}, ["a.b[1]: 2.0 in the archive, 2.001 made again"]),
        ({"a": "pass"}, {"a": "fail"}, ["a: pass in the archive, fail made again"]),
        ({"a": None, "c": 1}, {"a": 0.0, "b": 1}, ["a: None in the archive, 0.0 made again", "c: only in the archive"]),
        ({"a": True}, {"a": 1}, ["a: True in the archive, 1 made again"]),
        ([1], [1, 2], [": [1] in the archive, [1, 2] made again"]),
        ({"a": 1.0}, {"a": float("nan")}, ["a: 1.0 in the archive, nan made again"]),
    ],
)
def test_differences_are_told_with_their_place(before, after, found):
    assert [line for line in rebuild.differences(before, after) if "only in the rerun" not in line] == found


def test_long_lists_are_cut(capsys):
    rebuild._print_some([str(number) for number in range(25)])
    assert capsys.readouterr().out.splitlines()[-2:] == ["  19", "  and 5 more"]
