"""What torch itself says of a drawn hang: plainly, with TORCH_DISTRIBUTED_DEBUG=DETAIL, by monitored_barrier and by Flight
Recorder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from hangs import drawn

c10d: Any = _distributed_c10d
TIMEOUT = 6.0
"""Seconds that init_process_group is given."""
PATIENCE = 15.0
"""Seconds after which ranks are killed."""
WAYS = ("plain torch", "DETAIL", "monitored_barrier", "Flight Recorder")


@dataclass(frozen=True)
class Said:
    """What ranks said of a run: whether another rank names the one to blame, and how many ended by themselves."""

    way: str
    names_rank: bool
    ended: int
    ranks: int
    text: str

    def __str__(self) -> str:
        end = "all end" if self.ended == self.ranks else f"{self.ranks - self.ended} of {self.ranks} ranks hang on"
        return (
            f"{self.way:18} {'names the rank' if self.names_rank else 'does not name it':17} {end:24} {self.text[:100]}"
        )


def said_of(program: drawn.Program, way: str) -> Said:
    """Runs the ranks of a program without Layerproof."""
    messages: dict[int, tuple[str, list]] = {}
    with drawn.forked(program, functools.partial(_rank, way), {}) as ranks:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(child.process.is_alive() for child in ranks.values()):
            for rank, child in ranks.items():
                with contextlib.suppress(EOFError, OSError):
                    if child.messages.poll(0.05):
                        messages[rank] = child.messages.recv()
        ended = sum(not child.process.is_alive() for child in ranks.values())
    text = _first_difference(messages) if way == "Flight Recorder" else _shortest(messages, program.rank)
    names = re.search(rf"\b[Rr]anks? ?\[?{program.rank}\b", text) is not None
    return Said(way, names, ended, len(ranks), text)


def _shortest(messages: dict[int, tuple[str, list]], blamed: int) -> str:
    """The first line of what a rank says that is not to blame."""
    said = [text for rank, (text, _) in messages.items() if rank != blamed]
    by_name = [text for text in said if re.search(rf"\b[Rr]anks? ?\[?{blamed}\b", text)]
    found = next(iter(by_name or [text for text in said if text != "finished"] or said), "nothing")
    return " ".join(found.split())


def _first_difference(messages: dict[int, tuple[str, list]]) -> str:
    """The first collective of a group that is not the same on all ranks whose dumps are there."""
    dumps = {
        rank: {(group, number): name for group, number, name in entries} for rank, (_, entries) in messages.items()
    }
    for key in sorted({key for dump in dumps.values() for key in dump}, key=lambda key: key[1]):
        names = {rank: dump.get(key, "nothing") for rank, dump in dumps.items()}
        if len(set(names.values())) > 1:
            odd = min(set(names.values()), key=lambda name: list(names.values()).count(name))
            which = [rank for rank, name in names.items() if name == odd]
            return f"sequence {key[1]} of group {key[0]}: rank {which[0]} has {odd}" if len(which) == 1 else str(names)
    return "no difference"


def _rank(way: str, program: drawn.Program, rank: int, sender: Connection) -> None:
    if way == "DETAIL":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        c10d.set_debug_level_from_env()
    if way == "Flight Recorder":
        os.environ["TORCH_FR_BUFFER_SIZE"] = "256"
    if way == "monitored_barrier":
        drawn.CALLS["barrier"] = (
            "dist.monitored_barrier(group, __import__('datetime').timedelta(seconds=5), wait_all_ranks=True)"
        )
    mine = program.kind if rank == program.rank else ""
    drawn.make_early_mistake(mine, program, rank)
    text = "finished"
    if mine == "stuck before it joins":
        time.sleep(drawn.FOR_EVER)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        drawn.run_steps(program, rank, mine)
    except Exception as error:
        text = str(error)
    sender.send((text, _entries() if way == "Flight Recorder" else []))
    if text == "finished" and mine != "ends early":
        time.sleep(PATIENCE)  # so that others do not end because it does


def _entries() -> Sequence[tuple[str, int, str]]:
    dump = pickle.loads(c10d._dump_fr_trace(True, False, False))
    return [
        (one["process_group"][0], one["collective_seq_id"], one["profiling_name"]) for one in dump.get("entries", ())
    ]
