"""Layerproof in a folder of one's own: `layerproof init`, `run`, `why` and `snakefile`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from layerproof import config, running
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.model.resolve import resolve
from layerproof.paths import SNAKEFILE, WORKFLOW
from layerproof.rerun.command import Verbs, add_person_verb
from layerproof.rerun.job import RECORDS
from layerproof.rerun.records import Record, as_asked_now, why_stale

REPORT = "results/report.html"
NOT_A_RUN = {
    "-n",
    "--dry-run",
    "--dryrun",
    "--unlock",
    "--lint",
    "--list",
    "--list-rules",
    "--summary",
    "--dag",
    "--rulegraph",
}
"""Options of Snakemake with which it makes no file."""
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
        exits="0 if the port passes; 1 if it fails; 2 if a stage could not be compared, a job failed, or you made a mistake",
    )
    verb.add_argument("targets", nargs="*", help="files to write, instead of results/report.html")
    text = "exit with 0 whenever the comparison was finished, whatever the verdict"
    verb.add_argument("--exit-zero", action="store_true", help=text)
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
    from layerproof.terminal import summary

    rest = args.behind_dashes
    if not Path("config.yaml").exists() and not any(one.startswith("--configfile") for one in rest):
        raise UserError("config.yaml: does not exist in this directory. Write one with: layerproof init FOLDER")
    is_run = not NOT_A_RUN.intersection(rest)
    if args.cores != "all" and not (args.cores.isdigit() and int(args.cores)):
        raise UserError(f"--cores: {args.cores} is not a number of cores. Write a number from 1 on, or all.")
    targets = args.targets or [REPORT]
    held = running.hold_folder() if is_run else contextlib.nullcontext()
    logger = [] if "--logger" in rest else ["--logger", "layerproof"]  # also with another profile than ours
    with held:
        if is_run:
            _free_folder()
        code = _snakemake("--cores", args.cores, *logger, *rest, "--", *targets)
    if code or not is_run:
        return 2 if code else 0
    outcome = summary.exit_code(summary.answer(targets).overall)
    return 0 if args.exit_zero else outcome


def _snakemake(*arguments: str) -> int:
    """Calls snakemake in this folder and returns its exit code. Ctrl-C reaches it too, and a termination is passed on."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(SNAKEFILE), "--directory", ".", *arguments]
    # Jobs run `python`: the one that runs this, also where its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    process = subprocess.Popen(command, env={**os.environ, "PATH": path})
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _free_folder() -> None:
    """Removes the lock of a run that was killed.

    Raises:
        UserError: if another run is at work in this folder, or nobody can tell whether one is.
    """
    if not running.is_locked():
        return
    if alive := running.at_work():
        raise UserError(running.is_taken(alive))
    owners = [owner for _, owner in running.owners()]
    elsewhere = [owner for owner in owners if not owner.is_here()]
    if elsewhere or not owners:
        who = f"by {elsewhere[0].described()}" if elsewhere else "by a run that left no note"
        raise UserError(f"this folder is locked {who}. If it no longer runs: layerproof run -- --unlock")
    owner = running.owner_of_lock()
    print(f"The run before was killed ({owner.described()}). Its lock is removed, and this run goes on.", flush=True)
    running.forget_killed()
    shutil.rmtree(running.LOCKS)


def why(args: argparse.Namespace) -> int:
    record = _record_of(Path(os.path.relpath(args.file)))
    settings = config.as_json(resolve(config.read(Path("config.yaml"))).settings)
    now = as_asked_now(record.job, settings, package_versions())
    reason = why_stale(record, now, map(Path, record.inputs), map(Path, record.outputs))
    print(f"{record.job.name}: {'up to date' if reason is None else f'would run, because {reason}'}")
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


def snakefile(args: argparse.Namespace) -> None:
    print(SNAKEFILE)
