"""Verdicts and report made again from the tensors in an archive, on any host, and compared with those in it.

Neither the model nor the port runs. Comparisons are made again of golden, noise and port, chains of golden and chained
outputs, then verdicts of these and of the diagnoses in the archive, then plots and report. The product's own verbs do it,
in a folder of their own: `FOLDER/archive` is the unpacked archive, `FOLDER/results` what was made again.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from layerproof.errors import UserError
from layerproof.files import read_json
from layerproof.paths import CAUSES, GLOSSARY, LIBRARY, TEMPLATES
from layerproof.report import archive, manifest
from layerproof.rerun.records import Record
from layerproof.tensors import pruning

ROUNDING = 1e-6
"""Numbers of two verdicts that are relatively as close as this are the same: another CPU sums in another order."""
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
LAST_DIGIT = 0.01
"""Numbers in sentences have three digits, the last of which rounding may move."""
LONGEST_LIST = 20
"""So many differences are printed, and the number of the others."""

FLAGS = (
    ("results/compare/chain/", "chains"),
    ("results/compare/", "comparisons"),
    ("results/golden/", "golden"),
    ("results/noise/", "noise"),
    ("results/port/", "port"),
    ("results/chain/", "port"),
    ("results/tokens.json", "tokens"),
    ("results/diagnosis/", "diagnoses"),
    ("results/plots/", "plots"),
    ("results/verdicts.json", "verdicts"),
    ("results/weights/unused.json", "unused"),
    ("results/audit.json", "audit"),
    ("results/trimmed/", "pruned"),
    ("results/preflight/", "preflights"),
)
"""By how an input's path begins, the flag of a verb that names it; the first that fits counts."""


@dataclass(frozen=True)
class Step:
    """A verb, the jobs whose outputs it makes again, and whether it takes all of them at once."""

    verb: str
    jobs: re.Pattern[str]
    together: bool = False


STEPS = (
    Step("compare", re.compile(r"compare/[^/]+"), together=True),
    Step("compare-chain", re.compile(r"compare/chain/[^/]+")),
    Step("verdicts", re.compile(r"verdicts")),
    Step("plot-stage", re.compile(r"plots/(?!map$)[^/]+"), together=True),
    Step("plot-model", re.compile(r"plots/map")),
    Step("report", re.compile(r"report")),
)
"""What is made again, in the order in which one needs the other."""


def rerun(path: Path, into: Path | None) -> int:
    """Makes verdicts and report of an archive again, and prints whether they are the same.

    Works in the folder `into`, which must be empty or not exist, or by default in a temporary one.

    Returns 0 if the verdicts are the same, otherwise 1.

    Raises:
        UserError: if the archive is not as it was archived, has unsafe names, or lacks what is needed, or if the folder is
            not empty.
    """
    if found := archive.problems(path):
        raise UserError(f"{path}: {found[0]} ({len(found)} in all). layerproof verify {path} lists all.")
    with _folder(into) as folder:
        unpack(path, folder / "archive")
        try:
            different = _rebuild(path, folder)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # what its files hold may be anything
            raise UserError(f"{path}: cannot be made again ({error!r}).") from None
        if into:
            print(f"report made again: {folder / 'results/report.html'}")
    print(f"{path}: the verdicts " + ("differ" if different else "are the same"))
    return int(different)


def _rebuild(path: Path, folder: Path) -> bool:
    """Makes what is unpacked in `folder/archive` again, says how that went, and returns whether the verdicts differ."""
    _print_packages(manifest.read(folder / "archive/results/manifest.json"))
    rebuilding = _Rebuilding(path, folder)
    rebuilding.run()
    _print_code(rebuilding.records, folder)
    return _print_outcome(folder, rebuilding)


@contextlib.contextmanager
def _folder(into: Path | None) -> Iterator[Path]:
    if into is None:
        with tempfile.TemporaryDirectory(prefix="layerproof-rerun-") as folder:
            yield Path(folder)
        return
    if into.exists() and not (into.is_dir() and not any(into.iterdir())):
        raise UserError(f"{into}: exists and is not an empty folder. Name another one.")
    into.mkdir(parents=True, exist_ok=True)
    yield into.absolute()


def unpack(path: Path, folder: Path) -> None:
    """Unpacks an archive into a folder that does not exist yet.

    Raises:
        UserError: if a name in it leads out of the folder, or the disk is too small.
    """
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            if not _is_safe(info):
                raise UserError(f"{path}: contains the unsafe name {info.filename!r}. Nothing was unpacked.")
        folder.mkdir(parents=True)
        needed, free = sum(info.file_size for info in file.infolist()), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{folder}: {needed} bytes are needed and {free} are free. Name another folder with --into."
            )
        file.extractall(folder)


def _is_safe(info: zipfile.ZipInfo) -> bool:
    """Whether this is an ordinary file that stays below the folder in which it is unpacked."""
    ordinary = not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
    return ordinary and archive.is_safe(info.filename)


class _Rebuilding:
    """The jobs of an archive whose outputs are made again in `folder`."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.records = dict(self._records())
        self.pruned: list[str] = []

    def _records(self) -> Iterator[tuple[str, Record]]:
        records = self.folder / "archive/results/records"
        for file in sorted(records.rglob("*.json")):
            name = str(file.relative_to(records).with_suffix(""))
            if any(step.jobs.fullmatch(name) for step in STEPS):
                record = Record.read(file)
                if record is None or record.job.name != name:
                    raise UserError(f"{self.path}: results/records/{name}.json: is not a record of this version.")
                yield name, record

    def run(self) -> None:
        for step in STEPS:
            names = [name for name in self.records if step.jobs.fullmatch(name)]
            if step.verb == "compare":
                self.pruned = [name for name in names if self._is_pruned(name)]
                names = [name for name in names if name not in self.pruned]
            for group in [names] if step.together else [[name] for name in names]:
                if group:
                    self._call(step.verb, group)

    def _is_pruned(self, name: str) -> bool:
        """Whether tensors that a comparison needs were dropped."""
        files = (path for path in self.records[name].inputs if path.endswith(".h5"))
        return any(pruning.read(self._found(path)) is not None for path in files)

    def _found(self, path: str) -> Path:
        """An input of a job: as it was made again, or as it is in the archive."""
        self._check(path)
        made = self.folder / path
        return made if made.exists() else self.folder / "archive" / path

    def _check(self, path: str) -> None:
        parts = PurePosixPath(path).parts
        if parts[:1] != ("results",) or ".." in parts or len(parts) < 2:
            raise UserError(f"{self.path}: a record names {path!r}, which is not a path under results/.")

    def _call(self, verb: str, names: Sequence[str]) -> None:
        """Runs the verb of some jobs, with their recorded inputs and outputs, in the folder.

        Raises:
            UserError: if it fails, with its last line.
        """
        files: dict[str, list[Path]] = {}
        outputs, jobs = [], []
        for name in names:
            record = self.records[name]
            for path in record.inputs:
                if flag := _flag_of(path, verb):
                    known = files.setdefault(flag, [])
                    known += [found] if (found := self._found(path)) not in known else []
            for path in record.outputs:
                self._check(path)
                outputs.append(path)
            jobs.append(self.folder / f".layerproof/jobs/{name}.json")
            record.job.write(jobs[-1])
        if verb == "report":
            stages = [file.stem for file in files["comparisons"]]
            files["records"] = [self._found(f"results/records/port/{stage}.json") for stage in stages]
            # The page and its words belong to the code that fills it, which is this installation's.
            files |= {"templates": [*TEMPLATES], "glossary": [GLOSSARY], "causes": [CAUSES]}
        flags = [word for flag, paths in files.items() for word in (f"--{flag}", *map(str, paths))]
        command = [sys.executable, "-m", "layerproof", verb, *outputs, *flags, "--job", *map(str, jobs)]
        done = subprocess.run(command, cwd=self.folder, env=_environment(), capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise UserError(f"{self.path}: layerproof {verb} fails on its files: {lines[-1]}")


def _flag_of(path: str, verb: str) -> str | None:
    """The flag by which a verb takes an input of its job; None for files outside results/."""
    flag = next((flag for start, flag in FLAGS if path.startswith(start)), None)
    return "comparison" if (verb, flag) == ("plot-stage", "comparisons") else flag


def _environment() -> dict[str, str]:
    library = os.pathsep.join(filter(None, [str(LIBRARY.parent), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": library}


def _print_packages(listed: Mapping[str, Any]) -> None:
    """Says which packages of the run are not installed here in the same version."""
    recorded: dict[str, set[str]] = {}
    for packages in [listed["packages"], *(job["packages"] for job in listed["jobs"].values())]:
        for name, version in packages.items():
            recorded.setdefault(name, set()).add(version)
    lines = []
    for name, versions in sorted(recorded.items()):
        here = _installed(name)
        if versions != {here}:
            lines.append(
                f"  {name} {', '.join(sorted(versions))}: " + (f"here {here}" if here else "not installed here")
            )
    print(f"packages: {len(recorded) - len(lines)} of {len(recorded)} are installed in the recorded version")
    print(*lines, sep="\n", end="\n" if lines else "")


def _installed(name: str) -> str | None:
    from layerproof import __version__

    try:
        return __version__ if name == "layerproof" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print_code(before: Mapping[str, Record], folder: Path) -> None:
    """Says which of Layerproof's functions ran as other ones for the same jobs here."""
    seen: set[str] = set()
    changed: set[str] = set()
    for name, record in before.items():
        after = Record.read(folder / f"results/records/{name}.json")
        both = record.code.keys() & after.code.keys() if after else set()
        seen |= both
        changed |= {entry for entry in both if after and record.code[entry] != after.code[entry]}
    print(f"code: {len(seen) - len(changed)} of {len(seen)} functions and names are as they ran")
    _print_some(sorted(changed))


def _print_outcome(folder: Path, rebuilding: _Rebuilding) -> bool:
    """Says what is the same, and returns whether the verdicts differ."""
    made = [name for name in rebuilding.records if name.startswith("compare/") and name not in rebuilding.pruned]
    same = sum(_is_same(folder, f"results/{name}.json") for name in made)
    print(f"comparisons: {len(made)} made again, {same} of them the same byte for byte")
    if rebuilding.pruned:
        stages = ", ".join(name.rpartition("/")[2] for name in rebuilding.pruned)
        print(f"comparisons: {len(rebuilding.pruned)} taken from the archive, because their taps were pruned: {stages}")
    before, after = (read_json(part / "results/verdicts.json") for part in (folder / "archive", folder))
    different = list(differences(before, after))
    print(f"verdicts: {len(different)} differences" if different else "verdicts: the same")
    _print_some(different)
    same_page = _is_same(folder, "results/report.html")
    why = "differs, as it does with other versions, another commit or another host"
    print(f"report: {'the same byte for byte' if same_page else why}")
    return bool(different)


def _is_same(folder: Path, name: str) -> bool:
    return (folder / name).read_bytes() == (folder / "archive" / name).read_bytes()


def _print_some(lines: Sequence[str]) -> None:
    for line in lines[:LONGEST_LIST]:
        print(f"  {line}")
    if len(lines) > LONGEST_LIST:
        print(f"  and {len(lines) - LONGEST_LIST} more")


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yields each place at which two JSON values differ, with both values. Numbers may differ by rounding."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{where}.{key}".lstrip(".")
            if key in before and key in after:
                yield from differences(before[key], after[key], inner)
            else:
                yield f"{inner}: only in the {'archive' if key in before else 'rerun'}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif not _is_close(before, after):
        yield f"{where}: {before} in the archive, {after} made again"


def _is_same_text(before: str, after: str) -> bool:
    """Whether two sentences are the same but for the last digit of their numbers."""
    words, numbers = (
        [re.sub(NUMBER, "#", text) for text in (before, after)],
        [re.findall(NUMBER, text) for text in (before, after)],
    )
    return words[0] == words[1] and all(
        math.isclose(float(one), float(other), rel_tol=LAST_DIGIT) for one, other in zip(*numbers, strict=True)
    )


def _is_close(before: Any, after: Any) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=ROUNDING)
    if isinstance(before, str) and isinstance(after, str):
        return _is_same_text(before, after)
    return type(before) is type(after) and before == after
