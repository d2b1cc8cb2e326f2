"""The command line. Each package keeps its verbs in a module `verbs`, which imports heavy packages inside the verbs, so
that a job with nothing to do returns before any of that.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import textwrap
from collections.abc import Sequence

from layerproof import __version__, project
from layerproof.compare import verbs as compare
from layerproof.diagnose import verbs as diagnose
from layerproof.errors import UserError
from layerproof.golden import verbs as golden
from layerproof.host import verbs as host
from layerproof.model import verbs as model
from layerproof.port import verbs as port
from layerproof.report import verbs as report
from layerproof.rerun.command import PEOPLE

ORDER = ("init", "run", "gate", "verify", "audit", "preflight", "why", "snakefile", "make-tiny")
"""Verbs for people, as the help page lists them."""


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The command line; every flag that names several files takes them one after the other."""
    usage = "layerproof VERB ...    (layerproof VERB --help describes each)"
    top = argparse.ArgumentParser("layerproof", usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"layerproof {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", help=argparse.SUPPRESS)
    for package in (project, model, golden, port, compare, host, diagnose, report):
        package.add_verbs(verbs)
    top.description = _help_page(list(verbs.choices))
    return top


def _help_page(names: Sequence[str]) -> str:
    lines = ["Finds the layer where a port goes wrong, and says why.", "", "verbs for people:"]
    for name in ORDER:
        verb = PEOPLE[name]
        lines += [
            f"  {name:<10} {verb.sentence}",
            f"             {verb.example}",
            f"             exit code {verb.exits}",
        ]
    others = textwrap.wrap(", ".join(name for name in names if name not in PEOPLE), 100, break_on_hyphens=False)
    return "\n".join([*lines, "", "verbs that rules call:", *(f"  {line}" for line in others)])


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line up to the first --, and what is behind it."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:end]), list(argv[end + 1 :])


def run(argv: Sequence[str]) -> int:
    """Runs a verb and returns its exit code; a user's error is one line and exit code 2."""
    verb = ""
    try:
        own, behind_dashes = _parted(argv)
        args = parser().parse_args(own)
        verb, args.behind_dashes = args.verb, behind_dashes
        return args.action(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or verb}: {error.strerror or error}. Correct this and run again.", file=sys.stderr
        )
        return 2


def main() -> int:
    """The command `layerproof`."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what was printed before a crash is in the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    return run(sys.argv[1:])
