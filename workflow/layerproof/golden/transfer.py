"""The golden on its way between hosts that share no file system: a zip file for each job, with its outputs and its record.

The golden's host packs them, a storage plugin of Snakemake carries them, and the port's host takes those that were made from
what it has itself.
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
from layerproof.rerun.records import Record
from layerproof.tensors import pruning

RECORD = "record.json"
WEIGHTS = "weights.json"

LIBRARY = "workflow/layerproof/"
"""Where in the repository the code is that both hosts have to have alike."""

ALIKE = {
    "dtype": "golden.dtype",
    "attn_implementation": "golden.attn_implementation",
    "experts_implementation": "golden.experts_implementation",
    "trust_remote_code": "model.trust_remote_code",
}
"""Settings that the golden's numbers depend on and that no file tells, with their names in config.yaml: both hosts have to
have them alike."""


@dataclass(frozen=True)
class Own:
    """What this host has of a stage: results/weights/STAGE.json, results/tokens.json, the checkpoint's config.json, and
    golden and noise of the stage before, if there is one."""

    weights: Path
    tokens: Path
    config: Path
    before: Sequence[Path]


def pack(output: Path, record: Path, weights: Path | None) -> None:
    """Writes the zip file of a job that ran: its record, its outputs, and of a stage what its weights are.

    Equal jobs have equal files, whenever their outputs were written.

    Raises:
        UserError: if the job failed, an output is not what the record says, or was trimmed, or the weights are others.
    """
    made = Record.read(record)
    if made is None:
        raise UserError(f"{record}: cannot be read. Remove it and run again.")
    if made.error is not None:
        raise UserError(f"{next(iter(made.outputs))}: failed on this host, and is not stored: {made.error}")
    for name, description in made.outputs.items():
        path = Path(name)
        if path.exists() and pruning.read(path):
            raise UserError(f"{name}: holds only outputs. Set compare.taps to all in config.yaml and run again.")
        if not path.exists() or sha256(path) != description["sha256"]:
            raise UserError(f"{name}: is not what {record} says. Run again.")
    if weights and made.inputs.get(str(weights)) != sha256(weights):
        raise UserError(f"{weights}: is not what {next(iter(made.outputs))} was made from. Run again.")
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w") as file:
        for path, name in [
            (record, RECORD),
            *((Path(name), name) for name in made.outputs),
            *([(weights, WEIGHTS)] if weights else []),
        ]:
            with open(path, "rb") as source, file.open(zipfile.ZipInfo(name), "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, 1 << 20)


def unpack(stored: Path, outputs: Sequence[Path]) -> Record:
    """Writes the outputs in the zip file of a job, all of them or none, and returns what the job was run with.

    Raises:
        UserError: if the file is damaged, or is of another job or version.
    """
    with _opened(stored) as file, contextlib.ExitStack() as whole:
        record = _record(file, stored)
        if set(record.outputs) != set(map(str, outputs)):
            raise UserError(
                f"{stored}: holds {', '.join(record.outputs)}. Store it again by this version of Layerproof."
            )
        for path in outputs:
            temporary = whole.enter_context(replacing(path))
            with file.open(str(path)) as source, open(temporary, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if sha256(temporary) != record.outputs[str(path)]["sha256"]:
                raise UserError(f"{stored}: {path} in it is damaged. Store it again on the golden's host.")
    return record


def check(stored: Path, own: Own, spec: Mapping[str, Any]) -> None:
    """Checks that the golden of a stage was made from what this host has, by the code it has; `spec` is its own job's.

    Raises:
        UserError: if something is different: what, and what to do.
    """
    with _opened(stored) as file:
        record, weights = _record(file, stored), json.loads(file.read(WEIGHTS))
    problem = next(_differences(record, weights, own, spec), None)
    if problem:
        raise UserError(f"{spec['storage']}/{spec['stage']}.zip: {problem}")


def _differences(record: Record, weights: Mapping[str, Any], own: Own, spec: Mapping[str, Any]) -> Iterator[str]:
    configs = [digest for name, digest in record.inputs.items() if Path(name).name == own.config.name]
    for key, name in ALIKE.items():
        if record.spec.get(key) != spec[key]:
            yield f"was made with {name} {record.spec.get(key)}, and here it is {spec[key]}. Set both alike."
    if weights.get("digest") != read_json(own.weights).get("digest"):
        yield "was made from other weights. Give both hosts the same checkpoint."
    if configs != [sha256(own.config)]:
        yield f"was made with another {own.config.name} of the checkpoint. Give both hosts the same checkpoint."
    if record.inputs.get(str(own.tokens)) != sha256(own.tokens):
        yield "was made from other tokens. Give both hosts the same inputs in config.yaml, and the same tokenizer."
    if set(spec["compared"]) - set(record.spec.get("compared", ())):
        yield "was made without taps, because layers in config.yaml left it out. Store it again with the same layers."
    for path in own.before:
        if record.inputs.get(str(path)) != pruning.digest(path):
            yield (
                f"was not made from the {path.stem} that is here. Run snakemake store_golden again to its end, and then "
                "here with --forcerun take_golden."
            )
    remote = {f"{path}::{local}": digest for path, local, digest in _beside(own.config, record.code)}
    if changed := fingerprint.changed(library_code(record) | remote):
        yield f"was made by other code ({changed[0]}). Have the same on both hosts and store it again."


def library_code(record: Record) -> dict[str, str]:
    """Fingerprints of the library's functions that a job ran: what of its code is on every host under the same name."""
    return {entry: digest for entry, digest in record.code.items() if entry.startswith(LIBRARY)}


def _beside(config: Path, code: Mapping[str, str]) -> Iterator[tuple[Path, str, str]]:
    """Of code that a job ran what came with the checkpoint, by its file here: transformers runs a copy of that name."""
    for entry, digest in code.items():
        name, _, local = entry.partition("::")
        path = config.absolute().parent / Path(name).name
        if not entry.startswith(LIBRARY) and path.exists():
            yield path, local, digest


def _record(file: zipfile.ZipFile, stored: Path) -> Record:
    record = Record.parse(json.loads(file.read(RECORD)))
    if record is None:
        raise UserError(f"{stored}: is of another version of Layerproof. Store it again by this one.")
    return record


@contextlib.contextmanager
def _opened(stored: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(stored) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{stored}: is damaged or not by Layerproof ({error}). Store it again.") from None
