"""accelerate's own test of its collectives.

    layerproof watch --check-collectives -- accelerate launch --multi_gpu --num_processes 2 examples/watch/accelerate_ops.py

`--multi_gpu` has it start several processes, which use the CPU here. With `--broken` rank 1 leaves out a broadcast. Nothing
hangs, because the root only sends: without `--check-collectives` rank 1 goes on with the numbers that it had, unnoticed.
"""

import os
import sys

os.environ["USE_TORCH_XLA"] = "0"  # which accelerate prefers if it is installed

from accelerate import PartialState
from accelerate.test_utils.scripts import test_ops

rank = PartialState(cpu=True).process_index
if "--broken" in sys.argv and rank == 1:
    test_ops.test_broadcast = lambda state: None
test_ops.main()
