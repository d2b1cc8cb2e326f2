"""Verbs that run the port, or read what was captured of it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.devices import is_cpu
from layerproof.errors import StageError
from layerproof.files import read_json
from layerproof.port import ranks
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, checkpoint_of, leave_error, only
from layerproof.rerun.preload import PACKAGES, import_packages
from layerproof.rerun.recorder import cached

if TYPE_CHECKING:
    from layerproof.port.runner import Runner
    from layerproof.tensors.tensor import Tensor


def add_verbs(verbs: Verbs) -> None:
    """Adds `port` and `captured` to the command line."""
    text = (
        "Runs stages of the port: the first on the golden's input, each of the others on the output of the one before."
    )
    add_job_verb(verbs, "port", make_port, text, "weights", "tokens", "config", "previous")
    text = "Reads what was captured of a whole compiled model as a chain."
    add_job_verb(verbs, "captured", make_captured, text, "captured", "tokens")


def make_port(args: argparse.Namespace) -> None:
    """Stages of the port: the first is fed by the golden, each of the others by the one before.

    Each stage has its own stamp and record, so only those that changed, and those that their change reaches, run again.
    """
    weights = {path.stem: path for path in args.weights}

    @cached
    def start() -> Runner:
        from layerproof.model import tokens
        from layerproof.port.runner import Runner

        return Runner.start(checkpoint_of(args), tokens.Tokens.read(args.tokens), args.spec)

    def read(weights: Path, before: Path | None, source: str) -> tuple[Any, Tensor | None]:
        """What a stage is made of; what it lacks is told before minutes are spent on a device."""
        from layerproof.tensors import hdf5

        description = read_json(weights)
        if "error" in description:
            raise StageError(description["error"])
        return description, hdf5.read_stage_input(before, source) if before else None

    def make_stage(weights: Path, before: Path | None, source: str, output: Path) -> Mapping[str, Any]:
        from layerproof.port import stage as port_stage

        output = output.absolute()  # before the port's code runs, which may change the directory
        run = port_stage.chain_stage if "chain" in args.spec else port_stage.make_stage
        description, fed = read(weights, before, source)
        return run(start(), weights.stem, description, fed, output)

    def trace_stage(weights: Path, before: Path | None, source: str) -> tuple[dict[str, Any], str]:
        from layerproof.distributed import process_group
        from layerproof.model import tokens
        from layerproof.port import stage as port_stage
        from layerproof.port.runner import Runner

        description, fed = read(weights, before, source)
        process_group.pretend()
        runner = Runner.start(checkpoint_of(args), tokens.Tokens.read(args.tokens), args.spec | {"device": "CPU"})
        return port_stage.trace_stage(runner, weights.stem, description, fed)

    tasks: list[tuple[jobs.Job, jobs.Work]] = []
    before, source = only(args.previous), "golden/out"
    for output, stamp, record in zip(args.outputs, args.stamp, args.record, strict=True):
        inputs = tuple(path for path in (weights[output.stem], args.tokens, args.config, before) if path)
        job = jobs.Job(args.verb, args.spec | {"stage": output.stem}, stamp, inputs, (output,), record)
        files = weights[output.stem], before, source
        trace = functools.partial(trace_stage, *files) if "chain" not in args.spec else None
        make = functools.partial(make_stage, *files)
        tasks.append((job, functools.partial(by_ranks, args, make, output, trace)))
        before, source = output, "port/out"
    args.apart(tasks, leave_error)


def make_captured(args: argparse.Namespace) -> None:
    """A chain of what another program captured; a stage whose file cannot be used ends as error, and the others go on."""

    def work(file: Path, output: Path) -> None:
        from layerproof.model import tokens
        from layerproof.port import captured

        captured.make_stage(output.stem, file, tokens.Tokens.read(args.tokens), output)

    for output, file, stamp, record in zip(args.outputs, args.captured, args.stamp, args.record, strict=True):
        job = jobs.Job(args.verb, args.spec | {"stage": output.stem}, stamp, (file, args.tokens), (output,), record)
        jobs.run(job, functools.partial(work, file, output), functools.partial(leave_error, job))


def by_ranks(
    args: argparse.Namespace,
    make: Callable[[Path], Mapping[str, Any] | None],
    output: Path,
    trace: Callable[[], tuple[dict[str, Any], str]] | None = None,
) -> Mapping[str, Any]:
    """A file of the port that `make` writes: here, or by several ranks a part each, which are put together. With `trace`
    and `port.compile` these tell of their graphs, too. Returns facts for the record.
    """
    count = args.spec["tp"]
    if count == 1:
        return make(output) or {}
    if is_cpu(args.spec["device"]):  # once for the ranks of all stages; on other devices each has to begin anew
        import_packages(PACKAGES)
    parts = [output.with_name(f"{output.name}.{rank}.tmp") for rank in range(count)]

    def join(graphs: Sequence[tuple[dict[str, Any], str]]) -> None:
        from layerproof.model import tokens
        from layerproof.port import shards

        shards.join(parts, output, tokens.Tokens.read(args.tokens).valid, graphs)

    try:
        made = ranks.run(count, lambda rank: make(parts[rank]))
        traced = ranks.run(count, lambda rank: trace()) if trace and args.spec["compile"] else []
        joined = ranks.run(1, lambda rank: join([one.value for one in traced]))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    facts = {"ranks": count, "peak_rss_bytes": sum(one.peak_rss_bytes for one in made)}
    return {**(made[0].value or {}), **facts, jobs.CODE: ranks.code_of([*made, *traced, *joined])}
