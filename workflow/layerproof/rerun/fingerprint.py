"""Fingerprints of the Python functions that a job ran, which comments, docstrings and formatting do not change.

A fingerprint covers everything in our own files that a function's behaviour depends on: its code, the module-level
names that it uses (constants, imports, class bodies, also of other modules of our own), and statements that run at
import. Installed packages are covered by their versions instead. Fingerprints are computed from the syntax tree alone,
so comparing them imports nothing.

An entry is `PATH::function`, `PATH::Class.method`, `PATH::=name` (a module-level binding) or `PATH::` (the statements
that run at import). PATH is `layerproof/…` for the library's own code, otherwise relative to the working directory, or
absolute outside it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from layerproof.rerun import recorder
from layerproof.rerun.recorder import FOLDER, LIBRARY, Seen, is_generated, is_own, loaded_files, modified_time
from layerproof.rerun.source import Import, Source, parse_file

OWN = f"{Path(LIBRARY).name}/"
"""How names of the library's own files begin in records."""

Entry = tuple[str, str]
"""A file by its absolute path, and the part of an entry after `::`."""


def fingerprints(seen: Seen) -> dict[str, str]:
    """Fingerprint by entry of the recorded functions in our own files and of all module-level code that they use.

    Code that was edited while the job ran gets a fingerprint that matches nothing, so the job runs again.
    """
    _forget_what_changed()
    entries: set[Entry] = set()
    edited: set[str] = set()
    for code, modified in seen.values():
        file = code.co_filename
        if not is_own(file) or modified is None or is_generated(Path(file), modified):
            continue
        if modified >= recorder.STARTED or modified_time(file) != modified:
            edited.add(_written(file, ""))
        else:
            entries.add((file, _entry_of(_parsed(file), code)))
    left = list(entries)
    while left:
        new = _used_by(*left.pop()) - entries
        entries |= new
        left += new
    used = {_relative(file) for file, _ in entries}
    for file, modified in loaded_files.items():  # also files of which only a constant was used
        if _relative(file) in used and modified_time(file) != modified:
            edited.add(_written(file, ""))
    known = {_written(file, local): _fingerprint(_parsed, file, local) for file, local in entries}
    return dict(sorted(known.items())) | dict.fromkeys(sorted(edited), "edited while the job ran")


def changed(recorded: Mapping[str, str]) -> list[str]:
    """Entries whose fingerprint differs from the recorded one."""
    parse = functools.cache(parse_file)  # a record names hundreds of entries in some twenty files
    return [entry for entry, fingerprint in recorded.items() if current(entry, parse) != fingerprint]


def current(entry: str, parse: Callable[[str], Source] = parse_file) -> str:
    """Fingerprint of an entry as its file is now; not a digest if the file or entry is gone or broken."""
    return _fingerprint(parse, *_located(entry))


@functools.cache
def _located(entry: str) -> Entry:
    name, _, local = entry.partition("::")
    return str(path_of(name)), local


def path_of(name: str) -> Path:
    """The file of a name in a record: in the library, below the working directory, or anywhere by an absolute path."""
    return Path(LIBRARY).parent / name if name.startswith(OWN) else FOLDER / name


def _fingerprint(parse: Callable[[str], Source], file: str, local: str) -> str:
    try:
        return parse(file).digests[local]
    except OSError:
        return "file is gone"
    except (SyntaxError, ValueError):
        return "file does not parse"
    except KeyError:
        return "gone"


@functools.cache
def _parsed(file: str) -> Source:
    """`parse_file` as of the start of a set of fingerprints, which looks at few files thousands of times."""
    return parse_file(file)


def _entry_of(source: Source, code: CodeType) -> str:
    """The entry of a code object: its outermost function, or else the module-level statement that contains it."""
    qualified = code.co_qualname.split(".<locals>")[0]
    if qualified in source.functions:
        return qualified
    for name, statements in source.lines.items():
        if any(first <= code.co_firstlineno <= last for first, last in statements):
            return f"={name}"
    return ""


def _forget_what_changed() -> None:
    """Clears the cache of `_used_by` if more was loaded or a file edited, and that of `_parsed` in any case."""
    _parsed.cache_clear()
    loaded = list(map(id, sys.modules.values()))
    if loaded != _loaded_modules or any(_state(file) != before for file, before in _looked_at.items()):
        _loaded_modules[:] = loaded
        _looked_at.clear()
        _modules.cache_clear()
        _used_by.cache_clear()


def _state(file: str) -> Any:
    """The state of a file that results of `_used_by` depend on, besides which modules are loaded."""
    return modified_time(file), [
        (name, id(value)) for name, value in _globals(file).items() if isinstance(value, ModuleType)
    ]


_looked_at: dict[str, Any] = {}
"""Files that `_used_by` looked at, with their state."""

_loaded_modules: list[int] = []
"""All modules that were loaded then, by identity."""


@functools.cache
def _used_by(file: str, local: str) -> set[Entry]:
    """The entries in our own files that an entry uses directly."""
    if file not in _looked_at:
        _looked_at[file] = _state(file)
    source = _parsed(file)
    entries = {(file, "")}
    owner = local.rpartition(".")[0]
    if owner in source.classes:
        entries.add((file, f"={owner}"))
    module = _modules().get(file)
    for parts in source.uses[local]:
        used = {name for part in parts for name in part.names}
        entries |= {(file, f"={name}") for name in used & source.lines.keys()}
        if module is not None:
            _add_starred(module, source, used - source.lines.keys(), entries)
        for part in parts:
            here = _globals(file)
            for statement in part.imports:
                if not statement.is_from:
                    here |= _imported_modules(statement)
                elif module is not None:
                    if local:
                        _add_imported(module, statement, local, entries)
                    target = _target(module, statement)
                    here |= {bound or name: getattr(target, name, None) for name, bound in statement.names}
            for chain in part.chains:
                _add_attribute(here, chain, entries)
    return entries


def _globals(file: str) -> dict[str, Any]:
    module = _modules().get(file)
    return dict(vars(module)) if module is not None else {}


def _add_starred(module: ModuleType, source: Source, names: set[str], entries: set[Entry]) -> None:
    """Adds names that a module does not bind itself but gets by `from ... import *`."""
    for statement in source.stars if names else []:
        target = _target(module, statement)
        file = getattr(target, "__file__", None)
        if target is None or not file or not is_own(file):
            continue
        starred = _parsed(file)
        entries |= {(file, f"={name}") for name in names & starred.lines.keys()}
        _add_starred(target, starred, names - starred.lines.keys(), entries)


def _imported_modules(statement: Import) -> dict[str, ModuleType | None]:
    """Module by the local name that `import a.b` (`a`) or `import a.b as c` (`c`) binds."""
    names = ((bound or name.split(".")[0], name, bound) for name, bound in statement.names)
    return {local: sys.modules.get(name if bound else local) for local, name, bound in names}


def _add_attribute(here: Mapping[str, Any], chain: tuple[str, ...], entries: set[Entry]) -> None:
    """Adds what `pkg.mod.NAME` refers to, if everything before the last name is a module."""
    target = here.get(chain[0])
    for name in chain[1:-1]:
        target = getattr(target, name, None) if isinstance(target, ModuleType) else None
    if isinstance(target, ModuleType):
        _add_binding(target, chain[-1], entries)


def _add_imported(module: ModuleType, statement: Import, local: str, entries: set[Entry]) -> None:
    """Adds what a statement imports: in a function all of it, otherwise what binds the entry's name."""
    target = _target(module, statement)
    for name, bound in statement.names:
        if target is not None and (local == f"={bound or name}" or not local.startswith("=")):
            _add_binding(target, name, entries)


def _target(module: ModuleType, statement: Import) -> ModuleType | None:
    """The module that a `from ... import` statement of a module reads."""
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    parents = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
    return sys.modules.get(".".join([*parents, *([statement.module] if statement.module else [])]))


def _add_binding(module: ModuleType, name: str, entries: set[Entry]) -> None:
    file = getattr(module, "__file__", None)
    if file and is_own(file) and name in _parsed(file).lines:
        entries.add((file, f"={name}"))


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """Modules by file; if several have the same file, the first."""
    return {name: module for module in [*sys.modules.values()][::-1] if (name := getattr(module, "__file__", None))}


def _written(file: str, local: str) -> str:
    """An entry as records write it."""
    return f"{_relative(file)}::{local}"


@functools.cache
def _relative(file: str) -> str:
    """A file as records name it, independent of where the library and the working directory are."""
    path = Path(file).resolve()
    if path.is_relative_to(LIBRARY):
        return str(path.relative_to(Path(LIBRARY).parent))
    name = str(path.relative_to(FOLDER)) if path.is_relative_to(FOLDER) else str(path)
    return str(path) if name.startswith(OWN) else name
