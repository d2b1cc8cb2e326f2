"""Explains common errors of torch.distributed, torch_xla, NxD and Neuron's runtime, and how to fix them.

The original messages name a place in a library, not the cause. The patterns here match only text that does not change
between versions.
"""

from __future__ import annotations

import re

SMALLER_SLICES_REMEDY = (
    "Take a smaller degree for the experts (moe_tp_degree) and more expert parallelism (moe_ep_degree)."
)

KNOWN = (
    (
        r"No module named '(libneuronxla|torch_neuronx|neuronxcc|nki|neuronx_distributed(_inference)?)'"
        r"|'libneuronpjrt-path'",
        "Neuron's packages are not in this environment, or its bin folder is not on PATH. Run the port in the "
        "Neuron container, or activate the environment that has them; PyPI's packages of these names are empty.",
    ),
    (
        r"KeyError: 'xla'|Unknown backend type xla|Invalid backend: '?xla",
        "torch.distributed does not know its backend xla in this process: torch_xla.distributed.xla_backend was "
        "not imported. Layerproof does that before it imports the port; a process that the port starts has to do "
        "it itself.",
    ),
    (
        r"not linked with support for xla|module 'torch' has no attribute 'xla'|XLA device not found"
        r"|Missing XLA configuration",
        "There is no XLA device in this process. Import torch_xla before the first tensor goes there, take the "
        "device from torch_xla.device(), and see that PJRT_DEVICE names one that this host has (port.device).",
    ),
    (
        r"_XLAC.*undefined symbol",
        "torch and torch_xla are of different releases. Install those that belong together, such as 2.9.1 and 2.9.0.",
    ),
    (
        r"parallel[ _](group|state) is already initialized",
        "NxD's parallel groups are initialised a second time. Ask parallel_state.model_parallel_is_initialized() "
        "first, or leave it to port.backend: nxdi, which does it before the model is built.",
    ),
    (
        r"parallel[ _](group|state) is not initialized|initialized in a distributed env",
        "A module of NxD was built before its parallel groups were there. Use port.backend: nxdi, or call "
        "initialize_model_parallel where the port is imported.",
    ),
    (
        r"initialize the default process group twice",
        "The port, or a library that it imports, initialises torch.distributed, which the job has done. Ask "
        "torch.distributed.is_initialized() first.",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "Another process listens at MASTER_PORT. Unset it: a job that no launcher starts takes a free port.",
    ),
    (
        r"client socket has (timed out|failed)",
        "No rank 0 answers at MASTER_ADDR and MASTER_PORT. Unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT if "
        "they are left from another launcher; else see that rank 0 runs and that the address can be reached.",
    ),
    (
        r"Neuron ?Core\(s\) not available|No neuron device available|ERROR +NRT:nrt_allocate_neuron_cores"
        r"|NERR_RESOURCE_NC|cannot determine the number of available NeuronCores|NRT_LOAD_NOT_ENOUGH_NC",
        "No NeuronCore is free, or none is visible here. neuron-ls names the processes that hold them: end those, "
        "or give this one others by NEURON_RT_VISIBLE_CORES. A container needs the devices (--device "
        "/dev/neuron0).",
    ),
    (
        r"Supported number of Neuron Cores is",
        "Collectives do not run on so many cores of this instance. Take a number of ranks that the message names.",
    ),
    (
        r"(num_key_value_heads|num_attention_heads|num_heads|kv_heads|tp.degree|tensor.parallel).{0,80}divisible"
        r"|divisible by.{0,20}(tp.degree|tensor.parallel|num_kv_heads)|[QKV] weight of shape .{0,40}divisible",
        "The tensor parallel degree does not divide the heads, the key/value heads or the intermediate size. Take "
        "one that divides all of them, or one that is a multiple of the key/value heads, of which NxD Inference "
        "makes copies.",
    ),
    (
        r"\bDGE\b.{0,80}(fail|limit|unsupported|not supported|require|at least|partition size|< ?32)"
        r"|(fail|limit|unsupported|not supported).{0,80}\bDGE\b",
        "Neuron's descriptor generation fails for slices that are too small: of experts, where intermediate size / "
        f"tensor parallel degree is below 32. {SMALLER_SLICES_REMEDY}",
    ),
)
"""Patterns, each with the explanation of the error it matches."""


def explained(text: str) -> str | None:
    """Returns cause and remedy of the last known error in a message or log, or None if it contains none.

    The process survived the errors before the last one.
    """
    found = [(match.start(), meaning) for pattern, meaning in KNOWN for match in re.finditer(pattern, text)]
    return max(found)[1] if found else None
