"""Verbs that prepare what is to be run: checkpoint, weights and tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from layerproof.files import read_json, write_json
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, job_of

if TYPE_CHECKING:
    pass


def add_verbs(verbs: Verbs) -> None:
    """Adds `checkpoint`, `weights` and `tokens` to the command line."""
    add_job_verb(verbs, "checkpoint", make_checkpoint, "Makes the default checkpoint, a small MiniMax-M2.", "inputs")
    add_job_verb(verbs, "weights", make_weights, "Lists each stage's tensors in a checkpoint, with digests.", "inputs")
    add_job_verb(verbs, "tokens", make_tokens, "Turns prompts into padded token ids.", "inputs")


def make_checkpoint(args: argparse.Namespace) -> None:
    def work() -> None:
        from layerproof.model import tiny

        tiny.make(args.outputs[0].parent, seed=args.spec["seed"], form=args.spec["form"])

    jobs.run(job_of(args, args.inputs), work)


def make_weights(args: argparse.Namespace) -> None:
    directory = Path(args.spec["checkpoint_dir"])
    # A shard may be hundreds of gigabytes: its time and size tell whether to read it, its content what has changed.
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in args.inputs if path.exists()]

    *stages, unused = args.outputs

    def work() -> None:
        from layerproof.model.loading import describe_stages

        trust = args.spec["trust_remote_code"]
        by_stage, left = describe_stages(directory, [output.stem for output in stages], trust)
        for output, content in [*((output, by_stage[output.stem]) for output in stages), (unused, left)]:
            if not output.exists() or read_json(output) != content:
                write_json(output, content)
        for name in left:
            print(f"{name}: is in the checkpoint, but no stage loads it")

    jobs.run(job_of(args, (), files=files), work)


def make_tokens(args: argparse.Namespace) -> None:
    def work() -> None:
        from layerproof.model import tokens
        from layerproof.model.checkpoint import read_config

        directory = Path(args.spec["checkpoint_dir"])
        inputs = args.spec["inputs"]
        tokens.make(
            args.outputs[0],
            directory,
            read_config(directory),
            Path(inputs["prompts"]) if inputs["prompts"] else None,
            Path(inputs["token_ids"]) if inputs["token_ids"] else None,
            inputs["max_tokens"],
            args.spec["trust_remote_code"],
        )

    jobs.run(job_of(args, args.inputs), work)
