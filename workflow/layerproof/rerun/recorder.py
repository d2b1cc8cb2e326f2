"""Records which Python functions a job runs."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDER = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("recorder", "source", "fingerprint"))
"""Files that run around every job and change none."""
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
STARTED = time.time()
T = TypeVar("T")
P = ParamSpec("P")

Seen = dict[int, tuple[CodeType, float | None]]
"""Code that ran, by its identity, with the modification time that its file had when it was loaded."""


@contextlib.contextmanager
def recording(seen: Seen) -> Iterator[None]:
    """Adds the code of every Python function that runs inside the block, on whatever thread, to `seen`.

    Before Python 3.12 a thread is seen that was started inside of a recording.
    """
    _watch_loading()
    _recordings.append(seen)
    try:
        with _called_back():
            yield
    finally:
        _recordings.pop()


if sys.version_info >= (3, 12):
    TOOL = 4
    """One of those that debuggers, coverage and profilers leave alone."""

    @contextlib.contextmanager
    def _called_back() -> Iterator[None]:
        """Has `_add` called at the first start of each function, which so costs next to nothing."""
        events = sys.monitoring.events
        if len(_recordings) == 1:
            sys.monitoring.use_tool_id(TOOL, "layerproof")
            for event in (events.PY_START, events.PY_RESUME):
                sys.monitoring.register_callback(TOOL, event, _on_start)
            sys.monitoring.set_events(TOOL, events.PY_START | events.PY_RESUME)
        sys.monitoring.restart_events()
        try:
            yield
        finally:
            if len(_recordings) > 1:
                sys.monitoring.restart_events()  # the outer one did not see what the inner one saw first
            else:
                sys.monitoring.set_events(TOOL, events.NO_EVENTS)
                sys.monitoring.free_tool_id(TOOL)

    def _on_start(code: CodeType, offset: int) -> Any:
        if _recordings and threading.get_ident() not in _unrecorded:
            _add(code)
        return sys.monitoring.DISABLE

    @contextlib.contextmanager
    def _not_called_back() -> Iterator[None]:
        """Has what runs for the first time on this thread count as not seen."""
        thread = threading.get_ident()
        outer = thread in _unrecorded
        _unrecorded.add(thread)
        try:
            yield
        finally:
            if not outer:
                _unrecorded.remove(thread)
            sys.monitoring.restart_events()

    _unrecorded: set[int] = set()
    """Threads that are not recorded just now."""

else:

    class _Profiler(cProfile.Profile):
        """What `sys.getprofile` gives to code that sets it again with `sys.setprofile`, which calls it."""

        def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
            _on_event(frame, event, argument)
            self.enable()

    @contextlib.contextmanager
    def _called_back() -> Iterator[None]:
        """Calls `_add` for what a profiler in C saw on this thread, and a profile function on those that are started: both
        leave tracing to debuggers and coverage, and the first costs a third.
        """
        profiler, outer_threads = _Profiler(subcalls=False, builtins=False), threading.getprofile()
        with _not_called_back():
            threading.setprofile(_on_event)
            profiler.enable()
            try:
                yield
            finally:
                profiler.disable()
                threading.setprofile(outer_threads)
                for entry in profiler.getstats():
                    if isinstance(entry.code, CodeType):
                        _add(entry.code)

    def _on_event(frame: FrameType, event: str, argument: Any) -> None:
        """Of a thread that outlives the recording in which it was started, too, for the one that there is then."""
        if event == "call" and _recordings:
            _add(frame.f_code)

    @contextlib.contextmanager
    def _not_called_back() -> Iterator[None]:
        """Takes the profiler or profile function away from this thread."""
        outer = sys.getprofile()
        if isinstance(outer, cProfile.Profile):
            outer.disable()  # only so it counts the functions that have not returned yet
        sys.setprofile(None)
        try:
            yield
        finally:
            if isinstance(outer, cProfile.Profile):
                outer.enable()
            else:
                sys.setprofile(outer)


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """For imports of packages and of what is ours, which counts by the names that use it: the body of a class runs once in
    a process, and would count for the job that came first. And for calls of packages that call nothing of ours: before
    Python 3.12 recording takes its time for each function that they call.
    """
    return _not_called_back()


def _add(code: CodeType) -> None:
    seen, file = _recordings[-1], code.co_filename
    if id(code) not in seen and is_own(file):
        if file not in loaded_files:
            loaded_files[file] = modified_time(file)
        seen[id(code)] = code, loaded_files[file]


_recordings: list[Seen] = []
"""What is being recorded, the innermost last."""

loaded_files: dict[str, float | None] = {}
"""When each file of our own was written, as it was when its code was loaded."""


@functools.cache
def _watch_loading() -> None:
    """Keeps `_loaded` from now on: an edit while a job runs would not be told from one before, were it looked up later."""
    loaded_files.update(sources())
    sys.addaudithook(_on_audit)


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and is_own(file := arguments[0].co_filename):
        loaded_files[file] = modified_time(file)


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` that keeps the code, too, that ran for a value: it counts as run by every job that is given the
    value. For what the jobs of a process share.
    """
    kept: dict[Any, T] = {}
    code: dict[Any, Seen] = {}

    @functools.wraps(function)
    def kept_or_new(*args: P.args, **kwargs: P.kwargs) -> T:
        key = args, frozenset(kwargs.items())
        seen = code.setdefault(key, {})
        try:
            if key not in kept:
                with recording(seen):
                    kept[key] = function(*args, **kwargs)
        finally:
            if _recordings:
                _recordings[-1].update(seen)
        return kept[key]

    return kept_or_new


def sources() -> dict[str, float]:
    """The files of our own that are loaded as modules, and when each was written, as far as they are there."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {name: modified_time(name) for name in names if name and (is_own(name) or name in RECORDER)}
    return {name: time for name, time in files.items() if time is not None and not is_generated(Path(name), time)}


def are_unchanged(files: Mapping[str, float]) -> bool:
    """Whether the files that `sources` gave are as they were then."""
    return all(modified_time(name) == time for name, time in files.items())


def modified_time(filename: str) -> float | None:
    try:
        return os.stat(filename).st_mtime
    except OSError:
        return None


def lasting(seen: Seen) -> Seen:
    """The recorded code without that of files which this process wrote, while it is known that it did."""
    return {
        key: (code, modified)
        for key, (code, modified) in seen.items()
        if modified is None or not is_generated(Path(code.co_filename), modified)
    }


def is_generated(path: Path, modified: float) -> bool:
    """Whether a file was written by this process, as torch does: later than it began, and not where the user works."""
    return modified >= STARTED and not (path.is_relative_to(Path.cwd()) or path.is_relative_to(REPOSITORY))


@functools.cache
def is_own(filename: str) -> bool:
    """Whether a file is Python source that no package manager installed; not a template, say, that Jinja compiled.

    Nor a file of the recorder. A name without a folder is no file: torch.ops has one.
    """
    installed = filename.startswith(INSTALLED) or "site-packages" in filename
    return filename.endswith(".py") and os.path.isabs(filename) and not installed and filename not in RECORDER
