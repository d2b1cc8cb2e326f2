"""Records which Python functions a job runs."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import machinery, util
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = Path.cwd()
"""The working directory at the start, before a port or code from a checkpoint may change it."""
RECORDER = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("recorder", "source", "fingerprint", "jobs"))
"""Files that run around every job without changing any."""
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
LIBRARY = f"{Path(__file__).resolve().parents[1]}/"
"""Layerproof's own code, which counts wherever it is installed."""
DISTRIBUTED = f"{LIBRARY}distributed/"
CHANGES_RANKS = tuple(f"{DISTRIBUTED}{name}.py" for name in ("process_group", "mesh", "axes"))
"""What ranks compute by. The rest of the package watches them, on a thread that runs what it finds time for."""
FAULTS, SHIPPED_PORTS = f"{LIBRARY}diagnose/faults/", f"{LIBRARY}_workflow/"
"""Parts of the library whose import is recorded, because it registers faults or belongs to a port."""

IMPORTER = "<frozen importlib._bootstrap>"
"""The code that runs the body of an imported module, but not of a module that runs as a program."""

STARTED = time.time()
TOOL = 4
"""The number of a monitoring tool that debuggers, coverage and profilers do not use."""

Seen = dict[int, tuple[CodeType, float | None]]
"""Code that ran, by its identity, with the modification time of its file when the code was loaded."""


@contextlib.contextmanager
def recording(seen: Seen) -> Iterator[None]:
    """Adds to `seen` the code of every Python function of our own that runs inside the block, on any thread.

    Imports of installed packages and of the library's own modules are not recorded. The body of a class runs once in a
    process, so it would count only for the first job; instead it counts through the names that use it. The import of a
    port is recorded, and so is that of the fault dictionary, which registers faults that no other code names.
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
            sys.monitoring.restart_events()  # the outer recording missed what the inner one saw first
        else:
            sys.monitoring.set_events(TOOL, events.NO_EVENTS)
            sys.monitoring.free_tool_id(TOOL)


def _on_start(code: CodeType, offset: int) -> Any:
    """Runs only at the first start of each function, so it costs almost nothing."""
    if _recordings and is_own(code.co_filename):
        if _is_importing():
            return None  # runs again when the function starts for a job
        _add(code)
    return sys.monitoring.DISABLE


def _is_importing() -> bool:
    """Whether this thread imports an installed or library module: it runs the body, or what that calls."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_code.co_filename != IMPORTER:
        return False
    return _is_import(frame.f_code.co_filename)


@functools.cache
def _is_import(filename: str) -> bool:
    if filename.startswith(LIBRARY):
        return not filename.startswith((FAULTS, SHIPPED_PORTS))
    return _is_installed(filename)


def _add(code: CodeType) -> None:
    seen, file = _recordings[-1], code.co_filename
    if id(code) not in seen:
        if file not in loaded_files:
            loaded_files[file] = modified_time(file)
        seen[id(code)] = code, loaded_files[file]


_recordings: list[Seen] = []
"""The active recordings, the innermost last."""

loaded_files: dict[str, float | None] = {}
"""The modification time of each file of our own when its code was loaded."""


@functools.cache
def _watch_loading() -> None:
    """Keeps `loaded_files` from now on, and has modules that are neither installed nor the library's loaded `FromSource`.

    If the time of a file were looked up later, an edit while a job runs would look like one before the job.
    """
    loaded_files.update(sources())
    sys.addaudithook(_on_audit)
    sys.path_hooks.insert(0, _find_from_source)
    sys.path_importer_cache.clear()


class FromSource(machinery.SourceFileLoader):
    """Loads a file as it is. Python runs what it compiled before if the file's size and the second of its time are as they
    were, so of two edits in a second it may run the first where the second is recorded. What was compiled in that very
    second counts for nothing here.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        compiled, written = modified_time(util.cache_from_source(path)), modified_time(path)
        if compiled is not None and written is not None and compiled < int(written) + 1:
            return self.source_to_code(self.get_data(path), path)
        return super().get_code(fullname)


def _find_from_source(directory: str) -> machinery.FileFinder:
    if not os.path.isdir(directory) or f"{directory}/".startswith(LIBRARY) or _is_installed(f"{directory}/"):
        raise ImportError  # which leaves the path to Python's own finders
    return machinery.FileFinder(
        directory,
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (FromSource, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    )


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and is_own(file := arguments[0].co_filename):
        loaded_files[file] = modified_time(file)


def cached[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` that also keeps the code that ran for a value.

    Every job that gets the value counts as having run this code. For values that the jobs of a process share.
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
    """The files of our own that are loaded as modules, with their modification times, as far as they exist."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {name: modified_time(name) for name in names if name and (is_own(name) or _is_around(name))}
    return {name: time for name, time in files.items() if time is not None and not is_generated(Path(name), time)}


def are_unchanged(files: Mapping[str, float]) -> bool:
    """Whether the files that `sources` returned still have the same modification times."""
    return all(modified_time(name) == time for name, time in files.items())


def modified_time(filename: str) -> float | None:
    try:
        return os.stat(filename).st_mtime
    except OSError:
        return None


def lasting(seen: Seen) -> Seen:
    """The recorded code without the code in files that this process wrote.

    Only this process can recognise these files.
    """
    return {
        key: (code, modified)
        for key, (code, modified) in seen.items()
        if modified is None or not is_generated(Path(code.co_filename), modified)
    }


def is_generated(path: Path, modified: float) -> bool:
    """Whether this process wrote a file, as torch does.

    Such a file is newer than the start of the process, and not where the user works.
    """
    return modified >= STARTED and not (path.is_relative_to(Path.cwd()) or str(path).startswith(LIBRARY))


@functools.cache
def is_own(filename: str) -> bool:
    """Whether a file is Python source that no package manager installed.

    A template that Jinja compiled, for example, is not, and files that run around jobs do not count. A name without a folder
    is not a file: torch.ops has one.
    """
    is_source = filename.endswith(".py") and os.path.isabs(filename)
    return is_source and not _is_installed(filename) and not _is_around(filename)


def _is_around(filename: str) -> bool:
    """Whether a file runs around jobs without changing any."""
    return filename in RECORDER or (filename.startswith(DISTRIBUTED) and filename not in CHANGES_RANKS)


def _is_installed(filename: str) -> bool:
    return not filename.startswith(LIBRARY) and (filename.startswith(INSTALLED) or "site-packages" in filename)
