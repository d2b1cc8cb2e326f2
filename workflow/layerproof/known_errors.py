"""Explains common errors of torch.distributed, torch_xla, NxD and Neuron's runtime, and how to fix them.

The original messages name a place in a library, not the cause. The patterns here match only text that does not change
between versions.
"""

from __future__ import annotations

import re

SMALLER_SLICES_REMEDY = (
    "Use a smaller tensor parallel degree for the experts (moe_tp_degree) and more expert parallelism (moe_ep_degree)."
)

KNOWN = (
    (
        r"No module named '(libneuronxla|torch_neuronx|neuronxcc|nki|neuronx_distributed(_inference)?)'"
        r"|'libneuronpjrt-path'",
        "Neuron's packages are not in this environment, or its bin folder is not on PATH. Run the port in the "
        "Neuron container, or activate the environment that contains them; PyPI's packages of these names are empty.",
    ),
    (
        r"KeyError: 'xla'|Unknown backend type xla|Invalid backend: '?xla",
        "torch.distributed does not know its backend xla in this process: torch_xla.distributed.xla_backend was "
        "not imported. Layerproof imports it before the port; a process that the port starts must import it itself.",
    ),
    (
        r"not linked with support for xla|module 'torch' has no attribute 'xla'|XLA device not found"
        r"|Missing XLA configuration",
        "This process has no XLA device. Import torch_xla before moving the first tensor there, get the device from "
        "torch_xla.device(), and check that PJRT_DEVICE names a device of this host (port.device).",
    ),
    (
        r"_XLAC.*undefined symbol",
        "torch and torch_xla are from different releases. Install matching ones, such as 2.9.1 and 2.9.0.",
    ),
    (
        r"parallel[ _](group|state) is already initialized",
        "The port initialises NxD's parallel groups a second time. Check parallel_state.model_parallel_is_initialized() "
        "first, or use port.backend: nxdi, which initialises them before it builds the model.",
    ),
    (
        r"parallel[ _](group|state) is not initialized|initialized in a distributed env",
        "The port built a module of NxD before initialising NxD's parallel groups. Use port.backend: nxdi, or call "
        "initialize_model_parallel when the port is imported.",
    ),
    (
        r"initialize the default process group twice",
        "The port, or a library that it imports, initialises torch.distributed, but the job already did. Check "
        "torch.distributed.is_initialized() first.",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "Another process listens on MASTER_PORT. Unset it: without a launcher, the job picks a free port.",
    ),
    (
        r"client socket has (timed out|failed)",
        "No rank 0 answers at MASTER_ADDR and MASTER_PORT. Unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT if "
        "another launcher left them; otherwise check that rank 0 runs and that its address is reachable.",
    ),
    (
        r"Neuron ?Core\(s\) not available|No neuron device available|ERROR +NRT:nrt_allocate_neuron_cores"
        r"|NERR_RESOURCE_NC|cannot determine the number of available NeuronCores|NRT_LOAD_NOT_ENOUGH_NC",
        "No NeuronCore is free, or none is visible here. neuron-ls names the processes that use them: stop "
        "those, or choose other cores by NEURON_RT_VISIBLE_CORES. Pass the devices to a container (--device "
        "/dev/neuron0).",
    ),
    (
        r"Supported number of Neuron Cores is",
        "Collectives do not support this number of cores on this instance. Use a number of ranks that the message lists.",
    ),
    (
        r"(num_key_value_heads|num_attention_heads|num_heads|kv_heads|tp.degree|tensor.parallel).{0,80}divisible"
        r"|divisible by.{0,20}(tp.degree|tensor.parallel|num_kv_heads)|[QKV] weight of shape .{0,40}divisible",
        "The tensor parallel degree does not divide the heads, the key/value heads or the intermediate size. Use "
        "a degree that divides all of them, or a multiple of the number of key/value heads, which NxD Inference "
        "then copies.",
    ),
    (
        r"\bDGE\b.{0,80}(fail|limit|unsupported|not supported|require|at least|partition size|< ?32)"
        r"|(fail|limit|unsupported|not supported).{0,80}\bDGE\b",
        "Neuron's descriptor generation (DGE) fails for small slices: for experts, intermediate size / tensor parallel "
        f"degree must be at least 32. {SMALLER_SLICES_REMEDY}",
    ),
)
"""Patterns, each with the explanation of the error it matches."""


def explained(text: str) -> str | None:
    """Returns cause and remedy of the last known error in a message or log, or None if it contains none.

    The process survived the errors before the last one.
    """
    found = [(match.start(), meaning) for pattern, meaning in KNOWN for match in re.finditer(pattern, text)]
    return max(found)[1] if found else None
