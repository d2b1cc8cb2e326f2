"""The lines of source around the place where a port hands a tap over."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BEFORE, AFTER = 5, 2
"""Lines to show around a line: what computes a tensor lies before the line that hands it over."""


@dataclass(frozen=True)
class CodeFrame:
    """Some lines of a file with their numbers, counted from 1. `line` is the number of the one to look at."""

    file: str
    function: str
    line: int
    lines: tuple[tuple[int, str], ...]

    def text(self) -> str:
        """The lines as text, each with its number; an arrow points at the one to look at."""
        width = len(str(self.lines[-1][0]))
        return "\n".join(
            f"{'>' if number == self.line else ' '} {number:>{width}} {line}".rstrip() for number, line in self.lines
        )


def code_frame(place: Mapping[str, str] | None, tap: str) -> CodeFrame | None:
    """The lines of a file as it is now, around those that hand `tap` over. `place` has the `file` and the qualified name
    of the `function`, as `taps.Place` records them.

    None if the file or the function is no longer there.
    """
    if place is None:
        return None
    try:
        text = Path(place["file"]).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    function = _function(tree, place["function"])
    if function is None:
        return None
    line = _line(function, tree, tap)
    lines = text.splitlines()
    first, last = max(function.lineno, line - BEFORE), min(function.end_lineno or line, line + AFTER)
    shown = tuple((number, lines[number - 1]) for number in range(first, last + 1))
    return CodeFrame(place["file"], place["function"], line, shown)


def _function(tree: ast.AST, qualified: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function of a qualified name such as `Attention.forward` or `build.<locals>.Layer.forward`."""
    node: ast.AST | None = tree
    for name in qualified.replace("<locals>.", "").split("."):
        inner = [child for child in ast.walk(node) if child is not node] if node else []
        node = next((child for child in inner if getattr(child, "name", None) == name), None)
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _line(function: ast.FunctionDef | ast.AsyncFunctionDef, tree: ast.Module, tap: str) -> int:
    """The line that hands a tap over: the call that names it, else that of the module in the table TAPS, else the
    last value that the function returns, else its first line.
    """
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    for call in calls:
        if any(isinstance(one, ast.Constant) and one.value == tap for one in call.args):
            return call.lineno
    module = _table(tree).get(tap, "").rpartition(".")[2]
    for call in calls:
        if module and isinstance(call.func, ast.Attribute) and call.func.attr == module:
            return call.lineno
    returns = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    return max(returns, default=function.lineno)


def _table(tree: ast.Module) -> dict[str, str]:
    """The table TAPS of a port, as far as it is written out."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == "TAPS" for one in targets):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                return {
                    str(key.value): str(value.value)
                    for key, value in pairs
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
                }
    return {}
