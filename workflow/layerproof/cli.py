"""The command line. Each package keeps its verbs in a module `verbs`, which imports heavy packages inside the verbs, so
that a job with nothing to do returns before any of that. For the same reason only the module of the verb is imported.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Sequence

from layerproof import __version__
from layerproof.errors import UserError
from layerproof.rerun.command import PEOPLE

VERBS = {
    "project": ("init", "run", "why", "snakefile"),
    "model.verbs": ("weights", "schema", "tokens", "make-tiny"),
    "golden.verbs": ("golden", "import-golden", "import-preflight", "export"),
    "port.verbs": ("port", "chain", "captured"),
    "compare.verbs": ("compare", "compare-chain", "bisect"),
    "host.verbs": ("predict", "preflight", "watch", "launch"),
    "diagnose.verbs": ("teacher-force", "diagnose"),
    "report.verbs": (
        "audit",
        "prune",
        "verdicts",
        "plot-stage",
        "plot-model",
        "report",
        "manifest",
        "archive",
        "verify",
        "rerun",
        "diff",
        "gate",
    ),
}
"""The verbs of each module of Layerproof."""
ORDER = (
    "init",
    "run",
    "gate",
    "diff",
    "verify",
    "rerun",
    "audit",
    "preflight",
    "watch",
    "launch",
    "why",
    "snakefile",
    "make-tiny",
)
"""Verbs for people, as the help page lists them."""


@functools.cache
def parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The command line. For a verb it knows the verbs of one module, otherwise all of them. Every flag that names several
    files takes them one after the other.
    """
    usage = "layerproof VERB ...    (layerproof VERB --help describes each)"
    top = argparse.ArgumentParser("layerproof", usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"layerproof {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", help=argparse.SUPPRESS, prog="layerproof")
    of_verb = [module for module, names in VERBS.items() if verb in names]
    for module in of_verb or VERBS:
        importlib.import_module(f"layerproof.{module}").add_verbs(verbs)
    if not of_verb:
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
    return "\n".join([*lines, "", "other verbs, most of which rules call:", *(f"  {line}" for line in others)])


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line up to the first --, and what is behind it."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:end]), list(argv[end + 1 :])


def run(argv: Sequence[str]) -> int:
    """Runs a verb and returns its exit code; a user's error is one line and exit code 2."""
    verb = ""
    try:
        own, behind_dashes = _parted(argv)
        args = parser(own[0] if own else None).parse_args(own)
        verb, args.behind_dashes = args.verb, behind_dashes
        if behind_dashes and verb not in ("run", "watch", "launch"):
            raise UserError(f"--: {verb} takes nothing behind it. Leave it out.")
        return args.action(args) or 0
    except BrokenPipeError:  # of `layerproof audit | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
        return 128 + signal.SIGPIPE
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
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 2
