"""A server of warm starts (layerproof.warm) that serves Snakemake itself, too, and whatever the environment: one for all
workflows of a process of tests. Jobs import layerproof anew, from the copy of their workflow.
"""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

WARM = Path(__file__).resolve().parents[1] / "workflow/layerproof/warm"


@functools.cache
def server() -> str:
    """The folder in which the server listens. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    own = {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"}  # as jobs with --cores 1 have them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen(64)
        number = listener.fileno()
        command = [sys.executable, "-P", __file__, str(number), str(os.getpid())]
        subprocess.Popen(command, env={**os.environ, **own}, pass_fds=[number])
    return folder


def command(*arguments: str) -> list[str]:
    """Python with these arguments, started by the server."""
    return [sys.executable, "-IS", str(WARM / "client.py"), server(), str(os.getpid()), *arguments]


def main() -> None:
    sys.path.append(str(WARM))  # not as a part of layerproof, which jobs have to import anew
    from server import PACKAGES, serve

    listener, parent = map(int, sys.argv[1:])
    serve(socket.socket(fileno=listener), parent, (*PACKAGES, "snakemake.cli"), lambda job: job.argv[0] == "-m")


if __name__ == "__main__":
    main()
