"""Verbs that compare the port with the golden."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerproof.files import read_json, write_json
from layerproof.port import ranks
from layerproof.port.verbs import add_retries, crew_of, starter
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, of_stage, of_stages, only, only_job, run_tasks, task
from layerproof.rerun.job import Job
from layerproof.rerun.jobs import Task
from layerproof.rerun.recorder import cached
from layerproof.tensors import pruning

if TYPE_CHECKING:
    from layerproof.model.handed import StageInput
    from layerproof.tensors.tensor import Tensor

log = logging.getLogger(__name__)


def add_verbs(verbs: Verbs) -> None:
    """Adds `compare`, `compare-chain` and `bisect` to the command line."""
    files = "golden", "noise", "port", "tokens"
    add_job_verb(verbs, "compare", compare, "Compares every tap of stages with the golden.", *files)
    files = "golden", "port", "comparisons", "noise", "own_golden", "own_noise", "tokens"
    add_job_verb(verbs, "compare-chain", compare_chain, "Compares a chain with the golden's trajectory.", *files)
    text = "Finds the first stage at which the port goes wrong on its own outputs, by bisection."
    files = "golden", "noise", "weights", "tokens", "config", "previous"
    add_retries(add_job_verb(verbs, "bisect", bisect, text, *files))


def compare(args: argparse.Namespace) -> None:
    def task_of(job: Job) -> Task:
        golden, noise, port = (of_stage(paths, job.stage) for paths in (args.golden, args.noise, args.port))
        (output,) = of_stages(args.outputs, [job.stage])

        def work() -> None:
            from layerproof.compare import stage
            from layerproof.model.tokens import Tokens

            pruning.require_intact([golden, port])
            valid = Tokens.read(args.tokens).valid
            found = stage.compare_stage(job.stage, golden, noise, port, valid, job.config.compare.limit)
            log.info("%s: %s%s", job.name, found["status"], f", {found['reason']}" if found["reason"] else "")
            write_json(output, found)

        return task(args, job, [golden, noise, port, args.tokens], work)

    run_tasks(args, list(map(task_of, args.job)))


def compare_chain(args: argparse.Namespace) -> None:
    job = only_job(args)
    (output,) = args.outputs

    def work() -> None:
        from layerproof.compare import stage
        from layerproof.model.tokens import Tokens

        content = stage.compare_chain(
            job.arguments["chain"],
            job.arguments["stages"],
            {path.stem: path for path in args.golden},
            {path.stem: path for path in args.port},
            {path.stem: read_json(path) for path in args.comparisons},
            Tokens.read(args.tokens).valid,
            {path.stem: path for path in args.noise},
            {golden.stem: (golden, noise) for golden, noise in zip(args.own_golden, args.own_noise, strict=True)},
            job.arguments["limit"],
        )
        write_json(output, content)

    files = [*args.golden, *args.port, *args.comparisons, *args.noise, *args.own_golden, *args.own_noise]
    run_tasks(args, [task(args, job, [*files, args.tokens], work)])


def bisect(args: argparse.Namespace) -> None:
    job = only_job(args)
    output = args.outputs[0].absolute()
    golden, noise = ({path.stem: path.absolute() for path in paths} for paths in (args.golden, args.noise))
    previous = only(args.previous)
    start = starter(args)
    crew = crew_of(args, job.config.parallel.of_stage)

    @cached
    def given() -> tuple[Mapping[str, Any], StageInput | None]:
        from layerproof.model import handed

        return {path.stem: read_json(path) for path in args.weights}, handed.stage_input(previous, None)

    def run_here(stages: Sequence[str]) -> Tensor:
        from layerproof.port import stage

        descriptions, fed = given()
        return stage.run_chain(start(), descriptions, fed, stages)

    crew.works["chain"] = ranks.Work(lambda rank, stages: run_here(stages))

    def work() -> Mapping[str, Any]:
        from layerproof.compare import bisect
        from layerproof.model.tokens import Tokens

        done: list[ranks.Done[Tensor]] = []

        def run(stages: Sequence[str]) -> Tensor:
            if crew.count == 1:
                return run_here(stages)
            made = crew.run("chain", stages)
            done.extend(made)
            return made[0].value

        valid = Tokens.read(args.tokens).valid
        try:
            content = bisect.bisect(job.arguments["stages"], run, golden, noise, valid)
        finally:
            crew.end()
        left_out = job.arguments["left_out"]  # chains have no gap
        if left_out:
            print(f"{', '.join(left_out)}: skipped, because layers (config.yaml) has a gap before them")
        write_json(output, content | {"left_out": left_out})
        return {jobs.CODE: ranks.code_of(done)}

    inputs = [*args.golden, *args.noise, *args.weights, args.tokens, args.config, *args.previous]
    if not ranks.serves(crew):
        run_tasks(args, [task(args, job, inputs, work)])
