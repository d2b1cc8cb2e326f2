"""Finished runs, made of a few small files, and archives of them: to look into, to forge, and to compare."""

import hashlib
import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

from configs import REPOSITORY
from environments import install
from layerproof.files import sha256
from layerproof.report import archive, manifest
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.records import Record, described

CONFIG = {
    "model": {"checkpoint": "models/small"},
    "port": {"backend": "xla", "module": "ports/small.py"},
    "compare": {"limit": 1.5},
    "containers": {"golden": "images/golden.sif", "cpu": "docker://registry.example/cpu@sha256:" + "c" * 64},
}
CODE = "layerproof/model/stages.py"
FUNCTION = f"{CODE}::all_stages"
FACTS = {
    "started": "2026-11-27T09:00:00+00:00",
    "wall_s": 1.5,
    "peak_rss_bytes": 1000,
    "host": "anna",
    "user": "ada",
    "machine": "Linux 6.1 x86_64",
    "python": "3.12.1",
    "packages": {"numpy": "2.0"},
}
FILES = {
    "report.html": "<h1>pass</h1>",
    "verdicts.json": "{}",
    "golden/embed.h5": "golden",
    "weights/embed.json": json.dumps({"digest": "d" * 64}),
    "weights/unused.json": "[]",
    "weights/norm.json": json.dumps({"error": "norm: shard is gone."}),
    "preflight/port.json": json.dumps({"checks": [{"text": "1 GB of 9 GB available"}], "hardware": {"Cores": "2"}}),
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
}
JOBS = (
    ("preflight/port", [], ["preflight/port.json"]),
    ("golden/embed", ["prompts.txt", "../shared/tokenizer.json"], ["golden/embed.h5"]),
    ("golden/layer_009", ["results/golden/embed.h5"], ["golden/layer_009.h5"]),
    ("chain/all/embed", ["results/golden/embed.h5"], ["chain/all/embed.h5"]),
    ("verdicts", ["results/golden/embed.h5", "results/chain/all/embed.h5"], ["verdicts.json"]),
    ("report", ["results/verdicts.json", "results/preflight/port.json"], ["report.html"]),
)
"""Jobs with their inputs and outputs."""


def finish_run(plan="new", files=(), **facts):
    """A small results/ in the working directory as a run leaves it, with the manifest written. `files` have other contents
    by name, and `facts` are what the records say of the run.
    """
    results = Path("results")
    for name, text in {**FILES, **dict(files)}.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(text)
    Path("prompts.txt").write_text("Once")
    Path("../shared").mkdir(exist_ok=True)
    Path("../shared/tokenizer.json").write_text("{}")
    code = {FUNCTION: fingerprint.current(FUNCTION)}
    for name, inputs, outputs in JOBS:
        settings = CONFIG if name == "report" else {"compare": {"limit": 1.5}}
        versions = {"container": "sha256:" + "c" * 64} if name == "verdicts" else {"numpy": "2.0"}
        job = Job(name, settings, {"of": name}, versions, plan, "it has not run before", plan)
        Record(
            job,
            inputs={path: sha256(Path(path)) for path in inputs},
            outputs=described([results / path for path in outputs]),
            code=code,
            error="no shard" if name == "chain/all/embed" else None,
            run={"command": f"layerproof {name.partition('/')[0]} results/{outputs[0]}", **FACTS, **facts},
        ).write(job.record)
    manifest.write(results / "manifest.json")
    return results


def members(path):
    """The content of each file of an archive, by name."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def repacked(path, change):
    """The archive with its files changed by `change(files)`, and nothing else adapted to that."""
    files = members(path)
    change(files)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    return path


def forged(path, change):
    """The archive with its files changed by `change(files)`, by somebody who renews checksums and seal, too."""

    def change_all(files):
        change(files)
        del files[archive.CHECKSUMS]
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
        files[archive.CHECKSUMS] = "".join(lines).encode()

    repacked(path, change_all)
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"0" * archive.SEAL_BYTES
    archive._seal(path)
    return path


PROFILE = "provenance-run-crate"
VALIDATOR = REPOSITORY / "tests/validate_crate.py"


def validate(crate):
    """The validator's exit code and what it prints. Whatever it would download, it finds no proxy there."""
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    python = install(REPOSITORY / "requirements/crate.txt") / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | nowhere
    done = subprocess.run([python, VALIDATOR, crate, PROFILE], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


RUN = ("started", "wall_s", "peak_rss_bytes", "host", "user", "machine")
JOURNALS = ("results/logs/", "results/benchmarks/")
OFTEN = ("results/records/", "results/preflight/", "results/manifest.json", "results/report.html")
"""Files of which parts may differ."""
CHECKED = re.compile(r"of [\d.]+ [kMGT]?B available|the run will write [^<\"]*")
"""What a preflight says of memory and disk, in its file and in the report."""
VARYING = "digest of a file that differs between runs"
IN_METADATA = ("startTime", "endTime", "datePublished", "agent", "author", "location")


def comparable(path):
    """The files of an archive by name, without what may differ between two runs of equal inputs (docs/contracts.md)."""
    files = members(path)
    files.pop(archive.CHECKSUMS)
    varying = [name for name in files if name.startswith((*JOURNALS, *OFTEN))]
    digests = {hashlib.sha256(files[name]).hexdigest() for name in varying if name in files}
    return {name: _comparable(name, data, digests, varying) for name, data in files.items()}


def _comparable(name, data, digests, varying):
    if name.startswith(JOURNALS):
        return None
    if name.startswith(("results/preflight/", "results/report.html")):
        return CHECKED.sub("", data.decode())
    if not name.startswith(("results/records/", "results/manifest.json", archive.METADATA)):
        return data
    text = data.decode()
    for digest in digests:
        text = text.replace(digest, VARYING)
    content = json.loads(text)
    if name == archive.METADATA:
        entities = (entity for entity in content["@graph"] if not entity["@id"].startswith(("#host/", "#user/")))
        return [_plain(entity, varying) for entity in entities]
    if name == "results/manifest.json":
        for key in ("written", "host", "digest"):
            del content[key]
        content["others"] = sorted(content["others"])
        for entry in content["outputs"].values():
            if entry["sha256"] == VARYING:
                del entry["bytes"]
        for job in content["jobs"].values():
            _forget_run(job)
            job["arguments"] = _without_times(job["arguments"])
        return content
    for key in ("token", "plan", "why"):
        del content["job"][key]
    content["job"]["arguments"] = _without_times(content["job"]["arguments"])
    for output in content["outputs"].values():
        del output["mtime_ns"]
        if output["sha256"] == VARYING:
            del output["size"]
    _forget_run(content["run"])
    return content


def _plain(entity, varying):
    """An entity of the metadata without what may differ."""
    left_out = {*IN_METADATA, *(("contentSize",) if entity["@id"] in varying else ())}
    if entity["@id"].endswith("/memory"):
        left_out.add("value")
    return {key: value for key, value in entity.items() if key not in left_out}


def _forget_run(run):
    for key in RUN:
        run.pop(key, None)
    if "made" in run:
        _forget_run(run["made"])


def _without_times(arguments):
    """The job that reads the weights knows their files by name, size and time."""
    files = arguments.get("files")
    return arguments | {"files": [entry[:2] for entry in files]} if files else arguments
