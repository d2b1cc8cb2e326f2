"""The archive of a run: one zip file with results, inputs, code and provenance, in which no byte can change unnoticed.

Three things in it say what it should be. `ro-crate-metadata.json` describes the run and its files as a Provenance Run
Crate. `MANIFEST.sha256` has the digest of every other file, for `sha256sum -c`. The comment at the end of the zip file
is the SHA-256 of every byte before it: the seal. The files come in a fixed order and with a fixed time, so the same run
gives the same archive.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from layerproof.errors import UserError
from layerproof.files import replacing
from layerproof.report import manifest
from layerproof.report.member import Member
from layerproof.report.privacy import without_paths
from layerproof.rerun import fingerprint

METADATA = "ro-crate-metadata.json"
CHECKSUMS = manifest.CHECKSUMS
CONFIG = "config.yaml"
UNCOMMITTED = "uncommitted.diff"
CONTENTS = "archive.json"
"""The list of files in an archive of version 0.1, which has neither metadata nor seal."""
FIRST_TIME = (1980, 1, 1, 0, 0, 0)
"""The time of every file in an archive: the first that a zip file can state."""
PUBLIC = ("report.html", "verdicts.json", "compare/", "diagnosis/", "plots/")
"""What an archive contains with `report.share`, by how names in results/ begin."""
SEAL_BYTES = 64
BLOCK_BYTES = 2**20
UNREADABLE = (OSError, ValueError, LookupError, EOFError, RuntimeError, struct.error, zlib.error, zipfile.BadZipFile)
"""What zipfile raises for damaged files."""


def write(manifest_path: Path, output: Path) -> None:
    """Packs the manifest, the files that the report rests on, the code and inputs that they were made from, the config, and
    what was not committed, with metadata about all of them.

    Raises:
        UserError: if a file was changed or removed after the manifest was written, or code other than comments and
            formatting after it ran: the archive contains exactly what ran.
    """
    from layerproof.report import crate

    results = manifest_path.parent
    listed = manifest.read(manifest_path)
    records = manifest.jobs_behind_report(results)
    code = manifest.code_of(records)
    if problems := [*manifest.problems(results, listed), *_problems_elsewhere(listed, code)]:
        renew = "layerproof run results/manifest.json -- --forcerun manifest"
        raise UserError(f"{manifest_path}: {problems[0]} ({len(problems)} in all). Renew it: {renew}")
    is_public = listed["config"].get("report", {}).get("share", False)
    members = dict(_public(results, listed) if is_public else _members(results, manifest_path, listed, code))
    for name, member in members.items():
        if not is_safe(name):
            raise UserError(f"{member.path}: has a name that no archive takes. Rename it, and run again.")
    metadata = crate.public_metadata(listed, members) if is_public else crate.metadata(listed, records, members)
    members[METADATA] = Member.of(_json(metadata), METADATA)
    checksums = "".join(f"{members[name].sha256}  {name}\n" for name in sorted(members))
    members[CHECKSUMS] = Member.of(checksums.encode(), CHECKSUMS)
    with replacing(output) as temporary:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
            for name in sorted(members, key=lambda name: (name != METADATA, name)):
                _pack(file, name, members[name])
            file.comment = b"0" * SEAL_BYTES
        _seal(temporary)


def _problems_elsewhere(listed: Mapping[str, Any], code: Mapping[str, list[tuple[str, str]]]) -> Iterator[str]:
    """What changed outside results/ since the manifest was written."""
    if "workflow" not in listed:
        yield "it is of an earlier version"
        return
    read = {path: Path(path) for path in listed["inputs"]} | manifest.workflow_files()
    for path, entry in (listed["inputs"] | listed["workflow"]).items():
        if path not in read or manifest.differs(read[path], entry["sha256"]):
            yield f"changed: {path}"
    for entry, recorded in itertools.chain.from_iterable(code.values()):
        if fingerprint.current(entry) != recorded:
            yield f"changed: {entry}"


def _members(
    results: Path, manifest_path: Path, listed: Mapping[str, Any], code: Mapping[str, Any]
) -> Iterator[tuple[str, Member]]:
    """What is archived, by name in the archive. `write` has just checked the digests that the manifest states."""
    for name, entry in listed["outputs"].items():
        yield f"results/{name}", Member(results / name, entry["sha256"], entry["bytes"], f"results/{name}")
    yield f"results/{manifest_path.name}", Member.of(manifest_path.read_bytes(), str(manifest_path))
    for path, entry in listed["inputs"].items():
        yield name_in("inputs", path), Member(Path(path), entry["sha256"], entry["bytes"], path)
    files = manifest.workflow_files()
    for path, entry in listed["workflow"].items():
        yield name_in("code", path), Member(files[path], entry["sha256"], entry["bytes"], path)
    for path in code:
        if (file := fingerprint.path_of(path)).exists():
            yield name_in("code", path), Member.of(file.read_bytes(), path)
    yield CONFIG, Member.of(_yaml(listed["config"]), CONFIG)
    if diff := listed["git"]["diff"]:
        yield UNCOMMITTED, Member.of(diff.encode("utf-8", "surrogateescape"), UNCOMMITTED)


def _public(results: Path, listed: Mapping[str, Any]) -> Iterator[tuple[str, Member]]:
    """What is archived with `report.share`: the report and what it rests on, without prompts, source and local paths."""
    for name in listed["outputs"]:
        if name.startswith(PUBLIC) and name.endswith((".json", ".svg", ".html")):
            content = without_paths((results / name).read_text(encoding="utf-8")).encode()
            yield f"results/{name}", Member.of(content, f"results/{name}")


def name_in(folder: str, path: str) -> str:
    """The name in the archive of a file that the run knew by this path, relative to its directory or absolute: no path
    leads out of the folder, and no two become one.
    """
    replaced = {"/": "_root", "..": "_parent"}
    return "/".join([folder, *(replaced.get(part, part) for part in PurePosixPath(path).parts)])


def is_safe(name: str) -> bool:
    """Whether a name in an archive stays in the folder where it is unpacked, on any system, and fits a line."""
    return not {"", ".", ".."} & set(name.split("/")) and not re.search(r"[\\\x00-\x1f]", name)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _yaml(value: Any) -> bytes:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode()


def _pack(file: zipfile.ZipFile, name: str, member: Member) -> None:
    """Copies a file into the archive.

    Raises:
        UserError: if it is no longer what was listed.
    """
    info = zipfile.ZipInfo(name, FIRST_TIME)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3  # Unix, also where zipfile would write another one
    info.external_attr = 0o644 << 16
    info.file_size = member.bytes
    digest = hashlib.sha256()
    with member.open() as source, file.open(info, "w") as target:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            target.write(block)
    if digest.hexdigest() != member.sha256:
        raise UserError(f"{member.path}: changed while it was archived. Run again.")


def _seal(path: Path) -> None:
    """Writes the digest of all that comes before the comment into the comment."""
    digest, _ = _digest_and_seal(path)
    with open(path, "r+b") as file:
        file.seek(-SEAL_BYTES, 2)
        file.write(digest)


def is_sealed(path: Path, comment: bytes) -> bool:
    """Whether the last 64 bytes of a zip file are its comment, and the SHA-256, in hex, of all bytes before them.

    Raises:
        OSError: if the file cannot be read.
    """
    digest, seal = _digest_and_seal(path)
    return digest == seal == comment


def _digest_and_seal(path: Path) -> tuple[bytes, bytes]:
    """The digest of a file without its last 64 bytes, in hex, and these bytes."""
    digest, left = hashlib.sha256(), path.stat().st_size - SEAL_BYTES
    with open(path, "rb") as file:
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
        return digest.hexdigest().encode(), file.read()


def problems(path: Path) -> list[str]:
    """What differs in an archive from what was archived.

    Raises:
        UserError: if it cannot be read as an archive.
    """
    try:
        with zipfile.ZipFile(path) as file:
            wanted, has_seal = _wanted(file, path)
            counts = Counter(file.namelist())
            present = counts.keys() - {CHECKSUMS if has_seal else CONTENTS}
            found = [f"missing: {name}" for name in wanted if name not in present]
            found += [f"added: {name}" for name in sorted(present - wanted.keys())]
            found += [f"added: {name}, a second time" for name, count in sorted(counts.items()) if count > 1]
            found += [f"changed: {n}" for n in sorted(present & wanted.keys()) if _digest(file, n) != wanted[n]]
            if not found and has_seal and not is_sealed(path, file.comment):
                found = [f"changed: {path.name}, outside of its files"]
            return found
    except UNREADABLE as error:
        raise UserError(f"{path}: is not an archive of a run ({error}).") from None


def _wanted(file: zipfile.ZipFile, path: Path) -> tuple[dict[str, str], bool]:
    """The digests by name that an archive states of its files, and whether it has a seal."""
    if CHECKSUMS in file.namelist():
        lines = file.read(CHECKSUMS).decode().removesuffix("\n").split("\n")
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}, True
    files = manifest.checked(json.loads(file.read(CONTENTS)), path)["files"]
    return {name: entry["sha256"] for name, entry in files.items()}, False


def _digest(file: zipfile.ZipFile, name: str) -> str | None:
    """The digest of a file's content, or None if it cannot be unpacked."""
    digest = hashlib.sha256()
    try:
        with file.open(name) as content:
            while block := content.read(BLOCK_BYTES):
                digest.update(block)
    except UNREADABLE:
        return None
    return digest.hexdigest()


def verify(path: Path) -> int:
    """Checks results/ against its manifest, or an archive against what is stated in it, and prints the differences.

    Returns 0 if nothing was changed, removed or added, otherwise 1.

    Raises:
        UserError: if there is no usable manifest.
    """
    found = problems(path) if path.suffix == ".zip" else manifest.problems(path.parent, manifest.read(path))
    for problem in found:
        print(problem)
    print(f"{path}: " + (f"{len(found)} files differ" if found else "every file is as it was"))
    return 1 if found else 0
