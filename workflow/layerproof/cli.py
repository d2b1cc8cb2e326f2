"""The command line. Each package has its verbs in a module `verbs`, which imports what is heavy inside them: a job that has
nothing to do returns before any of that.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Sequence

from layerproof.compare import verbs as compare
from layerproof.diagnose import verbs as diagnose
from layerproof.errors import UserError
from layerproof.golden import verbs as golden
from layerproof.host import verbs as host
from layerproof.model import verbs as model
from layerproof.port import verbs as port
from layerproof.report import verbs as report
from layerproof.rerun import jobs


def run_in_turn(args: argparse.Namespace) -> int:
    codes = (subprocess.run(["bash", "-c", line]).returncode for line in args.lines)
    return next(filter(None, codes), 0)


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The command line; every flag that names several files takes them one after the other."""
    top = argparse.ArgumentParser(
        prog="layerproof", description="Finds the layer where a port goes wrong, and says why."
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for package in (model, golden, port, compare, host, diagnose, report):
        package.add_verbs(verbs)
    verb = verbs.add_parser("in-turn", help="Runs jobs of several stages one after the other, until one fails.")
    verb.set_defaults(action=run_in_turn)
    verb.add_argument("lines", nargs="+", help="their command lines")
    return top


def run(argv: Sequence[str], apart: jobs.Apart = jobs.run_apart) -> int:
    """Runs a verb and returns its exit code; a user's error is one line and exit code 2.

    `apart` runs the jobs of verbs that may take their process down with them.
    """
    args = parser().parse_args(argv)
    args.apart = apart
    try:
        return args.action(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or args.verb}: {error.strerror or error}. Correct this and run again.",
            file=sys.stderr,
        )
        return 2
