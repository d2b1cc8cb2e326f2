"""Which edits count: a table of edits to a small package whose function `run` was recorded before."""

import contextlib
import importlib.util
import json
import marshal
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs import REPOSITORY
from layerproof.rerun import fingerprint, recorder
from layerproof.rerun.recorder import recording

MAIN = '''"""Docstring of the module."""
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numba

from own.other import FACTOR, renamed as alias, Base
from own.other import used_by_nobody
from .relative import NEAR
from own import other, relative as nearby, reexport
from own.reexport import PASSED_ON
import own.other as long_way
import own.deep
from own.starred import *

if TYPE_CHECKING:
    from own.other import Typed

try:
    import no_such_module
except ImportError:
    no_such_module = None

try:
    from own.other import MAYBE
except ImportError:
    MAYBE = 0

if len(FLAGS := [1]) > 0:
    def conditional():
        return "conditional 1"
else:
    def conditional():
        return "conditional 2"

CONSTANT = 3
"""Docstring of the constant."""
SUM = CONSTANT + len("four")
UNUSED = 4
INNER_CONSTANT = 8
FIRST, SECOND = 5, 6
ANNOTATED: int = 7
HANDLERS = {}


def register(name):
    def add(function):
        HANDLERS[name] = function
        return function
    return add


def scaled(by):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return by * function(*args)
        return wrapper
    return decorate


def replaced_by(value):
    return lambda function: lambda: value


def helper(x, y=CONSTANT):
    """Docstring of the function."""
    # a comment
    return x + y


def unused(x):
    return x - 1


@scaled(2)
def decorated(x):
    return x + 21


@replaced_by(31)
def replaced():
    raise AssertionError


def generator():
    yield 22


async def coroutine():
    return 23


def nesting():
    def nested():
        return 24
    return nested()


def again():
    return 25


def again():
    return 26


@register("handled")
def handled():
    return 27


HANDLERS["other"] = unused

anonymous = lambda x: x + 28


def by_local_import():
    from own.other import LOCAL
    from own import other as hidden
    return LOCAL + hidden.LOCAL_ATTRIBUTE


class Parent:
    def inherited(self):
        return 41

    def overridden(self):
        return 42


class Child(Parent, Base):
    """Docstring of the class."""

    attribute = 43
    """Docstring of the attribute."""
    function = staticmethod(lambda: 44)
    table = [x + 45 for x in range(2)]

    class Named:
        named = INNER_CONSTANT

    class Inner:
        inner_attribute = 46

        def inner_method(self):
            return 47

    def method(self):
        return self.inherited() + self.from_base()

    def unused_method(self):
        return 48

    @property
    def prop(self):
        return 49

    @classmethod
    def class_method(cls):
        return cls.attribute

    if True:
        def conditional_method(self):
            return 50


class OnlyNamed(Parent):
    pass


@register("hidden")
class Hidden:
    hidden_attribute = 65

    def hidden_method(self):
        return self.hidden_attribute


@dataclass
class Point:
    x: int = 51


@numba.njit
def compiled_too(x):
    return x + IN_COMPILED


try:
    from numba import njit
except ImportError:
    njit = None

compile_it = numba.njit(cache=False)


@njit
def compiled_conditionally(x):
    return x + 75


@compile_it
def compiled_by_name(x):
    return x + 76


def compiled_by_call_(x):
    return x + 77


compiled_by_call = numba.njit(compiled_by_call_)


@numba.njit
def compiled(x):
    return compiled_too(x) + compiled_conditionally(x) + compiled_by_name(x) + compiled_by_call(x) + 71


@numba.njit
def compiled_but_unused(x):
    return x + 72


IN_COMPILED = 73


def run():
    child = Child()
    coroutine_ = coroutine()
    try:
        coroutine_.send(None)
    except StopIteration:
        pass
    thread = __import__("threading").Thread(target=in_thread)
    thread.start()
    thread.join()
    return [
        helper(1), decorated(1), replaced(), list(generator()), nesting(), again(), HANDLERS["handled"](), anonymous(1),
        child.method(), child.prop, Child.class_method(), child.function(), Child.Inner.inner_attribute,
        Child.Inner().inner_method(), child.conditional_method(), OnlyNamed().inherited(), Point().x, conditional(),
        SUM, FIRST, ANNOTATED, FACTOR, alias, NEAR, other.BY_MODULE, nearby.BY_ALIAS, long_way.BY_LONG_WAY,
        own.deep.DEEP, PASSED_ON, reexport.PASSED_ON_TOO, MAYBE, [x + 61 for x in range(1)], (lambda: 62)(),
        math.sqrt(4), by_local_import(), own.other.in_other(63), max(1, 2), STARRED,
        HANDLERS["hidden"]().hidden_method(), Child.Named.named, compiled(1),
    ]


def in_thread():
    return 64
'''

OTHER = """
FACTOR = DEPENDENCY = 101
DEPENDENCY = 102
renamed = DEPENDENCY + 103
MAYBE = 104
LOCAL = 105
LOCAL_ATTRIBUTE = 106
BY_MODULE = 107
BY_LONG_WAY = 108
UNUSED = 109
HIDDEN = 110
RE_EXPORTED = 111
RE_EXPORTED_TOO = 112


class Typed:
    pass


class Base:
    base_attribute = 113

    def from_base(self):
        return self.base_attribute


def used_by_nobody():
    return 114


def in_other(x):
    return x + HIDDEN
"""

FILES = {
    "__init__.py": "",
    "main.py": MAIN,
    "other.py": OTHER,
    "relative.py": "NEAR = 201\nBY_ALIAS = 202\n",
    "deep.py": "DEEP = 203\n",
    "starred.py": "STARRED = 204\nUNUSED_STARRED = 205\n",
    "reexport.py": "from own.other import RE_EXPORTED as PASSED_ON, RE_EXPORTED_TOO as PASSED_ON_TOO\n",
}


class Package:
    """The package `own` in a folder of its own, as if its files had been there before the process began."""

    def __init__(self, directory: Path, files: dict[str, str]) -> None:
        self.directory = directory / "own"
        self.directory.mkdir()
        for name, text in files.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(textwrap.dedent(text))

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.directory / name).read_text()
        assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
        self.write(name, text.replace(old, new))

    @contextlib.contextmanager
    def edited(self, name: str, old: str, new: str) -> Iterator[None]:
        """As after `edit`, in the block."""
        before = (self.directory / name).read_text()
        self.edit(name, old, new)
        try:
            yield
        finally:
            self.write(name, before)

    def record(self, import_inside: bool = False) -> dict[str, str]:
        """Fingerprints of what `own.main.run` executes; `import_inside` also of what its import does."""
        seen = {}
        if not import_inside:
            importlib.import_module("own.main")
        with recording(seen):
            importlib.import_module("own.main").run()
        return fingerprint.fingerprints(seen)

    def changed(self, recorded: dict[str, str]) -> set[str]:
        """Entries that changed, with the name of the file alone."""
        return {f"{Path(entry.split('::')[0]).stem}::{entry.split('::')[1]}" for entry in fingerprint.changed(recorded)}


@contextlib.contextmanager
def packages(directory: Path) -> Iterator[Callable[..., Package]]:
    """Makes the package, with files in place of those of the table, and forgets it again."""

    def make(**files: str) -> Package:
        return Package(directory, FILES | {f"{name}.py": textwrap.dedent(text) for name, text in files.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "STARTED", time.time() + 3600)
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.syspath_prepend(str(directory))
        yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path):
    with packages(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The package of the table, which each test leaves as it was, and its record."""
    with packages(tmp_path_factory.mktemp("recorded")) as make:
        own = make()
        record = own.record()
    return own, record


NEUTRAL = {
    "unused name of a star import": ("starred", "UNUSED_STARRED = 205", "UNUSED_STARRED = 1"),
    "comment": ("main", "# a comment", "# another comment"),
    "comment at the end": ("main", "return x + y", "return x + y  # the sum"),
    "docstring of the module": ("main", "Docstring of the module.", "Another docstring."),
    "docstring of the module removed": ("main", '"""Docstring of the module."""', ""),
    "docstring of a function": ("main", "Docstring of the function.", "Another docstring."),
    "docstring of a function removed": ("main", '    """Docstring of the function."""\n', ""),
    "docstring added": ("main", "def again():\n    return 26", 'def again():\n    """New."""\n    return 26'),
    "docstring of a class": ("main", "Docstring of the class.", "Another docstring."),
    "docstring of a class removed": ("main", '    """Docstring of the class."""\n', ""),
    "docstring of an attribute": ("main", "Docstring of the attribute.", "Another docstring."),
    "docstring of a constant": ("main", "Docstring of the constant.", "Another docstring."),
    "line breaks": ("main", "def helper(x, y=CONSTANT):", "def helper(\n    x,\n    y=CONSTANT,\n):"),
    "parentheses": ("main", "return x + y", "return (\n        (x) + y\n    )"),
    "quotes": ("main", '"four"', "'''four'''"),
    "spelling of a number": ("main", "FIRST, SECOND = 5, 6", "(FIRST, SECOND) = (0x5, 6)"),
    "blank lines": ("main", "CONSTANT = 3\n", "\n\n\nCONSTANT = 3\n\n\n"),
    "unused function that a package compiles": ("main", "x + 72", "x + 73"),
    "docstring of a function that a package compiles": (
        "main",
        "def compiled(x):\n",
        'def compiled(x):\n    """Sum."""\n',
    ),
    "unused function edited": ("main", "return x - 1", "return x - 2"),
    "unused function added": ("main", "def unused(x):", "def more():\n    return 1\n\n\ndef unused(x):"),
    "unused function removed": ("other", "def used_by_nobody():\n    return 114\n", "used_by_nobody = None\n"),
    "unused method edited": ("main", "return 48", "return 49"),
    "unused constant edited": ("main", "UNUSED = 4", "UNUSED = 5"),
    "unused constant added": ("main", "UNUSED = 4", "UNUSED = 4\nNEW = 5"),
    "unused constant elsewhere": ("other", "UNUSED = 109", "UNUSED = 110"),
    "unused class elsewhere": ("other", "class Typed:\n    pass", "class Typed:\n    more = 1"),
    "function moved": ("main", MAIN[MAIN.index("def helper") : MAIN.index("def unused")], ""),
}

TELLING = {
    "body of a function": ("main", "return x + y", "return x * y", "main::helper"),
    "body of the recorded function": ("main", "child = Child()", "child = Child.__call__()", "main::run"),
    "default argument": ("main", "y=CONSTANT", "y=30", "main::helper"),
    "body of a decorated function": ("main", "x + 21", "x + 22", "main::decorated"),
    "function that a package compiles": (
        "main",
        "compiled_by_call(x) + 71",
        "compiled_by_call(x) + 74",
        "main::=compiled",
    ),
    "function compiled by a name of a try": ("main", "x + 75", "x + 85", "main::=compiled_conditionally"),
    "function compiled by a name that is assigned": ("main", "x + 76", "x + 86", "main::=compiled_by_name"),
    "function compiled by a call": ("main", "x + 77", "x + 87", "main::=compiled_by_call_"),
    "function that compiled code calls": ("main", "x + IN_COMPILED", "x - IN_COMPILED", "main::=compiled_too"),
    "constant of compiled code": ("main", "IN_COMPILED = 73", "IN_COMPILED = 74", "main::=IN_COMPILED"),
    "argument of a decorator": ("main", "@scaled(2)", "@scaled(3)", "main::decorated"),
    "decorator removed": ("main", "@scaled(2)\n", "", "main::decorated"),
    "wrapper in a decorator": ("main", "by * function", "by - function", "main::scaled"),
    "decorator that replaces the function": ("main", "@replaced_by(31)", "@replaced_by(32)", "main::=replaced"),
    "generator": ("main", "yield 22", "yield 32", "main::generator"),
    "coroutine": ("main", "return 23", "return 33", "main::coroutine"),
    "nested function": ("main", "return 24", "return 34", "main::nesting"),
    "first of two definitions": ("main", "return 25", "return 35", "main::again"),
    "second of two definitions": ("main", "return 26", "return 36", "main::again"),
    "function reached by a registry": ("main", "return 27", "return 37", "main::handled"),
    "name it registers by": ("main", '@register("handled")', '@register("handle" + "d")', "main::handled"),
    "statement run at import": ("main", 'HANDLERS["other"] = unused', 'HANDLERS["handled"] = unused', "main::"),
    "call added at import": ("main", "UNUSED = 4", 'register("handled")(len)', "main::"),
    "loop added at import": ("main", "UNUSED = 4", "for CONSTANT in range(9):\n    pass", "main::"),
    "lambda with a name": ("main", "x + 28", "x + 38", "main::=anonymous"),
    "lambda in a function": ("main", "lambda: 62", "lambda: 63", "main::run"),
    "comprehension": ("main", "x + 61", "x + 62", "main::run"),
    "function on another thread": ("main", "return 64", "return 65", "main::in_thread"),
    "conditional function": ("main", '"conditional 1"', '"conditional 3"', "main::"),
    "condition of a function": ("main", "> 0:", "> 1:", "main::"),
    "inherited method": ("main", "return 41", "return 51", "main::Parent.inherited"),
    "inherited method of another module": ("other", "return self.base_attribute", "return 1", "other::Base.from_base"),
    "method that overrides": (
        *("main", "    def method(self):", "    def inherited(self):\n        return 1\n\n    def method(self):"),
        "main::=Child",
    ),
    "method that overrides in a class without methods": (
        *(
            "main",
            "class OnlyNamed(Parent):\n    pass",
            "class OnlyNamed(Parent):\n    def inherited(self):\n        pass",
        ),
        "main::=OnlyNamed",
    ),
    "method removed": ("main", "    def overridden(self):\n        return 42\n", "", "main::=Parent"),
    "class attribute": ("main", "attribute = 43", "attribute = 53", "main::=Child"),
    "attribute of a base elsewhere": ("other", "base_attribute = 113", "base_attribute = 13", "other::=Base"),
    "lambda in a class": ("main", "lambda: 44", "lambda: 54", "main::=Child"),
    "comprehension in a class": ("main", "x + 45", "x + 55", "main::=Child"),
    "attribute of an inner class": ("main", "inner_attribute = 46", "inner_attribute = 56", "main::=Child"),
    "constant used by an inner class": ("main", "INNER_CONSTANT = 8", "INNER_CONSTANT = 9", "main::=INNER_CONSTANT"),
    "attribute of a class that no name leads to": (
        *("main", "hidden_attribute = 65", "hidden_attribute = 66"),
        "main::=Hidden",
    ),
    "method of an inner class": ("main", "return 47", "return 57", "main::Child.Inner.inner_method"),
    "property": ("main", "return 49", "return 59", "main::Child.prop"),
    "class method": ("main", "return cls.attribute", "return 1", "main::Child.class_method"),
    "conditional method": ("main", "return 50", "return 60", "main::=Child"),
    "base class": ("main", "class Child(Parent, Base)", "class Child(Base, Parent)", "main::=Child"),
    "base of a class without methods": (
        "main",
        "class OnlyNamed(Parent)",
        "class OnlyNamed(Child)",
        "main::=OnlyNamed",
    ),
    "decorator of a method": ("main", "    @classmethod\n", "    @classmethod\n    @scaled(1)\n", "main::=Child"),
    "field of a dataclass": ("main", "x: int = 51", "x: int = 52", "main::=Point"),
    "decorator of a class": ("main", "@dataclass\n", "@dataclass(frozen=True)\n", "main::=Point"),
    "constant": ("main", "ANNOTATED: int = 7", "ANNOTATED: int = 8", "main::=ANNOTATED"),
    "constant used by a constant": ("main", "CONSTANT = 3\n", "CONSTANT = 4\n", "main::=CONSTANT"),
    "constant that a statement sets with others": ("main", "= 5, 6", "= 6, 6", "main::=FIRST"),
    "constant set twice": ("main", "UNUSED = 4", "ANNOTATED = 4", "main::=ANNOTATED"),
    "imported constant": ("other", "FACTOR = DEPENDENCY = 101", "FACTOR = DEPENDENCY = 99", "other::=FACTOR"),
    "constant used by an imported one": ("other", "\nDEPENDENCY = 102", "\nDEPENDENCY = 1", "other::=DEPENDENCY"),
    "constant imported by another name": ("other", "+ 103", "+ 104", "other::=renamed"),
    "constant of a relative import": ("relative", "NEAR = 201", "NEAR = 1", "relative::=NEAR"),
    "constant of a module": ("other", "BY_MODULE = 107", "BY_MODULE = 1", "other::=BY_MODULE"),
    "constant of a module under another name": ("relative", "BY_ALIAS = 202", "BY_ALIAS = 1", "relative::=BY_ALIAS"),
    "constant of import as": ("other", "BY_LONG_WAY = 108", "BY_LONG_WAY = 1", "other::=BY_LONG_WAY"),
    "constant of a dotted module": ("deep", "DEEP = 203", "DEEP = 1", "deep::=DEEP"),
    "constant imported by a third module": ("other", "RE_EXPORTED = 111", "RE_EXPORTED = 1", "other::=RE_EXPORTED"),
    "attribute imported by a third module": (
        *("other", "RE_EXPORTED_TOO = 112", "RE_EXPORTED_TOO = 1"),
        "other::=RE_EXPORTED_TOO",
    ),
    "constant of an import that may fail": ("other", "MAYBE = 104", "MAYBE = 1", "other::=MAYBE"),
    "constant imported in a function": ("other", "LOCAL = 105", "LOCAL = 1", "other::=LOCAL"),
    "constant of a module imported in a function": (
        *("other", "LOCAL_ATTRIBUTE = 106", "LOCAL_ATTRIBUTE = 1"),
        "other::=LOCAL_ATTRIBUTE",
    ),
    "constant of a star import": ("starred", "STARRED = 204", "STARRED = 1", "starred::=STARRED"),
    "constant used by a function of another module": ("other", "HIDDEN = 110", "HIDDEN = 1", "other::=HIDDEN"),
    "other origin of an import": ("main", "renamed as alias", "BY_MODULE as alias", "main::=alias"),
    "import shadowed": ("main", "UNUSED = 4", "def math():\n    return 1", "main::=math"),
    "builtin shadowed in a function": ("main", "UNUSED = 4", "def max(*args):\n    return 1", "main::run"),
    "builtin shadowed in a constant": ("main", "UNUSED = 4", "def len(text):\n    return 1", "main::=SUM"),
    "function added to a registry": ("main", "def unused(x):", "@register('unused')\ndef unused(x):", "main::"),
    "syntax error": ("other", "HIDDEN = 110", "HIDDEN = (", "other::in_other"),
}


@pytest.mark.parametrize("edit", NEUTRAL.values(), ids=NEUTRAL)
def test_edit_that_changes_no_behaviour(recorded, edit):
    own, record = recorded
    name, old, new = edit
    with own.edited(f"{name}.py", old, new):
        if not new and "def helper" in old:
            (own.directory / "main.py").write_text((own.directory / "main.py").read_text() + "\n\n" + old)
        assert own.changed(record) == set()


@pytest.mark.parametrize("edit", TELLING.values(), ids=TELLING)
def test_edit_that_may_change_behaviour(recorded, edit):
    own, record = recorded
    assert own.changed(record) == set()
    name, old, new, entry = edit
    with own.edited(f"{name}.py", old, new):
        assert entry in own.changed(record)
    assert own.changed(record) == set(), "an edit that was undone has changed nothing"


def test_deleted_file(package):
    own = package()
    recorded = own.record()
    (own.directory / "relative.py").unlink()
    assert "relative::=NEAR" in own.changed(recorded)
    assert fingerprint.current(f"{own.directory}/relative.py::=NEAR") == "file is gone"


def test_function_run_at_import_that_builds_a_table(package):
    own = package(
        main="""
            def entry(number):
                return number * 2

            def build():
                return [entry(number) for number in range(3)]

            TABLE = build()

            def run():
                return TABLE
        """
    )
    recorded = own.record(import_inside=True)
    own.edit("main.py", "number * 2", "number * 3")
    assert own.changed(recorded) == {"main::entry"}


def test_what_an_installed_package_calls_while_it_is_imported_is_left_out(package, tmp_path, monkeypatch):
    """A function of our own that the import of a package runs is recorded when a job runs it, and then alone."""
    package(
        main="""
            import builtins

            def entry():
                return 1

            def run():
                return entry()

            builtins.own_entry = entry
        """
    )
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/installed_caller.py").write_text("value = own_entry()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    main = importlib.import_module("own.main")
    assert "main::entry" not in entries_after(importlib.import_module, "installed_caller")
    assert "main::entry" in entries_after(main.run)


def test_entries_do_not_depend_on_lines(package):
    own = package()
    recorded = own.record()
    text = (own.directory / "main.py").read_text()
    own.write("main.py", "\n" * 100 + text.replace("\n\n\n", "\n\n\n\n# comment\n\n"))
    assert fingerprint.changed(recorded) == []
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]
    assert own.record() == recorded


def entries_after(function, *args):
    """The entries, with the name of the file alone, that a job of a process has which runs only this."""
    seen = {}
    with recording(seen):
        function(*args)
    return {f"{Path(entry.split('::')[0]).stem}::{entry.split('::')[1]}" for entry in fingerprint.fingerprints(seen)}


def test_of_a_process_with_several_jobs_each_is_looked_at_with_what_is_loaded_by_then(package):
    own = package(
        main="""
            def run(late):
                if late:
                    import own.limits as limits

                    return limits.LIMIT
        """,
        limits="LIMIT = 1\n",
    )
    run = importlib.import_module("own.main").run
    assert "limits::=LIMIT" not in entries_after(run, False)
    assert "limits::=LIMIT" in entries_after(run, True)
    own.edit("limits.py", "LIMIT = 1", "OTHER = LIMIT = 1")
    assert "limits::=LIMIT" in entries_after(run, True), "also of a file that was edited between two jobs"


def test_of_a_process_with_several_jobs_each_is_looked_at_with_the_modules_that_it_has_by_then(package):
    package(
        main="from own import limits\nfrom own import others\n\ndef run():\n    return limits.LIMIT\n",
        limits="LIMIT = 1\n",
        others="LIMIT = 2\n",
    )
    main = importlib.import_module("own.main")
    assert "others::=LIMIT" not in entries_after(main.run)
    main.limits = main.others
    assert "others::=LIMIT" in entries_after(main.run)


def test_record_is_plain_json(package):
    recorded = package().record()
    assert json.loads(json.dumps(recorded)) == recorded
    assert all(len(digest) == 64 for digest in recorded.values())


def test_installed_packages_are_not_recorded(package):
    own = package(
        main="""
            import json
            import yaml

            def run():
                return yaml.safe_load(json.dumps({"a": [1]}))
        """
    )
    entries = own.record()
    assert {entry.split("::")[0] for entry in entries} == {str(own.directory / "main.py")}


def test_the_librarys_code_is_named_by_its_path_in_the_library():
    from layerproof.model import stages

    seen = {}
    with recording(seen):
        stages.layer_stage(1)
    assert "layerproof/model/stages.py::layer_stage" in fingerprint.fingerprints(seen)


def test_code_is_named_alike_wherever_the_library_is_installed_and_the_folder_lies(tmp_path):
    """Also in site-packages: the library's own code counts there, too."""
    shutil.copytree(REPOSITORY / "workflow/layerproof", tmp_path / "site-packages/layerproof")
    recorded = []
    for library, folder in ((REPOSITORY / "workflow", tmp_path / "a"), (tmp_path / "site-packages", tmp_path / "b")):
        folder.mkdir()
        (folder / "own_port.py").write_text("def build():\n    return 1\n")
        os.utime(folder / "own_port.py", (1e9, 1e9))
        done = subprocess.run(
            [sys.executable, "-c", RUNS_LIBRARY_AND_PORT],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(library)},
            capture_output=True,
            text=True,
            check=True,
        )
        recorded.append(json.loads(done.stdout))
    assert recorded[0] == recorded[1]
    assert {"layerproof/model/stages.py::layer_stage", "own_port.py::build"} <= recorded[0].keys()


RUNS_LIBRARY_AND_PORT = """
import json, os, sys
from layerproof.model import stages
from layerproof.rerun import fingerprint
from layerproof.rerun.recorder import recording

seen = {}
sys.path[0] = os.getcwd()
with recording(seen):
    import own_port
    own_port.build()
    stages.layer_stage(1)
entries = fingerprint.fingerprints(seen)
assert fingerprint.changed(entries) == []
print(json.dumps(entries))
"""


def test_generated_files_are_not_recorded(package, tmp_path, monkeypatch):
    own = package(
        main="""
            import importlib.util
            from pathlib import Path

            def run():
                path = Path(__file__).parent / "generated.py"
                path.write_text("def made():\\n    return 1\\n")
                spec = importlib.util.spec_from_file_location("generated", path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                exec("def from_text(): return 1\\nfrom_text()")
                return module.made()
        """
    )
    age(own)
    monkeypatch.setattr(recorder, "STARTED", time.time() - 60)
    entries = own.record()
    assert {Path(entry.split("::")[0]).name for entry in entries} == {"main.py"}


def age(own):
    """Lets the package's files be an hour old."""
    for path in own.directory.glob("*.py"):
        os.utime(path, (time.time() - 3600,) * 2)


def test_file_edited_while_it_runs_counts_as_changed(package, monkeypatch):
    own = package(main="def run():\n    return 1\n")
    age(own)
    monkeypatch.setattr(recorder, "STARTED", time.time() - 60)
    seen = {}
    with recording(seen):
        importlib.import_module("own.main").run()
        own.edit("main.py", "return 1", "return 2")
    assert "main::" in own.changed(fingerprint.fingerprints(seen))


def test_file_of_which_only_a_constant_is_used_edited_while_it_runs_counts_as_changed(package, monkeypatch):
    own = package(main="from own.limits import LIMIT\n\n\ndef run():\n    return LIMIT\n", limits="LIMIT = 1\n")
    age(own)
    monkeypatch.setattr(recorder, "STARTED", time.time() - 60)
    seen = {}
    main = importlib.import_module("own.main")
    with recording(seen):
        main.run()
        own.edit("limits.py", "LIMIT = 1", "LIMIT = 2")
    assert "limits::" in own.changed(fingerprint.fingerprints(seen))


@pytest.mark.parametrize("keeps_compiled", [True, False])
def test_of_two_edits_in_a_second_the_later_one_runs(tmp_path, monkeypatch, keeps_compiled):
    """In a port and in what it imports. Python itself compares seconds and sizes."""
    from layerproof.port.runner import load_module

    monkeypatch.setattr(sys, "dont_write_bytecode", not keeps_compiled)
    with recording({}):
        pass
    port, helper = tmp_path / "port.py", tmp_path / "helper_of_port.py"
    time.sleep(1 - time.time() % 1)
    for number in (1, 2):
        port.write_text(f"from helper_of_port import NUMBER\nSUM = NUMBER + {number}\n")
        helper.write_text(f"NUMBER = {number}\n")
        sys.modules.pop("helper_of_port", None)
        assert 2 * number == load_module(str(port)).SUM


@pytest.mark.parametrize("seconds", [0, 1])
def test_compiled_code_is_taken_unless_it_is_of_the_second_of_an_edit(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "module.py"
    file.write_text("")
    os.utime(file, (1000.7, 1000.7))
    loader = recorder.FromSource("module", str(file))
    loader.get_code("module")
    compiled = Path(importlib.util.cache_from_source(str(file)))
    compiled.write_bytes(compiled.read_bytes()[:16] + marshal.dumps(compile("'of before'", "module", "eval")))
    os.utime(compiled, (1000.9 + seconds,) * 2)
    code = loader.get_code("module")
    assert code is not None and ("of before" in code.co_consts) == bool(seconds)


def names_of(seen):
    return {code.co_name for code, _ in seen.values()}


def before():
    return None


def within():
    return None


def test_only_what_runs_in_the_block_is_recorded():
    seen = {}
    before()
    with recording(seen):
        within()
    before()
    assert "within" in names_of(seen) and "before" not in names_of(seen)


def test_what_runs_before_an_exception_is_recorded_and_recording_ends():
    seen = {}

    def fails():
        raise ValueError

    with pytest.raises(ValueError), recording(seen):
        fails()
    within()
    assert "fails" in names_of(seen) and "within" not in names_of(seen)
    assert sys.getprofile() is None and threading.getprofile() is None
    assert sys.monitoring.get_tool(recorder.TOOL) is None


def test_recording_inside_a_recording():
    outer, inner = {}, {}
    with recording(outer):
        with recording(inner):
            within()
        before()
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert "within" in names_of(inner) and "before" not in names_of(inner)
    assert names_of(outer) >= {"before", "in_thread"}


def in_thread():
    return None


def test_what_the_librarys_own_import_runs_is_recorded_only_when_a_job_runs_it():
    """`bf16_ulp` fills a table when measure.kernel is imported."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_THEN_RUNS],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["[]", "['bf16_ulp']"]


IMPORTS_THEN_RUNS = """
import numpy as np
from layerproof.rerun.recorder import recording

def names(seen):
    return [code.co_name for code, _ in seen.values() if code.co_filename.endswith("tensor.py")]

imported, ran = {}, {}
with recording(imported):
    from layerproof.measure import kernel
print(names(imported))
with recording(ran):
    kernel.bf16_ulp(np.ones(1))
print(names(ran))
"""


def test_modules_whose_file_is_none_are_not_looked_for(tmp_path, monkeypatch):
    """torch.ops says that it is `_ops.py`."""
    (tmp_path / "names_torch_ops.py").write_text("import torch\n\ndef work():\n    return torch.ops.aten.relu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recorder, "STARTED", time.time() + 60)
    seen = {}
    with recording(seen):
        importlib.import_module("names_torch_ops").work()
    assert any(entry.endswith("names_torch_ops.py::work") for entry in fingerprint.fingerprints(seen))


@pytest.mark.slow
def test_the_library_runs_no_function_of_its_own_when_it_is_imported():
    """For what its imports run is not recorded. But for the dictionary of faults, whose imports are; what is also run for
    each tap; and the limits of the keys of config.yaml, which no job looks at.
    """
    known = {"faults", "bf16_ulp", "config.py"}
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert found and not [line for line in found if not known & set(line.replace("/", " ").split())]


IMPORTED = """
import importlib
from pathlib import Path
from layerproof.rerun import fingerprint, recorder

library = Path(fingerprint.__file__).parents[1]
recorder._is_importing = lambda: False
seen = {}
with recorder.recording(seen):
    for path in sorted(library.rglob("*.py")):
        if path.stem not in ("__main__", "__init__", "sitecustomize"):  # which no job imports
            importlib.import_module(".".join(path.relative_to(library.parent).with_suffix("").parts))
for code, _ in seen.values():
    path = Path(code.co_filename)
    # CO_NEWLOCALS: not the body of a module or class. A comprehension belongs to its statement.
    function = code.co_flags & 2 and not code.co_name.startswith("<")
    if function and path.is_relative_to(library) and path.parent.name != "rerun":
        print(path.relative_to(library), code.co_name)
"""


def test_code_that_sets_the_profiler_it_found_again_is_recorded():
    """As torch does where it looks for cycles."""
    seen = {}
    with recording(seen):
        found = sys.getprofile()
        sys.setprofile(None)
        sys.setprofile(found)
        within()
        before()
    assert {"within", "before"} <= names_of(seen)
