"""Runs a command and tells what it took: `python benchmarks/measure.py COMMAND...` prints it as JSON on the last line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REPEATS = 3


@dataclass(frozen=True)
class Result:
    """One figure: most are ratios to a baseline that was measured beside them."""

    name: str
    value: float
    unit: str
    baseline: str


@dataclass(frozen=True)
class Measured:
    """Wall time, the largest resident set of any process of the command, and the bytes that they had read from disk."""

    wall_s: float
    peak_rss: int
    read_bytes: int


def measure(command: Sequence[str], directory: Path) -> Measured:
    """Runs a command in a directory, with the library on its path.

    Raises:
        RuntimeError: if it fails.
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow"), "USE_TORCH_XLA": "0"}
    outcome = subprocess.run(
        [sys.executable, __file__, *command], cwd=directory, env=environment, capture_output=True, text=True
    )
    if outcome.returncode:
        raise RuntimeError(f"{' '.join(command)}: {outcome.stdout[-2000:]}{outcome.stderr[-2000:]}")
    return Measured(**json.loads(outcome.stdout.splitlines()[-1]))


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The shortest of a few runs, after one that does not count: what others do on the machine only adds to it."""
    times = []
    for _ in range(1 + REPEATS):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times[1:])


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Has the kernel forget files, so that the next to read them reads from disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_bytes() -> int:
    """Bytes that this process and its children that ended had fetched from the storage layer; see proc(5)."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
    started, before = time.perf_counter(), _read_bytes()
    code = subprocess.run(sys.argv[1:]).returncode
    wall = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(json.dumps(asdict(Measured(wall, peak, _read_bytes() - before))))
    sys.exit(code)
