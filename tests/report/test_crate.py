"""The metadata of an archive: valid for a validator of others, and it says who made what from what."""

import json
from pathlib import Path

import pytest

from archives import CODE, FACTS, finish_run, members, validate
from layerproof import __version__
from layerproof.files import digest_of
from layerproof.report import archive as archives
from layerproof.report import manifest
from layerproof.rerun.records import Record


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    monkeypatch.setattr(manifest, "git_state", lambda: {"commit": "f" * 40, "dirty": True})
    monkeypatch.setattr(manifest, "_uncommitted", lambda: {"diff": "a\n", "untracked": []})


def metadata(path):
    """The entities by identifier."""
    return {entity["@id"]: entity for entity in json.loads(members(path)["ro-crate-metadata.json"])["@graph"]}


def ids(value):
    return [one["@id"] for one in (value if isinstance(value, list) else [value])]


@pytest.mark.slow
def test_the_crate_is_valid(archive, tmp_path):
    code, text = validate(archive)
    assert code == 0 and "91 checks" in text, text


@pytest.mark.slow
def test_the_validator_sees_what_is_missing(archive, tmp_path):
    """An action without a tool, and a listed file that is not there."""
    files = members(archive)
    crate = json.loads(files.pop("ro-crate-metadata.json"))
    del files["results/report.html"]
    for entity in crate["@graph"]:
        if entity["@id"] == "#job/report":
            del entity["instrument"]
    folder = tmp_path / "broken"
    for name, data in (files | {"ro-crate-metadata.json": json.dumps(crate).encode()}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    code, text = validate(folder)
    assert code == 1 and "MUST have an instrument" in text and "results/report.html" in text


def test_every_file_is_described_with_digest_and_size(archive):
    found, listed = metadata(archive), members(archive)
    files = {name: entity for name, entity in found.items() if "File" in entity["@type"]}
    assert files.keys() == listed.keys() - {"ro-crate-metadata.json"}
    sums = dict(line.split("  ")[::-1] for line in listed["MANIFEST.sha256"].decode().splitlines())
    for name in files.keys() - {"MANIFEST.sha256"}:
        assert (files[name]["sha256"], files[name]["contentSize"]) == (sums[name], str(len(listed[name]))), name
    assert sorted(ids(found["./"]["hasPart"])) == sorted(files)
    assert files["inputs/_parent/shared/tokenizer.json"]["name"] == "../shared/tokenizer.json"


def test_an_action_says_who_made_what_from_what(archive):
    found = metadata(archive)
    action = found["#job/golden/embed"]
    assert action["@type"] == "CreateAction" and action["description"] == "layerproof golden results/golden/embed.h5"
    assert ids(action["object"]) == ["inputs/prompts.txt", "inputs/_parent/shared/tokenizer.json"]
    assert ids(action["result"]) == ["results/golden/embed.h5"]
    assert (action["startTime"], action["endTime"]) == (
        "2026-11-27T09:00:00.000+00:00",
        "2026-11-27T09:00:01.500+00:00",
    )
    assert found[action["agent"]["@id"]] | {"@id": ""} == {"@id": "", "@type": "Person", "name": "ada"}
    host = found[action["location"]["@id"]]
    assert (host["name"], host["description"]) == ("anna", "Linux 6.1 x86_64")
    assert [(found[one]["name"], found[one]["value"]) for one in ids(host["additionalProperty"])] == [("Cores", "2")]
    assert found[action["resourceUsage"]["@id"]]["value"] == "1000"
    tool = found[action["instrument"]["@id"]]
    assert (tool["name"], tool["softwareVersion"]) == ("layerproof golden", __version__)
    needs = [found[one] for one in ids(tool["softwareRequirements"])]
    assert [(one["name"], one["softwareVersion"]) for one in needs] == [("Python", "3.12.1"), ("numpy", "2.0")]
    assert action["actionStatus"].endswith("/CompletedActionStatus") and "error" not in action


def test_an_error_and_an_image_are_stated(archive):
    found = metadata(archive)
    failed = found["#job/chain/all/embed"]
    assert failed["actionStatus"].endswith("/FailedActionStatus") and failed["error"] == "no shard"
    image = found[found["#job/verdicts"]["containerImage"]["@id"]]
    assert (image["sha256"], image["registry"]) == ("c" * 64, "registry.example")
    assert image["additionalType"]["@id"].endswith("#DockerImage")
    assert "containerImage" not in found["#job/report"]


def test_the_run_as_a_whole(archive):
    found = metadata(archive)
    run, workflow = found["#run"], found["code/Snakefile"]
    assert ids(run["result"]) == ["results/report.html", "results/verdicts.json"]
    assert ids(run["object"]) == [
        "config.yaml",
        "inputs/_parent/shared/tokenizer.json",
        "inputs/prompts.txt",
        "#checkpoint",
    ]
    assert found["./"]["mainEntity"]["@id"] == run["instrument"]["@id"] == "code/Snakefile"
    assert workflow["identifier"] == "f" * 40 and "with uncommitted changes" in workflow["description"]
    assert found["#checkpoint"]["name"] == "models/small"
    assert set(ids(found["./"]["mentions"])) == {"#run"} | {name for name in found if is_job(name)}


def is_job(name):
    return name.startswith("#job/") and not name.endswith("/memory")


def test_it_is_dated_when_the_manifest_was_written(results):
    path = results / "manifest.json"
    content = json.loads(path.read_text()) | {"written": "2020-01-01T00:00:00+00:00"}
    del content["digest"]
    path.write_text(json.dumps(content | {"digest": digest_of(content)}))
    archives.write(path, results / "archive/run.zip")
    assert metadata(results / "archive/run.zip")["./"]["datePublished"] == "2020-01-01T00:00:00+00:00"


def test_a_file_that_is_not_in_the_archive_is_mentioned_with_its_digest(results):
    Path("prompts.txt").unlink()
    manifest.write(results / "manifest.json")
    archives.write(results / "manifest.json", results / "archive/run.zip")
    found = metadata(results / "archive/run.zip")
    absent = found["#absent/prompts.txt"]
    assert absent["name"] == "prompts.txt" and len(absent["sha256"]) == 64
    assert "#absent/prompts.txt" in ids(found["#job/golden/embed"]["object"])


def test_an_imported_golden_was_made_elsewhere(results):
    """By another user on another host: an action of its own."""
    path = results / "records/golden/embed.json"
    record = Record.read(path)
    outputs = {name: output["sha256"] for name, output in record.outputs.items()}
    facts = {**FACTS, "user": "bob", "host": "berta", "command": "layerproof golden results/golden/embed.h5"}
    made = {"inputs": {"prompts.txt": record.inputs["prompts.txt"]}, "outputs": outputs, **facts}
    content = json.loads(path.read_text())
    content["run"] |= {"made": made, "command": "layerproof import-golden results/golden/embed.h5"}
    path.write_text(json.dumps(content))
    manifest.write(results / "manifest.json")
    archives.write(results / "manifest.json", results / "archive/run.zip")
    found = metadata(results / "archive/run.zip")
    made, imported = found["#job/golden/embed/made"], found["#job/golden/embed"]
    assert (made["agent"]["@id"], made["location"]["@id"]) == ("#user/bob", "#host/berta")
    assert made["result"] == imported["result"] and made["instrument"]["@id"] == "#tool/golden"
    assert imported["agent"]["@id"] == "#user/ada" and imported["instrument"]["@id"] == "#tool/import-golden"
    assert ids(found["./"]["author"]) == ["#user/ada", "#user/bob"]


def test_the_code_that_ran_is_part_of_it(archive):
    assert metadata(archive)[f"code/{CODE}"]["encodingFormat"] == "text/x-python"


def test_no_network_is_needed_to_write_it(tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", None)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    archives.write(finish_run() / "manifest.json", tmp_path / "run.zip")
