"""Layerproof in a folder of one's own: `layerproof init`, `run`, `why` and `snakefile`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerproof import config
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.model.resolve import resolve
from layerproof.paths import SNAKEFILE, WORKFLOW
from layerproof.rerun.command import Verbs, add_person_verb
from layerproof.rerun.job import RECORDS
from layerproof.rerun.records import Record, why_stale

REPORT = "results/report.html"
STARTER = WORKFLOW / "workflow/resources/init"
"""What `layerproof init` copies: config.yaml, port.py and prompts.txt."""


def add_verbs(verbs: Verbs) -> None:
    """Adds `init`, `run`, `why` and `snakefile` to the command line."""
    verb = add_person_verb(
        verbs,
        "init",
        init,
        "Writes a folder to start from: a commented config.yaml, a port to fill in, and prompts.",
        example="layerproof init my-port && cd my-port && layerproof run",
        exits="0 if the folder was written; 2 if a file of that name already exists",
    )
    verb.add_argument("directory", type=Path)
    verb = add_person_verb(
        verbs,
        "run",
        run,
        "Runs the workflow in this folder, up to results/report.html or to the files that you name. Options after -- go "
        "to snakemake: layerproof run -- --dry-run.",
        example="layerproof run results/compare/layer_003.json --cores 4",
        exits="that of snakemake: 0 if every file was written, even if the port fails parity; 1 if a job failed",
    )
    verb.add_argument("targets", nargs="*", help="files to write, instead of results/report.html")
    verb.add_argument("--cores", default="all", help="number of cores that jobs may use together (all: every core)")
    verb = add_person_verb(
        verbs,
        "why",
        why,
        "Says why the job that wrote a file would run again: settings, code, inputs, or a damaged output.",
        example="layerproof why results/port/layer_003.h5",
        exits="0 if the file is up to date; 1 if its job would run; 2 if no job wrote it",
    )
    verb.add_argument("file", type=Path, help="a file under results/")
    add_person_verb(
        verbs,
        "snakefile",
        snakefile,
        "Prints the path of the Snakefile, for snakemake -s and for module: in your own workflow.",
        example='snakemake -s "$(layerproof snakefile)" --directory . --cores 1',
        exits="0",
    )


def init(args: argparse.Namespace) -> None:
    files = sorted(path for path in STARTER.iterdir() if path.is_file())
    there = [args.directory / path.name for path in files if (args.directory / path.name).exists()]
    if there:
        raise UserError(f"{there[0]}: already exists. Name another folder, or remove the file.")
    args.directory.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy(path, args.directory / path.name)
    print(
        f"{args.directory}: wrote {', '.join(path.name for path in files)}. Next: cd {args.directory} && layerproof run"
    )


def run(args: argparse.Namespace) -> int:
    rest = args.behind_dashes
    if not Path("config.yaml").exists() and not any(one.startswith("--configfile") for one in rest):
        raise UserError("config.yaml: does not exist in this directory. Write one with: layerproof init FOLDER")
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(SNAKEFILE),
        "--directory",
        ".",
        "--cores",
        args.cores,
    ]
    # Jobs run `python`: the one that runs this, also where its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return subprocess.run(
        [*command, *rest, "--", *(args.targets or [REPORT])], env={**os.environ, "PATH": path}
    ).returncode


def why(args: argparse.Namespace) -> int:
    record = _record_of(Path(os.path.relpath(args.file)))
    settings = config.as_json(resolve(config.read(Path("config.yaml"))).settings)
    installed = package_versions()
    now = replace(
        record.job,
        settings=_values_now(record.job.settings, settings),
        versions={name: installed.get(name, version) for name, version in record.job.versions.items()},
    )
    reason = why_stale(record, now, map(Path, record.inputs), map(Path, record.outputs))
    print(f"{record.job.name}: {'up to date' if reason is None else f'would run because {reason}'}")
    return int(reason is not None)


def _record_of(file: Path) -> Record:
    """The record of the job that made a file.

    Raises:
        UserError: if there is none.
    """
    for path in sorted(RECORDS.rglob("*.json")):
        record = Record.read(path)
        if record is not None and str(file) in record.outputs:
            return record
    if file.exists():
        raise UserError(f"{file}: has no record. Snakemake writes it again when a file that it is made from is newer.")
    raise UserError(f"{file}: no job has written it. Run layerproof run {file}.")


def _values_now(
    recorded: Mapping[str, Any], settings: Mapping[str, Any], section: type[config.Section] = config.Config
) -> dict[str, Any]:
    """The settings that a job had, with the values that config.yaml gives them now. Of a section only the keys that the
    job had count; any other mapping, such as `port.options`, counts whole.
    """
    inner = config.SECTIONS.get(section, {})
    return {
        key: _values_now(value, settings[key], inner[key])
        if key in inner and isinstance(settings.get(key), Mapping)
        else settings.get(key)
        for key, value in recorded.items()
    }


def snakefile(args: argparse.Namespace) -> None:
    print(SNAKEFILE)
