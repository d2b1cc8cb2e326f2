"""Errors that users of Neuron meet are answered with cause and remedy, in the words that they have there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerproof import known_errors
from layerproof.errors import StageError, StageMissing, UserError
from layerproof.failures import as_stage_error

WORKFLOW = Path(__file__).parents[1] / "workflow"

RECORDED = {
    "ModuleNotFoundError: No module named 'libneuronxla'": "Run the port in the Neuron container",
    "my_model.py: cannot be imported (ModuleNotFoundError: No module named 'neuronx_distributed_inference').": "are empty",
    "FileNotFoundError: [Errno 2] No such file or directory: 'libneuronpjrt-path'": "bin folder is not on PATH",
    "KeyError: 'xla'": "xla_backend was not imported",
    "AssertionError: Unknown backend type xla": "xla_backend was not imported",
    "RuntimeError: XLA device not found": "This process has no XLA device",
    "RuntimeError: PyTorch is not linked with support for xla devices": "This process has no XLA device",
    "AttributeError: module 'torch' has no attribute 'xla'": "This process has no XLA device",
    "ImportError: _XLAC.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN2at6native6einsum": "different releases",
    "AssertionError: tensor model parallel group is already initialized": "a second time",
    "AssertionError: parallel_state is already initialized": "a second time",
    "AssertionError: intra_layer_model parallel group is not initialized": "before initialising NxD's parallel groups",
    "ValueError: trying to initialize the default process group twice!": "is_initialized() first",
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29777, useIpv6: false, "
    "code: -98, name: EADDRINUSE, message: address already in use": "listens on MASTER_PORT",
    "DistNetworkError: The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 29778).": (
        "No rank 0"
    ),
    "ERROR   NRT:nrt_allocate_neuron_cores  Logical Neuron Core(s) not available - Requested:1 Available:0": "No NeuronCore",
    "RuntimeError: Neuron runtime cannot be initialized; cannot determine the number of available NeuronCores": (
        "No NeuronCore"
    ),
    "INFO   NRT:nrt_allocate_neuron_cores  Instance info:: device count:1 cores per device:2 architecture:TRN": None,
    "ERROR  TDRV:tdrv_get_dev_info    No neuron device available": "--device /dev/neuron0",
    "NRT:nrt_load_collectives  Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32.": (
        "number of ranks that the message lists"
    ),
    "AssertionError: num_key_value_heads (8) is not divisible by the tensor parallel degree": "divide the heads",
    "AssertionError: Q weight of shape 24 should be divisible by tp_degree.": "divide the heads",
    "AssertionError: num_heads (12) must be divisible by num_kv_heads (5)": "divide the heads",
    "ValueError: Unsupported I_size 1536 for tp degree 32. Per rank I_size 48 must be divisible by 512": "divide the heads",
    "ValueError: hidden_size 65 is not divisible by 4": None,
    "ImportError: flash_attn.so: undefined symbol: _ZN3c104cuda": None,
    "NewConnectionError: Failed to establish a new connection: [Errno 111] Connection refused": None,
    "No module named 'neuronx_distributed_inference.models.foo'": None,
    "[ERROR] DGE: descriptor generation failed": "moe_tp_degree",
    "DGE requires at least 32 elements per partition": "moe_tp_degree",
    "dma descriptor DGE: partition size 24 < 32": "moe_tp_degree",
    "neuronx-cc compile --internal-enable-dge-levels vector_dynamic_offsets": None,
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)": None,
}


@pytest.mark.parametrize(("text", "meaning"), RECORDED.items())
def test_recorded_errors(text, meaning):
    found = known_errors.explained(f"some line before\n{text}\nTraceback (most recent call last)")
    assert found is None if meaning is None else meaning in found


def test_of_several_the_last_ended_the_process():
    log = "No module named 'nki'\nRuntimeError: XLA device not found\nLogical Neuron Core(s) not available"
    assert "NeuronCore is free" in known_errors.explained(log)


@pytest.mark.slow
@pytest.mark.parametrize(
    "provoke",
    [
        "dist.init_process_group('gloo'); dist.init_process_group('gloo')",
        "import socket; s = socket.create_server(('127.0.0.1', 29791)); dist.init_process_group('gloo')",
        "dist.init_process_group('xla')",
        "torch.ones(1).to('xla')",
        "torch.xla",
    ],
)
def test_errors_of_the_installed_torch_are_among_them(provoke):
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29791", "RANK": "0", "WORLD_SIZE": "1"}
    code = f"import torch, torch.distributed as dist\n{provoke}"
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert outcome.returncode
    assert known_errors.explained(outcome.stderr.splitlines()[-1]), outcome.stderr


@pytest.mark.parametrize(
    "error",
    [
        KeyError("xla"),
        UserError("no device: XLA device not found"),
        StageError("KeyError: 'xla'"),
        StageMissing("KeyError: 'xla'"),
    ],
)
def test_a_stage_says_what_its_error_means(error):
    told = as_stage_error(error)
    assert known_errors.explained("KeyError: 'xla'") in str(told) or "This process has no XLA device" in str(told)
    assert "\n" not in str(told) and isinstance(told, StageMissing) == isinstance(error, StageMissing)


ABORTS = """
import os, sys
from pathlib import Path
from layerproof.rerun import jobs
from layerproof.rerun.job import Job
from layerproof.files import write_text

def work():
    print("NRT:nrt_allocate_neuron_cores  Logical Neuron Core(s) not available - Requested:1 Available:0", file=sys.stderr)
    sys.stderr.flush()
    os.abort()

job = Job("port/layer_000", {}, {}, {}, "new", "it has not run before", "new")
task = jobs.Task(job, (), (Path("out"),), work)
jobs.run_in_subprocess([task], lambda task, error: write_text(task.outputs[0], str(error)))
"""


def test_a_process_that_aborts_is_explained_by_its_log(tmp_path):
    with open(tmp_path / "log", "w") as log:
        environment = os.environ | {"PYTHONPATH": str(WORKFLOW)}
        command = [sys.executable, "-c", ABORTS]
        assert subprocess.run(command, cwd=tmp_path, env=environment, stdout=log, stderr=log).returncode == 0
    told = (tmp_path / "out").read_text()
    assert "killed by SIGABRT" in told and "No NeuronCore is free" in told and "\n" not in told
