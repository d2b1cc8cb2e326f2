"""The archive of a run: it holds the run, two of equal runs are equal, and no byte of it changes unnoticed."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import archives as archive_run
from archives import CODE, comparable, finish_run, forged, members, repacked
from layerproof.errors import UserError
from layerproof.files import digest_of
from layerproof.paths import WORKFLOW
from layerproof.report import archive as archives
from layerproof.report import manifest
from layerproof.rerun import fingerprint

OF_THE_ARCHIVE = {"ro-crate-metadata.json", "MANIFEST.sha256", "config.yaml", "uncommitted.diff"}


@pytest.fixture(autouse=True)
def uncommitted(monkeypatch):
    monkeypatch.setattr(manifest, "_uncommitted", lambda: {"diff": "a\udce9\n", "untracked": []})


def test_an_archive_holds_the_run_and_verifies_anywhere(results, archive, verified, tmp_path):
    held = members(archive)
    listed = json.loads((results / "manifest.json").read_text())
    files = {f"results/{name}": results / name for name in [*listed["outputs"], "manifest.json"]}
    files |= {f"code/{name}": path for name, path in manifest.workflow_files().items()}
    files |= {f"code/{CODE}": fingerprint.path_of(CODE), "inputs/prompts.txt": Path("prompts.txt")}
    files |= {"inputs/_parent/shared/tokenizer.json": Path("../shared/tokenizer.json")}
    assert held.keys() == files.keys() | OF_THE_ARCHIVE
    assert {name: held[name] for name in files} == {name: path.read_bytes() for name, path in files.items()}
    assert held["uncommitted.diff"] == b"a\xe9\n"
    elsewhere = archive.rename(tmp_path / "elsewhere.zip")
    (results / "report.html").unlink()
    assert verified(elsewhere) == (0, [f"{elsewhere}: every file is as it was"])


def test_an_archive_to_share_has_no_source_no_prompts_and_no_folders(tmp_path, monkeypatch, verified):
    monkeypatch.setattr(archive_run, "CONFIG", archive_run.CONFIG | {"report": {"share": True}})
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    results = finish_run(files=[("verdicts.json", json.dumps({"place": f"{tmp_path}/run/deep/port.py"}))])
    path = results / "archive/public.zip"
    archives.write(results / "manifest.json", path)
    held = members(path)
    named = {"results/report.html", "results/verdicts.json", "ro-crate-metadata.json", "MANIFEST.sha256"}
    assert named <= held.keys() and not any(name.startswith(("code/", "inputs/", "results/golden")) for name in held)
    assert held["results/verdicts.json"] == b'{"place": "port.py"}'
    together = b"".join(held.values())
    for private in (str(tmp_path).encode(), b"Once", b'"anna"', b'"ada"', b"prompts.txt"):
        assert private not in together, private
    assert verified(path) == (0, [f"{path}: every file is as it was"])


def test_the_config_in_an_archive_is_one_that_layerproof_reads(archive):
    import yaml

    from archives import CONFIG

    assert yaml.safe_load(members(archive)["config.yaml"]) == CONFIG


def test_an_archive_can_be_checked_without_layerproof(archive, tmp_path):
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path / "unpacked")
        seal = file.comment.decode()
    command = ["sha256sum", "--check", "--strict", "--quiet", "MANIFEST.sha256"]
    subprocess.run(command, cwd=tmp_path / "unpacked", check=True)
    assert hashlib.sha256(archive.read_bytes()[:-64]).hexdigest() == seal


def test_an_archive_inside_results_is_no_added_file(results, archive, verified):
    assert verified(results / "manifest.json")[0] == 0


def test_the_same_run_gives_the_same_archive(results, archive):
    """Whatever its name, and however often it is made."""
    archives.write(results / "manifest.json", results / "archive/again.zip")
    assert (results / "archive/again.zip").read_bytes() == archive.read_bytes()


LATER = {"started": "2027-01-01T00:00:00+00:00", "wall_s": 9.0, "peak_rss_bytes": 9, "host": "berta", "user": "bob"}
LATER_FILES = {
    "logs/golden/embed.log": "done later",
    "benchmarks/chain/all.tsv": "s\n9",
    "preflight/port.json": json.dumps({"checks": [{"text": "1 GB of 7.5 GB available"}], "hardware": {"Cores": "2"}}),
}


def second_run(tmp_path, monkeypatch, **more):
    """An archive of the same run at another time on another host, or of one with more differences."""
    folder = tmp_path / "second/run"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    results = finish_run("other", LATER_FILES | more, **LATER, machine="Linux 7 x86_64")
    archives.write(results / "manifest.json", folder / "second.zip")
    return folder / "second.zip"


def test_two_equal_runs_differ_only_where_the_contract_says(archive, tmp_path, monkeypatch):
    first, second = comparable(archive.absolute()), comparable(second_run(tmp_path, monkeypatch))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_another_result_is_another_archive(archive, tmp_path, monkeypatch):
    first = comparable(archive.absolute())
    second = comparable(second_run(tmp_path, monkeypatch, **{"golden/embed.h5": "goldeN"}))
    assert {"results/golden/embed.h5", "results/manifest.json", "ro-crate-metadata.json"} <= {
        name for name in first if first[name] != second[name]
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: files.update({"results/report.html": b"forged"}), "changed: results/report.html"),
        (lambda files: files.update({f"code/{CODE}": b"forged"}), f"changed: code/{CODE}"),
        (lambda files: files.update({"inputs/prompts.txt": b"forged"}), "changed: inputs/prompts.txt"),
        (lambda files: files.update({"ro-crate-metadata.json": b"{}"}), "changed: ro-crate-metadata.json"),
        (lambda files: files.pop("results/golden/embed.h5"), "missing: results/golden/embed.h5"),
        (lambda files: files.pop("inputs/prompts.txt"), "missing: inputs/prompts.txt"),
        (lambda files: files.update({"results/more.txt": b"new"}), "added: results/more.txt"),
        (lambda files: None, "changed: run.zip, outside of its files"),
    ],
)
def test_a_changed_archive_is_found(archive, verified, change, problem):
    assert verified(repacked(archive, change)) == (1, [problem, f"{archive}: 1 files differ"])


def test_a_file_that_is_there_twice_is_found(archive, verified):
    """One reader takes the first of the two, another the last."""
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(archive, "a") as file:
        file.writestr("results/report.html", file.read("results/report.html"))
    assert verified(archive) == (1, ["added: results/report.html, a second time", f"{archive}: 1 files differ"])


def test_an_archive_with_a_damaged_byte_names_the_file(archive, verified):
    with zipfile.ZipFile(archive) as file:
        info = file.getinfo(f"code/{CODE}")
    data = bytearray(archive.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 0x10
    archive.write_bytes(data)
    assert verified(archive) == (1, [f"changed: code/{CODE}", f"{archive}: 1 files differ"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-90]),
        lambda path: path.write_bytes(b"no zip"),
        lambda path: path.unlink(),
        lambda path: repacked(path, lambda files: files.pop("MANIFEST.sha256")),
        lambda path: repacked(path, lambda files: files.update({"MANIFEST.sha256": b"{"})),
    ],
    ids=["cut", "no zip", "gone", "no checksums", "broken checksums"],
)
def test_an_unusable_archive_is_told_in_one_line(archive, damage):
    damage(archive)
    with pytest.raises(UserError, match=r"is not an archive of a run") as error:
        archives.verify(archive)
    assert "\n" not in str(error.value)


def is_found(path, data):
    """Whether `verify` finds that a file with these bytes is not the archive that it was."""
    path.write_bytes(data)
    try:
        return archives.verify(path) == 1
    except UserError:
        return True


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_found(archive, tmp_path, data):
    whole = archive.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1) | st.integers(len(whole) - 3000, len(whole) - 1))
    other = data.draw(st.integers(1, 255))
    damaged = bytearray(whole)
    damaged[position] ^= other
    assert is_found(tmp_path / "damaged.zip", damaged)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_added_or_removed_bytes_are_found(archive, tmp_path, data):
    whole = archive.read_bytes()
    position = data.draw(st.sampled_from([0, len(whole), len(whole) - 64]) | st.integers(0, len(whole)))
    added = data.draw(st.binary(max_size=80))
    removed = data.draw(st.integers(0 if added else 1, 80))
    changed = whole[:position] + added + whole[position + removed :]
    assert changed == whole or is_found(tmp_path / "damaged.zip", changed)


def test_an_archive_that_is_longer_by_another_seal_is_found(archive, tmp_path):
    """Somebody appends bytes and a seal that fits them; the comment of the zip file then ends too early."""
    longer = archive.read_bytes() + b"more"
    seal = hashlib.sha256(longer).hexdigest().encode()
    assert is_found(tmp_path / "longer.zip", longer + seal)


@pytest.fixture
def older(archive):
    """An archive as version 0.1 wrote it."""
    files = {name: data for name, data in members(archive).items() if name not in OF_THE_ARCHIVE}
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    content = {"schema_version": 1, "files": listed}
    path = archive.with_name("older.zip")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive.json", json.dumps(content | {"digest": digest_of(content)}))
        for name, data in files.items():
            file.writestr(name, data)
    return path


def test_an_archive_of_an_earlier_version_still_verifies(older, verified):
    assert verified(older) == (0, [f"{older}: every file is as it was"])
    repacked(older, lambda files: files.update({"results/report.html": b"forged"}))
    assert verified(older) == (1, ["changed: results/report.html", f"{older}: 1 files differ"])


def test_a_manifest_of_an_earlier_version_is_not_archived(results):
    path = results / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"], content["workflow"]
    path.write_text(json.dumps(content | {"digest": digest_of(content)}))
    with pytest.raises(UserError, match=r"it is of an earlier version \(1 in all\)\. Renew it"):
        archives.write(path, results / "archive/run.zip")


def test_a_rule_that_changed_is_not_archived(results, monkeypatch):
    files = manifest.workflow_files() | {"Snakefile": WORKFLOW / "config.yaml"}
    monkeypatch.setattr(manifest, "workflow_files", lambda: files)
    with pytest.raises(UserError, match=r"changed: Snakefile \(1 in all\)"):
        archives.write(results / "manifest.json", results / "archive/run.zip")


def test_a_file_that_changes_while_it_is_archived_ends_it(results, monkeypatch):
    checked = archives._problems_elsewhere

    def change_after(*arguments):
        yield from checked(*arguments)
        (results / "report.html").write_text("<h1>Pass</h1>")

    monkeypatch.setattr(archives, "_problems_elsewhere", change_after)
    with pytest.raises(UserError, match=r"results/report\.html: changed while it was archived"):
        archives.write(results / "manifest.json", results / "archive/run.zip")
    assert not (results / "archive/run.zip").exists()


def test_names_in_an_archive_stay_in_their_folder_and_apart():
    paths = ["a/b.txt", "/a/b.txt", "../a/b.txt", "../../a/b.txt", "/", "a/../b.txt"]
    names = [archives.name_in("inputs", path) for path in paths]
    assert len(set(names)) == len(paths)
    assert all(name.startswith("inputs/") and archives.is_safe(name) for name in names)


@pytest.mark.parametrize("name", ["a\nb.txt", "a\\b.txt"])
def test_a_name_that_cannot_be_unpacked_everywhere_is_not_archived(results, name):
    Path(name).write_text("Once")
    path = results / "records/golden/embed.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"inputs": {name: hashlib.sha256(b"Once").hexdigest()}}))
    manifest.write(results / "manifest.json")
    with pytest.raises(UserError, match="has a name that no archive takes"):
        archives.write(results / "manifest.json", results / "archive/run.zip")


def test_who_renews_checksums_and_seal_is_not_found_by_verify(archive, verified):
    """It finds damage. Against forgers compare the seal with one that was noted before, or run `layerproof rerun`."""
    forged(archive, lambda files: files.update({"results/report.html": b"forged"}))
    assert verified(archive)[0] == 0
