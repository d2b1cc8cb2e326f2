"""What preflight says of a host: of devices as their drivers describe them, of memory, disk, versions and checkpoint."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from configs import config_with
from layerproof.config import read
from layerproof.errors import UserError
from layerproof.host import checks, neuron, preflight
from layerproof.host.checks import Check
from layerproof.host.neuron import NeuronDevice
from layerproof.host.preflight import Gpu
from layerproof.paths import shipped
from models import save
from programs import write_program

FIXTURES = Path(__file__).parents[1] / "fixtures"
GIB = 1 << 30
NO_DRIVER = (
    'time="2026-09-12T02:42:06Z" level=fatal msg="Failed to load MLA system information" '
    'error="failed to discover Neuron devices"\n'
)
GOLDEN = {"device": "auto", "mode": "streamed"}
WHOLE = {"device": "cpu", "mode": "whole", "device_map": "auto"}
PREDICTION = {"golden": 8 * GIB, "port": 8 * GIB, "whole": 430 * GIB, "files": 3 * GIB, "forced": GIB}
PREDICTION |= {"weights": {"golden": 10 * GIB}, "stages": {"layer_000": {"files": GIB}, "norm": {"files": 2 * GIB}}}


def check_golden_device(golden, *arguments):
    return preflight.check_golden_device(config_with(golden=golden).golden, *arguments)


def check_whole_memory(golden, *arguments):
    return preflight.check_whole_memory(config_with(golden=golden).golden, *arguments)


def statuses(found):
    return {check.name: check.status for check in found}


def neuron_ls(name, **environment):
    return list(neuron.check_neuron_ls(0, (FIXTURES / name).read_text(), PREDICTION, environment))


def test_each_rank_wants_a_core():
    text = (FIXTURES / "neuron-ls-trn1.2xlarge.json").read_text()

    def found(ranks, **environment):
        return {check.name: check for check in neuron.check_neuron_ls(0, text, PREDICTION, environment, ranks)}

    assert "ranks" not in found(2)
    assert (
        "need 4.29 GB of the 17.2 GB of a core, split evenly over 2 ranks" in found(2)["device memory"].text
        and "ranks" not in found(1)["device memory"].text
    )
    assert (found(3)["ranks"].status, found(3)["ranks"].text) == (
        "fail",
        "parallel asks for 3 ranks, but only 2 cores are usable",
    )
    assert (
        found(2, NEURON_RT_VISIBLE_CORES="1")["ranks"].text == "parallel asks for 2 ranks, but only 1 cores are usable"
    )
    devices = json.loads(text) * 2
    found = neuron.check_neuron_ls(0, json.dumps(devices), None, {"NEURON_RT_VISIBLE_CORES": "0-3"}, 2)
    assert "parallel asks for 2 ranks, but NEURON_RT_VISIBLE_CORES=0-3 names 4 cores" in {check.text for check in found}


def test_nvidia_smi_is_read():
    text = "NVIDIA H100 80GB HBM3, 81559, 4, 550.90.07\nNVIDIA A100-SXM4-80GB, 81920, 75899, 535.104.05\n"
    assert preflight.parse_nvidia_smi(text) == [
        Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 4 << 20, "550.90.07"),
        Gpu("NVIDIA A100-SXM4-80GB", 81920 << 20, 75899 << 20, "535.104.05"),
    ]
    assert preflight.parse_nvidia_smi("NVIDIA GB10, [N/A], [N/A], 580.95.05\n") == [
        Gpu("NVIDIA GB10", 0, 0, "580.95.05")
    ]
    h200 = preflight.parse_nvidia_smi((FIXTURES / "nvidia-smi-h200-nvl.csv").read_text())
    assert [(gpu.name, gpu.free >> 20) for gpu in h200] == [("NVIDIA H200 NVL", 55012), ("NVIDIA H200 NVL", 81964)]
    for text in ("No devices were found\n", "lorem, ipsum, dolor, sit\n", "A, 81920, ², 535\n"):
        assert preflight.parse_nvidia_smi(text) == []


def test_neuron_ls_is_read():
    read = {path.name: neuron.parse_neuron_ls(path.read_text()) for path in FIXTURES.glob("neuron-ls-*.json")}
    assert read == {
        "neuron-ls-trn1.2xlarge.json": [NeuronDevice(2, 32 * GIB, ())],
        "neuron-ls-trn2.48xlarge.json": [NeuronDevice(4, 96 * GIB, ("1966680", "1966681"))],
    }
    itself = {"pid": 7, "command": "neuron-ls --json-output --show-all-procs"}
    (device,) = json.loads((FIXTURES / "neuron-ls-trn1.2xlarge.json").read_text())
    assert neuron.parse_neuron_ls(json.dumps([device | {"neuron_processes": [itself]}]))[0].users == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "{}x",
        '[{"neuron_device": 0}]',
        '["trn1"]',
        "[null]",
        '[{"nc_count": 0, "memory_size": 1}]',
        '[{"nc_count": "2", "memory_size": 1}]',
    ],
)
def test_what_is_not_of_neuron_ls_is_told(text):
    with pytest.raises(UserError, match="neuron-ls: its output cannot be parsed"):
        neuron.parse_neuron_ls(text)
    (check,) = neuron.check_neuron_ls(0, text, None, {})
    assert (check.name, check.status) == ("device", "fail")


def test_an_idle_trn1_is_ready():
    found = neuron_ls("neuron-ls-trn1.2xlarge.json", NEURON_RT_VISIBLE_CORES="0-1")
    assert statuses(found) == {"device": "ok", "device memory": "ok"}
    assert found[0].text == "1 Neuron devices, 2 logical cores with 17.2 GB each"


def test_cores_that_are_in_use_and_cores_that_are_not_there_are_told():
    found = neuron_ls("neuron-ls-trn2.48xlarge.json", NEURON_RT_VISIBLE_CORES="2,4-5")
    assert statuses(found) == {"device": "ok", "cores": "fail", "visible cores": "fail", "device memory": "ok"}
    assert found[1].text == "0 of 1 cores are on idle devices; processes on the other devices: 1966680; 1966681"
    assert "this host has cores 0-3" in found[2].text
    used, idle = (
        json.loads((FIXTURES / f"neuron-ls-{name}.json").read_text()) for name in ("trn2.48xlarge", "trn1.2xlarge")
    )
    both = json.dumps(used + idle)
    found = neuron.check_neuron_ls(0, both, None, {"NEURON_RT_VISIBLE_CORES": "zero"})
    assert statuses(found) == {"device": "ok", "visible cores": "fail"}
    for cores, status in (
        ({}, "warn"),
        ({"NEURON_RT_VISIBLE_CORES": "3-4"}, "warn"),
        ({"NEURON_RT_VISIBLE_CORES": "4-5"}, None),
    ):
        assert statuses(neuron.check_neuron_ls(0, both, None, cores)).get("cores") == status, cores


@pytest.mark.parametrize(
    ("code", "output", "text"),
    [
        (None, "is not installed", "neuron-ls is not installed"),
        (1, NO_DRIVER, "no Neuron device: failed to discover Neuron devices"),
        (1, "", "no Neuron device"),
        (0, "[]", "no Neuron device"),
    ],
)
def test_a_host_without_neuron_fails(code, output, text):
    (check,) = neuron.check_neuron_ls(code, output, PREDICTION, {})
    assert (check.status, check.text) == ("fail", text) and check.remedy


def test_a_stage_that_is_larger_than_a_core_is_warned_of():
    text = (FIXTURES / "neuron-ls-trn1.2xlarge.json").read_text()
    found = neuron.check_neuron_ls(0, text, {"port": 17 * GIB}, {})
    assert statuses(found)["device memory"] == "warn"


def test_neurons_driver_and_runtime(monkeypatch, tmp_path):
    monkeypatch.setattr(neuron, "NEURON_DRIVER", tmp_path / "version")
    monkeypatch.setattr(neuron, "NEURON_LIBRARIES", str(tmp_path))
    found = {check.name: check for check in neuron.check_neuron(None, {}, 1)}
    assert (found["driver"].status, found["runtime"].status) == ("warn", "fail")
    assert "aws-neuronx-dkms" in found["driver"].remedy and "aws-neuronx-runtime-lib" in found["runtime"].remedy
    (tmp_path / "version").write_text("2.24.7.0\n")
    (tmp_path / "libnrt.so.1").touch()
    found = {check.name: check for check in neuron.check_neuron(None, {}, 1)}
    assert found["driver"] == Check("driver", "ok", "neuron 2.24.7.0")
    assert found["runtime"] == Check("runtime", "ok", str(tmp_path / "libnrt.so.1"))


def fake_tool(monkeypatch, directory, name, text, code=0):
    write_program(directory / name, f"cat <<'E'\n{text}\nE\nexit {code}")
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def golden_device(golden, prediction=PREDICTION):
    return list(check_golden_device(golden, prediction, *preflight._gpus()))


def test_a_gpu_that_torch_does_not_see_is_warned_of_and_one_asked_for_fails(monkeypatch, tmp_path):
    fake_tool(monkeypatch, tmp_path, "nvidia-smi", "NVIDIA H100 80GB HBM3, 81559, 4, 550.90.07")
    (check,) = golden_device(GOLDEN)
    assert check.status == "warn" and "NVIDIA H100 80GB HBM3 is present, but torch" in check.text
    (check,) = golden_device(GOLDEN | {"device": "cuda"})
    assert check.status == "fail" and "nvidia-smi lists 1" in check.text
    (check,) = golden_device(GOLDEN | {"device": "cpu"})
    assert check.status == "ok"


def test_a_tool_that_fails_is_warned_of_where_a_gpu_may_be(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (check,) = check_golden_device(GOLDEN, None, [], "nvidia-smi does not answer within a minute")
    assert (check.status, check.text) == ("warn", "the CPU; nvidia-smi does not answer within a minute")
    for problem in ("nvidia-smi is not installed", ""):
        (check,) = check_golden_device(GOLDEN, None, [], problem)
        assert check.status == "ok"
    (check,) = check_golden_device(GOLDEN | {"device": "cuda"}, None, [], "")
    assert (check.status, check.text) == ("fail", "no CUDA device: nvidia-smi lists none")


def test_a_disk_without_a_folder_fails():
    golden = WHOLE | {"device_map": {"model": "cpu", "lm_head": "disk"}}
    check = check_whole_memory(golden, None, GIB, [])
    assert check.status == "fail" and "golden.offload_folder is not set" in check.text
    assert check_whole_memory(golden | {"offload_folder": "left"}, None, GIB, []).status == "ok"


def test_a_gpu_that_is_not_there_fails(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpus = [Gpu("A", 80 * GIB, 0, "550")] * 2
    for golden in (WHOLE | {"device_map": "cuda:2"}, WHOLE | {"device_map": {"lm_head": 0, "model": 2}}):
        (check,) = check_golden_device(golden, None, gpus, "")
        assert (check.status, check.text) == ("fail", "golden.device_map names GPU 2, but the last visible GPU is 1")
    assert statuses(check_golden_device(WHOLE | {"device_map": "cuda:1"}, None, gpus, "")) == {"device": "ok"}


def test_a_limit_that_leaves_weights_without_a_place_fails(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    golden = WHOLE | {"max_memory": {"cpu": "9GiB"}}
    check = check_whole_memory(golden, PREDICTION, 900 * GIB, [])
    assert check.status == "fail" and "golden.max_memory allows the host only 9GiB" in check.text
    for enough in (golden | {"max_memory": {"cpu": "10GiB"}}, golden | {"offload_folder": "left"}):
        assert check_whole_memory(enough, PREDICTION, 900 * GIB, []).status == "ok"


def test_nvidia_smi_is_asked_for_what_cuda_may_use(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--id=1*) echo "B, 10, 1, 550";; *) echo "A, 9, 1, 550"; echo "B, 10, 1, 550";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.name for gpu in preflight._gpus()[0]] == ["A", "B"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in preflight._gpus()[0]] == ["B"]
    tool.write_text('#!/bin/sh\necho " "\nexit 9\n')
    assert preflight._gpus() == ([], "nvidia-smi ended with exit code 9")
    tool.write_bytes(b"#!/bin/sh\nprintf '\\377\\376 broken'\nexit 9\n")
    assert preflight._gpus()[1].endswith("broken")
    tool.chmod(0o644)
    assert preflight._gpus() == ([], "nvidia-smi cannot run (Permission denied)")


def test_a_tool_that_hangs_is_not_told_to_be_missing(monkeypatch):
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(checks.subprocess, "run", hangs)
    assert preflight._gpus() == ([], "nvidia-smi does not answer within a minute")
    with pytest.raises(UserError, match="sinfo: does not answer within a minute"):
        preflight.require_slurm()


def test_slurm_must_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    with pytest.raises(UserError, match=r"sinfo: is not installed\. Run on a host with Slurm's commands"):
        preflight.require_slurm()
    tool = tmp_path / "sinfo"
    write_program(tool, "echo Unable to contact slurm controller >&2\nexit 1")
    with pytest.raises(UserError, match=r"Slurm does not answer \(Unable to contact slurm controller\)"):
        preflight.require_slurm()
    tool.write_text("#!/bin/sh\necho cpu up\n")
    preflight.require_slurm()


def test_the_limit_of_a_group_above_counts(tmp_path):
    def group(name, limit, used, cache=0):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")

    group("slurm", 100, 60, cache=20)
    group("slurm/job", "max", 30)
    (tmp_path / "memory.stat").write_text("anon 1\n")
    assert list(preflight.left_in_groups("0::/slurm/job\n", tmp_path)) == [60]
    group("slurm/job", 40, 30)
    assert list(preflight.left_in_groups("1:cpu:/\n0::/slurm/job\n", tmp_path)) == [10, 60]
    assert not list(preflight.left_in_groups("4:memory:/user\n", tmp_path)), "version 1 says nothing"


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (1, {}),
        (8, {}),
        (3, {"heads": "48 query heads and 8 key/value heads on 3 ranks"}),
        (48, {}),
        (64, {"heads": "on 64 ranks", "intermediate size": "1536 / 64 ranks = 24 of each expert, below 32"}),
        (5, {"heads": "on 5 ranks", "intermediate size": "1536 is not divisible by 5 ranks"}),
    ],
)
def test_ranks_are_held_against_the_models_sizes(ranks, told):
    sizes = {"num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 1536, "num_local_experts": 256}
    found = {check.name: check for check in neuron.check_sharding(sizes, ranks)}
    assert found.keys() == told.keys() and {check.status for check in found.values()} <= {"warn"}
    assert all(text in found[name].text for name, text in told.items())
    dense = {check.name for check in neuron.check_sharding(sizes | {"num_local_experts": None}, 64)}
    assert dense == {"heads"}


def test_a_driver_that_does_not_answer_is_quoted(monkeypatch, tmp_path):
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    fake_tool(monkeypatch, tmp_path, "nvidia-smi", said, code=9)
    (check,) = golden_device(GOLDEN | {"device": "cuda"})
    assert check.text == f"no CUDA device: {said}"


def test_gpu_memory_is_held_against_what_is_predicted(monkeypatch, tmp_path):
    fake_tool(monkeypatch, tmp_path, "nvidia-smi", "\n".join(["NVIDIA H100 80GB HBM3, 81559, 76000, 550.90.07"] * 8))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = golden_device(GOLDEN)
    assert statuses(found) == {"device": "ok", "device memory": "warn"}
    found = golden_device(WHOLE, PREDICTION | {"whole": 40 * GIB})
    assert statuses(found) == {"device": "ok", "device memory": "ok"}
    assert found[1].text.startswith("the full model is predicted to need 42.9 GB of 46.6 GB")


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, "warn"),
        ({"offload_folder": "left"}, "ok"),
        ({"device_map": "sequential", "offload_folder": "left"}, "ok"),
        ({"max_memory": {"0": "10GiB"}}, "warn"),
        ({"max_memory": {"0": "10GiB", "cpu": "500GiB"}}, "ok"),
        ({"max_memory": {"0": "10GiB", "cpu": "400GiB"}}, "warn"),
        ({"max_memory": {"0": "10GiB", "cpu": "400GiB"}, "offload_folder": "left"}, "ok"),
        # Accelerate moves nothing that is placed by name.
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "warn"),
        ({"device_map": {"": 0}, "max_memory": {"0": "10GiB", "cpu": "500GiB"}}, "warn"),
        ({"device_map": "cuda:0", "offload_folder": "left"}, "warn"),
    ],
)
def test_what_the_config_leaves_to_the_host_need_not_fit_on_gpus(settings, status, monkeypatch, tmp_path):
    fake_tool(monkeypatch, tmp_path, "nvidia-smi", "NVIDIA H100 80GB HBM3, 81559, 4, 550.90.07")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert statuses(golden_device(WHOLE | settings)) == {"device": "ok", "device memory": status}


@pytest.mark.parametrize(
    ("settings", "on_gpus"),
    [
        ({"device_map": "auto"}, 8 * 40),
        ({"device_map": "balanced_low_0", "max_memory": {"0": "10GiB", "3": "60GiB", "cpu": "500GiB"}}, 10 + 40),
        ({"device_map": "cuda:1"}, 40),
        ({"device_map": "cuda"}, 40),
        ({"device_map": {"model.embed_tokens": 2, "model.layers": "cuda:3", "lm_head": "cpu"}}, 2 * 40),
        ({"device_map": "cpu"}, 0),
    ],
)
def test_the_host_has_what_gpus_have_no_room_for_of_the_whole_model(settings, on_gpus, monkeypatch):
    gpus = [Gpu("NVIDIA H100 80GB HBM3", 40 * GIB, 0, "550.90.07")] * 8
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    golden = WHOLE | settings
    left = (430 - on_gpus) * GIB + preflight.IMPORTS
    assert check_whole_memory(golden, PREDICTION, left, gpus).status == "ok"
    check = check_whole_memory(golden, PREDICTION, left - 1, gpus)
    assert (check.status, check.remedy) == (
        "warn",
        "Set golden.offload_folder, or write golden.mode: streamed.",
    )
    offloaded = golden | {"offload_folder": "left"}
    assert check_whole_memory(offloaded, PREDICTION, left - 1, gpus).status == "ok"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check_whole_memory(golden, PREDICTION, 430 * GIB, gpus).status == "warn", "torch sees no GPU"


@pytest.mark.parametrize(
    ("device_map", "status"),
    [
        ("cuda:0", "fail"),
        ({"model": 0, "lm_head": "cpu"}, "fail"),
        ({"model": "cpu", "lm_head": "disk"}, "ok"),
        ("auto", "ok"),
    ],
)
def test_devices_of_the_whole_model_are_those_of_its_map(device_map, status, monkeypatch, tmp_path):
    """Not golden.device, which is of a streamed one."""
    fake_tool(monkeypatch, tmp_path, "nvidia-smi", "No devices were found", code=6)
    (check,) = golden_device(WHOLE | {"device_map": device_map})
    assert check.status == status
    if status == "fail":
        assert check.remedy == "Run on a GPU host, or write golden.device_map: cpu."


def test_the_whole_model_on_this_host(tmp_path):
    save("llama", tmp_path / "model")
    config = config_with(golden=WHOLE | {"device_map": "cpu"})
    for held, status in ((GIB, "ok"), (1 << 50, "warn")):
        prediction = PREDICTION | {"whole": held, "golden": 0}
        found = preflight.check_side("golden", config, tmp_path / "model", tmp_path, prediction)
        assert statuses(found)["memory"] == status


def needs_nothing(name):
    return []


def test_libraries():
    (check,) = preflight.check_libraries("port", True, {"torch": "2.9.1", "torch-xla": "2.9.0"}.get, needs_nothing)
    assert check.status == "fail"
    assert check.text.startswith(
        "safetensors, h5py, torch-neuronx, libneuronxla, neuronx-cc are not installed; found torch 2.9.1"
    )
    (check,) = preflight.check_libraries("golden", False, lambda name: "1.0", needs_nothing)
    assert check == Check("libraries", "ok", "torch 1.0, transformers 1.0, accelerate 1.0, safetensors 1.0, h5py 1.0")


def test_versions_that_do_not_belong_together_are_told():
    """As packages themselves say; torch-xla says nothing, and aborts with the torch of another release."""
    installed = dict.fromkeys(preflight.LIBRARIES["port"], "1.0") | {
        "torch": "2.8.0+cpu",
        "torch-neuronx": "2.8.0.2.10",
    }
    installed |= {"torch-xla": "2.8.1", "libneuronxla": "2.2", "neuronx-cc": "2.20.9961.0+0acef03a"}
    needs = {"torch-neuronx": [Requirement("torch==2.8.*"), Requirement("torch-xla==2.8.1"), Requirement("absent>1")]}

    def versions(**other):
        there = installed | {name.replace("_", "-"): version for name, version in other.items()}
        found = preflight.check_libraries("port", True, there.get, lambda name: needs.get(name, []))
        return [check for check in found if check.name == "versions"]

    assert versions() == []
    (check,) = versions(torch="2.9.1")
    assert (check.status, check.text) == (
        "warn",
        "torch-neuronx 2.8.0.2.10 needs torch==2.8.*, but 2.9.1 is installed; "
        "torch-xla 2.8.1 was not built for torch 2.9.1",
    )


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.6.0a0+ecf3bae40a.nv25.1", True), ("2.6.0+cpu", True), ("2.5.1", False), ("2.8.0-gitx", True)],
)
def test_versions_of_vendors_are_compared_as_far_as_they_can_be(version, fits):
    installed = dict.fromkeys(preflight.LIBRARIES["golden"], "1.0") | {"torch": version}
    needs = {"transformers": [Requirement("torch>=2.6")]}
    found = preflight.check_libraries("golden", False, installed.get, lambda name: needs.get(name, []))
    assert ("versions" not in statuses(found)) == fits
    assert "versions" not in statuses(
        preflight.check_libraries("port", False, lambda name: "made-up" if "torch" in name else "1.0", needs_nothing)
    )


def test_a_requirement_that_cannot_be_understood_is_left_out(monkeypatch):
    asked = ["numpy (>=1.24.*)", "h5py>=3", 'pytest; extra == "test"', 'torch>=2; extra == "torch"']
    monkeypatch.setattr(preflight.metadata, "requires", lambda name: asked)
    assert [one.name for one in preflight._required("any")] == ["h5py", "torch"]


def test_a_golden_on_the_cpu_asks_no_driver(monkeypatch):
    def fails(*command):
        raise AssertionError(command)

    monkeypatch.setattr(preflight, "run_tool", fails)
    for golden in (GOLDEN | {"device": "cpu"}, WHOLE | {"device_map": {"model": "cpu", "lm_head": "disk"}}):
        found = preflight.check_golden_host(config_with(golden=golden), None, GIB)
        assert statuses(found)["device"] == "ok"


def test_what_is_installed_here_belongs_together():
    needed = {one.name: one.specifier for one in preflight._required("transformers")}
    assert needed["torch"] and "tokenizers" in needed, "torch is an extra of transformers"
    for side in ("golden", "port"):
        found = list(preflight.check_libraries(side, False, preflight._installed, preflight._required))
        assert statuses(found) == {"libraries": "ok"}


def test_nxd_inference():
    (check,) = neuron.check_nxdi({"neuronx_distributed": "spec"}.get)
    assert check.status == "fail" and check.text == "neuronx_distributed_inference is not installed"
    (check,) = neuron.check_nxdi(lambda name: "spec")
    assert check.status == "ok"


def test_memory_and_disk(tmp_path):
    assert preflight.check_memory("golden", PREDICTION, 10 * GIB).status == "ok"
    assert preflight.check_memory("golden", PREDICTION, 8 * GIB).status == "warn"
    assert preflight.check_memory("port", PREDICTION, 10 * GIB, ranks=2).status == "warn", "each converts the stage"
    assert preflight.check_memory("golden", None, 0).status == "ok"
    assert preflight.check_disk(tmp_path, PREDICTION, 5 * GIB).status == "ok"
    if_all_fail = preflight.check_disk(tmp_path, PREDICTION, 4 * GIB)
    assert if_all_fail.status == "warn" and "if all stages fail, it writes 1.07 GB more" in if_all_fail.text
    assert preflight.check_disk(tmp_path, PREDICTION, 3 * GIB).status == "fail", (
        "noise and plots come beside the tensors"
    )
    others = {"forced/norm.h5": GIB, "golden/layer_009.h5": GIB, "port/layer_000.h5": 0}
    for name, size in (others | {"noise/layer_000.h5": 3 * GIB}).items():
        assert preflight.check_disk(tmp_path, PREDICTION, 3 * GIB).status == "fail", "they are not among its files"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    assert preflight.check_disk(tmp_path, PREDICTION, 2 * GIB).status == "fail", "those of one stage are not another's"
    assert preflight.check_disk(tmp_path, PREDICTION, 4 * GIB).status == "ok", "what is there needs no room"


def test_results_that_cannot_be_written_are_told(tmp_path, monkeypatch):
    def refuse(**options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    check = preflight.check_disk(tmp_path, PREDICTION, 5 * GIB)
    assert (check.status, check.text) == ("fail", f"{tmp_path} cannot be written (Read-only file system)")


def test_the_compile_cache_must_be_writable(tmp_path):
    kept = {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "not/yet/made")}
    assert neuron.check_compile_cache(kept) == Check("compile cache", "ok", kept["NEURON_COMPILE_CACHE_URL"])
    by_flag = neuron.check_compile_cache({"NEURON_CC_FLAGS": "--model-type=transformer --cache_dir=/proc/cache"})
    assert (by_flag.status, by_flag.text.split()[0]) == ("warn", "/proc/cache")
    assert neuron.check_compile_cache({"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"}).status == "ok"


def test_a_checkpoint_is_whole_or_is_told_of(tmp_path):
    save("llama", tmp_path, shard_size="30KB")
    assert preflight.check_checkpoint(tmp_path).status == "ok"
    config = (tmp_path / "config.json").read_text()
    for text in ("{", "{}"):
        (tmp_path / "config.json").write_text(text)
        assert preflight.check_checkpoint(tmp_path).status == "fail"
    (tmp_path / "config.json").write_text(config)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {"a.b": shard_of(content)}}))
    check = preflight.check_checkpoint(tmp_path)
    assert check.status == "warn" and "names a.b, which no shard contains" in check.text
    index.write_text(json.dumps(content))
    shard = tmp_path / shard_of(content)
    shard.write_bytes(shard.read_bytes()[:-2])
    check = preflight.check_checkpoint(tmp_path)
    assert check.status == "warn" and "is shorter than its header says" in check.text
    shard.unlink()
    assert "does not exist, but the index names it" in preflight.check_checkpoint(tmp_path).text
    others = sorted(tmp_path.glob("*.safetensors"))
    others[0].unlink()
    check = preflight.check_checkpoint(tmp_path)
    assert check.status == "warn" and check.text.endswith("; 2 shards are damaged")
    for other in others[1:]:
        other.unlink()
    assert preflight.check_checkpoint(tmp_path).status == "fail", "no stage has its weights"
    index.unlink()
    assert preflight.check_checkpoint(tmp_path).status == "fail"


def shard_of(index):
    return next(iter(index["weight_map"].values()))


@pytest.mark.parametrize("side", ["golden", "port"])
def test_the_checkpoint_that_ships_is_whole_and_one_that_does_not_exist_is_told(side, tmp_path, monkeypatch):
    raw = read(Path("config.yaml"))
    monkeypatch.chdir(tmp_path)
    settings = config_with(**raw)
    for checkpoint, status in ((shipped(settings.model.checkpoint), "ok"), (Path("gone"), "fail")):
        found = preflight.check_side(side, settings, checkpoint, Path("results"), None)
        assert statuses(found)["checkpoint"] == status


@pytest.mark.parametrize(("side", "device", "code"), [("golden", "auto", 0), ("port", "CPU", 0), ("port", "NEURON", 1)])
def test_by_hand(side, device, code, tmp_path):
    save("llama", tmp_path / "model")
    (tmp_path / "ids.json").write_text("[[3, 4]]")
    (tmp_path / "config.yaml").write_text(
        "model: {checkpoint: model}\ninputs: {prompts: null, token_ids: ids.json}\n"
        f"port: {{backend: transformers, device: {device}}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "layerproof", "preflight", "--side", side],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path("workflow").absolute())},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "ok   checkpoint:" in done.stdout and "ok   memory:" in done.stdout
    assert ("fail device: neuron-ls is not installed" in done.stdout) == (device == "NEURON")


@pytest.mark.parametrize(
    ("model_type", "golden", "status"),
    [
        ("llama", {}, None),
        ("llama", {"attn_implementation": "sdpa"}, "ok"),
        ("llama", {"experts_implementation": "grouped_mm"}, "fail"),
        ("gemma2", {"attn_implementation": "sdpa"}, "fail"),
        ("qwen3_moe", {"attn_implementation": "eager", "experts_implementation": "grouped_mm"}, "ok"),
    ],
)
def test_implementations_that_the_model_lacks_end_the_run(model_type, golden, status, tmp_path):
    save(model_type, tmp_path / "model", 0)
    found = list(preflight.check_implementations(config_with(golden=golden), tmp_path / "model"))
    assert [check.status for check in found] == ([status] if status else [])
    if status == "fail":
        (key,) = golden
        assert found[0].text.startswith(f"config.yaml: golden.{key}: the model has no {golden[key]} (")


def test_a_file_to_write_wants_what_a_job_has(capsys, tmp_path):
    from layerproof import cli

    assert cli.run(["preflight", str(tmp_path / "port.json"), "--side", "port"]) == 2
    assert capsys.readouterr().err.startswith("error: preflight: an output file needs exactly one --job.")
