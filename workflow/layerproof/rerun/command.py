"""What the verbs that run jobs have in common on the command line.

Such a verb names the files that it writes, then by flag those that it reads and its job files. Given several jobs it
runs them one after the other: each flag then names the files of all of them, in any order. (Those of `--captured` come in
the order of the job files.)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerproof.errors import StageError, UserError
from layerproof.rerun import jobs
from layerproof.rerun.job import Job
from layerproof.rerun.jobs import Task, Work

Verbs = Any  # what ArgumentParser.add_subparsers returns, a class that argparse keeps to itself

ONE_FILE = ("exported", "tokens", "config", "glossary", "causes", "verdicts", "unused", "audit", "prediction")
"""Flags that name one file; the others name any number."""


def add_job_verb(
    verbs: Verbs, name: str, action: Any, text: str, *files: str, example: str = "", exits: str = ""
) -> argparse.ArgumentParser:
    """Adds a verb that runs jobs to the command line, with a flag for each of the `files` that it reads. A verb that
    can also be called by hand needs neither outputs nor job files; `example` and `exits` are for its help.
    """
    by_hand = bool(example)
    if by_hand:
        verb = add_person_verb(verbs, name, action, text, example=example, exits=exits)
    else:
        verb = verbs.add_parser(name, description=text)
        verb.set_defaults(action=action)
    verb.add_argument("outputs", nargs="*" if by_hand else "+", type=Path, help="files to write")
    verb.add_argument("--job", nargs="+", type=_job, default=[], required=not by_hand, help="job files")
    verb.add_argument(
        "--log", nargs="+", type=Path, default=[], help="log file of each job; by default jobs print on the terminal"
    )
    text = "run in this process even if up to date, and do not catch exceptions"
    verb.add_argument("--debug", action="store_true", help=text)
    for file in files:
        one = file in ONE_FILE
        many: dict[str, Any] = {} if one else {"nargs": "*", "default": []}
        verb.add_argument(f"--{file}", type=Path, required=one and not by_hand, **many)
    return verb


def _job(path: str) -> Job:
    return Job.read(Path(path))


@dataclass(frozen=True)
class PersonVerb:
    """A verb that people call, as the help page lists it."""

    name: str
    sentence: str
    example: str
    exits: str


PEOPLE: dict[str, PersonVerb] = {}
"""Verbs for people, by name; all others are for rules."""


def add_person_verb(
    verbs: Verbs, name: str, action: Any, sentence: str, *, example: str, exits: str
) -> argparse.ArgumentParser:
    """Adds a verb that people call, with an example and its exit codes in its help."""
    verb = verbs.add_parser(
        name,
        description=sentence,
        epilog=f"example:\n  {example}\n\nexit code:\n  {exits}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.set_defaults(action=action)
    PEOPLE[name] = PersonVerb(name, sentence, example, exits)
    return verb


def of_stage(paths: Iterable[Path], stage: str) -> Path:
    """The file of a stage among those that a flag names.

    Raises:
        UserError: if there is none.
    """
    for path in paths:
        if path.stem == stage:
            return path
    raise UserError(f"{stage}: the command names no file of this stage. Copy the command from snakemake -n -p.")


def of_stages(paths: Iterable[Path], stages: Iterable[str]) -> list[Path]:
    """The files of some stages among those that a flag names."""
    wanted = set(stages)
    return [path for path in paths if path.stem in wanted]


def task(args: argparse.Namespace, job: Job, inputs: Iterable[Path], work: Work) -> Task:
    """A task of the command: of several jobs each writes the outputs that are named like its stage."""
    alone = len(args.job) == 1
    outputs = args.outputs if alone else of_stages(args.outputs, [job.stage])
    log = args.log[args.job.index(job)] if args.log else None
    return Task(job, tuple(inputs), tuple(outputs), work, log)


def run_tasks(args: argparse.Namespace, tasks: Iterable[Task], leave_error: jobs.LeaveError | None = None) -> None:
    """Runs the tasks of a command in this process."""
    jobs.run_all(list(tasks), None if args.debug else leave_error, force=args.debug)


def run_tasks_in_subprocess(
    args: argparse.Namespace, tasks: Iterable[Task], leave_error: jobs.LeaveError, independent: bool = False
) -> None:
    """Runs the tasks of a command in a subprocess, because they may take their process down; with --debug in this one."""
    if args.debug:
        run_tasks(args, tasks)
    else:
        jobs.run_in_subprocess(list(tasks), leave_error, independent)


def only_job(args: argparse.Namespace) -> Job:
    """The job of a verb that runs one.

    Raises:
        UserError: if a verb that may be called by hand has files to write and no job file.
    """
    if len(args.job) != 1:
        raise UserError(f"{args.verb}: an output file needs exactly one --job. Omit the file to print the result.")
    return args.job[0]


def only(paths: Sequence[Path]) -> Path | None:
    """The file of a flag that may name one or none, as `--previous` of the first stage."""
    return paths[0] if paths else None


def leave_tensors_error(task: Task, error: StageError) -> None:
    """Leaves files of tensors that say what went wrong."""
    from layerproof.tensors import hdf5

    for output in task.outputs:
        hdf5.write_error(output, error)


Action = Callable[[argparse.Namespace], int | None]
