"""Snakemake's logger plugin `layerproof`: prints a run's progress in one line a stage, and at its end the verdict.

`profiles/default` names it. With -p, --verbose, --debug-dag or in a dry run Snakemake prints as it always does, and only
the last words come from here. `.snakemake/log` has all that Snakemake says in any case.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from logging import LogRecord
from typing import TYPE_CHECKING, Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from layerproof.terminal.live import Live
    from layerproof.terminal.progress import Plan, Progress, RunningJob

QUIET_S = 30.0
"""Without a live view a line says what runs whenever nothing was printed for so many seconds."""


class LogHandler(LogHandlerBase):
    """Prints what Layerproof says of a run.

    A Snakemake that runs single jobs on a cluster has no plan: it prints as it always does, and no verdict.
    """

    def __post_init__(self) -> None:
        from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter
        from snakemake.settings.enums import Quietness

        given = self.common_settings
        self.snakemakes = ColorizingTextHandler(given.nocolor, sys.stdout if given.stdout else sys.stderr)
        self.snakemakes.addFilter(
            DefaultFilter(given.quiet, given.debug_dag, given.verbose, given.dryrun, given.printshellcmds)
        )
        self.snakemakes.setFormatter(DefaultFormatter(given.quiet, given.show_failed_logs))
        self.is_snakemakes = bool(given.printshellcmds or given.verbose or given.debug_dag or given.dryrun)
        self.is_silent = Quietness.ALL in (given.quiet or ())
        self.progress: Progress | None = None
        self.waiting: list[LogRecord] = []
        self.live: Live | None = None
        self.printed_at = time.monotonic()
        self.ended = threading.Event()

    writes_to_stream = property(lambda self: True)
    writes_to_file = property(lambda self: False)
    has_filter = property(lambda self: True)
    has_formatter = property(lambda self: True)
    needs_rulegraph = property(lambda self: False)

    def emit(self, record: LogRecord) -> None:
        try:
            self._take(record)
        except Exception:
            self.handleError(record)

    def _take(self, record: LogRecord) -> None:
        event = getattr(record, "event", None)
        plan = getattr(record, "layerproof_plan", None)
        if plan and not self.progress:
            self._begin(plan)
        if not self.progress and not self.is_snakemakes and event != LogEvent.WORKFLOW_STARTED:
            self.waiting.append(record)  # until it is known whether this is the Snakemake of a user
            return
        earlier, self.waiting = self.waiting, []
        for one in [*earlier, record]:
            if self.is_snakemakes or not self.progress:
                self.snakemakes.handle(one)
            if self.progress:
                self._print(self._lines(one, self.progress))

    def _begin(self, plan: Plan) -> None:
        from layerproof.terminal.progress import Progress

        self.progress = Progress(plan)
        if self.is_snakemakes or self.common_settings.quiet:
            return
        if sys.stderr.isatty():
            from layerproof.terminal.live import Live

            self.live = Live(self.progress)
        else:
            threading.Thread(target=self._say_that_it_runs, daemon=True).start()

    def _lines(self, record: LogRecord, progress: Progress) -> Iterable[str]:
        """What to print for a record besides what Snakemake prints of it."""
        event, given = getattr(record, "event", None), record.__dict__
        if event == LogEvent.RUN_INFO:
            return progress.plan_jobs(given["stats"])
        if event == LogEvent.JOB_INFO:
            return progress.start(given["jobid"], _job(given))
        if event == LogEvent.JOB_FINISHED:
            return progress.finish(given["job_id"])
        if event == LogEvent.JOB_ERROR:
            return progress.fail(given["jobid"], _job(given))
        if event == LogEvent.ERROR:
            return progress.stop(given["exception"], record.getMessage())
        if event is None and record.levelno >= logging.WARNING:
            return progress.warn(record.getMessage())
        if event is None:
            progress.note(record.getMessage())
        return ()

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.printed_at = time.monotonic()
            if self.is_snakemakes or self.common_settings.quiet:
                continue
            if self.live:
                self.live.print(line)
            else:
                print(line, file=sys.stderr, flush=True)

    def _say_that_it_runs(self) -> None:
        while not self.ended.wait(1.0):
            progress = self.progress
            if progress and progress.running and time.monotonic() - self.printed_at > QUIET_S:
                self._print([progress.still()])

    def close(self) -> None:
        """Prints the last words of the run."""
        if not self.ended.is_set():
            self.ended.set()
            if self.live:
                self.live.stop()
            for record in self.waiting:
                self.snakemakes.handle(record)
            if self.progress and not self.common_settings.dryrun and not self.is_silent:
                lines = list(self.progress.conclude())
                print(
                    *lines,
                    sep="\n",
                    end="\n" * bool(lines),
                    file=sys.stdout if self.progress.is_finished else sys.stderr,
                )
                sys.stdout.flush()
        super().close()


def _job(given: Mapping[str, Any]) -> RunningJob:
    from layerproof.terminal.progress import RunningJob

    outputs, logs = (tuple(path.partition(" (")[0] for path in given[key]) for key in ("output", "log"))
    return RunningJob(given["rule_name"], outputs, logs, time.monotonic())
