"""The live view of a run on a terminal: a bar, and a line for each job that runs, with the last line of its log."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from layerproof.terminal.progress import Progress, duration

SHOWN = 8
"""Of the jobs that run side by side, the view shows so many."""


class Live:
    """Shows how far a run is below the lines that it prints, until `stop`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.console = Console(stderr=True, highlight=False)
        self.view = RichLive(
            get_renderable=self._render,
            console=self.console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
        )
        self.view.start()

    def print(self, line: str) -> None:
        self.console.print(Text(line))

    def stop(self) -> None:
        self.view.stop()

    def _render(self) -> Group:
        progress = self.progress
        jobs = Table.grid(padding=(0, 1))
        running = list(progress.running.values())
        now = time.monotonic()
        for job in running[:SHOWN]:
            says = Text(job.says(), style="dim", no_wrap=True, overflow="ellipsis")
            jobs.add_row(f"{duration(now - job.started):>7}", job.title(), says)
        more = [Text(f"         and {len(running) - SHOWN} more")] if len(running) > SHOWN else []
        seconds = progress.estimate()
        left = f", about {duration(seconds)} left" if seconds is not None else ""
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(progress.total, 1), completed=progress.done, width=30),
            f"{progress.done} of {progress.total} jobs{left}",
        )
        return Group(jobs, *more, bar)
