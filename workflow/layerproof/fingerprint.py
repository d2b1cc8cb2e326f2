"""Which Python functions a job ran, and a fingerprint of each that comments, docstrings and formatting do not change.

A fingerprint covers what a function's behaviour depends on inside our own files: its code, the module-level names that
it uses (constants, imports, class bodies, also of other own modules), and statements that run at import. Installed
packages are covered by their versions, not here. Fingerprints are made from the syntax tree alone, so they can be
compared without importing anything.

An entry is `PATH::function`, `PATH::Class.method`, `PATH::=name` (a module-level binding) or `PATH::` (the statements that
run at import). PATH is relative to the repository, or absolute outside of it.
"""

from __future__ import annotations

import ast
import contextlib
import cProfile
import functools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, ParamSpec, TypeGuard, TypeVar

from layerproof.files import digest_of

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

STARTED = time.time()
STAR = "*"
"""What `from module import *` is bound as."""

T = TypeVar("T")
P = ParamSpec("P")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


Seen = dict[int, tuple[CodeType, float | None]]
"""Code that ran, by its identity, with the modification time that its file had when it was loaded."""
Entry = tuple[str, str]
"""A file by its absolute path, and what is after the `::` of an entry."""


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
    if id(code) not in seen and _is_own(file):
        if file not in _loaded:
            _loaded[file] = _modified(file)
        seen[id(code)] = code, _loaded[file]


_recordings: list[Seen] = []
"""What is being recorded, the innermost last."""

_loaded: dict[str, float | None] = {}
"""When each file of our own was written, as it was when its code was loaded."""


@functools.cache
def _watch_loading() -> None:
    """Keeps `_loaded` from now on: an edit while a job runs would not be told from one before, were it looked up later."""
    _loaded.update(sources())
    sys.addaudithook(_on_audit)


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and _is_own(file := arguments[0].co_filename):
        _loaded[file] = _modified(file)


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
    files = {name: _modified(name) for name in names if name and (_is_own(name) or name == __file__)}
    return {name: time for name, time in files.items() if time is not None and not _is_generated(Path(name), time)}


def are_unchanged(files: Mapping[str, float]) -> bool:
    """Whether the files that `sources` gave are as they were then."""
    return all(_modified(name) == time for name, time in files.items())


def _modified(filename: str) -> float | None:
    try:
        return os.stat(filename).st_mtime
    except OSError:
        return None


def fingerprints(seen: Seen) -> dict[str, str]:
    """Fingerprint by entry of the recorded functions in our own files and of all module-level code that they use.

    What was edited while the job ran gets a fingerprint that nothing has, so that the job runs again.
    """
    _forget_what_changed()
    entries: set[Entry] = set()
    edited: set[str] = set()
    for code, modified in seen.values():
        file = code.co_filename
        if not _is_own(file) or modified is None or _is_generated(Path(file), modified):
            continue
        if modified >= STARTED or _modified(file) != modified:
            edited.add(_written(file, ""))
        else:
            entries.add((file, _entry_of(_parsed(file), code)))
    left = list(entries)
    while left:
        new = _used_by(*left.pop()) - entries
        entries |= new
        left += new
    used = {_relative(file) for file, _ in entries}
    for file, modified in _loaded.items():  # also where no function ran, but a constant was used
        if _relative(file) in used and _modified(file) != modified:
            edited.add(_written(file, ""))
    known = {_written(file, local): _fingerprint(_parsed, file, local) for file, local in entries}
    return dict(sorted(known.items())) | dict.fromkeys(sorted(edited), "edited while the job ran")


def lasting(seen: Seen) -> Seen:
    """The recorded code without that of files which this process wrote, while it is known that it did."""
    return {
        key: (code, modified)
        for key, (code, modified) in seen.items()
        if modified is None or not _is_generated(Path(code.co_filename), modified)
    }


def _is_generated(path: Path, modified: float) -> bool:
    """Whether a file was written by this process, as torch does: later than it began, and not where the user works."""
    return modified >= STARTED and not (path.is_relative_to(Path.cwd()) or path.is_relative_to(REPOSITORY))


def changed(recorded: Mapping[str, str]) -> list[str]:
    """Entries whose fingerprint is not the recorded one any more."""
    return [entry for entry, fingerprint in recorded.items() if current(entry) != fingerprint]


def current(entry: str) -> str:
    """Fingerprint of an entry as its file is now; a text that is no digest if the file or entry is gone or broken."""
    name, _, local = entry.partition("::")
    return _fingerprint(_parse, str(REPOSITORY / name), local)


def _fingerprint(parse: Callable[[str], _Source], file: str, local: str) -> str:
    try:
        return parse(file).fingerprint(local)
    except OSError:
        return "file is gone"
    except (SyntaxError, ValueError):
        return "file does not parse"
    except KeyError:
        return "gone"


@dataclass(frozen=True)
class _Uses:
    """What one part of an entry names: plain names, dotted names as their parts, and imports."""

    names: set[str]
    chains: set[tuple[str, ...]]
    imports: list[ast.Import | ast.ImportFrom]

    @classmethod
    def of(cls, part: ast.AST) -> _Uses:
        imports = [node for node in ast.walk(part) if isinstance(node, ast.Import | ast.ImportFrom)]
        return cls(_names(part), _attributes(part), imports)


@dataclass(frozen=True)
class _Source:
    """One parsed file: functions by qualified name, statements by the module-level name that they bind, and the rest.

    `compiled` are names of what a function of an installed package decorates or is called with. It may compile functions
    (numba.njit, torch.jit.script), so that none of their code is ever seen to run: they count where they are named.
    """

    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    bare: list[ast.stmt] = field(default_factory=list)
    compiled: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    used: dict[str, list[list[_Uses]]] = field(default_factory=dict)

    def fingerprint(self, local: str) -> str:
        """Digest of an entry, made once: the records of many stages name the same functions.

        Raises:
            KeyError: if the file has no such entry.
        """
        if local not in self.digests:
            self.digests[local] = self._digest(local)
        return self.digests[local]

    def _digest(self, local: str) -> str:
        if local == "":
            return digest_of([_dump(statement) for statement in self.bare])
        if local.startswith("="):
            whole = local[1:] in self.compiled
            dumps = [
                _dump(statement) if whole and isinstance(statement, Function) else _binding(statement)
                for statement in self._bound(local[1:])
            ]
        else:
            dumps = [_dump(node) for node in self.functions[local]]
        parts = [part for node in self.nodes(local) for part in self._parts(node, local)]
        # The names that resolve in this module belong to the entry: a new one may shadow what it used before.
        return digest_of([dumps, sorted({name for part in parts for name in _names(part)} & self.bindings.keys())])

    def uses(self, local: str) -> list[list[_Uses]]:
        """Of each node of an entry what its parts use, found once: the jobs of a process share most of their functions."""
        if local not in self.used:
            self.used[local] = [[_Uses.of(part) for part in self._parts(node, local)] for node in self.nodes(local)]
        return self.used[local]

    def nodes(self, local: str) -> list[Any]:
        """What an entry consists of, to look for the names that it uses."""
        if local == "":
            return list(self.bare)
        return self._bound(local[1:]) if local.startswith("=") else self.functions[local]

    def _parts(self, node: Any, local: str) -> list[ast.AST]:
        """The parts of a node that count: of a class its header, of a function that is only bound its decorators."""
        if isinstance(node, ast.ClassDef):
            return _header(node)
        if local.startswith("=") and isinstance(node, Function) and local[1:] not in self.compiled:
            return list(node.decorator_list)
        return [node]

    def _bound(self, name: str) -> list[ast.stmt]:
        return [self.classes[name]] if name in self.classes else self.bindings[name]


def _parse(file: str) -> _Source:
    status = os.stat(file)
    return _parse_version(file, status.st_mtime_ns, status.st_size)


@functools.cache
def _parsed(file: str) -> _Source:
    """`_parse` as it was when a set of fingerprints was begun: it looks at few files thousands of times."""
    return _parse(file)


@functools.cache
def _parse_version(file: str, mtime_ns: int, size: int) -> _Source:
    source = _Source()
    for statement in ast.parse(Path(file).read_bytes()).body:
        if isinstance(statement, Definition):
            source.bindings.setdefault(statement.name, []).append(statement)
            _add_definition(source, statement, "")
            # A decorator of the module's own may keep what it is given, as a registry does, without anybody naming it.
            source.bare.extend(ast.Expr(one) for one in statement.decorator_list if _is_own_name(source, _root(one)))
            if any(_is_of_a_package(source, _root(one)) for one in statement.decorator_list):
                source.compiled.add(statement.name)
            continue
        called = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(called, ast.Call) and _is_of_a_package(source, _root(called)):
            source.compiled.update(_names(called))
        names = _bound_names(statement)
        for name in names:
            source.bindings.setdefault(name, []).append(statement)
        plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom)
        if not _is_text(statement) and not (plain and names):
            source.bare.append(statement)
    return source


def _is_own_name(source: _Source, name: str | None) -> bool:
    """Whether the module binds a name otherwise than by an import, so far as it was read."""
    bound = source.bindings.get(name or "", [])
    return any(not isinstance(statement, ast.Import | ast.ImportFrom) for statement in bound)


def _is_of_a_package(source: _Source, name: str | None, seen: frozenset[str | None] = frozenset()) -> bool:
    """Whether a module has a name from elsewhere than Python's own library: imported, or assigned from what is."""
    modules: list[str] = []
    for statement in [] if name in seen else source.bindings.get(name or "", []):
        for node in [] if isinstance(statement, Definition) else ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "." * node.level)
            elif isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and _is_of_a_package(source, _root(value), seen | {name}):
                return True
    return any(module.split(".")[0] not in sys.stdlib_module_names for module in modules)


def _root(node: ast.expr) -> str | None:
    """The name that an expression such as `a.b(c)` starts with."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _add_definition(source: _Source, node: Definition, prefix: str) -> None:
    name = prefix + node.name
    if not isinstance(node, ast.ClassDef):
        source.functions.setdefault(name, []).append(node)
        return
    source.classes[name] = node
    for statement in node.body:
        if isinstance(statement, Definition):
            _add_definition(source, statement, name + ".")


def _bound_names(statement: ast.stmt) -> list[str]:
    """Names that a statement binds, also inside `if`, `try` and the like at module level."""
    names: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.alias):
            names.append((node.asname or node.name).split(".")[0])
        elif isinstance(node, Definition):
            names.append(node.name)
    return list(dict.fromkeys(names))


@functools.cache
def _is_own(filename: str) -> bool:
    """Whether a file is Python source that no package manager installed; not a template, say, that Jinja compiled.

    Nor this file, which runs around every job and changes none. A name without a folder is no file: torch.ops has one.
    """
    installed = filename.startswith(INSTALLED) or "site-packages" in filename
    return filename.endswith(".py") and os.path.isabs(filename) and not installed and filename != __file__


def _entry_of(source: _Source, code: CodeType) -> str:
    """The entry that a code object belongs to: its outermost function, or else the module-level statement it is in."""
    qualified = code.co_qualname.split(".<locals>")[0]
    if qualified in source.functions:
        return qualified
    for name, statements in source.bindings.items():
        if any(node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno) for node in statements):
            return f"={name}"
    return ""


def _forget_what_changed() -> None:
    """Has `_used_by` look again if more was loaded, or a file edited, and `_parsed` in any case."""
    _parsed.cache_clear()
    loaded = list(map(id, sys.modules.values()))
    if loaded != _loaded_modules or any(_state(file) != before for file, before in _looked_at.items()):
        _loaded_modules[:] = loaded
        _looked_at.clear()
        _modules.cache_clear()
        _used_by.cache_clear()


def _state(file: str) -> Any:
    """What `_used_by` finds in a file depends on this, besides on which modules are loaded."""
    return _modified(file), [
        (name, id(value)) for name, value in _globals(file).items() if isinstance(value, ModuleType)
    ]


_looked_at: dict[str, Any] = {}
"""Files in which `_used_by` looked, with their state."""
_loaded_modules: list[int] = []
"""All that were loaded then, by their identity."""


@functools.cache
def _used_by(file: str, local: str) -> set[Entry]:
    """The entries in our own files that an entry uses by itself."""
    if file not in _looked_at:
        _looked_at[file] = _state(file)
    source = _parsed(file)
    entries = {(file, "")}
    owner = local.rpartition(".")[0]
    if owner in source.classes:
        entries.add((file, f"={owner}"))
    module = _modules().get(file)
    for parts in source.uses(local):
        used = {name for part in parts for name in part.names}
        entries |= {(file, f"={name}") for name in used & source.bindings.keys()}
        if module is not None:
            _add_starred(module, source, used - source.bindings.keys(), entries)
        for part in parts:
            here = _globals(file)
            for statement in part.imports:
                if local and isinstance(statement, ast.ImportFrom) and module is not None:
                    _add_imported(module, statement, local, entries)
                if isinstance(statement, ast.Import):
                    here |= _imported_modules(statement)
                elif isinstance(statement, ast.ImportFrom) and module is not None:
                    target = _target(module, statement)
                    here |= {alias.asname or alias.name: getattr(target, alias.name, None) for alias in statement.names}
            for chain in part.chains:
                _add_attribute(here, chain, entries)
    return entries


def _globals(file: str) -> dict[str, Any]:
    module = _modules().get(file)
    return dict(vars(module)) if module is not None else {}


def _add_starred(module: ModuleType, source: _Source, names: set[str], entries: set[Entry]) -> None:
    """Adds names that a module does not bind itself but has from `from ... import *`."""
    stars = [node for bound in source.bindings.get(STAR, []) for node in ast.walk(bound) if _is_star(node)]
    for statement in stars if names else []:
        target = _target(module, statement)
        file = getattr(target, "__file__", None)
        if target is None or not file or not _is_own(file):
            continue
        starred = _parsed(file)
        entries |= {(file, f"={name}") for name in names & starred.bindings.keys()}
        _add_starred(target, starred, names - starred.bindings.keys(), entries)


def _is_star(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and any(alias.name == STAR for alias in node.names)


def _imported_modules(statement: ast.Import) -> dict[str, ModuleType | None]:
    """Module by the local name that `import a.b` (`a`) or `import a.b as c` (`c`) binds."""
    names = ((alias.asname or alias.name.split(".")[0], alias) for alias in statement.names)
    return {name: sys.modules.get(alias.name if alias.asname else name) for name, alias in names}


def _add_attribute(here: Mapping[str, Any], chain: tuple[str, ...], entries: set[Entry]) -> None:
    """Adds what `pkg.mod.NAME` stands for, if all before the last name are modules."""
    target = here.get(chain[0])
    for name in chain[1:-1]:
        target = getattr(target, name, None) if isinstance(target, ModuleType) else None
    if isinstance(target, ModuleType):
        _add_binding(target, chain[-1], entries)


def _add_imported(module: ModuleType, statement: ast.ImportFrom, local: str, entries: set[Entry]) -> None:
    """Adds what a statement imports: in a function all of it, else what makes the entry's binding."""
    target = _target(module, statement)
    for alias in statement.names:
        if target is not None and (local == f"={alias.asname or alias.name}" or not local.startswith("=")):
            _add_binding(target, alias.name, entries)


def _target(module: ModuleType, statement: ast.ImportFrom) -> ModuleType | None:
    """The module that `from ... import` in a module reads."""
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    parents = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
    return sys.modules.get(".".join([*parents, *([statement.module] if statement.module else [])]))


def _add_binding(module: ModuleType, name: str, entries: set[Entry]) -> None:
    file = getattr(module, "__file__", None)
    if file and _is_own(file) and name in _parsed(file).bindings:
        entries.add((file, f"={name}"))


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """Modules by file; of several the first."""
    return {name: module for module in [*sys.modules.values()][::-1] if (name := getattr(module, "__file__", None))}


def _written(file: str, local: str) -> str:
    """An entry as records have it."""
    return f"{_relative(file)}::{local}"


@functools.cache
def _relative(file: str) -> str:
    path = Path(file).resolve()
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _attributes(node: ast.AST) -> set[tuple[str, ...]]:
    """Dotted names in a syntax tree, each as its parts: of `a.b.c` both `(a, b)` and `(a, b, c)`."""
    chains = set()
    for child in ast.walk(node):
        parts: list[str] = []
        while isinstance(child, ast.Attribute):
            parts.append(child.attr)
            child = child.value
        if parts and isinstance(child, ast.Name):
            chains.add((child.id, *reversed(parts)))
    return chains


def _header(node: ast.ClassDef) -> list[ast.AST]:
    """What runs when a class is made: bases, decorators and all of the body but its functions and texts."""
    body: list[ast.AST] = []
    for statement in node.body:
        if isinstance(statement, ast.ClassDef):
            body += _header(statement)
        elif not isinstance(statement, Definition) and not _is_text(statement):
            body.append(statement)
    return [*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list, *body]


def _binding(statement: ast.stmt) -> Any:
    """What a module-level name stands for. Functions are fingerprinted where they run, here only their existence."""
    if isinstance(statement, ast.ClassDef):
        members = [[member.name, _binding(member)] for member in statement.body if isinstance(member, Definition)]
        return ["class", [_dump(part) for part in _header(statement)], members]
    if isinstance(statement, Function):
        return ["function", [_dump(decorator) for decorator in statement.decorator_list]]
    return _dump(statement)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _dump(node: Any) -> Any:
    """A syntax tree as plain lists, without positions, docstrings and empty fields, equal on every Python version."""
    if isinstance(node, list):
        return [_dump(item) for item in node if not _is_text(item)]
    if not isinstance(node, ast.AST):
        return [type(node).__name__, repr(node)]
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment"))
    return [type(node).__name__, *([name, _dump(value)] for name, value in fields if value not in (None, []))]
