"""The groups and the ring of yunchang: sequence parallelism by Ulysses and by a ring, of 2 each.

    layerproof watch --deadline 20 -- torchrun --standalone --nproc-per-node 4 examples/watch/sequence_parallel.py

With `--broken` rank 2 leaves the ring before its last turn.
"""

import sys

import torch
import torch.distributed as dist
from yunchang import set_seq_parallel_pg
from yunchang.globals import PROCESS_GROUP
from yunchang.ring.utils import RingComm

dist.init_process_group("gloo")
rank = dist.get_rank()
set_seq_parallel_pg(2, 2, rank, 4)
ring = RingComm(PROCESS_GROUP.RING_PG)
chunk = torch.full((4,), float(rank))
turns = 1 if "--broken" in sys.argv and rank == 2 else 2
for _ in range(turns):
    following = ring.send_recv(chunk)
    ring.commit()
    ring.wait()
    chunk = following
dist.barrier()
print(f"rank {rank}: its chunk is that of rank {int(chunk[0])} again")
