"""Warm starts: on one host without containers, jobs of one call of Snakemake are forked from a process that has imported
the large packages.

A job spends four seconds on imports and, with a tiny model, less than one on its work. `shell_prefix` has
`python -m layerproof ...` in the commands of rules run the program `client.py`. The first client starts `server.py`, which
imports what jobs need. Each client hands its job to the server: that forks a process, which imports layerproof anew and runs
the command with the client's folder, input and output. Whoever kills the client kills that process, and the server ends
with Snakemake.

A job starts its own Python wherever a warm start might differ from that: if its environment is another than the server's (as
that of a job with more threads is), and if importing started a thread or opened a device.
"""

import atexit
import os
import shlex
import shutil
import tempfile
from pathlib import Path

VARIABLE = "LAYERPROOF_WARM"
"""`off` in this variable: each job starts its own Python. A folder: jobs are handed to the server that listens there."""


def shell_prefix(own_server: bool) -> str:
    """What comes before the commands of this call of Snakemake, in bash. `own_server`: whether it may start a server."""
    folder = os.environ.get(VARIABLE)
    if folder == "off" or (folder is None and not own_server):
        return ""
    if folder is None:
        folder = tempfile.mkdtemp(prefix="layerproof-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = shlex.join(["python", "-IS", str(Path(__file__).with_name("client.py")), folder, str(os.getpid())])
    is_ours = '[ "${1-} ${2-}" = "-m layerproof" ]'
    return f'python() {{ if {is_ours}; then command {command} "$@"; else command python "$@"; fi; }}; '
