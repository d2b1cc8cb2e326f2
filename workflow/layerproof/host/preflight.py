"""Checks whether this host can run a side before it spends hours on it: devices, memory, versions, disk, checkpoint.

A check fails if the side as a whole cannot run. A problem of only some stages, or one that is only predicted, is a
warning: the run continues and reports it by stage.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from layerproof.config import Config, Golden
from layerproof.errors import StageError, UserError, first_line
from layerproof.files import read_json, size
from layerproof.host.checks import FAIL, NOT_INSTALLED, OK, WARN, Check, existing_parent, run_tool, why_not_writable
from layerproof.host.neuron import check_neuron, check_nxdi, check_sharding
from layerproof.model import checkpoint

IMPORTS = 1 << 30
"""Bytes that a process needs for its imports, more than was measured (`make bench`)."""
BESIDE_FILES = 16_000_000, 1.05
"""Disk space for plots, logs, records and statistics: bytes of a small run, and a factor for tensors still to write."""
LIBRARIES = {
    # accelerate: for FP8, and the full model
    "golden": ("torch", "transformers", "accelerate", "safetensors", "h5py"),
    "port": ("torch", "torch-xla", "safetensors", "h5py"),
    "neuron": ("torch-neuronx", "libneuronxla", "neuronx-cc"),
}
NO_GPU = 6
"""Exit code of nvidia-smi, by its manual, if the requested device does not exist."""
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""accelerate's strategies, which fill GPUs and leave the rest to the host. Other maps place everything as written."""


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi; memory in bytes."""

    name: str
    memory: int
    used: int
    driver: str

    @property
    def free(self) -> int:
        return self.memory - self.used


def check_side(
    side: str, config: Config, directory: Path, results: Path, prediction: Mapping[str, Any] | None
) -> list[Check]:
    """Every check of a side, `golden` or `port`, on this host.

    `config` is resolved, and `directory` is the checkpoint. Without `prediction`, the content of
    results/prediction.json, the checks do not judge memory and disk space.
    """
    check_host = check_golden_host if side == "golden" else check_port_host
    whole = check_checkpoint(directory)
    is_sharded = side == "port" and whole.status != FAIL and directory.exists()
    return [
        *check_host(config, prediction, _available_memory()),
        *(check_implementations(config, directory) if side == "golden" and whole.status != FAIL else ()),
        *(check_sharding(checkpoint.read_config(directory), config.parallel.tp) if is_sharded else ()),
        check_disk(results, prediction, shutil.disk_usage(existing_parent(results)).free),
        whole,
    ]


def check_golden_host(config: Config, prediction: Mapping[str, Any] | None, available: int) -> Iterator[Check]:
    """Checks libraries, GPU and host memory, of which `available` bytes are free."""
    golden = config.golden
    yield from check_libraries("golden", False, _installed, _required)
    gpus, problem = ([], "") if _is_on_host(golden) else _gpus()
    yield from check_golden_device(golden, prediction, gpus, problem)
    if golden.mode == "whole":
        yield check_whole_memory(golden, prediction, available, gpus)
    else:
        yield check_memory("golden", prediction, available)


def check_implementations(config: Config, directory: Path) -> Iterator[Check]:
    """Checks that transformers has the implementations of attention and experts in this model that the config names."""
    given = config.golden.implementations
    if not given:
        return
    from layerproof.model.loading import meta_model

    text = ", ".join(f"golden.{key}: {value}" for key, value in given.items())
    try:
        meta_model(directory, config.model.trust_remote_code, None, **given)
    except UserError as error:
        yield Check("implementations", FAIL, str(error))
    else:
        yield Check("implementations", OK, text)


def check_port_host(config: Config, prediction: Mapping[str, Any] | None, available: int) -> Iterator[Check]:
    """Checks libraries, Neuron if the port runs on it, and host memory, of which `available` bytes are free."""
    port = config.port
    device = os.environ.get("PJRT_DEVICE", "CPU") if port.device == "auto" else port.device
    on_neuron = device == "NEURON" or port.compile == "neuron"
    ranks = math.prod(config.parallel.of_stage.values())
    yield from check_libraries("port", on_neuron, _installed, _required)
    if not on_neuron:
        yield Check("device", OK, f"XLA's {device}; port.device is {port.device}")
    if port.backend == "nxdi":
        yield from check_nxdi(find_spec)
    if on_neuron:
        yield from check_neuron(prediction, os.environ, ranks)
    yield check_memory("port", prediction, available, ranks)


def check_libraries(
    side: str, on_neuron: bool, installed: Callable[[str], str | None], required: Callable[[str], Iterable[Requirement]]
) -> Iterator[Check]:
    """Checks the packages that a side imports: their versions, and whether these meet the packages' own requirements.

    `installed` returns the version of a package, or None if it is missing; `required` returns its requirements.
    """
    names = [*LIBRARIES[side], *(LIBRARIES["neuron"] if on_neuron else ())]
    versions = {name: installed(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    remedy = f"Run in the {side} container (containers/README.md), or activate the environment that has them."
    if missing:
        are = "is" if len(missing) == 1 else "are"
        yield Check(
            "libraries", FAIL, f"{', '.join(missing)} {are} not installed; found {found or 'nothing else'}", remedy
        )
    else:
        yield Check("libraries", OK, found)
    unfit = [
        f"{name} {versions[name]} needs {one.name}{one.specifier}, but {there} is installed"
        for name in names
        if name not in missing
        for one in required(name)
        if (there := installed(one.name)) is not None and not _is_in(one.specifier, there)
    ]
    torch, xla = (_parsed(versions.get(name)) for name in ("torch", "torch-xla"))
    if torch and xla and torch.release[:2] != xla.release[:2]:  # torch-xla does not require this itself
        unfit.append(f"torch-xla {xla} was not built for torch {torch}")
    if unfit:
        yield Check("versions", WARN, "; ".join(unfit), remedy)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _required(name: str) -> list[Requirement]:
    """The requirements of an installed package on this host.

    Includes those of its extra `torch`, and leaves out those that cannot be parsed.
    """
    asked = []
    for text in metadata.requires(name) or ():
        with contextlib.suppress(InvalidRequirement):
            asked.append(Requirement(text))
    return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": "torch"})]


def _parsed(version: str | None) -> Version | None:
    """A version, or None for a number that a packager made up."""
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


def _is_in(wanted: SpecifierSet, version: str) -> bool:
    """Whether a version meets a requirement.

    A vendor's build before a release counts as the release. A version that cannot be compared counts as good.
    """
    there = _parsed(version)
    return there is None or any(wanted.contains(one, prereleases=True) for one in (there, there.base_version))


def check_golden_device(
    golden: Golden, prediction: Mapping[str, Any] | None, gpus: Sequence[Gpu], problem: str
) -> Iterator[Check]:
    """Checks the golden's GPU, if one is requested or exists; `problem` says why nvidia-smi names none."""
    import torch

    key, places = _asked(golden)
    if _is_on_host(golden):
        yield Check("device", OK, f"the CPU, as golden.{key} says")
        return
    seen = torch.cuda.is_available()
    numbers = [number for place in places if (number := _gpu_number(place)) is not None]
    if not seen and numbers:
        found = f"nvidia-smi lists {len(gpus)}, but torch {torch.__version__} sees none" if gpus else problem
        found = found or "nvidia-smi lists none"
        yield Check("device", FAIL, f"no CUDA device: {found}", f"Run on a GPU host, or write golden.{key}: cpu.")
    elif not seen and gpus:
        text = (
            f"{gpus[0].name} is present, but torch {torch.__version__} does not see it, so the golden runs on the CPU"
        )
        yield Check(
            "device",
            WARN,
            text,
            f"Install a torch for CUDA that driver {gpus[0].driver} supports, or use the container.",
        )
    elif not seen and problem and problem != f"nvidia-smi {NOT_INSTALLED}":
        yield Check(
            "device",
            WARN,
            f"the CPU; {problem}",
            "Repair the driver if the host has a GPU, or write golden.device: cpu.",
        )
    elif not seen:
        yield Check("device", OK, "the CPU; there is no GPU")
    elif gpus and max(numbers, default=0) >= len(gpus):
        text = f"golden.{key} names GPU {max(numbers)}, but the last visible GPU is {len(gpus) - 1}"
        yield Check("device", FAIL, text, f"Correct golden.{key}, or CUDA_VISIBLE_DEVICES.")
    else:
        names = ", ".join(f"{gpu.name} with {size(gpu.free)} free" for gpu in gpus) or "one that torch sees"
        yield Check("device", OK, f"{names}; driver {gpus[0].driver if gpus else 'unknown'}")
        if gpus and prediction:
            yield _fits_gpus(golden, gpus, prediction)


def _fits_gpus(golden: Golden, gpus: Sequence[Gpu], prediction: Mapping[str, Any]) -> Check:
    if golden.mode == "whole":
        needed, has, what = prediction["whole"], sum(_room(golden, gpus)), "the full model"
        if needed > has and _is_left_to_the_host(golden, needed - has):
            return Check("device memory", OK, f"{size(has)}; the rest of {size(needed)} is left to the host")
        remedy = "Offload (golden.max_memory, golden.offload_folder), or write golden.mode: streamed."
    else:
        needed, has, what = prediction["golden"], gpus[0].free, "the largest stage"
        remedy = "Stop other processes on the GPU, or use shorter prompts."
    text = f"{what} is predicted to need {size(needed)} of {size(has)}"
    return Check("device memory", OK if needed <= has else WARN, text, None if needed <= has else remedy)


def _is_left_to_the_host(golden: Golden, left: int) -> bool:
    """Whether the config makes accelerate keep this many bytes off the GPUs, as only its strategies do.

    If they do so without being asked, it is slow, and worth a warning.
    """
    if golden.device_map not in STRATEGIES:
        return False
    limit = _host_limit(golden)
    return bool(golden.offload_folder) or (limit is not None and left <= limit)


def _host_limit(golden: Golden) -> int | None:
    """Bytes that golden.max_memory allows the host. Only accelerate's strategies respect it."""
    limit = (golden.max_memory or {}).get("cpu")
    if limit is None or golden.device_map not in STRATEGIES:
        return None
    from accelerate.utils import convert_file_size_to_int

    return convert_file_size_to_int(limit)


def _asked(golden: Golden) -> tuple[str, list[str]]:
    """The key that says where the golden runs, and the places that it names."""
    key = "device_map" if golden.mode == "whole" else "device"
    return key, _places(golden.device_map if golden.mode == "whole" else golden.device)


def _is_on_host(golden: Golden) -> bool:
    return set(_asked(golden)[1]) <= {"cpu", "disk"}


def _places(device_map: str | Mapping[str, str | int]) -> list[str]:
    """The strategies and devices in `golden.device` or `golden.device_map`."""
    return [device_map] if isinstance(device_map, str) else [str(place) for place in device_map.values()]


def _gpu_number(place: str) -> int | None:
    """1 for cuda:1 and for 1, 0 for cuda; None for anything but a GPU, such as cpu, disk and strategies."""
    match = re.fullmatch(r"cuda|(?:cuda:)?(\d+)", place)
    return int(match[1] or 0) if match else None


def _room(golden: Golden, gpus: Sequence[Gpu]) -> list[int]:
    """Bytes that the full model may use on each GPU: its free memory, if device_map names the GPU.

    If device_map is a strategy, it is the free memory of every GPU within max_memory, which then names all that
    accelerate uses.
    """
    places, limits = _places(golden.device_map), golden.max_memory
    named = {_gpu_number(place) for place in places} - {None}
    if named or _is_on_host(golden):
        return [gpu.free if number in named else 0 for number, gpu in enumerate(gpus)]
    if limits is None:
        return [gpu.free for gpu in gpus]
    from accelerate.utils import convert_file_size_to_int

    allowed = [convert_file_size_to_int(limits.get(str(number), "0GB")) for number in range(len(gpus))]
    return [min(gpu.free, most) for gpu, most in zip(gpus, allowed, strict=True)]


def _gpus() -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists and CUDA may use; if it lists none, the reason."""
    query = ["--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    code, output = run_tool("nvidia-smi", *query, *([f"--id={visible}"] if visible else []))
    if code is None:
        return [], f"nvidia-smi {output}"
    if code and code != NO_GPU:
        return [], first_line(output) or f"nvidia-smi ended with exit code {code}"
    return parse_nvidia_smi(output), ""


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """GPUs from `nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader,nounits`.

    Memory is in MiB there. A value that a card does not report is 0, such as `[N/A]` on machines that share memory with
    the host.
    """
    number = r"(\d+|\[.*\])"
    rows = (re.fullmatch(rf"(.+), {number}, {number}, (\S+)", line.strip(), re.ASCII) for line in text.splitlines())
    return [Gpu(row[1], _mib(row[2]), _mib(row[3]), row[4]) for row in rows if row]


def _mib(text: str) -> int:
    return 0 if text.startswith("[") else int(text) << 20


def check_memory(side: str, prediction: Mapping[str, Any] | None, available: int, ranks: int = 1) -> Check:
    """Checks host memory against the side's largest job, in which each rank may convert the whole stage."""
    if not prediction:
        return _not_predicted(available)
    needed = ranks * (prediction[side] + IMPORTS)
    text = f"the largest job is predicted to need {size(needed)} of {size(available)} available"
    remedy = "Free memory, run one job at a time (--cores 1), or use shorter prompts."
    return Check("memory", OK if needed <= available else WARN, text, None if needed <= available else remedy)


def _not_predicted(available: int) -> Check:
    return Check(
        "memory",
        OK,
        f"{size(available)} available; nothing to compare it with, because results/prediction.json has no numbers",
    )


def check_whole_memory(
    golden: Golden, prediction: Mapping[str, Any] | None, available: int, gpus: Sequence[Gpu]
) -> Check:
    """Checks host memory against the part of the full model that does not fit on the GPUs.

    With golden.offload_folder, the rest goes there.
    """
    import torch

    if "disk" in _places(golden.device_map) and not golden.offload_folder:
        text = "golden.device_map puts weights on the disk, but golden.offload_folder is not set"
        return Check("memory", FAIL, text, "Set golden.offload_folder, or write cpu instead of disk.")
    if not prediction:
        return _not_predicted(available)
    on_gpus = sum(_room(golden, gpus)) if torch.cuda.is_available() else 0
    needed = max(0, prediction["whole"] - on_gpus) + IMPORTS
    text = f"the full model is predicted to need {size(needed)} of {size(available)} available on the host"
    limit = _host_limit(golden)
    left = max(0, prediction["weights"]["golden"] - on_gpus)
    if limit is not None and left > limit and not golden.offload_folder:
        allowed = (golden.max_memory or {})["cpu"]
        text = f"{size(left)} of weights do not fit on the GPUs, but golden.max_memory allows the host only {allowed}"
        return Check("memory", FAIL, text, "Set golden.offload_folder, or increase golden.max_memory.")
    if needed <= available:
        return Check("memory", OK, text)
    if golden.offload_folder:
        return Check("memory", OK, f"{text}; the rest goes to {golden.offload_folder}")
    return Check("memory", WARN, text, "Set golden.offload_folder, or write golden.mode: streamed.")


def _available_memory() -> int:
    """Bytes that a process may still use: of the host, or of a control group that a scheduler put it in."""
    try:
        membership = Path("/proc/self/cgroup").read_text(encoding="ascii")
    except OSError:
        membership = ""
    return min([psutil.virtual_memory().available, *left_in_groups(membership, Path("/sys/fs/cgroup"))])


def left_in_groups(membership: str, root: Path) -> Iterator[int]:
    """Yields the bytes that a process's control group, and each one above it, has left.

    Memory that the kernel would reclaim counts as left. `membership` is /proc/PID/cgroup, and `root` is where control
    groups of version 2 are mounted.
    """
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), None)
    if own is None:
        return
    folder = root / own.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            return
        with contextlib.suppress(OSError, ValueError, KeyError):  # `max` means no limit; the first group has none
            limit = int((group / "memory.max").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((group / "memory.current").read_text(encoding="ascii")) - int(stat["inactive_file"])
            yield max(0, limit - used)


def require_slurm() -> None:
    """Checks that this host can submit jobs to Slurm. If it cannot, Snakemake's plugin waits, or fails job after job.

    Raises:
        UserError: if Slurm's commands are not installed, or its controller does not answer.
    """
    code, output = run_tool("sinfo", "--noheader")
    if code is None:
        raise UserError(f"sinfo: {output}. Run on a host with Slurm's commands, or without --workflow-profile.")
    if code:
        raise UserError(
            f"sinfo: Slurm does not answer ({first_line(output)}). Wait until its controller runs, or check slurm.conf."
        )


def check_disk(results: Path, prediction: Mapping[str, Any] | None, free: int) -> Check:
    """Checks that results/ can be written, and has room for everything that is not in it yet, even if stages fail."""
    if why := why_not_writable(results):
        text = f"{results} cannot be written ({why})"
        return Check("disk", FAIL, text, "Make it a directory, or a link to one, that you may write to.")
    if not prediction:
        return Check("disk", OK, f"{size(free)} free")
    there = sum(min(entry["files"], _existing_bytes(results, stage)) for stage, entry in prediction["stages"].items())
    needed = BESIDE_FILES[0] + BESIDE_FILES[1] * max(0, prediction["files"] - there)
    text = f"the run will write {size(needed)}; {size(free)} are free"
    remedy = f"Free disk space, or make {results} a link to a larger disk."
    if needed > free:
        return Check("disk", FAIL, text, remedy)
    if needed + prediction["forced"] > free:
        return Check("disk", WARN, f"{text}; if all stages fail, it writes {size(prediction['forced'])} more", remedy)
    return Check("disk", OK, text)


def _existing_bytes(results: Path, stage: str) -> int:
    """Bytes of the stage's files that the prediction counts and that exist."""
    folders = [*(results / folder for folder in ("golden", "noise", "port")), *results.glob("chain/*")]
    paths = (folder / f"{stage}.h5" for folder in folders)
    return sum(path.stat().st_size for path in paths if path.exists())


def check_checkpoint(directory: Path) -> Check:
    """Checks for a config.json, every shard as long as its header says, and every tensor of the index in one of them.

    The digests cover the contents. A problem that stops every stage is a failure; one that some stages survive is a
    warning.
    """
    try:
        checkpoint.num_layers(checkpoint.read_config(directory))
        names = checkpoint.shards(directory)
    except UserError as error:
        return _of_checkpoint(FAIL, [str(error)])
    found: set[str] = set()
    damaged = []
    for name in names:
        try:
            tensors = checkpoint.read_shard_header(directory / name)
            found |= tensors.keys()
            if (directory / name).stat().st_size < max((tensor.end for tensor in tensors.values()), default=0):
                raise StageError(f"{directory / name}: is shorter than its header says. Copy the shard again.")
        except StageError as error:
            damaged.append(str(error))
    if damaged:
        return _of_checkpoint(WARN if found else FAIL, damaged)
    index = directory / checkpoint.INDEX
    missing = sorted(read_json(index)["weight_map"].keys() - found) if index.exists() else []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        said = f"{index}: names {missing[0]}{more}, which no shard contains. Copy the checkpoint again."
        return _of_checkpoint(WARN, [said])
    return Check("checkpoint", OK, f"{len(names)} shards, {len(found)} tensors")


def _of_checkpoint(status: str, errors: Sequence[str]) -> Check:
    """The check for these errors. The last sentence of an error is its remedy."""
    text, _, remedy = errors[0].rpartition(". ")
    return Check(
        "checkpoint", status, text + (f"; {len(errors)} shards are damaged" if len(errors) > 1 else ""), remedy
    )
