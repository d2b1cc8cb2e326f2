"""Verbs that find out why a stage fails."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerproof.diagnose.result import undiagnosed
from layerproof.errors import StageError
from layerproof.files import read_json, write_json
from layerproof.port.verbs import add_retries, by_ranks, crew_of, run_tasks_of, starter
from layerproof.rerun.command import (
    Verbs,
    add_job_verb,
    of_stage,
    of_stages,
    only,
    run_tasks_in_subprocess,
    task,
)
from layerproof.rerun.job import Job
from layerproof.rerun.jobs import Task
from layerproof.tensors import pruning

log = logging.getLogger(__name__)


def add_verbs(verbs: Verbs) -> None:
    """Adds `teacher-force` and `diagnose` to the command line."""
    text = "Runs failing stages of the port teacher-forced: the golden's tap replaces each of their own."
    files = "comparison", "golden", "weights", "tokens", "config", "previous"
    add_retries(add_job_verb(verbs, "teacher-force", teacher_force, text, *files))
    text = "Finds the known mistake that explains a failing stage."
    files = "comparison", "golden", "noise", "port", "forced", "weights", "tokens", "config", "previous"
    add_job_verb(verbs, "diagnose", diagnose, text, *files)


def teacher_force(args: argparse.Namespace) -> None:
    """A stage that does not fail leaves an empty file: there is nothing to find out."""
    start = starter(args)
    crew = crew_of(args, args.job[0].config.parallel.of_stage, independent=True)

    def task_of(job: Job) -> Task:
        comparison, golden, weights = (of_stage(p, job.stage) for p in (args.comparison, args.golden, args.weights))
        before = only(of_stages(args.previous, job.arguments["fed_by"]))
        (output,) = of_stages(args.outputs, [job.stage])
        output = output.absolute()

        def force(
            output: Path,
        ) -> None:  # reads all its files before the port's code runs, which may change the directory
            from layerproof.model import handed
            from layerproof.port import stage
            from layerproof.tensors import hdf5

            taps = hdf5.read_group(golden, "golden")
            fed = handed.stage_input(before, job.stage)
            description = read_json(weights)
            stage.teacher_force_stage(start(), job.stage, description, fed, taps, output)

        forced = by_ranks(crew, args, job, force, output)

        def work() -> Mapping[str, Any] | None:
            from layerproof.tensors import hdf5

            if read_json(comparison)["status"] == "fail":
                pruning.require_intact([golden])
                return forced()
            if not hdf5.is_empty(output):  # an equal output is left alone, and what depends on it
                hdf5.write(output, {}, attributes={"stage": job.stage})
            return {}

        inputs = [path for path in (comparison, golden, weights, args.tokens, args.config, before) if path]
        return task(args, job, inputs, work)

    run_tasks_of(crew, args, list(map(task_of, args.job)))


def diagnose(args: argparse.Namespace) -> None:
    def task_of(job: Job) -> Task:
        stage, siblings = job.stage, job.arguments["sibling"]
        before, before_sibling = (
            only(of_stages(args.previous, job.arguments[key])) for key in ("fed_by", "sibling_fed_by")
        )
        comparison, golden, noise, port, forced = (
            of_stage(paths, stage) for paths in (args.comparison, args.golden, args.noise, args.port, args.forced)
        )
        of_sibling = [of_stage(paths, name) for name in siblings for paths in (args.golden, args.noise)]
        weights = of_stages(args.weights, [stage, *job.arguments["related"], *siblings])
        (output,) = of_stages(args.outputs, [stage])
        output = output.absolute()

        def work() -> None:
            compared = read_json(comparison)
            nothing = undiagnosed(stage)
            if compared["status"] != "fail":
                if not output.exists() or read_json(output) != nothing:
                    write_json(output, nothing)
                return
            pruning.require_intact([golden, port])
            from layerproof.diagnose import diagnose
            from layerproof.model.tokens import Tokens

            subject = diagnose.FailedStage(
                stage,
                job.checkpoint,
                {path.stem: read_json(path) for path in weights},
                Tokens.read(args.tokens),
                before and before.absolute(),
                job.config,
                job.config.compare.limit,
            )
            other = None
            if siblings:
                previous = before_sibling and before_sibling.absolute()
                other = diagnose.Sibling(replace(subject, name=only(siblings), previous=previous), *of_sibling)
            found = diagnose.diagnose(subject, compared, diagnose.Files(golden, noise, port, forced), other)
            for culprit in found["culprits"]:
                log.info("%s: %s: %s", job.name, culprit["tap"], (culprit["cause"] or {}).get("text", "no known cause"))
            write_json(output, found)

        files = comparison, golden, noise, port, forced, *of_sibling, *weights, args.tokens, args.config
        return task(args, job, [*files, *dict.fromkeys(path for path in (before, before_sibling) if path)], work)

    def leave_undiagnosed(task: Task, error: StageError) -> None:
        (output,) = task.outputs
        write_json(output, undiagnosed(task.job.stage, str(error)))

    run_tasks_in_subprocess(args, list(map(task_of, args.job)), leave_undiagnosed, independent=True)
