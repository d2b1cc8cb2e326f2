"""Tensor-parallel generation by transformers' own plan, with a tiny Llama of random weights.

    layerproof watch --deadline 20 -- torchrun --standalone --nproc-per-node 2 examples/watch/tensor_parallel.py

With `--broken` rank 1 generates a token less, as if it saw the end of the text before the others.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

dist.init_process_group("gloo")
folder = Path(tempfile.gettempdir()) / f"tiny-llama-{os.environ['TORCHELASTIC_RUN_ID']}"
if dist.get_rank() == 0:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
tokens = 7 if "--broken" in sys.argv and dist.get_rank() == 1 else 8
made = model.generate(torch.arange(1, 6)[None], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
dist.barrier()
print(f"rank {dist.get_rank()}: {made[0].tolist()}")
