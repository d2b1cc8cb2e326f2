"""Tensors that NxD Inference captured: which files are which stages, what is read of them, and what is refused."""

import pytest
import torch

import streaming
from configs import config_with
from layerproof import cli
from layerproof.errors import StageError, UserError
from layerproof.golden import stage as golden_stage
from layerproof.model import loading
from layerproof.model.captured import find
from layerproof.model.tokens import pad
from layerproof.port import captured
from layerproof.rerun.job import Job
from layerproof.tensors import hdf5

TOKENS = pad([[1, 2, 3], [4, 5]], pad_id=0)


def name(module, step="cte_step_1", side="output"):
    return f"captured_tensors_{step}_module_{module}_{side}.pt"


def test_outputs_of_stages_are_found_among_all_that_is_captured(tmp_path):
    wanted = {"embed": "embed_tokens", "layer_000": "layers.0", "layer_061": "model.layers.61", "norm": "model.norm"}
    others = [
        "layers.0.self_attn",
        "layers.1.self_attn.norm",
        "layers.0.input_layernorm",
        "lm_head",
        "layers",
        "layers.2.norm",
    ]
    for module in (*wanted.values(), *others):
        (tmp_path / name(module)).touch()
    for other in (name("layers.3", "tkg_step_2"), name("layers.3", side="input"), "capture_metadata.json"):
        (tmp_path / other).touch()
    assert find(tmp_path) == {stage: tmp_path / name(module) for stage, module in wanted.items()}


def test_two_files_for_a_stage_are_refused(tmp_path):
    for module in ("layers.0", "model.layers.0"):
        (tmp_path / name(module)).touch()
    with pytest.raises(UserError, match=r"is the output of layer_000, and so is .*\. Remove one"):
        find(tmp_path)


def test_a_folder_without_any_is_refused(tmp_path):
    (tmp_path / name("layers.0.mlp")).touch()
    with pytest.raises(
        UserError, match=r"contains no file such as captured_tensors_cte_step_1_module_layers\.0_output\.pt"
    ):
        find(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_padding_to_the_compiled_shape_is_left_out(tmp_path, dtype):
    padded = torch.randn(4, 8, 16).to(dtype)
    torch.save(padded, tmp_path / "file.pt")
    captured.make_stage("layer_000", tmp_path / "file.pt", TOKENS, tmp_path / "out.h5")
    found = hdf5.to_torch(hdf5.read(tmp_path / "out.h5", "port/out"))
    assert found.dtype == dtype and torch.equal(found, padded[:2, :3])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.zeros(1, dtype=torch.bfloat16), "contains one number"),
        (torch.zeros(1, 8, 16), r"has shape \[1, 8, 16\], but the run has 2 prompts of up to 3 tokens"),
        (torch.zeros(2, 2, 16), r"has shape \[2, 2, 16\]"),
        (torch.zeros(2, 8), r"has shape \[2, 8\]"),
        (torch.zeros(2, 8, 16, dtype=torch.int32), "contains no tensor of floats"),
        ({"a": torch.zeros(2, 8, 16)}, "contains no tensor of floats"),
        (print, "cannot be read as a tensor"),
    ],
)
def test_what_is_no_output_of_a_stage_is_refused(tmp_path, content, words):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(StageError, match=words):
        captured.make_stage("layer_000", tmp_path / "file.pt", TOKENS, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(StageError, match=r"file\.pt: cannot be read as a tensor"):
        captured.make_stage("layer_000", tmp_path / "file.pt", TOKENS, tmp_path / "out.h5")


def test_another_number_of_files_than_jobs_is_told(tmp_path, capsys):
    job = Job("chain/captured/layer_000", {}, {}, {}, "new", "it has not run before", "new")
    job.write(tmp_path / "job.json")
    command = ["captured", "layer_000.h5", "--job", str(tmp_path / "job.json"), "--tokens", "tokens.json"]
    assert cli.run([*command, "--captured", "a.pt", "b.pt"]) == 2
    assert "error: --captured: names 2 files for 1 job files." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("is_bf16_too", [True, False])
def test_an_input_captured_as_fp32_is_taken_in_the_golden_s_dtype(golden_of, tmp_path, is_bf16_too):
    """People save what they capture as fp32. If it is fp32, the model computed with it is another one."""
    golden = golden_of("qwen3")
    x = hdf5.to_torch(hdf5.read(golden / "layer_000.h5", "golden/out")).float()
    previous = tmp_path / "layer_000.h5"
    captured_input = hdf5.to_array(x if is_bf16_too else x * 1.001)
    hdf5.write(previous, {"port": {"out": captured_input}}, valid=streaming.TOKENS.valid, attributes={})
    descriptions, _ = loading.describe_stages(golden / "model", ["layer_001"], trust_remote_code=False)
    made = ["layer_001", golden / "model", descriptions["layer_001"], streaming.TOKENS, previous, None]
    made += [tmp_path / "layer_001.h5", tmp_path / "noise.h5", config_with(golden={"device": "cpu"})]
    if is_bf16_too:
        golden_stage.make_stage(*made, reads="port/out")
        out = hdf5.to_torch(hdf5.read(tmp_path / "layer_001.h5", "golden/out"))
        assert torch.equal(out, hdf5.to_torch(hdf5.read(golden / "layer_001.h5", "golden/out")))
    else:
        with pytest.raises(StageError, match=r"layer_001: its captured input is float32, with numbers that bfloat16"):
            golden_stage.make_stage(*made, reads="port/out")
