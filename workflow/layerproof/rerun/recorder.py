"""Records which Python functions a job runs."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDER = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("recorder", "source", "fingerprint"))
"""Files that run around every job and change none."""
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
LIBRARY = f"{Path(__file__).resolve().parents[1]}/"
FAULTS = f"{LIBRARY}diagnose/faults/"

IMPORTER = "<frozen importlib._bootstrap>"
"""What runs the body of a module that is imported, not of one that is run as a program."""

STARTED = time.time()
TOOL = 4
"""The number of a monitoring tool that debuggers, coverage and profilers leave alone."""

Seen = dict[int, tuple[CodeType, float | None]]
"""Code that ran, by its identity, with the modification time that its file had when it was loaded."""


@contextlib.contextmanager
def recording(seen: Seen) -> Iterator[None]:
    """Adds the code of every Python function of our own that runs inside the block, on any thread, to `seen`.

    Imports of installed packages and of the library's own modules are not recorded. The body of a class runs once in a
    process, so it would count for the job that came first; it counts by the names that use it instead. A port's import is
    recorded, and that of the dictionary of faults, which registers faults that no other code names.
    """
    _watch_loading()
    _recordings.append(seen)
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
        _recordings.pop()
        if _recordings:
            sys.monitoring.restart_events()  # the outer one did not see what the inner one saw first
        else:
            sys.monitoring.set_events(TOOL, events.NO_EVENTS)
            sys.monitoring.free_tool_id(TOOL)


def _on_start(code: CodeType, offset: int) -> Any:
    """Called at the first start of each function only, so it costs next to nothing."""
    if _recordings and is_own(code.co_filename):
        if _is_importing():
            return None  # called again when the function starts for a job
        _add(code)
    return sys.monitoring.DISABLE


def _is_importing() -> bool:
    """Whether this thread imports a module that is installed or of the library: it runs its body, or what that calls."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_code.co_filename != IMPORTER:
        return False
    return _is_import(frame.f_code.co_filename)


@functools.cache
def _is_import(filename: str) -> bool:
    return _is_installed(filename) or (filename.startswith(LIBRARY) and not filename.startswith(FAULTS))


def _add(code: CodeType) -> None:
    seen, file = _recordings[-1], code.co_filename
    if id(code) not in seen:
        if file not in loaded_files:
            loaded_files[file] = modified_time(file)
        seen[id(code)] = code, loaded_files[file]


_recordings: list[Seen] = []
"""What is being recorded, the innermost last."""

loaded_files: dict[str, float | None] = {}
"""When each file of our own was written, as it was when its code was loaded."""


@functools.cache
def _watch_loading() -> None:
    """Keeps `loaded_files` from now on: looked up later, an edit while a job runs would look like one before it."""
    loaded_files.update(sources())
    sys.addaudithook(_on_audit)


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and is_own(file := arguments[0].co_filename):
        loaded_files[file] = modified_time(file)


def cached[**P, T](function: Callable[P, T]) -> Callable[P, T]:
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
    is_source = filename.endswith(".py") and os.path.isabs(filename)
    return is_source and not _is_installed(filename) and filename not in RECORDER


def _is_installed(filename: str) -> bool:
    return filename.startswith(INSTALLED) or "site-packages" in filename
