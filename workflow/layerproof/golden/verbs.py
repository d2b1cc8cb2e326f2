"""Verbs that run the golden, or carry it from host to host."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.errors import StageError
from layerproof.files import digest_of, read_json
from layerproof.golden import transfer
from layerproof.rerun import jobs
from layerproof.rerun.command import (
    Verbs,
    add_job_verb,
    leave_tensors_error,
    of_stage,
    of_stages,
    only,
    only_job,
    run_tasks,
    run_tasks_in_subprocess,
    task,
)
from layerproof.rerun.job import Job
from layerproof.rerun.jobs import Task
from layerproof.rerun.recorder import cached
from layerproof.rerun.records import Record

if TYPE_CHECKING:
    from layerproof.golden.whole import FullModel


def add_verbs(verbs: Verbs) -> None:
    """Adds `golden`, `export`, `import-golden` and `import-preflight` to the command line."""
    files = "weights", "tokens", "config", "previous", "noise"
    text = "Runs stages of the golden, each on the output of the one before."
    add_job_verb(verbs, "golden", run_golden, text, *files)
    text = "Imports the golden of a stage that another host exported, if it was computed from the same inputs."
    add_job_verb(verbs, "import-golden", import_golden, text, "exported", *files)
    text = "Imports the preflight checks of the golden's host."
    add_job_verb(verbs, "import-preflight", import_preflight, text, "exported")
    text = "Packs the outputs of a job, for hosts that share no file system with this one."
    verb = verbs.add_parser("export", description=text)
    verb.set_defaults(action=export)
    verb.add_argument("output", type=Path)
    verb.add_argument("--record", type=Path, required=True, help="record of the job")
    verb.add_argument("--weights", type=Path, help="weights of the job's stage: results/weights/STAGE.json")


def run_golden(args: argparse.Namespace) -> None:
    """Stages of the golden, each fed by the one before: its taps in one file, its noise in a second.

    A full model is loaded by the first stage that must run, for all the others.
    """
    # Absolute and before anything is loaded, because code that comes with a checkpoint may change the directory.
    prompts = args.tokens.absolute()

    @cached
    def start() -> FullModel | Exception:
        """A failure is cached as well: the next stage would spend as long and fail the same way."""
        from layerproof.golden.whole import FullModel
        from layerproof.model.tokens import Tokens

        first = args.job[0]
        try:
            return FullModel.start(first.checkpoint, Tokens.read(prompts), first.config)
        except Exception as error:
            return error

    def task_of(job: Job, before: tuple[Path | None, ...]) -> Task:
        weights = of_stage(args.weights, job.stage)
        tensors, noise = of_stages(args.outputs, [job.stage])
        files = tuple(path and path.absolute() for path in (*before, tensors, noise))

        def work() -> None:
            from layerproof.golden import stage
            from layerproof.model.tokens import Tokens

            description, ids = read_json(weights), Tokens.read(prompts)
            reads = job.arguments.get("reads", stage.OWN)
            model = start() if job.config.golden.mode == "whole" and reads == stage.OWN else None
            if isinstance(model, Exception):
                raise model
            with_taps = job.arguments.get("with_taps", True)
            args = job.stage, job.checkpoint, description, ids, *files
            stage.make_stage(*args, job.config, with_taps, model, reads)  # type: ignore[arg-type]

        inputs = [path for path in (weights, args.tokens, args.config, *before) if path]
        return task(args, job, inputs, work)

    tasks: list[Task] = []
    before = only(args.previous), only(args.noise)
    for job in args.job:
        tasks.append(task_of(job, before))
        tensors, noise = tasks[-1].outputs
        before = tensors, noise
    run_tasks_in_subprocess(args, tasks, leave_tensors_error)


def export(args: argparse.Namespace) -> None:
    transfer.pack(args.output, args.record, args.weights)


def import_preflight(args: argparse.Namespace) -> None:
    job = only_job(args)
    run_tasks(args, [task(args, job, [args.exported], lambda: _made(transfer.unpack(args.exported, args.outputs)))])


def import_golden(args: argparse.Namespace) -> None:
    """The golden of a stage as another host exported it, if that host had the same inputs as this one."""
    job = only_job(args)
    (weights,) = args.weights
    before = [*args.previous, *args.noise]
    own = transfer.LocalInputs(weights, args.tokens, args.config, before)
    damaged = read_json(weights).get("error")

    def work() -> Mapping[str, Any]:
        if damaged:  # as in the golden's own job
            raise StageError(damaged)
        transfer.check(args.exported, own, job)
        return _made(transfer.unpack(args.exported, args.outputs))

    inputs = [args.exported, weights, args.tokens, args.config, *before]
    run_tasks(args, [task(args, job, inputs, work)], leave_tensors_error if damaged else None)


def _made(record: Record) -> dict[str, Any]:
    """What an importing job's own record keeps of how the golden was made; the code that made it counts as the job's own."""
    made = {
        "settings": record.job.settings,
        "inputs": record.inputs,
        "outputs": {name: description["sha256"] for name, description in record.outputs.items()},
        "code": digest_of(record.code),
        **record.run,
    }
    return {"made": made, jobs.CODE: transfer.library_code(record)}
