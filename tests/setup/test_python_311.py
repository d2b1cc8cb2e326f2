"""Before Python 3.12 a profiler records what a job runs, and from then on `sys.monitoring`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("pytest", "hypothesis", "numba", "h5py", "safetensors", "packaging", "psutil", "pyyaml")
TESTS = ("test_fingerprint.py", "test_jobs.py", "test_records.py")
NEED_TORCH = ("test_modules_whose_file_is_none", "test_the_library_runs_no_function")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="all tests run on 3.11")
def test_what_jobs_run_is_recorded_on_python_3_11_too(tmp_path):
    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "bin/python"
    subprocess.run([uv, "venv", "--quiet", "--allow-existing", "--python", "3.11", tmp_path], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", python, "--constraint", "requirements/dev.txt", *PACKAGES]
    subprocess.run(install, cwd=REPOSITORY, check=True)
    tests = [f"tests/unit/{name}" for name in TESTS]
    run = [python, "-m", "pytest", "-p", "no:cacheprovider", *tests, "-k", f"not ({' or '.join(NEED_TORCH)})"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    done = subprocess.run(run, cwd=REPOSITORY, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
