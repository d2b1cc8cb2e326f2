"""Verbs that say what a run will take and whether a host has it, and that watch a program of ranks on it."""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof import distributed
from layerproof.config import LAUNCHERS
from layerproof.errors import UserError
from layerproof.failures import as_stage_error
from layerproof.files import read_json, write_json
from layerproof.rerun.command import Verbs, add_job_verb, add_person_verb, only_job, run_tasks, task

if TYPE_CHECKING:
    from layerproof.config import Config
    from layerproof.host import checks


def add_verbs(verbs: Verbs) -> None:
    """Adds `predict`, `preflight`, `watch` and `launch` to the command line."""
    text = "Predicts the memory of each job and the disk space of the run."
    add_job_verb(verbs, "predict", predict, text, "weights", "tokens", "config")
    text = "Checks whether this host can run a side: libraries, devices, memory, disk and checkpoint."
    verb = add_job_verb(
        verbs,
        "preflight",
        preflight,
        text,
        example="layerproof preflight --side port",
        exits="0 if the host can run the side; 1 if a check fails; 2 if config.yaml is wrong",
    )
    verb.add_argument("--side", choices=("golden", "port"), required=True)
    verb.add_argument("--config", type=Path, default=Path("config.yaml"), help="config file, without a job file")
    verb.add_argument("--prediction", type=Path, default=Path("results/prediction.json"))
    watched = add_person_verb(
        verbs,
        "watch",
        watch,
        "Runs a program of several ranks, and says why they hang.",
        example="layerproof watch -- torchrun --nproc-per-node 4 train.py",
        exits="that of the program",
    )
    launched = add_person_verb(
        verbs,
        "launch",
        launch,
        "Runs a Python program on the ranks of config.yaml (parallel), under watch.",
        example="layerproof launch --launcher ray -- train.py",
        exits="that of the program",
    )
    launched.add_argument("--config", type=Path, default=Path("config.yaml"), help="config file")
    launched.add_argument("--launcher", choices=LAUNCHERS, help="in place of the one in the config file")
    for verb in (watched, launched):
        text = "seconds that a rank may wait in one step (default: nine tenths of the timeout of init_process_group)"
        verb.add_argument("--deadline", type=float, help=text)
        text = "compare each collective between ranks before it runs: another shape or dtype may give wrong sums"
        verb.add_argument("--check-collectives", action="store_true", help=text)


def watch(args: argparse.Namespace) -> int:
    from layerproof.host.watch import run

    if not args.behind_dashes:
        raise UserError("watch: there is no program behind --. Write layerproof watch -- torchrun train.py, say.")
    return run(args.behind_dashes, args.deadline, args.check_collectives)


def launch(args: argparse.Namespace) -> int:
    """Runs the program again if it fails, as often as `parallel.retries` says."""
    from layerproof.config import read, validate
    from layerproof.distributed.axes import as_variable
    from layerproof.host.watch import run
    from layerproof.launch.commands import command

    if not args.behind_dashes:
        raise UserError("launch: there is no program behind --. Write layerproof launch -- train.py, say.")
    parallel = validate(read(args.config)).parallel
    axes = parallel.of_program
    start = command(args.launcher or parallel.launcher, math.prod(axes.values()), args.behind_dashes)
    variables = {distributed.MESH: as_variable(axes)}
    code = 0
    for tried in range(parallel.retries + 1):
        if code:
            print(f"layerproof: runs the program again, for time {tried} of {parallel.retries}", file=sys.stderr)
        if not (code := run(start, args.deadline, args.check_collectives, variables)):
            break
    return code


def predict(args: argparse.Namespace) -> None:
    job = only_job(args)
    (output,) = args.outputs

    def work() -> None:
        from layerproof.host import prediction
        from layerproof.model.tokens import Tokens

        descriptions = {path.stem: read_json(path) for path in args.weights}
        stages = job.arguments["compared"], job.arguments["before"], job.arguments["chains"]
        prompts = Tokens.read(args.tokens)
        try:
            content = prediction.predict(job.checkpoint, descriptions, prompts, job.config, *stages)
        except UserError:
            raise
        except Exception as error:  # the run can do without it
            traceback.print_exc()
            content = prediction.unknown(str(as_stage_error(error)))
        write_json(output, content)

    run_tasks(args, [task(args, job, [*args.weights, args.tokens, args.config], work)])


def _prediction(path: Path) -> Any:
    """What results/prediction.json says; None if it does not exist, or could not predict anything.

    Raises:
        UserError: if it is damaged.
    """
    try:
        content = read_json(path) if path.exists() else None
        return None if content is None or content.get("error") else content
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}). Delete it and run again.") from None


def preflight(args: argparse.Namespace) -> int | None:
    """Checks of a side as a job of the workflow or, without an output, by hand: printed on the terminal and kept nowhere."""
    from layerproof import environment
    from layerproof.host import checks, preflight

    def look(settings: Config, checkpoint: Path, results: Path) -> list[checks.Check]:
        found = preflight.check_side(args.side, settings, checkpoint, results, _prediction(args.prediction))
        print(*checks.lines(found), sep="\n", flush=True)
        return found

    if not args.outputs:
        from layerproof.config import read
        from layerproof.model.resolve import resolve

        settings = resolve(read(args.config)).settings
        found = look(settings, Path(settings.model.checkpoint), Path("results"))
        return int(any(check.status == checks.FAIL for check in found))

    job = only_job(args)
    (output,) = args.outputs

    def work() -> None:
        found = look(job.config, job.checkpoint, output.parent.parent)
        failed = [check for check in found if check.status == checks.FAIL]
        if failed:
            raise UserError(f"the {args.side} cannot run on this host: {' '.join(checks.lines(failed))}")
        content = {
            "schema_version": 1,
            "side": args.side,
            "checks": [asdict(check) for check in found],
            "software": environment.software(job.versions),
            "hardware": environment.hardware(),
        }
        write_json(output, content)

    run_tasks(args, [task(args, job, [args.prediction], work)])
    return None
