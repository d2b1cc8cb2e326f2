"""Runs one job: not at all if nothing that it depends on changed; else recorded, with its errors told in a line."""

from __future__ import annotations

import getpass
import os
import platform
import resource
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from layerproof import fingerprint
from layerproof.errors import StageError, UserError
from layerproof.files import sha256
from layerproof.records import Record, described, why_stale

PACKAGES = (
    "torch",
    "torch-xla",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "h5py",
    "matplotlib",
)
"""Packages whose version a job's record states."""


@dataclass(frozen=True)
class Job:
    """What a verb was asked for: `spec` holds its settings; `stamp` is explained in `records`."""

    verb: str
    spec: Mapping[str, Any]
    stamp: str
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    record: Path


Work = Callable[[], Mapping[str, Any] | None]


def is_current(job: Job) -> bool:
    """Whether the job ran before with the same settings, code and inputs and its output is whole; says so in the log."""
    reason = why_stale(Record.read(job.record), job.spec, job.stamp, job.inputs, job.outputs)
    names = ", ".join(map(str, job.outputs[:1])) + (f" and {len(job.outputs) - 1} more" if len(job.outputs) > 1 else "")
    print(f"{names}: up to date" if reason is None else f"{names}: runs because {reason}", flush=True)
    return reason is None


def run(
    job: Job,
    work: Work,
    on_error: Callable[[StageError], None] | None = None,
    setup: fingerprint.Seen | None = None,
) -> None:
    """Does the job's work unless `is_current`, and writes its record.

    `work` returns facts for the record. With `on_error` an exception becomes a result: the function is given the error
    and leaves an output that says so, the record keeps it, and the job succeeds, so that other stages go on. `setup`
    are functions that ran for this job and others of the process: what it uses was imported and set up by them.
    """
    if is_current(job):
        return
    inputs = {str(path): sha256(path) for path in job.inputs}
    started, clock = datetime.now(UTC), time.perf_counter()
    facts: Mapping[str, Any] | None = None
    error = None
    seen: fingerprint.Seen = {}
    with fingerprint.recording(seen):
        try:
            facts = work()
        except Exception as exception:
            if on_error is None:
                raise
            if not isinstance(exception, StageError):
                traceback.print_exc()
            error = _as_stage_error(exception)
            print(f"error: {error}", file=sys.stderr)
            on_error(error)
    Record(
        verb=job.verb,
        spec=job.spec,
        stamp=job.stamp,
        inputs=inputs,
        outputs=described(job.outputs),
        code=fingerprint.fingerprints(seen | (setup or {})),
        error=None if error is None else str(error),
        run={
            "command": shlex.join(["python", "-m", "layerproof", *sys.argv[1:]]),
            "started": started.isoformat(timespec="seconds"),
            "wall_s": round(time.perf_counter() - clock, 3),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "host": platform.node(),
            "user": _user(),
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": package_versions(),
            **(facts or {}),
        },
    ).write(job.record)


def _user() -> str:
    """Who ran the job; a number where the user has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def package_versions() -> dict[str, str]:
    """Versions of the packages that numbers may depend on, of those that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _as_stage_error(exception: Exception) -> StageError:
    """The error as one line for the report; what is none of ours is named by its type and the line that raised it."""
    if isinstance(exception, StageError):
        return exception
    if isinstance(exception, UserError):
        return StageError(str(exception))
    text = str(exception).strip().splitlines()
    frames = [frame for frame in traceback.extract_tb(exception.__traceback__) if "site-packages" not in frame.filename]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return StageError(f"{type(exception).__name__}{where}: {text[0] if text else 'no message'}")
