"""Works off a list in processes that may die, and keeps one row for each item, so that a second call goes on."""

from __future__ import annotations

import json
import multiprocessing
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]

SECONDS = 600
ITEMS_PER_PROCESS = 15
"""Compiled graphs stay in memory."""
PROCESSES = 2


def read(path: Path) -> list[Row]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def work_off[Item](
    items: Sequence[Item],
    judge: Callable[[Item, Path], Row],
    ended: Callable[[Item, str, float], Row],
    line: Callable[[Row], str],
    output: Path,
) -> None:
    """Appends the row of each item to `output`, and prints its line.

    `judge` gets an item and an empty folder, in which the file `doing` says what it is about to do; `ended` makes the row
    of an item whose process died or took longer than `SECONDS`, or for which `judge` raised.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    left: queue.Queue[Item] = queue.Queue()
    for item in items:
        left.put(item)
    lock = threading.Lock()
    with output.open("a") as file:
        threads = [
            threading.Thread(target=_work, args=(left, judge, ended, line, file, lock)) for _ in range(PROCESSES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _work[Item](
    left: queue.Queue[Item],
    judge: Callable[[Item, Path], Row],
    ended: Callable[[Item, str, float], Row],
    line: Callable[[Row], str],
    file: TextIO,
    lock: threading.Lock,
) -> None:
    context = multiprocessing.get_context("spawn")
    pool = None
    while True:
        try:
            item = left.get_nowait()
        except queue.Empty:
            return
        pool = pool or ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=ITEMS_PER_PROCESS)
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = pool.submit(judge, item, Path(folder)).result(timeout=SECONDS)
            except (TimeoutError, BrokenProcessPool) as error:
                doing = Path(folder) / "doing"
                at = doing.read_text() if doing.exists() else "its checkpoint"
                why = f"takes more than {SECONDS} s" if isinstance(error, TimeoutError) else "ends the process"
                row = ended(item, f"{at} {why}", float(SECONDS))
                for process in pool._processes.values():
                    process.kill()
                pool.shutdown()
                pool = None
            except Exception as error:
                row = ended(item, f"{type(error).__name__}: {error}", 0.0)
        with lock:
            print(json.dumps(row), file=file, flush=True)
            print(line(row), flush=True)
