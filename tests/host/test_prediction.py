"""What is expected of a run is what it takes."""

import h5py
import pytest
import torch
from safetensors.torch import load_file

from configs import config_with
from layerproof.golden import stage as golden_stage
from layerproof.host import prediction
from layerproof.model import checkpoint, handed, loading
from layerproof.model.stages import all_stages
from layerproof.model.tokens import pad
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors import pruning
from models import CONFIGS, save
from peak import Peak
from streaming import SETTINGS, stream

pytestmark = pytest.mark.slow

BY_TRANSFORMERS = config_with(port={"backend": "transformers", "device": "CPU"})
LONG = pad([list(range(3, 80)) * 6, [5, 9, 2, 40, 41]], pad_id=0)


def predicted(directory, tokens, settings=SETTINGS, **asked):
    stages = all_stages(checkpoint.num_layers(checkpoint.read_config(directory)))
    descriptions, _ = loading.describe_stages(directory, stages, trust_remote_code=False)
    run = {"compared": stages, "before": [], "chains": dict.fromkeys(stages, 1)}
    return prediction.predict(directory, descriptions, tokens, settings, **run | asked), descriptions


def stored(path):
    """Bytes of the tensors in a file."""
    with h5py.File(path) as file:
        found = []
        for group in ("golden", "truth", "port", "chained"):
            if group in file:
                file[group].visititems(lambda _, node: found.append(node.nbytes if getattr(node, "shape", None) else 0))
        return sum(found)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_weights_and_files_are_exact(model_type, tmp_path):
    save(model_type, tmp_path / "model")
    expected, descriptions = predicted(tmp_path / "model", LONG, BY_TRANSFORMERS)
    total = sum(
        tensor.nbytes for shard in (tmp_path / "model").glob("*.safetensors") for tensor in load_file(shard).values()
    )
    assert expected["weights"]["golden"] == total, "a head that is the embedding counts once"
    stage = "layer_001"
    model = golden_stage.load(
        stage, tmp_path / "model", descriptions[stage], torch.device("cpu"), torch.bfloat16, SETTINGS
    )
    held = sum(tensor.nbytes for tensor in loading.parameters_of(model, stage).values())
    assert expected["stages"][stage]["weights"]["golden"] == held

    stream(tmp_path / "model", tmp_path, tokens=LONG)
    runner = Runner.start(tmp_path / "model", LONG, BY_TRANSFORMERS)
    fed = handed.stage_input(tmp_path / "layer_000.h5", stage)
    port_stage.make_stage(runner, stage, descriptions[stage], fed, tmp_path / "port.h5")
    port_stage.chain_stage(runner, stage, descriptions[stage], fed, tmp_path / "chain.h5")
    noise = tmp_path / f"{stage}.noise.h5"
    files = [tmp_path / f"{stage}.h5", tmp_path / "port.h5", tmp_path / "chain.h5"]
    # Files hold wider integers than were expected.
    assert expected["stages"][stage]["files"] == pytest.approx(sum(map(stored, [*files, noise])), rel=0.02)
    for path in files:
        pruning.prune(path)
    assert expected["stages"][stage]["kept"] == sum(map(stored, [*files, noise]))


def test_disk_is_that_of_the_stages_which_run(tmp_path):
    save("minimax_m2", tmp_path / "model")
    whole, _ = predicted(tmp_path / "model", LONG)
    assert whole["files"] == sum(one["files"] for one in whole["stages"].values())
    assert whole["kept"] == sum(one["kept"] for one in whole["stages"].values())
    some, _ = predicted(tmp_path / "model", LONG, compared=["layer_001"], before=["embed", "layer_000"], chains={})
    two, _ = predicted(tmp_path / "model", LONG, compared=["layer_001"], before=[], chains={"layer_001": 2})
    stream(tmp_path / "model", tmp_path, tokens=LONG, compared=["layer_001"])
    before = [tmp_path / f"{stage}{end}.h5" for stage in ("embed", "layer_000") for end in ("", ".noise")]
    of_chain = whole["stages"]["layer_001"]["kept"] // 6  # the truth is two sixths, in fp32
    assert some["files"] - two["files"] == sum(map(stored, before)) - 2 * of_chain
    assert some["stages"]["norm"]["files"] == 0
    taps = {stage: one["files"] - one["kept"] // 6 for stage, one in whole["stages"].items()}
    assert 0 < some["forced"] < taps["layer_001"] and whole["forced"] < sum(taps.values())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_golden_job_takes_what_is_expected_and_not_much_less(model_type, tmp_path):
    save(model_type, tmp_path / "model")
    stream(tmp_path / "model", tmp_path, tokens=LONG)
    expected, descriptions = predicted(tmp_path / "model", LONG)
    for stage, before in (("layer_001", "layer_000"), ("lm_head", "norm")):
        paths = [tmp_path / name for name in (f"{before}.h5", f"{before}.noise.h5", "again.h5", "noise.h5")]
        with Peak() as peak:
            golden_stage.make_stage(stage, tmp_path / "model", descriptions[stage], LONG, *paths, SETTINGS)
        assert 0.5 < peak.bytes / expected["stages"][stage]["golden"] < 1.15, stage


def test_a_machine_is_told_by_its_memory():
    size = 60 * prediction.GIB
    totals = {"golden": size, "port": size, "weights": {"port": size}, "whole": 3 * size}
    found = {one["machine"].split(",")[0]: one for one in prediction.machines(totals)}
    assert not found["1 x A100 40 GB"]["stage"] and found["1 x H100 80 GB"]["stage"]
    assert not found["1 x H100 80 GB"]["whole"] and found["8 x A100 80 GB"]["whole"]
    assert found["8 x A100 80 GB"]["devices"] == 3
    trn = found["trn2.48xlarge"]
    assert trn["side"] == "port" and not trn["stage"] and trn["whole"] and trn["devices"] == 3
