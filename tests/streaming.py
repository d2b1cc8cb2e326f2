"""The golden of a small checkpoint, stage by stage."""

from configs import config_with
from layerproof.golden import stage as golden_stage
from layerproof.model import checkpoint, loading
from layerproof.model.stages import all_stages, previous_stage
from layerproof.model.tokens import pad

SETTINGS = config_with(golden={"device": "cpu"})
TOKENS = pad([list(range(3, 23)), [5, 9, 2, 40, 41], [7] * 12], pad_id=0)


def stream(directory, results, whole=None, tokens=TOKENS, compared=None):
    """Every stage by the golden's jobs, as the workflow calls them."""
    layers = checkpoint.num_layers(checkpoint.read_config(directory))
    stages = all_stages(layers)
    descriptions, _ = loading.describe_stages(directory, stages, trust_remote_code=False)
    for stage in stages:
        previous = previous_stage(stage, layers)
        before = [results / f"{previous}{ending}" if previous else None for ending in (".h5", ".noise.h5")]
        golden_stage.make_stage(
            stage,
            directory,
            descriptions[stage],
            tokens,
            *before,
            results / f"{stage}.h5",
            results / f"{stage}.noise.h5",
            SETTINGS,
            compared is None or stage in compared,
            whole,
        )
    return stages
