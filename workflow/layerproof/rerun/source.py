"""Python source files, reduced to what fingerprints need of them.

Every job asks whether the functions that it ran are as they were, so what a file was reduced to is kept in
`.layerproof/code/`, as Python keeps compiled modules: for this content, this module and this version of Python. A copy of
the whole folder takes it along. It is pickled, as what numba keeps beside it is: like `__pycache__`, it has to be deleted
in a folder that comes from a stranger.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from layerproof.files import digest_of, write_note

STAR = "*"
"""The name to which `from module import *` is bound."""
NOTES = Path(".layerproof/code").absolute()  # before a port changes the directory

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Import:
    """`from MODULE import NAME as BOUND, ...`, or `import NAME as BOUND, ...` where `is_from` is false.

    Attributes:
        level: the number of dots before MODULE.
        names: NAME and BOUND, or None for what is bound under its own name.
    """

    is_from: bool
    module: str | None
    level: int
    names: list[tuple[str, str | None]]

    @classmethod
    def of(cls, node: ast.Import | ast.ImportFrom) -> Import:
        names = [(alias.name, alias.asname) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            return cls(True, node.module, node.level, names)
        return cls(False, None, 0, names)


@dataclass(frozen=True)
class Uses:
    """The names in one part of an entry: plain names, dotted names as tuples of their parts (for `a.b.c` both `(a, b)` and
    `(a, b, c)`), and imports.
    """

    names: set[str]
    chains: set[tuple[str, ...]]
    imports: list[Import]

    @classmethod
    def of(cls, part: ast.AST) -> Uses:
        uses = cls(set(), set(), [])
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                uses.names.add(node.id)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                uses.imports.append(Import.of(node))
            elif isinstance(node, ast.Attribute):
                parts, root = [], node
                while isinstance(root, ast.Attribute):
                    parts.append(root.attr)
                    root = root.value
                if isinstance(root, ast.Name):
                    uses.chains.add((root.id, *reversed(parts)))
        return uses


@dataclass(frozen=True)
class Source:
    """What fingerprints need of one file.

    Attributes:
        functions: functions and methods, by qualified name.
        classes: classes, by qualified name.
        lines: the first and the last line of each statement that binds a name of the module, by that name.
        stars: the statements `from module import *`.
        compiled: names that a function from a module outside Python's own library decorates or gets as arguments. It may
            compile functions (numba.njit, torch.jit.script) whose code is then never seen to run, so they count where they
            are named.
        digests: the fingerprint of each entry.
        uses: for each node of an entry, what its parts use.
    """

    functions: set[str]
    classes: set[str]
    lines: dict[str, list[tuple[int, int]]]
    stars: list[Import]
    compiled: set[str]
    digests: dict[str, str]
    uses: dict[str, list[list[Uses]]]


def parse_file(file: str) -> Source:
    """What fingerprints need of a file as it is now.

    Raises:
        OSError: if the file cannot be read.
        SyntaxError, ValueError: if it is not Python.
    """
    status = os.stat(file)
    return _parse_version(file, status.st_mtime_ns, status.st_size)


@functools.cache
def _parse_version(file: str, mtime_ns: int, size: int) -> Source:
    content = Path(file).read_bytes()
    version = digest_of([_digest_of_this_module(), hashlib.sha256(content).hexdigest()])
    note = NOTES / f"{digest_of(os.path.relpath(file, NOTES))[:32]}.{sys.implementation.cache_tag}"
    with contextlib.suppress(Exception):  # whatever a damaged file may raise
        kept, source = pickle.loads(note.read_bytes())
        if kept == version:
            return source
    source = reduced(_Tree.of(ast.parse(content)))
    with contextlib.suppress(OSError):  # without it the file is parsed once more
        write_note(note, pickle.dumps((version, source)))
    return source


@functools.cache
def _digest_of_this_module() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@dataclass(frozen=True)
class _Tree:
    """One parsed file: functions by qualified name, statements by the module-level name that they bind, and the rest."""

    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    bare: list[ast.stmt] = field(default_factory=list)
    compiled: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: ast.Module) -> _Tree:
        tree = cls()
        for statement in module.body:
            if isinstance(statement, Definition):
                tree.bindings.setdefault(statement.name, []).append(statement)
                _add_definition(tree, statement, "")
                # A decorator of the module's own may keep its argument, as a registry does, without any code naming it.
                tree.bare.extend(ast.Expr(one) for one in statement.decorator_list if _is_own_name(tree, _root(one)))
                if any(_is_of_a_package(tree, _root(one)) for one in statement.decorator_list):
                    tree.compiled.add(statement.name)
                continue
            called = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if isinstance(called, ast.Call) and _is_of_a_package(tree, _root(called)):
                tree.compiled.update(_names(called))
            names = _bound_names(statement)
            for name in names:
                tree.bindings.setdefault(name, []).append(statement)
            plain = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom)
            if not _is_text(statement) and not (plain and names):
                tree.bare.append(statement)
        return tree

    def entries(self) -> list[str]:
        """The statements that run at import, each function, and each name that is bound."""
        return ["", *self.functions, *(f"={name}" for name in {**self.bindings, **self.classes})]

    def nodes(self, local: str) -> list[Any]:
        if local == "":
            return list(self.bare)
        if not local.startswith("="):
            return self.functions[local]
        name = local[1:]
        return [self.classes[name]] if name in self.classes else self.bindings[name]

    def parts(self, node: Any, local: str) -> list[ast.AST]:
        """The parts of a node that count: for a class its header, for a function that is only bound its decorators."""
        if isinstance(node, ast.ClassDef):
            return _header(node)
        if local.startswith("=") and isinstance(node, Function) and local[1:] not in self.compiled:
            return list(node.decorator_list)
        return [node]

    def digest(self, local: str, uses: list[list[Uses]]) -> str:
        nodes = self.nodes(local)
        if local == "":
            return digest_of([_dump(statement) for statement in nodes])
        if local.startswith("="):
            whole = local[1:] in self.compiled
            dumps = [_dump(node) if whole and isinstance(node, Function) else _binding(node) for node in nodes]
        else:
            dumps = [_dump(node) for node in nodes]
        names = {name for parts in uses for part in parts for name in part.names}
        # Names that resolve in this module belong to the entry: a new one may shadow what the entry used before.
        return digest_of([dumps, sorted(names & self.bindings.keys())])


def reduced(tree: _Tree) -> Source:
    """What is kept of a parsed file: of each entry its fingerprint and what it uses."""
    uses = {
        local: [[Uses.of(part) for part in tree.parts(node, local)] for node in tree.nodes(local)]
        for local in tree.entries()
    }
    stars = [node for bound in tree.bindings.get(STAR, []) for node in ast.walk(bound) if _is_star(node)]
    return Source(
        functions=set(tree.functions),
        classes=set(tree.classes),
        lines={
            name: [(node.lineno, node.end_lineno or node.lineno) for node in nodes]
            for name, nodes in tree.bindings.items()
        },
        stars=list(map(Import.of, stars)),
        compiled=tree.compiled,
        digests={local: tree.digest(local, used) for local, used in uses.items()},
        uses=uses,
    )


def _is_own_name(tree: _Tree, name: str | None) -> bool:
    """Whether the module, as far as it is read, binds a name by anything but an import."""
    bound = tree.bindings.get(name or "", [])
    return any(not isinstance(statement, ast.Import | ast.ImportFrom) for statement in bound)


def _is_of_a_package(tree: _Tree, name: str | None, seen: frozenset[str | None] = frozenset()) -> bool:
    """Whether a name comes from outside Python's own library: by import, or assigned from such a name."""
    modules: list[str] = []
    for statement in [] if name in seen else tree.bindings.get(name or "", []):
        for node in [] if isinstance(statement, Definition) else ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "." * node.level)
            elif isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and _is_of_a_package(tree, _root(value), seen | {name}):
                return True
    return any(module.split(".")[0] not in sys.stdlib_module_names for module in modules)


def _root(node: ast.expr) -> str | None:
    """The name that an expression such as `a.b(c)` starts with."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _add_definition(tree: _Tree, node: Definition, prefix: str) -> None:
    name = prefix + node.name
    if not isinstance(node, ast.ClassDef):
        tree.functions.setdefault(name, []).append(node)
        return
    tree.classes[name] = node
    for statement in node.body:
        if isinstance(statement, Definition):
            _add_definition(tree, statement, name + ".")


def _bound_names(statement: ast.stmt) -> list[str]:
    """Names that a statement binds, including those inside `if`, `try` and the like at module level."""
    names: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.alias):
            names.append((node.asname or node.name).split(".")[0])
        elif isinstance(node, Definition):
            names.append(node.name)
    return list(dict.fromkeys(names))


def _is_star(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and any(alias.name == STAR for alias in node.names)


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _header(node: ast.ClassDef) -> list[ast.AST]:
    """The code that runs when a class is created: bases, decorators, and the body without functions and texts."""
    body: list[ast.AST] = []
    for statement in node.body:
        if isinstance(statement, ast.ClassDef):
            body += _header(statement)
        elif not isinstance(statement, Definition) and not _is_text(statement):
            body.append(statement)
    return [*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list, *body]


def _binding(statement: ast.stmt) -> Any:
    """The value of a module-level name. A function is fingerprinted where it runs; here only its existence counts."""
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
