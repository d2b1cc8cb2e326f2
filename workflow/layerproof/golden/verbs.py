"""Verbs that run the golden, or carry it from host to host."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.errors import StageError
from layerproof.files import digest_of, read_json
from layerproof.golden import transfer
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, checkpoint_of, job_of, leave_error, only
from layerproof.rerun.recorder import cached
from layerproof.rerun.records import Record

if TYPE_CHECKING:
    from layerproof.golden.whole import Whole


def add_verbs(verbs: Verbs) -> None:
    """Adds `golden`, `take-golden`, `take-preflight` and `store` to the command line."""
    files = "weights", "tokens", "config", "previous", "noise"
    add_job_verb(verbs, "golden", make_golden, "Runs stages of the golden.", *files)
    text = "Takes the golden of a stage that another host stored, if it was made from the same."
    add_job_verb(verbs, "take-golden", take_golden, text, "stored", *files)
    text = "Takes what was found of the golden's host before it began."
    add_job_verb(verbs, "take-preflight", take_preflight, text, "stored")
    text = "Packs what a job made, for hosts that share no file system with this one."
    verb = verbs.add_parser("store", help=text)
    verb.set_defaults(action=store)
    verb.add_argument("output", type=Path)
    verb.add_argument("--record", type=Path, required=True, help="of the job")
    verb.add_argument("--weights", type=Path, help="of the stage that the job made: results/weights/STAGE.json")


def make_golden(args: argparse.Namespace) -> None:
    """Stages of the golden, each fed by the one before; of each its taps, and in a second file its noise.

    A whole model is loaded by the first stage that has to run and is all the others'.
    """
    weights = {path.stem: path for path in args.weights}
    # Absolute and before anything is loaded, since code that comes with a checkpoint may change the directory.
    checkpoint, prompts = checkpoint_of(args), args.tokens.absolute()

    @cached
    def start() -> Whole | Exception:
        """What it fails of is kept, too: it would take as long for the next stage, and fail again."""
        from layerproof.golden import whole
        from layerproof.model import tokens

        try:
            return whole.Whole.start(checkpoint, tokens.Tokens.read(prompts), args.spec)
        except Exception as error:
            return error

    def make_stage(
        spec: Mapping[str, Any], weights: Path, before: tuple[Path | None, ...], outputs: tuple[Path, ...]
    ) -> None:
        from layerproof.golden import stage as golden_stage
        from layerproof.model import tokens

        description, ids = read_json(weights), tokens.Tokens.read(prompts)
        previous, previous_noise = (path and path.absolute() for path in before)
        output, noise = (path.absolute() for path in outputs)
        model = start() if spec["mode"] == "whole" else None
        if isinstance(model, Exception):
            raise model
        files = previous, previous_noise, output, noise
        golden_stage.make_stage(spec["stage"], checkpoint, description, ids, *files, settings=spec, whole=model)

    tasks: list[tuple[jobs.Job, jobs.Work]] = []
    before = only(args.previous), only(args.noise)
    files = zip(args.outputs[: len(args.record)], args.outputs[len(args.record) :], strict=True)
    for outputs, stamp, record in zip(files, args.stamp, args.record, strict=True):
        stage = outputs[0].stem
        compared = [stage] if stage in args.spec["compared"] else []
        spec = args.spec | {"stage": stage, "compared": compared}
        inputs = tuple(path for path in (weights[stage], args.tokens, args.config, *before) if path)
        job = jobs.Job(args.verb, spec, stamp, inputs, outputs, record)
        tasks.append((job, functools.partial(make_stage, spec, weights[stage], before, outputs)))
        before = outputs
    args.apart(tasks, leave_error)


def store(args: argparse.Namespace) -> None:
    transfer.pack(args.output, args.record, args.weights)


def take_preflight(args: argparse.Namespace) -> None:
    jobs.run(job_of(args, [args.stored]), lambda: _made(transfer.unpack(args.stored, args.outputs)))


def take_golden(args: argparse.Namespace) -> None:
    """The golden of a stage as another host stored it, if that had the same to make it from as this one has."""
    (weights,) = args.weights
    before = [*args.previous, *args.noise]
    own = transfer.Own(weights, args.tokens, args.config, before)
    job = job_of(args, [args.stored, weights, args.tokens, args.config, *before])

    damaged = read_json(weights).get("error")

    def work() -> Mapping[str, Any]:
        if damaged:  # as the golden's own job has it
            raise StageError(damaged)
        transfer.check(args.stored, own, args.spec)
        return _made(transfer.unpack(args.stored, args.outputs))

    jobs.run(job, work, functools.partial(leave_error, job) if damaged else None)


def _made(record: Record) -> dict[str, Any]:
    """What a taken job's own record keeps of how it was made; the code that made it counts as the job's own."""
    made = {
        "settings": record.spec,
        "inputs": record.inputs,
        "outputs": {name: description["sha256"] for name, description in record.outputs.items()},
        "code": digest_of(record.code),
        **record.run,
    }
    return {"made": made, jobs.CODE: transfer.library_code(record)}
