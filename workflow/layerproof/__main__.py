"""`python -m layerproof VERB`: what the rules call, and the same by hand."""

import os
import sys


def main() -> int:
    """Runs a verb; if the workflow says where, in a process that the jobs of one call of snakemake share."""
    if workers := os.environ.get("LAYERPROOF_WORKERS"):
        from layerproof.server import client

        verb, *arguments = sys.argv[1:] or [""]
        if verb == "in-turn":
            return client.submit_in_turn(workers, arguments)
        if verb:
            return client.submit(workers, sys.argv[1:])
    from layerproof.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
