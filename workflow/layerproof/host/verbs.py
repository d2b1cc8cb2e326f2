"""Verbs that say what a run will take, and whether a host has it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.errors import UserError
from layerproof.files import read_json, write_json
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, checkpoint_of, job_of, one_output

if TYPE_CHECKING:
    pass


def add_verbs(verbs: Verbs) -> None:
    """Adds `predict` and `preflight` to the command line."""
    text = "Predicts the memory of each job and the disk of the run."
    add_job_verb(verbs, "predict", make_prediction, text, "weights", "tokens", "config")
    verb = add_job_verb(verbs, "preflight", make_preflight, "Checks whether this host can run a side.", by_hand=True)
    verb.add_argument("--side", choices=("golden", "port"), required=True)
    verb.add_argument("--config", type=Path, default=Path("config.yaml"), help="which settings to check by hand")
    verb.add_argument("--prediction", type=Path, default=Path("results/prediction.json"))


def make_prediction(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        from layerproof.host import prediction
        from layerproof.model import tokens

        descriptions = {path.stem: read_json(path) for path in args.weights}
        prompts = tokens.Tokens.read(args.tokens)
        write_json(output, prediction.predict(checkpoint_of(args), descriptions, prompts, args.spec))

    jobs.run(job_of(args, [*args.weights, args.tokens, args.config]), work)


def _prediction(path: Path) -> Any:
    """What results/prediction.json says; None if it is not there.

    Raises:
        UserError: if it is damaged.
    """
    try:
        return read_json(path) if path.exists() else None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}). Delete it and run again.") from None


def make_preflight(args: argparse.Namespace) -> int | None:
    """Checks of a side as a job of the workflow or, without an output, by hand: told on the terminal and kept nowhere."""
    from layerproof import environment
    from layerproof.host import checks, preflight

    def look(config: Mapping[str, Any], checkpoint: Path, results: Path) -> list[checks.Check]:
        prediction = _prediction(args.prediction)
        found = preflight.check_side(args.side, config, checkpoint, results, prediction)
        print(*checks.lines(found), sep="\n", flush=True)
        return found

    if not args.outputs:
        from layerproof.config import read
        from layerproof.model.resolve import resolve

        resolved = resolve(read(args.config))
        found = look(resolved.resolved, Path(resolved.checkpoint), Path("results"))
        return int(any(check.status == checks.FAIL for check in found))

    output = one_output(args)

    def work() -> None:
        found = look(args.spec, checkpoint_of(args), output.parent.parent)
        failed = [check for check in found if check.status == checks.FAIL]
        if failed:
            raise UserError(f"the {args.side} cannot run on this host: {' '.join(checks.lines(failed))}")
        content = {
            "schema_version": 1,
            "side": args.side,
            "checks": [asdict(check) for check in found],
            "software": environment.software(args.spec),
            "hardware": environment.hardware(),
        }
        write_json(output, content)

    jobs.run(job_of(args, [args.prediction]), work)
    return None
