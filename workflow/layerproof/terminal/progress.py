"""The progress of a run, made of Snakemake's log records: one line a stage, and on a terminal a live view of its jobs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layerproof.files import read_json
from layerproof.model.stages import all_stages, ranges
from layerproof.report.words import counted, with_period
from layerproof.shapes import Verdicts
from layerproof.terminal import summary
from layerproof.wording import times

NOT_SHOWN = ("--keep-incomplete mode is set", "Cannot restore ", "Exiting because a job execution failed")
"""How messages of Snakemake begin that tell a user nothing: what failed is said before and after them."""
LOG_END = 4096
"""Bytes at the end of a job's log to search for its last line."""
PHASES = {
    "weights": "weights",
    "tokens": "tokens",
    "golden": "golden",
    "port": "port",
    "chain": "chain",
    "compare": "comparison",
    "forced": "teacher-forced run",
    "diagnosis": "diagnosis",
    "plots": "plots",
    "preflight": "check of the host",
}
"""What a folder of results/ is made by."""


@dataclass(frozen=True)
class Plan:
    """What a run was asked for, and what its sides run on. Snakemake knows both only after it has read the rules."""

    targets: Callable[[], Sequence[str]]
    stages: tuple[str, ...]
    sides: Callable[[], Mapping[str, str]]

    def asked(self) -> list[str]:
        """The stages that this run compares: those of the files that it was asked for, or all."""
        named = [Path(target).stem for target in self.targets()]
        return (
            [one for one in self.stages if one in named] if named and set(named) <= set(self.stages) else [*self.stages]
        )

    def opening(self) -> str:
        stages = self.asked()
        return f"{counted(len(stages), 'stage')} ({ranges(stages)})"


@dataclass
class RunningJob:
    """A job that has started, with the files that it makes."""

    rule: str
    outputs: tuple[str, ...]
    logs: tuple[str, ...]
    started: float

    @property
    def phase(self) -> str:
        folder = next((Path(path).parts[1] for path in self.outputs if Path(path).parts[:1] == ("results",)), "")
        name = Path(folder).stem
        return PHASES.get(name, name or self.rule)

    @property
    def stages(self) -> list[str]:
        return [name for name in dict.fromkeys(Path(path).stem for path in self.outputs) if is_stage(name)]

    def says(self) -> str:
        """The last line of the newest of its logs, without its time."""
        newest = self.newest_log()
        return last_line(newest) if newest else ""

    def newest_log(self) -> Path | None:
        """The log that was written last, of those that are there."""
        paths = [path for path in map(Path, self.logs) if path.exists()]
        return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)

    def title(self) -> str:
        stages = self.stages
        if len(stages) > 1:
            return f"{self.phase}: {len(stages)} stages, {stages[0]} to {stages[-1]}"
        return f"{self.phase}: {stages[0]}" if stages else self.phase


def is_stage(name: str) -> bool:
    return name in all_stages(0) or bool(re.fullmatch(r"layer_\d+", name))


def last_line(path: Path) -> str:
    """The last line of a log; of a progress bar that redraws itself its last state."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_END))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return re.sub(r"^\d{4}-\d\d-\d\d [\d:]{8} (\S+: )?", "", lines[-1]) if lines else ""


@dataclass
class Progress:
    """How far a run is: what Snakemake reports goes in, lines for the terminal come out."""

    plan: Plan
    before: Verdicts | None = field(default_factory=summary.verdicts_at_hand)
    total: int = 0
    done: int = 0
    per_rule: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    running: dict[int, RunningJob] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    phases: set[str] = field(default_factory=set)
    failed: dict[int, RunningJob] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    has_nothing_to_do: bool = False
    was_stopped: bool = False

    def plan_jobs(self, stats: Mapping[str, int]) -> Iterator[str]:
        """Yields what runs, given how many jobs of each rule do."""
        self.per_rule = Counter({rule: count for rule, count in stats.items() if rule != "total"})
        self.total = sum(self.per_rule.values())
        where = ", ".join(f"{side} on {device}" for side, device in self.plan.sides().items())
        yield f"Layerproof: {counted(self.total, 'job')} for {self.plan.opening()}, {where}"

    def start(self, number: int, job: RunningJob) -> Iterator[str]:
        """Yields a line if this is the first job of its kind."""
        self.running[number] = job
        if job.phase not in self.phases:
            self.phases.add(job.phase)
            yield self._timed(f"{job.title()} ...")

    def finish(self, number: int) -> Iterator[str]:
        """Yields a line for each stage that was compared, and for each warning of a check of the hosts."""
        job = self.running.pop(number, None)
        if job is None:
            return
        self.done += 1
        self.failed.pop(number, None)  # it was tried again
        self.seconds.setdefault(job.rule, []).append(time.monotonic() - job.started)
        for path in job.outputs:
            if Path(path).parent == summary.RESULTS / "compare" and Path(path).stem not in self.judged:
                self.judged.add(Path(path).stem)
                yield self._timed(f"{stage_line(Path(path))}{self.left()}")
            if Path(path).parent == summary.RESULTS / "preflight":
                texts = [text for text in _warnings(Path(path)) if text not in self.warned]  # both sides may find it
                self.warned.update(texts)
                yield from (self._timed(f"warning: {text}") for text in texts)

    def fail(self, number: int, job: RunningJob) -> Iterator[str]:
        """Yields why a job failed, by its log."""
        self.running.pop(number, None)
        if number not in self.failed:
            self.failed[number] = job
        says = with_period(job.says() or "it left no log")
        if not self.was_stopped:  # a job's own error is above, and in the last words
            yield self._timed(f"{job.title()} failed{'' if says.startswith('error: ') else f': {says}'}")

    def stop(self, exception: str, message: str) -> Iterator[str]:
        """Yields an error of Snakemake's own, in one line where it is one that people make."""
        if exception == "MissingRuleException":
            named = re.search(r"No rule to produce (\S+)", message)
            wanted = named[1] if named else ", ".join(self.plan.targets())
            self.problems.append(
                f"error: {wanted}: no rule makes this file. The stages of this run are {ranges(list(self.plan.stages))} "
                "(layers in config.yaml). Ask for results/report.html, results/compare/STAGE.json or "
                "results/diagnosis/STAGE.json."
            )
        elif exception == "LockException":
            self.problems.append(
                "error: another run works in this folder, or one that was killed left its lock. If none runs: "
                "layerproof run, or snakemake --unlock."
            )
        elif "did not complete successfully" not in message:
            self.problems.append(message)
        return iter(())

    def warn(self, message: str) -> Iterator[str]:
        self.note(message)
        if not self.was_stopped and not message.startswith(NOT_SHOWN):
            yield message

    def note(self, message: str) -> None:
        self.has_nothing_to_do |= message.startswith("Nothing to be done")
        self.was_stopped |= message.startswith(("Terminating processes on user request", "Will exit after finishing"))

    @property
    def is_finished(self) -> bool:
        """Whether all that was asked for is there."""
        return self.has_nothing_to_do or (0 < self.total == self.done)

    def conclude(self) -> Iterator[str]:
        """Yields the last words of the run."""
        if self.is_finished:
            if self.has_nothing_to_do:
                yield "Everything is up to date."
            yield from summary.answer(self.plan.targets(), None if self.has_nothing_to_do else self.before).lines
        elif self.total and not (self.problems and not self.done and not self.failed):
            yield from self._unfinished()
        else:
            yield from self.problems

    def _unfinished(self) -> Iterator[str]:
        failed = [] if self.was_stopped else list(self.failed.values())
        why = f"did not finish, {counted(len(failed), 'job')} failed" if failed else "was stopped"
        yield f"NO VERDICT: the run {why} ({self.done} of {counted(self.total, 'job')} done)."
        for job in failed:
            yield f"  {job.title()}: {with_period(job.says() or 'it left no log')} Log: {job.newest_log() or job.logs[0]}"
        if not failed and not self.was_stopped:
            yield from self.problems
        if summary.SET_ASIDE.exists():
            yield f"The report of the run before is {summary.SET_ASIDE / summary.REPORT.name}."
        yield f"Next: {'correct that, then ' if failed else ''}layerproof run, which goes on where this run ended"

    def left(self) -> str:
        """How many stages are left to compare, and about how long the run takes yet."""
        left = len(set(self.plan.asked()) - self.judged)
        seconds = self.estimate()
        parts = [f"{counted(left, 'stage')} left"] if left else []
        parts += [f"about {duration(seconds)}"] if seconds is not None and left else []
        return f"  ({', '.join(parts)})" if parts else ""

    def estimate(self) -> float | None:
        """Seconds that the jobs that are left take, if they take as long as those of their rule did and as many run side
        by side; None before any job ended.
        """
        spent = [one for times in self.seconds.values() for one in times]
        if not spent:
            return None
        mean = sum(spent) / len(spent)
        waiting = self.per_rule - Counter({rule: len(times) for rule, times in self.seconds.items()})
        of_rule = {rule: sum(times) / len(times) for rule, times in self.seconds.items()}
        now = time.monotonic()
        left = sum(of_rule.get(rule, mean) * count for rule, count in waiting.items())
        left -= sum(min(now - job.started, of_rule.get(job.rule, mean)) for job in self.running.values())
        side_by_side = max(1.0, sum(spent) / max(now - self.started, 1e-9))
        return max(left, 0.0) / side_by_side

    def still(self) -> str:
        """What is running now, for a terminal without a live view."""
        running = list(self.running.values())  # some may end meanwhile
        jobs = "; ".join(f"{job.title()}{f' ({says})' if (says := job.says()) else ''}" for job in running)
        return self._timed(f"{self.done} of {self.total} jobs done; {jobs}")

    def _timed(self, text: str) -> str:
        return f"{duration(time.monotonic() - self.started):>7}  {text}"


def _warnings(path: Path) -> Iterator[str]:
    """The warnings of a check of a host, with their remedies."""
    try:
        checks = read_json(path)["checks"]
    except (OSError, ValueError, KeyError):
        return
    for check in checks:
        if check["status"] == "warn":
            yield " ".join(filter(None, [with_period(f"{check['name']}: {check['text']}"), check["remedy"]]))


def stage_line(path: Path) -> str:
    """The verdict on a stage by its comparison: `layer_003  fail  router.scores 147 times too far off`."""
    try:
        comparison = read_json(path)
        status, taps = comparison["status"], comparison["taps"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path.stem:<9}  compared"
    name = next((name for name, tap in taps.items() if tap["status"] == "fail"), None)
    if status == "pass":
        missing = sum(tap["status"] == "missing" for tap in taps.values())
        what = counted(len(taps) - missing, "tap") + (f" ({missing} missing)" if missing else "")
        what += summary.how_near(comparison)
    elif name is None:
        what = comparison["reason"].removeprefix(f"{path.stem}: ")
    else:
        excess = taps[name]["excess"]
        what = f"{name} {f'{times(excess)} too far off' if excess and excess > 1 else taps[name]['reason']}"
    return f"{path.stem:<9}  {status:<7}  {what}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min` or `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
