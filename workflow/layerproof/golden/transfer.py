"""Transfers the golden between hosts that share no file system: one zip file per job, with its outputs and its record.

The golden's host packs the files, a storage plugin of Snakemake carries them, and the port's host imports those that
were made from the same inputs as its own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import read_json, replacing, sha256
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.records import Record
from layerproof.tensors import pruning

RECORD = "record.json"
WEIGHTS = "weights.json"

LIBRARY = "layerproof/"
"""The code that must be the same on both hosts, by its path in records."""

MUST_MATCH = (
    "golden.dtype",
    "golden.attn_implementation",
    "golden.experts_implementation",
    "golden.taps",
    "model.trust_remote_code",
)
"""Settings that the golden's numbers depend on and that no file records. They must be equal on both hosts."""


@dataclass(frozen=True)
class LocalInputs:
    """This host's inputs of a stage.

    These are results/weights/STAGE.json, results/tokens.json, the checkpoint's config.json, and golden and noise of the
    previous stage, if there is one.
    """

    weights: Path
    tokens: Path
    config: Path
    before: Sequence[Path]


def pack(output: Path, record: Path, weights: Path | None) -> None:
    """Exports a job that ran to a zip file: its record, its outputs, and for a stage the description of its weights.

    Equal jobs give equal files, no matter when their outputs were written.

    Raises:
        UserError: if the job failed, an output differs from the record or was pruned, or the weights differ.
    """
    made = Record.read(record)
    if made is None:
        raise UserError(f"{record}: cannot be read. Delete it and run again.")
    if made.error is not None:
        raise UserError(f"{next(iter(made.outputs))}: its job failed, so it cannot be exported: {made.error}")
    for name, description in made.outputs.items():
        path = Path(name)
        if path.exists() and pruning.read(path):
            raise UserError(f"{name}: contains only outputs. Set compare.taps to all in config.yaml and run again.")
        if not path.exists() or sha256(path) != description["sha256"]:
            raise UserError(f"{name}: does not match {record}. Run again.")
    if weights and made.inputs.get(str(weights)) != sha256(weights):
        raise UserError(f"{weights}: has changed since {next(iter(made.outputs))} was computed. Run again.")
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w") as file:
        for path, name in [
            (record, RECORD),
            *((Path(name), name) for name in made.outputs),
            *([(weights, WEIGHTS)] if weights else []),
        ]:
            with open(path, "rb") as source, file.open(zipfile.ZipInfo(name), "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, 1 << 20)


def unpack(exported: Path, outputs: Sequence[Path]) -> Record:
    """Writes the outputs in the zip file of a job, all of them or none, and returns what the job was run with.

    Raises:
        UserError: if the file is damaged, or belongs to another job or version.
    """
    with _opened(exported) as file, contextlib.ExitStack() as whole:
        record = _record(file, exported)
        if set(record.outputs) != set(map(str, outputs)):
            raise UserError(
                f"{exported}: contains {', '.join(record.outputs)}. Export it again with this version of Layerproof."
            )
        for path in outputs:
            temporary = whole.enter_context(replacing(path))
            with file.open(str(path)) as source, open(temporary, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if sha256(temporary) != record.outputs[str(path)]["sha256"]:
                raise UserError(f"{exported}: {path} in it is damaged. Export it again on the golden's host.")
    return record


def check(exported: Path, own: LocalInputs, job: Job) -> None:
    """Checks that the golden of a stage was made from this host's inputs by this host's code; `job` is this host's job.

    Raises:
        UserError: if something differs: says what, and what to do.
    """
    with _opened(exported) as file:
        record, weights = _record(file, exported), json.loads(file.read(WEIGHTS))
    problem = next(_differences(record, weights, own, job), None)
    if problem:
        raise UserError(f"{job.config.golden.storage}/{job.stage}.zip: {problem}")


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return settings.get(section, {}).get(key)


def _differences(record: Record, weights: Mapping[str, Any], own: LocalInputs, job: Job) -> Iterator[str]:
    configs = [digest for name, digest in record.inputs.items() if Path(name).name == own.config.name]
    for name in MUST_MATCH:
        there, here = _setting(record.job.settings, name), _setting(job.settings, name)
        if there != here:
            yield f"was computed with {name} {there}, but this host has {here}. Use the same value on both hosts."
    if weights.get("digest") != read_json(own.weights).get("digest"):
        yield "was computed from other weights. Use the same checkpoint on both hosts."
    if configs != [sha256(own.config)]:
        yield f"was computed with another {own.config.name} of the checkpoint. Use the same checkpoint on both hosts."
    if record.inputs.get(str(own.tokens)) != sha256(own.tokens):
        yield "was computed from other tokens. Use the same inputs and the same tokenizer on both hosts."
    if job.arguments["with_taps"] and not record.job.arguments.get("with_taps"):
        yield "was computed without taps, because layers in config.yaml excluded it. Export it again with the same layers."
    for path in own.before:
        if record.inputs.get(str(path)) != pruning.digest(path):
            yield (
                f"was not computed from this host's {path.stem}. Run snakemake export_golden again to its end, then run "
                "snakemake here with --forcerun import_golden."
            )
    remote = {f"{path}::{local}": digest for path, local, digest in _beside(own.config, record.code)}
    if changed := fingerprint.changed(library_code(record) | remote):
        yield f"was computed by other code ({changed[0]}). Install the same code on both hosts and export it again."


def library_code(record: Record) -> dict[str, str]:
    """Fingerprints of the library's functions that a job ran: this code has the same name on every host."""
    return {entry: digest for entry, digest in record.code.items() if entry.startswith(LIBRARY)}


def _beside(config: Path, code: Mapping[str, str]) -> Iterator[tuple[Path, str, str]]:
    """Yields code from the checkpoint that a job ran, with its file here: transformers runs a copy of that name."""
    for entry, digest in code.items():
        name, _, local = entry.partition("::")
        path = config.absolute().parent / Path(name).name
        if not entry.startswith(LIBRARY) and path.exists():
            yield path, local, digest


def _record(file: zipfile.ZipFile, exported: Path) -> Record:
    record = Record.parse(json.loads(file.read(RECORD)))
    if record is None:
        raise UserError(f"{exported}: was exported by another version of Layerproof. Export it again with this one.")
    return record


@contextlib.contextmanager
def _opened(exported: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(exported) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{exported}: is damaged, or not an export of Layerproof ({error}). Export it again.") from None
