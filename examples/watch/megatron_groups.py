"""The process groups of Megatron: tensor and pipeline parallelism of 2 each.

    layerproof watch --deadline 20 -- torchrun --standalone --nproc-per-node 4 examples/watch/megatron_groups.py

With `--broken` rank 3 uses another order of the axes and so creates other groups. torch would connect them without an error.
"""

import sys

import torch.distributed as dist
from megatron.core import parallel_state

dist.init_process_group("gloo")
order = "tp-cp-ep-dp-pp"
if "--broken" in sys.argv and dist.get_rank() == 3:
    order = "pp-tp-cp-ep-dp"
parallel_state.initialize_model_parallel(2, 2, order=order)
dist.barrier()
tensor, pipeline = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
print(f"rank {dist.get_rank()}: tp {tensor} of 2, pp {pipeline} of 2")
