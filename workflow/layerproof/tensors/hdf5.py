"""HDF5 files of tensors: bf16 is stored bit for bit, checksums cover data and metadata, and no file is half written.

One file stores the tensors of one stage in groups: `golden/TAP` and `truth/TAP` in results/golden, `port/TAP` in
results/port. bfloat16 is stored as uint16 with the attribute `dtype="bfloat16"`. A failed stage leaves a file without
tensors; its attribute `error` says why. Files contain no times, so equal tensors make equal files.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import h5py
import numpy as np

from layerproof.errors import StageError, StageMissing, first_line
from layerproof.files import canonical_json, replacing
from layerproof.taps import OUT, Fed, in_order, is_output
from layerproof.tensors.tensor import STORAGE, Tensor, statistics
from layerproof.threads import mapped

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20

HIDDEN_STATES = "hidden_states"
"""The name of `out` among the outputs of a stage that has several, which are stored as `out/NAME`."""

WEIGHTS, TAPS, SOURCES = "held", "taps", "sources"
CONVERSION, PLACES, COMPILED, RANKS, PLACEMENTS = "conversion", "places", "compiled", "ranks", "placements"
"""Names of JSON documents in files.

WEIGHTS, TAPS and SOURCES are in a golden's file: dtypes and shapes of the weights in memory; the taps in order, each with
those that feed it; and the files of what is handed over to later stages besides `out`. The others are in a port's file:
how its weights were converted, which function of its code hands each tap over, what compiling changed, and how its ranks
differ.
"""


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's dtype in files and configs, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def to_array(tensor: torch.Tensor) -> Tensor:
    """Converts a torch tensor on any device to numpy data with the dtype's name; bfloat16 becomes uint16 bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return Tensor(bits, dtype_name(tensor))


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to a dtype that files can store.

    Small integers and fp8 become wider dtypes; complex numbers become pairs.
    """
    import torch

    if dtype_name(tensor) in STORAGE:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def to_torch(array: Tensor) -> torch.Tensor:
    """Converts back what `to_array` returned, to a torch tensor on the CPU."""
    import torch

    data = np.ascontiguousarray(array.data[...])
    if array.dtype == "bfloat16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)


def write(
    path: Path,
    groups: Mapping[str, Mapping[str, Tensor]],
    *,
    valid: np.ndarray | None = None,
    attributes: Mapping[str, Any] | None = None,
    documents: Mapping[str, Any] | None = None,
) -> None:
    """Writes tensors by group and tap, and JSON values (`documents`) by name beside the groups.

    Each tensor gets its statistics, over the tokens in `valid`, as attributes.

    Raises:
        StageError: if the file cannot be written, for instance because the disk is full; no partial file stays.
    """
    named = {
        f"{group}/{_place(tap, tensors)}": tensor
        for group, tensors in groups.items()
        for tap, tensor in tensors.items()
    }
    described = mapped(lambda tensor: _described(tensor, valid), named.values())
    with creating(path) as file:
        set_attributes(file, attributes or {})
        for (name, tensor), of_tensor in zip(named.items(), described, strict=True):
            _write_dataset(file, name, tensor, of_tensor)
        for name, value in (documents or {}).items():
            data = np.frombuffer(canonical_json(value).encode(), np.uint8)
            file.create_dataset(name, data=data, chunks=data.shape, fletcher32=True)
    device = (attributes or {}).get("device")
    where = f", on {device}" if device else ""
    for group, tensors in groups.items():
        out = f", out {tensors[OUT].dtype} {list(tensors[OUT].shape)}" if OUT in tensors else ""
        log.info("%s/%s: %s, taps: %d%s%s", path.parent.name, path.stem, group, len(tensors), out, where)


def _place(name: str, names: Collection[str]) -> str:
    """Where a tap is stored: under its name, but `out` in a group with the other outputs if there are any."""
    return (
        f"{OUT}/{HIDDEN_STATES}" if name == OUT and any(is_output(other) for other in names if other != OUT) else name
    )


def write_pruned(source: Path, target: Path, user_block: int) -> None:
    """Copies a stage's file without the data of its taps, except the outputs.

    Other taps keep only their attributes: statistics, dtype, and `shape`, which only pruned files contain. The caller
    fills the first `user_block` bytes.

    Raises:
        StageError: as `reading` does.
        OSError: if the target cannot be written.
    """

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            if is_output(name.partition("/")[2]) or "dtype" not in node.attrs:
                node.file.copy(node, file, name)
                return
            empty = file.create_dataset(name, data=h5py.Empty(node.dtype))
            for key, value in node.attrs.items():
                empty.attrs[key] = value
            empty.attrs["shape"] = node.shape

    # Open the target outermost; otherwise a full disk would be reported as damage to the source.
    with _writing(target, user_block) as file, reading(source) as whole:
        for key, value in whole.attrs.items():
            file.attrs[key] = value
        whole.visititems(visit)


@contextlib.contextmanager
def replacing_or_saying_why(path: Path) -> Iterator[Path]:
    """Works like `files.replacing`, but its error says what a user can do if the file cannot be written.

    Raises:
        StageError: if the file cannot be written, for instance because the disk is full.
    """
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise StageError(f"{path}: cannot be written ({first_line(error)}). Free disk space and run again.") from error


@contextlib.contextmanager
def creating(path: Path) -> Iterator[h5py.File]:
    with replacing_or_saying_why(path) as temporary, _writing(temporary) as file:
        yield file


class _Disk(io.FileIO):
    """A file that stores its first write error for later, because HDF5 crashes the process if closing a file fails."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and self.failure is None:
            try:
                done += super().write(view[done:])
            except OSError as error:
                self.failure = error
        return len(view)


@contextlib.contextmanager
def _writing(path: Path, user_block: int = 0) -> Iterator[h5py.File]:
    """Opens a new HDF5 file and leaves its first `user_block` bytes to the caller.

    Raises:
        OSError: if any part of the file could not be written.
    """
    with _Disk(path, "w+") as disk:
        try:
            with h5py.File(disk, "w", libver="latest", userblock_size=user_block) as file:
                yield file
        finally:
            if disk.failure is not None:
                raise disk.failure


def write_dataset(file: h5py.File, name: str, tensor: Tensor, valid: np.ndarray | None) -> None:
    """Writes a tensor with its statistics over the tokens in `valid`."""
    _write_dataset(file, name, tensor, _described(tensor, valid))


def _described(tensor: Tensor, valid: np.ndarray | None) -> dict[str, Any]:
    """The statistics of a tensor; none if it has another shape than the tokens, for which the comparison will fail it."""
    return statistics(tensor, valid) if valid is None or tensor.shape[:2] == valid.shape else {}


def _write_dataset(file: h5py.File, name: str, tensor: Tensor, described: Mapping[str, Any]) -> None:
    data: Any = tensor.data
    chunks = chunks_of(data)
    dataset = file.create_dataset(name, data=data, chunks=chunks, fletcher32=chunks is not None)
    set_attributes(dataset, {"dtype": tensor.dtype, **described})


def chunks_of(data: Any) -> tuple[int, ...] | None:
    """Returns the shape of storage chunks of an array [batch, seq, features...]; None if it needs no chunks.

    A chunk is a run of whole tokens of one prompt, at most CHUNK_BYTES unless one token is longer. Chunks are of equal
    size, because the last one uses as much disk as the others.
    """
    if not data.size or data.ndim < 2:
        return None
    pieces = math.ceil(data.shape[1] / max(1, CHUNK_BYTES // data[0, 0].nbytes))
    return (1, math.ceil(data.shape[1] / pieces), *data.shape[2:])


def set_attributes(node: h5py.HLObject, attributes: Mapping[str, Any]) -> None:
    """Sets all attributes except those that are None.

    Text gets a fixed length, because HDF5 stores variable-length text where no checksum covers it.
    """
    for key, value in attributes.items():
        if isinstance(value, str):
            data = value.encode()
            node.attrs[key] = np.array(data, dtype=h5py.string_dtype("utf-8", max(1, len(data))))
        elif value is not None:
            node.attrs[key] = value


def attributes(node: h5py.HLObject) -> dict[str, Any]:
    """Returns the attributes of a file or dataset as plain Python values.

    Raises:
        KeyError: from h5py, if an attribute cannot be read; `reading` turns it into a StageError.
    """
    found: dict[str, Any] = {}
    for key, value in node.attrs.items():
        plain = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        found[key] = plain.decode() if isinstance(plain, bytes) else plain
    return found


def write_error(path: Path, error: StageError) -> None:
    """Writes a file without tensors that says why the stage failed."""
    write(path, {}, attributes={"error": str(error), "missing": isinstance(error, StageMissing)})


@contextlib.contextmanager
def reading(path: Path) -> Iterator[h5py.File]:
    """Opens a file of tensors.

    Raises:
        StageError: if the file is missing or damaged, also while the block reads data; or if it records a failed stage
            (the message is the one that the stage wrote).
    """
    try:
        with h5py.File(path, "r") as file:
            if "error" in file.attrs:
                facts = attributes(file)
                raise (StageMissing if facts["missing"] else StageError)(facts["error"])
            yield file
    except FileNotFoundError as error:
        raise StageError(f"{path}: does not exist. Run layerproof again to make it.") from error
    except (OSError, RuntimeError, KeyError) as error:
        raise StageError(
            f"{path}: cannot be read, the file is damaged ({first_line(error)}). Delete it and run again."
        ) from error


def taps(file: h5py.File, group: str) -> dict[str, Tensor]:
    """Returns the tensors of a group by tap name, without reading their data; empty if the group does not exist.

    They come in the order of data flow, which a golden's file states (`feeds`).

    Raises:
        StageError: if the file is pruned.
    """
    found = _datasets(file, group)
    if any(node.shape is None for node in found.values()):
        raise StageError(f"{file.filename}: contains only outputs (compare.taps: auto). Make it again with --forcerun.")
    return {name: Tensor(node, attributes(node)["dtype"]) for name, node in found.items()}


def dtypes(file: h5py.File, group: str) -> dict[str, str]:
    """Returns the dtypes of a group's tensors by tap name; also works for a pruned file."""
    return {name: attributes(node)["dtype"] for name, node in _datasets(file, group).items()}


def feeds(file: h5py.File) -> list[Fed]:
    """Returns a golden's taps in order, each with the taps that feed it; empty for a file that does not state it."""
    return [
        Fed(entry["name"], tuple(entry["fed_by"]), entry["optional"], entry.get("reach", 0))
        for entry in document_if_there(file, TAPS) or ()
    ]


def tap(file: h5py.File, name: str) -> Tensor:
    """Returns one tensor by its full name, such as `golden/out`, without reading its data."""
    node = file[name]
    dataset = cast("h5py.Dataset", node[HIDDEN_STATES] if isinstance(node, h5py.Group) else node)
    return Tensor(dataset, attributes(dataset)["dtype"])


def _datasets(file: h5py.File, group: str) -> dict[str, h5py.Dataset]:
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            found[OUT if name == f"{OUT}/{HIDDEN_STATES}" else name] = node

    if group in file:
        cast("h5py.Group", file[group]).visititems(visit)
    stated = [fed.name for fed in feeds(file) if fed.name in found]
    return {name: found[name] for name in (stated or in_order(found))}


def is_empty(path: Path) -> bool:
    """Whether the file exists, has no tensors and does not record a failure."""
    try:
        with reading(path) as file:
            return not len(file)
    except StageError:
        return False


def read_group(path: Path, group: str) -> dict[str, Tensor]:
    """Reads all tensors of a group into memory, by tap name.

    Raises:
        StageError: as `reading` does.
    """
    with reading(path) as file:
        return {name: Tensor(tensor.data[...], tensor.dtype) for name, tensor in taps(file, group).items()}


def read(path: Path, name: str) -> Tensor:
    """Reads one tensor into memory, by its full name such as `golden/out`.

    Raises:
        StageError: as `reading` does.
    """
    with reading(path) as file:
        stored = tap(file, name)
        return Tensor(stored.data[...], stored.dtype)


def read_document(path: Path, name: str) -> Any:
    """Reads a JSON document from a file.

    Raises:
        StageError: as `reading` does.
    """
    with reading(path) as file:
        return document(file, name)


def document(file: h5py.File, name: str) -> Any:
    """Reads a JSON document from an open file."""
    return json.loads(cast("h5py.Dataset", file[name])[...].tobytes())


def document_if_there(file: h5py.File, name: str) -> Any:
    """Works like `document`, but returns None if the file has no document of that name."""
    return document(file, name) if name in file else None


def check(path: Path) -> None:
    """Reads all golden and truth tensors of a file to find damage.

    Raises:
        StageError: as `reading` does, if any part is damaged.
    """
    with reading(path) as file:
        for group in ("golden", "truth"):
            for tap in taps(file, group).values():
                for row in range(tap.shape[0]):
                    tap.data[row]
