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

from layerproof import fingerprint, trimming
from layerproof.errors import UserError
from layerproof.files import read_json, replacing, sha256
from layerproof.records import Record

RECORD = "record.json"
WEIGHTS = "weights.json"

LIBRARY = "workflow/layerproof/"
"""Where in the repository the code is that both hosts have to have alike."""

ALIKE = ("dtype", "attn_implementation", "experts_implementation")
"""Settings of the golden that numbers depend on and that no file tells: both hosts have to have them alike."""


@dataclass(frozen=True)
class Own:
    """What this host has of a stage: results/weights/STAGE.json, results/tokens.json, the checkpoint's config.json, and the
    golden of the stage before."""

    weights: Path
    tokens: Path
    config: Path
    previous: Path | None


def pack(output: Path, record: Path, weights: Path | None) -> None:
    """Writes the zip file of a job that ran: its record, its outputs, and of a stage what its weights are.

    Raises:
        UserError: if an output is not what the record says, or was trimmed.
    """
    made = Record.read(record)
    if made is None:
        raise UserError(f"{record}: cannot be read. Remove it and run again.")
    for name, description in made.outputs.items():
        path = Path(name)
        if path.exists() and trimming.read(path):
            raise UserError(f"{name}: holds only outputs. Set compare.taps to all in config.yaml and run again.")
        if not path.exists() or sha256(path) != description["sha256"]:
            raise UserError(f"{name}: is not what {record} says. Run again.")
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w") as file:
        file.write(record, RECORD)
        for name in made.outputs:
            file.write(name, name)
        if weights is not None:
            file.write(weights, WEIGHTS)


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
    """Whether the golden of a stage was made from what this host has, by the code it has; `spec` is its own job's.

    Raises:
        UserError: if something is different: what, and what to do.
    """
    with _opened(stored) as file:
        record, weights = _record(file, stored), json.loads(file.read(WEIGHTS))
    for problem in _differences(record, weights, own, spec):
        raise UserError(f"{spec['storage']}/{spec['stage']}.zip: {problem}")


def _differences(record: Record, weights: Mapping[str, Any], own: Own, spec: Mapping[str, Any]) -> Iterator[str]:
    read = {Path(name).name: digest for name, digest in record.inputs.items() if "/noise/" not in name}
    for key in ALIKE:
        if record.spec.get(key) != spec[key]:
            yield f"was made with golden.{key} {record.spec.get(key)}, and here it is {spec[key]}. Set both alike."
    if weights.get("digest") != read_json(own.weights).get("digest"):
        yield "was made from other weights. Give both hosts the same checkpoint."
    if read.get(own.config.name) != sha256(own.config):
        yield f"was made with another {own.config.name} of the checkpoint. Give both hosts the same checkpoint."
    if read.get(own.tokens.name) != sha256(own.tokens):
        yield "was made from other tokens. Give both hosts the same inputs in config.yaml, and the same tokenizer."
    if set(spec["compared"]) - set(record.spec.get("compared", ())):
        yield "was made without taps, because layers in config.yaml left it out. Store it again with the same layers."
    if own.previous is not None and read.get(own.previous.name) != trimming.digest(own.previous):
        yield f"was not made from the {own.previous.stem} that is stored. Run snakemake store_golden again to its end."
    ours = {entry: digest for entry, digest in record.code.items() if entry.startswith(LIBRARY)}
    if changed := fingerprint.changed(ours):
        yield f"was made by other code ({changed[0]}). Check out the same commit on both hosts and store it again."


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
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError) as error:
        raise UserError(f"{stored}: is damaged or not by Layerproof ({error}). Store it again.") from None
