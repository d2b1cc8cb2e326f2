"""Verbs that compare the port with the golden."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerproof.files import read_json, write_json
from layerproof.port import ranks
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, checkpoint_of, job_of, only
from layerproof.rerun.recorder import cached
from layerproof.tensors import pruning

if TYPE_CHECKING:
    from layerproof.port.runner import Runner
    from layerproof.tensors.tensor import Tensor


def add_verbs(verbs: Verbs) -> None:
    """Adds `compare`, `compare-chain` and `bisect` to the command line."""
    files = "golden", "noise", "port", "tokens"
    add_job_verb(verbs, "compare", make_comparison, "Compares the two sides of a stage.", *files)
    files = "golden", "port", "comparisons", "noise", "tokens"
    add_job_verb(
        verbs, "compare-chain", make_chain_comparison, "Compares a chain with the golden's trajectory.", *files
    )
    text = "Finds the first stage at which the port goes wrong on its own outputs, by halving."
    files = "golden", "noise", "weights", "tokens", "config", "previous"
    add_job_verb(verbs, "bisect", make_bisection, text, *files)


def make_comparison(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        from layerproof.compare import stage as compare_stages
        from layerproof.model import tokens

        pruning.require_whole([*args.golden, *args.port])
        valid = tokens.Tokens.read(args.tokens).valid
        content = compare_stages.compare_stage(
            args.spec["stage"], args.golden[0], args.noise[0], args.port[0], valid, args.spec["limit"]
        )
        write_json(output, content)

    jobs.run(job_of(args, [*args.golden, *args.noise, *args.port, args.tokens]), work)


def make_chain_comparison(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        from layerproof.compare import stage as compare_stages
        from layerproof.model import tokens

        content = compare_stages.compare_chain(
            args.spec["chain"],
            args.spec["stages"],
            {path.stem: path for path in args.golden},
            {path.stem: path for path in args.port},
            {path.stem: read_json(path) for path in args.comparisons},
            tokens.Tokens.read(args.tokens).valid,
            {path.stem: path for path in args.noise},
        )
        write_json(output, content)

    jobs.run(job_of(args, [*args.golden, *args.port, *args.comparisons, *args.noise, args.tokens]), work)


def make_bisection(args: argparse.Namespace) -> None:
    output = args.outputs[0].absolute()
    golden, noise = ({path.stem: path.absolute() for path in paths} for paths in (args.golden, args.noise))
    previous = only(args.previous)

    def work() -> Mapping[str, Any]:
        from layerproof.compare import bisect
        from layerproof.model import tokens
        from layerproof.tensors import hdf5

        prompts = tokens.Tokens.read(args.tokens)
        descriptions = {path.stem: read_json(path) for path in args.weights}
        fed = hdf5.read_stage_input(previous, "golden/out") if previous else None
        count, done = args.spec["tp"], []

        @cached
        def start() -> Runner:
            from layerproof.port.runner import Runner

            return Runner.start(checkpoint_of(args), prompts, args.spec)

        def run_here(stages: Sequence[str]) -> Tensor:
            from layerproof.port import stage as port_stage

            return port_stage.run_chain(start(), descriptions, fed, stages)

        def run(stages: Sequence[str]) -> Tensor:
            if count == 1:
                return run_here(stages)
            made = ranks.run(count, lambda rank: run_here(stages))
            done.extend(made)
            return made[0].value

        content = bisect.bisect(args.spec["stages"], run, golden, noise, prompts.valid)
        left_out = args.spec["left_out"]  # chains have no gap
        if left_out:
            print(f"{', '.join(left_out)}: behind a gap in layers (config.yaml), so not looked at")
        write_json(output, content | {"left_out": left_out})
        return {jobs.CODE: ranks.code_of(done)}

    jobs.run(job_of(args, [*args.golden, *args.noise, *args.weights, args.tokens, args.config, *args.previous]), work)
