"""Verbs that prepare what is to be run: weights, tokens, and the checkpoint that comes with Layerproof."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerproof.files import read_json, write_json
from layerproof.rerun.command import Verbs, add_job_verb, add_person_verb, only_job, run_tasks
from layerproof.rerun.jobs import Task

log = logging.getLogger(__name__)


def add_verbs(verbs: Verbs) -> None:
    """Adds `weights`, `tokens`, `schema` and `make-tiny` to the command line."""
    add_job_verb(
        verbs, "weights", describe_weights, "Lists each stage's tensors in a checkpoint, with digests.", "files"
    )
    verb = verbs.add_parser("schema", description="Prints the JSON schema of config.yaml, as YAML.")
    verb.set_defaults(action=print_schema)
    add_job_verb(verbs, "tokens", make_tokens, "Turns prompts into padded token ids.", "files")
    verb = add_person_verb(
        verbs,
        "make-tiny",
        make_tiny,
        "Trains the small MiniMax-M2 that comes with Layerproof, in half a minute, for example with another seed.",
        example="layerproof make-tiny models/tiny --seed 1 --form fp8",
        exits="0 if the checkpoint was written",
    )
    verb.add_argument("directory", type=Path, help="where to write the checkpoint; an existing directory is replaced")
    verb.add_argument("--seed", type=int, default=0)
    text = (
        "how to store the matrices: bf16, or fp8 as MiniMax-M2 was released, with a scale for each block of 128 x 128"
    )
    verb.add_argument("--form", choices=("bf16", "fp8"), default="bf16", help=text)


def print_schema(args: argparse.Namespace) -> None:
    import yaml

    from layerproof.config import schema

    print("# Every key of config.yaml, with its type, default and meaning. Made by `layerproof schema`.\n")
    print(yaml.safe_dump(schema(), sort_keys=False, width=120, allow_unicode=True), end="")


def make_tiny(args: argparse.Namespace) -> None:
    from layerproof.model import tiny

    tiny.make(args.directory, args.seed, form=args.form)


def describe_weights(args: argparse.Namespace) -> None:
    job = only_job(args)
    *stages, unused = args.outputs

    def work() -> None:
        from layerproof.model.loading import describe_stages

        trust = job.config.model.trust_remote_code
        by_stage, left = describe_stages(job.checkpoint, [output.stem for output in stages], trust)
        contents: list[tuple[Path, Any]] = [(output, by_stage[output.stem]) for output in stages]
        for output, content in [*contents, (unused, left)]:
            if not output.exists() or read_json(output) != content:
                write_json(output, content)
        for name in left:
            log.info("%s: is in the checkpoint, but no stage loads it", name)

    # Not the shards, which may be hundreds of gigabytes: their times and sizes, which are arguments, say whether to read.
    run_tasks(args, [Task(job, (), tuple(args.outputs), work, *args.log)])


def make_tokens(args: argparse.Namespace) -> None:
    job = only_job(args)

    def work() -> Mapping[str, Any] | None:
        from layerproof.model import tokens
        from layerproof.model.checkpoint import read_config

        inputs = job.config.inputs
        tokens.make(
            args.outputs[0],
            job.checkpoint,
            read_config(job.checkpoint),
            Path(inputs.prompts) if inputs.prompts else None,
            Path(inputs.token_ids) if inputs.token_ids else None,
            inputs.max_tokens,
            job.config.model.trust_remote_code,
        )

    run_tasks(args, [Task(job, tuple(args.files), tuple(args.outputs), work, *args.log)])
