"""What the verbs that run jobs have in common on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerproof.errors import StageError, UserError
from layerproof.rerun import jobs

Verbs = Any  # what ArgumentParser.add_subparsers returns, a class that argparse keeps to itself


ONE_FILE = ("stored", "tokens", "config", "template", "verdicts", "unused", "comparison", "audit", "prediction")
"""Flags that name one file; the others name any number."""


def add_job_verb(
    verbs: Verbs, name: str, action: Any, text: str, *files: str, by_hand: bool = False
) -> argparse.ArgumentParser:
    """Adds a verb that runs jobs to the command line, with a flag for each of the `files` that it reads."""
    text += " Without an output, by hand." if by_hand else ""
    verb = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(action=action)
    verb.add_argument("outputs", nargs="*" if by_hand else "+", type=Path, help="files to write")
    verb.add_argument("--spec", type=json.loads, required=not by_hand, help="settings of the job, as JSON")
    verb.add_argument("--stamp", nargs="+", default=["new"], help="changes when a job must run again (see records.py)")
    text = "where to keep what each job was run with"
    verb.add_argument("--record", nargs="+", type=Path, required=not by_hand, help=text)
    for file in files:
        one = file in ONE_FILE
        many: dict[str, Any] = {} if one else {"nargs": "*", "default": []}
        verb.add_argument(f"--{file}", type=Path, required=one and not by_hand, **many)
    return verb


def one_output(args: argparse.Namespace) -> Path:
    """Of a verb that may be called by hand, without.

    Raises:
        UserError: if it is no job's call.
    """
    if args.spec is None or args.record is None or len(args.outputs) > 1:
        raise UserError(f"{args.verb}: a file to write wants --spec and --record, too. Leave it out to look by hand.")
    return args.outputs[0]


def job_of(args: argparse.Namespace, inputs: Sequence[Path], **more: Any) -> jobs.Job:
    (stamp,), (record,) = args.stamp, args.record
    return jobs.Job(args.verb, args.spec | more, stamp, tuple(inputs), tuple(args.outputs), record)


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The checkpoint's directory; absolute, since a port or code that comes with a checkpoint may change the directory."""
    return Path(args.spec["checkpoint_dir"]).absolute()


def only(paths: Sequence[Path]) -> Path | None:
    """The file of a flag that may name one or none, as `--previous` of the first stage."""
    return paths[0] if paths else None


def leave_error(job: jobs.Job, error: StageError) -> None:
    from layerproof.tensors import hdf5

    for output in job.outputs:
        hdf5.write_error(output, error)
