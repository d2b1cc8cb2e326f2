"""Verbs that run the port, or read what was captured from it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.devices import is_cpu
from layerproof.errors import StageError, UserError
from layerproof.files import read_json
from layerproof.port import ranks
from layerproof.rerun import jobs
from layerproof.rerun.command import (
    Verbs,
    add_job_verb,
    leave_tensors_error,
    of_stage,
    of_stages,
    only,
    run_tasks,
    run_tasks_in_subprocess,
    task,
)
from layerproof.rerun.job import Job
from layerproof.rerun.jobs import Task, Work
from layerproof.rerun.preload import PACKAGES, import_packages
from layerproof.rerun.recorder import cached

if TYPE_CHECKING:
    from layerproof.model.handed import StageInput
    from layerproof.port.runner import Runner


def add_verbs(verbs: Verbs) -> None:
    """Adds `port`, `chain` and `captured` to the command line."""
    files = "weights", "tokens", "config", "previous"
    verb = add_job_verb(verbs, "port", run_port, "Runs stages of the port, each on the golden's input.", *files)
    add_retries(verb)
    text = (
        "Runs stages of the port: the first on the golden's input, each of the others on the output of the one before."
    )
    add_retries(add_job_verb(verbs, "chain", run_chain, text, *files))
    text = "Reads the tensors captured from a compiled full model as a chain."
    add_job_verb(verbs, "captured", read_captured, text, "captured", "tokens")


def add_retries(verb: argparse.ArgumentParser) -> None:
    """Adds the flag of `parallel.retries`: which is no setting of a job, because its output does not depend on it."""
    verb.add_argument("--retries", type=int, default=0, help="times that a stage runs again after a rank died")


def run_port(args: argparse.Namespace) -> None:
    """Stages of the port, each on its own golden input."""
    start = starter(args)
    crew = crew_of(args, args.job[0].config.parallel.of_stage, independent=True)

    def task_of(job: Job) -> Task:
        before = only(of_stages(args.previous, job.arguments["fed_by"]))
        weights, (output,) = of_stage(args.weights, job.stage), of_stages(args.outputs, [job.stage])
        output = output.absolute()  # before the port's code runs, which may change the directory

        def make(output: Path) -> Mapping[str, Any]:
            from layerproof.port import stage

            description, fed = read_inputs(job.stage, weights, before)
            return stage.make_stage(start(), job.stage, description, fed, output)

        def trace(rank: int) -> tuple[dict[str, Any], str]:
            from layerproof import config
            from layerproof.distributed import process_group
            from layerproof.model.tokens import Tokens
            from layerproof.port import stage
            from layerproof.port.runner import Runner

            description, fed = read_inputs(job.stage, weights, before)
            process_group.join_fake_group()
            on_cpu = config.changed(job.config, port=config.changed(job.config.port, device="CPU"))
            runner = Runner.start(job.checkpoint, Tokens.read(args.tokens), on_cpu)
            return stage.trace_stage(runner, job.stage, description, fed)

        inputs = [path for path in (weights, args.tokens, args.config, before) if path]
        return task(args, job, inputs, by_ranks(crew, args, job, make, output, trace))

    run_tasks_of(crew, args, list(map(task_of, args.job)))


def run_chain(args: argparse.Namespace) -> None:
    """Stages of the port, the first fed by the golden, each of the others by the one before.

    Each stage has its own job and record, so only those that changed, and those that their change reaches, run again.
    """
    start = starter(args)
    crew = crew_of(args, args.job[0].config.parallel.of_stage)

    def task_of(job: Job, before: Path | None, source: str) -> Task:
        weights, (output,) = of_stage(args.weights, job.stage), of_stages(args.outputs, [job.stage])
        output = output.absolute()

        def make(output: Path) -> Mapping[str, Any]:
            from layerproof.port import stage

            description, fed = read_inputs(job.stage, weights, before, source)
            return stage.chain_stage(start(), job.stage, description, fed, output)

        inputs = [path for path in (weights, args.tokens, args.config, before) if path]
        return task(args, job, inputs, by_ranks(crew, args, job, make, output))

    tasks: list[Task] = []
    before, source = only(args.previous), "golden/out"
    for job in args.job:
        tasks.append(task_of(job, before, source))
        before, source = tasks[-1].outputs[0], "port/out"
    run_tasks_of(crew, args, tasks)


def starter(args: argparse.Namespace) -> Callable[[], Runner]:
    """What the jobs of a command share: the device and the port's code, loaded by the first job that must run."""

    @cached
    def start() -> Runner:
        from layerproof.model.tokens import Tokens
        from layerproof.port.runner import Runner

        first = args.job[0]
        return Runner.start(first.checkpoint, Tokens.read(args.tokens), first.config)

    return start


def read_inputs(
    stage: str, weights: Path, before: Path | None, source: str = "golden/out"
) -> tuple[Any, StageInput | None]:
    """What a stage is made of and what feeds it. Anything that is missing is reported before minutes are spent on a
    device.
    """
    from layerproof.model import handed

    description = read_json(weights)
    if "error" in description:
        raise StageError(description["error"])
    return description, handed.stage_input(before, stage, source)


def read_captured(args: argparse.Namespace) -> None:
    """A chain of what another program captured; a stage whose file cannot be used ends as an error, and the others go on."""

    def work(job: Job, file: Path, output: Path) -> None:
        from layerproof.model.tokens import Tokens
        from layerproof.port import captured

        captured.make_stage(job.stage, file, Tokens.read(args.tokens), output)

    def task_of(job: Job, file: Path) -> Task:
        (output,) = of_stages(args.outputs, [job.stage])
        return task(args, job, [file, args.tokens], functools.partial(work, job, file, output))

    if len(args.captured) != len(args.job):  # which pairs them: the names of captured files do not say the stage
        counted = f"{len(args.captured)} files for {len(args.job)} job files"
        raise UserError(f"--captured: names {counted}. Copy the command from snakemake -n -p.")
    run_tasks(args, list(map(task_of, args.job, args.captured)), leave_tensors_error)


def crew_of(args: argparse.Namespace, axes: Mapping[str, int], independent: bool = False) -> ranks.Crew:
    """The ranks of a command, which are not started yet."""
    parallel = args.job[0].config.parallel
    return ranks.Crew(parallel.launcher, axes, args.retries, independent)


def run_tasks_of(crew: ranks.Crew, args: argparse.Namespace, tasks: Sequence[Task]) -> None:
    """Runs the tasks of a command whose stages a crew runs; or this process is one of its ranks, and does its part."""
    if not ranks.serves(crew):
        run_tasks_in_subprocess(args, tasks, leave_tensors_error, crew.independent)


def by_ranks(
    crew: ranks.Crew,
    args: argparse.Namespace,
    job: Job,
    make: Callable[[Path], Mapping[str, Any] | None],
    output: Path,
    trace: Callable[[int], tuple[dict[str, Any], str]] | None = None,
) -> Work:
    """The work that makes a file of the port: `make` writes it here, or several ranks write a part each, which are joined.
    With `trace` and `port.compile` the ranks report their graphs, too. It returns facts for the record.
    """
    if crew.count == 1:
        return lambda: make(output) or {}
    parts = [output.with_name(f"{output.name}.{rank}.tmp") for rank in range(crew.count)]
    log = args.log[args.job.index(job)].absolute() if args.log else None
    crew.works[job.name] = ranks.Work(lambda rank: make(parts[rank]), log)

    def join(graphs: Sequence[tuple[dict[str, Any], str]]) -> None:
        from layerproof.model.tokens import Tokens
        from layerproof.port import shards

        shards.join(parts, output, Tokens.read(args.tokens).valid, crew.axes, graphs)

    def work() -> Mapping[str, Any]:
        if crew.launcher == "fork" and is_cpu(job.config.port.device):  # on others each rank has to begin anew
            import_packages(PACKAGES)
        try:
            made = crew.run(job.name)
            traced = ranks.run(crew.count, trace) if trace and job.config.port.compile else []
            joined = ranks.run(1, lambda rank: join([one.value for one in traced]))
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        facts = {
            "ranks": crew.count,
            "launcher": crew.launcher,
            "mesh": dict(crew.axes),
            "peak_rss_bytes": sum(one.peak_rss_bytes for one in made),
        }
        return {**(made[0].value or {}), **facts, jobs.CODE: ranks.code_of([*made, *traced, *joined])}

    return work
