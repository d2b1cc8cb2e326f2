"""Two runs side by side: which verdicts turned, whose error grew or shrank, which jobs ran, and which versions differ."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.model.stages import ranges
from layerproof.paths import DIFF_TEMPLATE
from layerproof.report import gate, layout
from layerproof.report.verdicts import SCHEMA_VERSION
from layerproof.rerun.records import Record
from layerproof.shapes import Verdicts
from layerproof.wording import times

VERDICTS = "verdicts.json"
RECORDS = "records/"
GREW = 1.2
"""An error grew or shrank if it changed by more than this factor: another order of sums changes it by less."""
LISTED = 12
"""So many taps are listed on the terminal; the page lists all."""


@dataclass(frozen=True)
class Run:
    """A run to compare: what it is called, its verdicts, and the records of its jobs."""

    name: str
    verdicts: Verdicts
    records: Mapping[str, Record]


@dataclass(frozen=True)
class TapChange:
    """How a tap changed: its status in both runs, and how many times too far off it is in both (None: no number)."""

    stage: str
    tap: str
    statuses: tuple[str, str]
    excess: tuple[float | None, float | None]

    @property
    def factor(self) -> float:
        """By how much the error grew; 1 if one of the runs has no number."""
        before, after = self.excess
        return after / before if before and after else 1.0

    def text(self) -> str:
        numbers = " to ".join("no number" if one is None else times(one).removesuffix(" times") for one in self.excess)
        status = "" if self.statuses[0] == self.statuses[1] else f", {self.statuses[0]} to {self.statuses[1]}"
        return f"{self.stage} {self.tap}: {numbers} times what is allowed{status}"


@dataclass(frozen=True)
class Difference:
    """What differs between two runs. Of mappings, each value is that of both runs, None where one lacks it."""

    before: Run
    after: Run
    turned: Mapping[tuple[str | None, str | None], list[str]]
    taps: tuple[TapChange, ...]
    ran_again: tuple[str, ...]
    other_outputs: tuple[str, ...]
    versions: Mapping[str, tuple[str | None, str | None]]
    settings: Mapping[str, tuple[Any, Any]]

    def lines(self) -> Iterator[str]:
        """Yields the difference as lines for a terminal."""
        for run in (self.before, self.after):
            yield f"{run.name}: {run.verdicts['overall']}. {run.verdicts['headline']}"
        for (was, now), stages in self.turned.items():
            yield f"{ranges(stages)}: {was or 'not compared'} to {now or 'not compared'}"
        for change in self.taps[:LISTED]:
            yield f"  {change.text()}"
        if len(self.taps) > LISTED:
            yield f"  and {len(self.taps) - LISTED} more taps"
        if not self.turned and not self.taps:
            yield "No verdict turned, and no error grew or shrank."
        yield from _pairs("settings", self.settings)
        yield from _pairs("versions", self.versions)
        ran = f"{len(self.ran_again)} of {len(self.after.records)} jobs ran between the two"
        yield f"{ran}, {len(self.other_outputs)} of them with another output"

    def page(self) -> str:
        """The difference as a page of its own."""
        return layout.load(DIFF_TEMPLATE).render(difference=self, ranges=ranges, times=times)


def _pairs(title: str, values: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, (was, now) in values.items():
        yield f"{title}: {name} {'–' if was is None else was} to {'–' if now is None else now}"


def difference(before: Run, after: Run) -> Difference:
    """Compares two runs stage by stage and tap by tap."""
    stages = list(dict.fromkeys([*before.verdicts["stages"], *after.verdicts["stages"]]))
    sides = before.verdicts["stages"], after.verdicts["stages"]
    turned: dict[tuple[str | None, str | None], list[str]] = {}
    for stage in stages:
        was, now = (side[stage]["status"] if stage in side else None for side in sides)
        if was != now:
            turned.setdefault((was, now), []).append(stage)
    both = [name for name in after.records if name in before.records]
    again = [name for name in after.records if _started(before, name) != _started(after, name)]
    return Difference(
        before=before,
        after=after,
        turned=turned,
        taps=tuple(sorted(_taps(sides), key=lambda change: -max(change.factor, 1 / change.factor))),
        ran_again=tuple(again),
        other_outputs=tuple(name for name in both if name in again and _outputs(before, name) != _outputs(after, name)),
        versions=_changed(_packages(before), _packages(after)),
        settings=_changed(_settings(before), _settings(after)),
    )


def _taps(sides: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Iterator[TapChange]:
    for stage in sides[0]:
        if stage not in sides[1]:
            continue
        before, after = (side[stage]["isolated"]["taps"] for side in sides)
        for tap in before:
            if tap in after:
                one, other = before[tap], after[tap]
                change = TapChange(stage, tap, (one["status"], other["status"]), (one["excess"], other["excess"]))
                if one["status"] != other["status"] or max(change.factor, 1 / change.factor) > GREW:
                    yield change


def _started(run: Run, name: str) -> str | None:
    return run.records[name].run.get("started") if name in run.records else None


def _outputs(run: Run, name: str) -> dict[str, str]:
    return {path: output["sha256"] for path, output in run.records[name].outputs.items()}


def _packages(run: Run) -> dict[str, str]:
    """The versions that the jobs of a run had; several joined, where they differ."""
    found: dict[str, set[str]] = {}
    for record in run.records.values():
        for name, version in record.run.get("packages", {}).items():
            found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def _settings(run: Run) -> dict[str, Any]:
    """The settings of a run by dotted key."""
    record = run.records.get("report")
    return dict(_flat(record.job.settings)) if record else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


# Where runs come from


def read(name: str) -> Run:
    """A run by the name that people give it: a folder such as `results`, an archive, or a git revision that holds
    `results/`.

    Raises:
        UserError: if there is no run of that name, or it is of another version.
    """
    path = Path(name)
    if path.is_dir():
        files = [str(one.relative_to(path)) for one in path.rglob("*.json")]
        return _run(name, lambda file: (path / file).read_bytes(), files)
    if path.is_file():
        try:
            with zipfile.ZipFile(path) as archive:
                files = [one.removeprefix("results/") for one in archive.namelist() if one.startswith("results/")]
                return _run(name, lambda file: archive.read(f"results/{file}"), files)
        except zipfile.BadZipFile as error:
            raise UserError(f"{name}: is not an archive of a run ({error}).") from None
    listed = _git("ls-tree", "-r", "--name-only", name, "--", "results/")
    if listed is None:
        raise UserError(f"{name}: is neither a folder of results, nor an archive, nor a git revision here.")
    files = [one.removeprefix("results/") for one in listed.decode().splitlines()]
    return _run(name, lambda file: _git("show", f"{name}:results/{file}") or b"", files)


def _git(*arguments: str) -> bytes | None:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _run(name: str, content: Callable[[str], bytes], files: list[str]) -> Run:
    if VERDICTS not in files:
        raise UserError(f"{name}: holds no {VERDICTS}. Run layerproof run there, or name results/archive/RUN.zip.")
    try:
        verdicts = json.loads(content(VERDICTS))
        if verdicts["schema_version"] != SCHEMA_VERSION or verdicts["overall"] not in gate.EXIT:
            raise ValueError(f"schema {verdicts['schema_version']}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{name}: its {VERDICTS} is not of schema {SCHEMA_VERSION} ({error}).") from None
    found = {
        file.removeprefix(RECORDS).removesuffix(".json"): _record(content(file))
        for file in sorted(files)
        if file.startswith(RECORDS) and file.endswith(".json")
    }
    return Run(name, verdicts, {job: record for job, record in found.items() if record is not None})


def _record(content: bytes) -> Record | None:
    try:
        return Record.parse(json.loads(content))
    except ValueError:
        return None
