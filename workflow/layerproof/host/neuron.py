"""Checks whether this host can run a port on Neuron: driver, devices, cores, runtime, libraries and compile cache."""

from __future__ import annotations

import ctypes.util
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import size
from layerproof.host.checks import FAIL, OK, WARN, Check, run_tool, why_not_writable
from layerproof.known_errors import SMALLER_SLICES_REMEDY

NEURON_TOOLS, NEURON_LIBRARIES = "/opt/aws/neuron/bin", "/opt/aws/neuron/lib"
NEURON_DRIVER = Path("/sys/module/neuron/version")
SMALLEST_SLICE = 32
"""Smallest slice of an expert's intermediate size on a rank: below it, Neuron's descriptor generation (DGE) fails."""
COMPILE_CACHE = "/var/tmp/neuron-compile-cache"
"""The default folder in which Neuron's compiler keeps what it compiled."""


@dataclass(frozen=True)
class NeuronDevice:
    """One entry of neuron-ls: its logical cores, its memory in bytes, and its users (`pid command`)."""

    cores: int
    memory: int
    users: tuple[str, ...]


def check_nxdi(find: Any) -> Iterator[Check]:
    """Checks that NxD Inference is installed.

    `find` returns a module's spec or None. Package names do not suffice: PyPI has empty packages of these names.
    """
    missing = [name for name in ("neuronx_distributed", "neuronx_distributed_inference") if find(name) is None]
    if missing:
        remedy = (
            "Run the port in the Neuron container (containers/README.md); PyPI's packages of these names are empty."
        )
        yield Check(
            "NxD Inference",
            FAIL,
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            remedy,
        )
    else:
        yield Check("NxD Inference", OK, "neuronx_distributed and neuronx_distributed_inference are installed")


def check_neuron(prediction: Mapping[str, Any] | None, environment: Mapping[str, str], ranks: int) -> Iterator[Check]:
    """Checks Neuron's driver, its devices and cores (one for each rank), its runtime and its compile cache."""
    yield check_driver()
    code, output = run_tool(
        shutil.which("neuron-ls") or f"{NEURON_TOOLS}/neuron-ls", "--json-output", "--show-all-procs"
    )
    yield from check_neuron_ls(code, output, prediction, environment, ranks)
    yield check_runtime()
    yield check_compile_cache(environment)


def check_sharding(model: Mapping[str, Any], ranks: int) -> Iterator[Check]:
    """Checks that tensor parallelism over this many ranks fits the model's sizes; `model` is config.json.

    For experts, Neuron generates descriptors only for slices of at least SMALLEST_SLICE (known_errors.py).
    """
    text = model.get("text_config") or model
    queries = text.get("num_attention_heads")
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size")
    is_moe = any(text.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    if ranks == 1 or not queries:
        return
    keys = text.get("num_key_value_heads") or queries
    remedy = "Set parallel.tp to a number that divides all of them, or to a multiple of the key/value heads."
    if queries % ranks or (keys % ranks and ranks % keys):
        said = f"{queries} query heads and {keys} key/value heads on {ranks} ranks"
        yield Check("heads", WARN, f"{said}: the port must pad or copy heads", remedy)
    if inner and inner % ranks:
        yield Check("intermediate size", WARN, f"{inner} is not divisible by {ranks} ranks", remedy)
    elif inner and is_moe and inner // ranks < SMALLEST_SLICE:
        slices = f"{inner} / {ranks} ranks = {inner // ranks} of each expert, below {SMALLEST_SLICE}"
        yield Check("intermediate size", WARN, f"{slices}: too small for Neuron's DGE", SMALLER_SLICES_REMEDY)


def check_driver() -> Check:
    """Reads the version of Neuron's kernel module from where the runtime reads it, too."""
    try:
        return Check("driver", OK, f"neuron {NEURON_DRIVER.read_text(encoding='ascii').strip()}")
    except OSError:
        remedy = "Install aws-neuronx-dkms for this kernel, and load it: modprobe neuron."
        return Check("driver", WARN, f"{NEURON_DRIVER} does not exist: the driver is not loaded", remedy)


def check_runtime() -> Check:
    """Checks that Neuron's runtime library exists."""
    runtime = ctypes.util.find_library("nrt") or next(Path(NEURON_LIBRARIES).glob("libnrt.so*"), None)
    if runtime:
        return Check("runtime", OK, f"{runtime}")
    return Check(
        "runtime", FAIL, "libnrt is not installed", "Install aws-neuronx-runtime-lib, or run in the port container."
    )


def check_neuron_ls(
    code: int | None, output: str, prediction: Mapping[str, Any] | None, environment: Mapping[str, str], ranks: int = 1
) -> Iterator[Check]:
    """Checks the output of `neuron-ls --json-output --show-all-procs`, which ended with exit code `code`.

    If `code` is None, neuron-ls did not run, and `output` is the reason.
    """
    if code is None:
        remedy = "Install aws-neuronx-tools, run in the port container, or check dmesg for a hanging driver."
        yield Check("device", FAIL, f"neuron-ls {output}", remedy)
        return
    try:
        devices = parse_neuron_ls(output) if code == 0 else []
    except UserError as error:
        yield Check("device", FAIL, str(error), "Install aws-neuronx-tools of the same release as the driver.")
        return
    if not devices:
        said = re.search(r'error="([^"]*)"', output) or re.search(r'msg="([^"]*)"', output)
        text = f"no Neuron device{f': {said[1]}' if said else ''}"
        yield Check(
            "device", FAIL, text, "Run on a trn host with its driver loaded, and pass /dev/neuron* to a container."
        )
        return
    cores = sum(device.cores for device in devices)
    memory = devices[0].memory // devices[0].cores
    yield Check("device", OK, f"{len(devices)} Neuron devices, {cores} logical cores with {size(memory)} each")
    visible = environment.get("NEURON_RT_VISIBLE_CORES")
    usable = _core_numbers(visible) if visible else set(range(cores))
    device_of_core = [device for device in devices for _ in range(device.cores)]
    mine = [device_of_core[core] for core in sorted(usable) if core < cores]
    taken = [device for device in mine if device.users]
    if taken:
        users = dict.fromkeys(user for device in taken for user in device.users)
        free = len(mine) - len(taken)
        text = f"{free} of {len(mine)} cores are on idle devices; processes on the other devices: {'; '.join(users)}"
        remedy = "Stop these processes, or set NEURON_RT_VISIBLE_CORES to cores of other devices."
        yield Check("cores", WARN if free else FAIL, text, remedy)
    if not usable or max(usable) >= cores:
        text = f"NEURON_RT_VISIBLE_CORES={visible} names cores that do not exist; this host has cores 0-{cores - 1}"
        yield Check("visible cores", FAIL, text, "Correct it, or unset it.")
    elif ranks > len(usable):
        text = f"parallel asks for {ranks} ranks, but only {len(usable)} cores are usable"
        yield Check("ranks", FAIL, text, "Reduce parallel.tp, cp or ep, or use a larger host.")
    elif visible and 1 < ranks < len(usable):  # torch_xla needs exactly as many cores as ranks
        text = f"parallel asks for {ranks} ranks, but NEURON_RT_VISIBLE_CORES={visible} names {len(usable)} cores"
        yield Check("ranks", FAIL, text, "Name as many cores as there are ranks, or unset it.")
    if prediction:
        needed = prediction["port"] // ranks
        share = f", split evenly over {ranks} ranks" if ranks > 1 else ""
        text = f"the largest stage is predicted to need {size(needed)} of the {size(memory)} of a core{share}"
        remedy = "Shard the stage over more cores, or use shorter prompts."
        yield Check("device memory", OK if needed <= memory else WARN, text, None if needed <= memory else remedy)


def parse_neuron_ls(text: str) -> list[NeuronDevice]:
    """Devices from the output of `neuron-ls --json-output`, where `nc_count` is the number of logical cores.

    Raises:
        UserError: if the text is not output of neuron-ls.
    """
    try:
        return [_device(entry) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"neuron-ls: its output cannot be parsed ({type(error).__name__}: {error})") from None


def _device(entry: Mapping[str, Any]) -> NeuronDevice:
    for key in ("nc_count", "memory_size"):
        if not (isinstance(entry[key], int) and entry[key] > 0):
            raise ValueError(f"{key} is {entry[key]!r}")
    users = (
        f"{process['pid']} {process['command']}".strip()
        for process in entry.get("neuron_processes") or ()
        if "neuron-ls" not in process["command"].partition(" ")[0]
    )
    return NeuronDevice(entry["nc_count"], entry["memory_size"], tuple(users))


def _core_numbers(text: str) -> set[int]:
    """Cores of NEURON_RT_VISIBLE_CORES, such as `0-3,8`; empty if it cannot be parsed."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            return set()
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def check_compile_cache(environment: Mapping[str, str]) -> Check:
    """Checks that the folder for what Neuron compiles is writable.

    It is $NEURON_COMPILE_CACHE_URL, or `--cache_dir` of $NEURON_CC_FLAGS.
    """
    flags = re.search(r"--cache_dir[= ](\S+)", environment.get("NEURON_CC_FLAGS", ""))
    place = environment.get("NEURON_COMPILE_CACHE_URL") or (flags[1] if flags else COMPILE_CACHE)
    if place.startswith("s3://"):
        return Check("compile cache", OK, f"{place}, not tested for writing")
    if not why_not_writable(Path(place)):
        return Check("compile cache", OK, place)
    remedy = "Set NEURON_COMPILE_CACHE_URL to a directory that you may write to."
    return Check("compile cache", WARN, f"{place} cannot be written, so every run compiles everything again", remedy)
