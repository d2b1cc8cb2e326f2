"""What a stage's job holds in memory beside the stage: next to nothing, in the golden's job as in the port's."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from layerproof import checkpoint, fp8, golden, loading, port
from layerproof.tokens import pad
from models import COMMON

STAGE = "layer_000"
SETTINGS = {"device": "cpu", "dtype": "bfloat16", "trust_remote_code": False, "compared": [STAGE]}
TOKENS = pad([[3, 4, 5], [6, 7]], pad_id=0)
WIDE = {"num_hidden_layers": 1, "num_local_experts": 64, "num_experts_per_tok": 2, "rotary_dim": 8, "hidden_size": 128}


class Peak:
    """The most bytes that tensors on the host take at one time inside the block, beside those that were there before."""

    def __enter__(self):
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profiler.__enter__()
        return self

    def __exit__(self, *exception):
        self.profiler.__exit__(*exception)
        nodes, changes = list(self.profiler.profiler.kineto_results.experimental_event_tree()), []
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            # A shard that is mapped and not allocated adds nothing to the total.
            if node.tag.name == "Allocation" and node.extra_fields.total_allocated:
                changes.append((node.start_time_ns, node.extra_fields.total_allocated, node.extra_fields.alloc_size))
        _, total, change = min(changes)
        self.bytes = max(total for _, total, _ in changes) - (total - change)


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def model(request, tmp_path_factory):
    """A layer that is nearly all experts, as those of the full-size models are, and its bytes in bf16."""
    directory = tmp_path_factory.mktemp("model")
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["minimax_m2"](**COMMON | WIDE)).to(torch.bfloat16)
    made.save_pretrained(directory, max_shard_size="100KB")
    if request.param == "fp8":
        fp8.quantize_checkpoint(directory)
    stages = loading.describe_stages(directory, ["embed", STAGE], False)[0]
    return directory, stages, sum(tensor.nbytes for tensor in made.model.layers[0].state_dict().values())


def test_golden_holds_its_stage_once(model, tmp_path):
    directory, stages, size = model
    paths = [tmp_path / name for name in ("embed.h5", "embed.noise.h5", "layer.h5", "layer.noise.h5")]
    golden.make_stage("embed", directory, stages["embed"], TOKENS, None, None, *paths[:2], SETTINGS)
    with Peak() as peak:
        golden.make_stage(STAGE, directory, stages[STAGE], TOKENS, *paths, SETTINGS)
    assert size <= peak.bytes < 1.25 * size


def test_port_holds_its_stage_once(model):
    directory, stages, size = model
    ported = port.load_module("workflow/ports/minimax_m2.py")
    stage = port.Stage(STAGE, 0, checkpoint.read_config(directory), torch.bfloat16, {})
    weights = checkpoint.StageWeights(checkpoint.tensors_of_stage(directory, stages[STAGE]))
    with Peak() as peak:
        state = dict(ported.convert(stage, weights))
    assert sum(tensor.nbytes for tensor in state.values()) <= peak.bytes < 1.1 * size
