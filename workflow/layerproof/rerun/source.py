"""Python source files, parsed into the parts that a fingerprint covers."""

from __future__ import annotations

import ast
import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from layerproof.files import digest_of

STAR = "*"
"""The name to which `from module import *` is bound."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class _Uses:
    """The names in one part of an entry: plain names, dotted names as tuples of their parts, and imports."""

    names: set[str]
    chains: set[tuple[str, ...]]
    imports: list[ast.Import | ast.ImportFrom]

    @classmethod
    def of(cls, part: ast.AST) -> _Uses:
        imports = [node for node in ast.walk(part) if isinstance(node, ast.Import | ast.ImportFrom)]
        return cls(_names(part), _attributes(part), imports)


@dataclass(frozen=True)
class Source:
    """One parsed file: functions by qualified name, statements by the module-level name that they bind, and the rest.

    `compiled` are names that a function of an installed package decorates or gets as arguments. It may compile
    functions (numba.njit, torch.jit.script) whose code is then never seen to run, so they count where they are named.
    """

    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    bare: list[ast.stmt] = field(default_factory=list)
    compiled: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    used: dict[str, list[list[_Uses]]] = field(default_factory=dict)

    def fingerprint(self, local: str) -> str:
        """Digest of an entry, computed once: the records of many stages name the same functions.

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
        # Names that resolve in this module belong to the entry: a new one may shadow what the entry used before.
        return digest_of([dumps, sorted({name for part in parts for name in _names(part)} & self.bindings.keys())])

    def uses(self, local: str) -> list[list[_Uses]]:
        """For each node of an entry, what its parts use. Found once: the jobs of a process share most functions."""
        if local not in self.used:
            self.used[local] = [[_Uses.of(part) for part in self._parts(node, local)] for node in self.nodes(local)]
        return self.used[local]

    def nodes(self, local: str) -> list[Any]:
        """The nodes of an entry, for finding the names that it uses."""
        if local == "":
            return list(self.bare)
        return self._bound(local[1:]) if local.startswith("=") else self.functions[local]

    def _parts(self, node: Any, local: str) -> list[ast.AST]:
        """The parts of a node that count: for a class its header, for a function that is only bound its decorators."""
        if isinstance(node, ast.ClassDef):
            return _header(node)
        if local.startswith("=") and isinstance(node, Function) and local[1:] not in self.compiled:
            return list(node.decorator_list)
        return [node]

    def _bound(self, name: str) -> list[ast.stmt]:
        return [self.classes[name]] if name in self.classes else self.bindings[name]


def parse_file(file: str) -> Source:
    status = os.stat(file)
    return _parse_version(file, status.st_mtime_ns, status.st_size)


@functools.cache
def _parse_version(file: str, mtime_ns: int, size: int) -> Source:
    source = Source()
    for statement in ast.parse(Path(file).read_bytes()).body:
        if isinstance(statement, Definition):
            source.bindings.setdefault(statement.name, []).append(statement)
            _add_definition(source, statement, "")
            # A decorator of the module's own may keep its argument, as a registry does, without any code naming it.
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


def _is_own_name(source: Source, name: str | None) -> bool:
    """Whether the module, as far as it is read, binds a name by anything but an import."""
    bound = source.bindings.get(name or "", [])
    return any(not isinstance(statement, ast.Import | ast.ImportFrom) for statement in bound)


def _is_of_a_package(source: Source, name: str | None, seen: frozenset[str | None] = frozenset()) -> bool:
    """Whether a name comes from outside Python's own library: by import, or assigned from such a name."""
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


def _add_definition(source: Source, node: Definition, prefix: str) -> None:
    name = prefix + node.name
    if not isinstance(node, ast.ClassDef):
        source.functions.setdefault(name, []).append(node)
        return
    source.classes[name] = node
    for statement in node.body:
        if isinstance(statement, Definition):
            _add_definition(source, statement, name + ".")


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


def is_star(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and any(alias.name == STAR for alias in node.names)


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _attributes(node: ast.AST) -> set[tuple[str, ...]]:
    """Dotted names in a syntax tree, each as its parts: for `a.b.c` both `(a, b)` and `(a, b, c)`."""
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
