"""The Python that `make` sets up with."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "requirements/find-python.sh"
REFUSED = "raise SystemExit('pyenv: command not found')"


def found(folder, **commands):
    """Calls the script where there are no commands but these, each a line of Python; None is this Python."""
    folder.mkdir()
    for name, line in commands.items():
        command = folder / name.replace("_", ".")
        run = f"exec {sys.executable} " + ('"$@"' if line is None else f'-c "{line}"')
        command.write_text(f"#!/bin/sh\n{run}\n")
        command.chmod(0o755)
    return subprocess.run(["/bin/sh", SCRIPT], env={"PATH": str(folder)}, capture_output=True, text=True)


def test_the_first_python_that_can_be_used_is_found(tmp_path):
    one = found(tmp_path / "one", python3=None)
    assert (one.returncode, one.stdout.strip()) == (0, sys.executable)
    newer = found(
        tmp_path / "newer", python3_12="print('twelve')", python3_13="print('thirteen')", python3="print('three')"
    )
    assert newer.stdout == "twelve\n"
    shim = found(tmp_path / "shim", python3_12=REFUSED, python3_13=REFUSED, python3="print('three')")
    assert shim.stdout == "three\n"


def test_where_none_can_be_used_it_is_said_what_to_install(tmp_path):
    none = found(tmp_path / "none", python3=REFUSED)
    assert none.returncode == 1 and not none.stdout
    assert "apt-get install python3-venv libpython3-dev" in none.stderr and len(none.stderr.splitlines()) == 1


def test_the_version_is_named_for_pyenv(tmp_path):
    shim = found(tmp_path / "shim", python3_12="import os; print(os.environ['PYENV_VERSION'])")
    assert shim.stdout == "3.12\n"
