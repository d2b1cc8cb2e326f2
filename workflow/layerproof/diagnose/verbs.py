"""Verbs that find out why a stage fails."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.diagnose.result import undiagnosed
from layerproof.errors import StageError
from layerproof.files import read_json, write_json
from layerproof.port.verbs import by_ranks
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, checkpoint_of, job_of, leave_error, only
from layerproof.tensors import pruning

if TYPE_CHECKING:
    pass


def add_verbs(verbs: Verbs) -> None:
    """Adds `force` and `diagnose` to the command line."""
    text = "Runs a stage of the port that fails with the golden's tap in place of each of its own."
    files = "comparison", "golden", "weights", "tokens", "config", "previous"
    add_job_verb(verbs, "force", make_forced, text, *files)
    text = "Finds which known mistake a stage that fails behaves like."
    files = "comparison", "golden", "noise", "port", "forced", "weights", "tokens", "config", "previous"
    add_job_verb(verbs, "diagnose", make_diagnosis, text, *files)


def make_forced(args: argparse.Namespace) -> None:
    """A stage that does not fail leaves an empty file: there is nothing to find out."""
    output = args.outputs[0].absolute()
    stage = output.stem
    previous = only(args.previous)

    def force(output: Path) -> None:  # reads all its files before the port's code runs, which may change the directory
        from layerproof.model import tokens
        from layerproof.port import stage as port_stage
        from layerproof.port.runner import Runner
        from layerproof.tensors import hdf5

        golden = hdf5.read_group(args.golden[0], "golden")
        fed = hdf5.read_stage_input(previous, "golden/out") if previous else None
        prompts, description = tokens.Tokens.read(args.tokens), read_json(args.weights[0])
        runner = Runner.start(checkpoint_of(args), prompts, args.spec)
        port_stage.force_stage(runner, stage, description, fed, golden, output)

    def work() -> Mapping[str, Any]:
        from layerproof.tensors import hdf5

        if read_json(args.comparison)["status"] == "fail":
            pruning.require_whole(args.golden)
            return by_ranks(args, force, output)
        if not hdf5.is_empty(output):  # an equal output is left alone, and what depends on it
            hdf5.write(output, {}, attributes={"stage": stage})
        return {}

    inputs = [args.comparison, *args.golden, *args.weights, args.tokens, args.config, *args.previous]
    args.apart([(job_of(args, inputs), work)], leave_error)


def make_diagnosis(args: argparse.Namespace) -> None:
    output = args.outputs[0].absolute()
    stage, previous = args.spec["stage"], only(args.previous)

    def work() -> None:
        comparison = read_json(args.comparison)
        nothing = undiagnosed(stage)
        if comparison["status"] != "fail":
            if not output.exists() or read_json(output) != nothing:
                write_json(output, nothing)
            return
        import transformers.modeling_utils  # noqa: F401

        pruning.require_whole([*args.golden, *args.port])
        # Recorded: the dictionary of faults is filled when it is imported, by functions that no other code names.
        from layerproof.diagnose import diagnose
        from layerproof.model import tokens

        subject = diagnose.Stage(
            stage,
            checkpoint_of(args),
            {path.stem: read_json(path) for path in args.weights},
            tokens.Tokens.read(args.tokens),
            previous and previous.absolute(),
            args.spec,
            args.spec["limit"],
        )
        files = diagnose.Files(args.golden[0], args.noise[0], args.port[0], args.forced[0])
        write_json(output, diagnose.diagnose(subject, comparison, files))

    def leave_undiagnosed(job: jobs.Job, error: StageError) -> None:
        write_json(output, undiagnosed(stage, str(error)))

    inputs = [args.comparison, *args.golden, *args.noise, *args.port, *args.forced, *args.weights, args.tokens]
    job = job_of(args, [*inputs, args.config, *args.previous])
    args.apart([(job, work)], leave_undiagnosed)
