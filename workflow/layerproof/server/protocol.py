"""What clients and servers agree on. Imports nothing."""

from __future__ import annotations

SIDES = {
    **dict.fromkeys(("weights", "tokens", "predict", "preflight", "golden"), "golden"),
    **dict.fromkeys(("port", "force", "bisect"), "port"),
    "diagnose": "diagnose",
}
"""Verbs that share a process: because they have use for torch and transformers, because they run a port, because they have
the dictionary of faults. The others share one that imports none of this.
"""

BY_KIND = ("port", "diagnose")
"""Sides of which only stages of one kind share a process, and what they ran counts for each of them: a port may keep
something in its first job that the next one uses, such as a compiled graph or a table; and faults are registered when the
dictionary is imported.
"""

DIGITS = 8
"""Of the checksums that name environments and kinds."""

HOST, DEVICE = b"h", b"d"
"""Whether the process of a job holds a device, so that an idle one of another kind has to end before it."""


def side_of(verb: str) -> str:
    """The side whose server runs a verb."""
    return SIDES.get(verb, "other")
