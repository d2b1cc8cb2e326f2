"""The commands of launchers, as a person could type them."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def command(launcher: str, count: int, arguments: Sequence[str]) -> list[str]:
    """The command by which a launcher, one of `parallel.launcher`, runs a Python program on `count` ranks.

    `arguments` are those of Python: a file or `-m MODULE`, and what the program is given. srun runs within a Slurm job,
    and its ranks share the cores of that job with what runs there already.
    """
    start = [sys.executable, "-m"]
    if launcher == "torchrun":
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        start += ["-m", "layerproof.launch.rank", "--"]  # or it looks at the program's flags, too
    elif launcher == "srun":
        srun = ["srun", "--ntasks", str(count), "--overlap", "--overcommit", "--kill-on-bad-exit=1"]
        start = [*srun, *start, "layerproof.launch.rank"]
    else:
        start += [f"layerproof.launch.{launcher}", str(count)]
    return [*start, *arguments]
