"""A checkpoint directory: which tensors are on disk, and how to read a stage's tensors unchanged.

Layerproof reads only safetensors, because they contain tensors and no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.errors import StageError, UserError, one_line
from layerproof.files import digest_of, read_json
from layerproof.threads import mapped

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")
"""What files that a training leaves beside its weights begin with."""
OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".safetensors")
"""How files end that hold weights in a form that Layerproof does not read, or under a name of their own."""
POINTER = b"version https://git-lfs"
"""How a pointer begins that Git LFS leaves where it did not fetch the file."""
READ_BYTES = 1 << 20
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
"""The first number in a tensor's name is the layer, as in `model.layers.3.mlp.experts.7.w1.weight`."""
NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))


def itemsize(dtype: str) -> int:
    """Returns the bytes per number of a dtype, named as in safetensors or torch: BF16, bfloat16, F8_E4M3, BOOL."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def torch_name(dtype: str) -> str:
    """Translates a safetensors dtype to torch's name: BF16 is bfloat16, F8_E4M3 is float8_e4m3fn, I64 is int64."""
    names = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint"}
    letters = dtype.rstrip("0123456789")
    eights = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    return eights.get(dtype) or (names[letters] + dtype[len(letters) :] if letters in names else dtype.lower())


def bytes_on_disk(entry: Mapping[str, Any]) -> int:
    """Returns the bytes on disk of a tensor that results/weights/STAGE.json describes."""
    return math.prod(entry["shape"]) * itemsize(entry["dtype"])


@dataclass(frozen=True)
class TensorOnDisk:
    """One tensor of a checkpoint and where its bytes are. `dtype` is the safetensors name, such as BF16."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def sha256(self) -> str:
        """Returns the SHA-256 of the tensor's bytes, in hex.

        Raises:
            StageError: if the shard ends before the tensor does.
            OSError: if it cannot be read.
        """
        digest, left = hashlib.sha256(), self.end - self.start
        with open(self.file, "rb") as file:
            file.seek(self.start)
            while data := file.read(min(left, READ_BYTES)):
                digest.update(data)
                left -= len(data)
        if left:
            raise StageError(f"{self.file}: ends inside tensor {self.name} (truncated?). Copy the shard again.")
        return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the checkpoint's config.json.

    Raises:
        UserError: if it is missing or not a JSON object.
    """
    path = directory / CONFIG
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: does not exist. {_remedy_without_config(directory)}") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}). Copy the file again.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: is not a JSON object. Copy the file again.")
    return config


def transformers_config(directory: Path, trust_remote_code: bool) -> Any:
    """Reads config.json as transformers does.

    Raises:
        UserError: if transformers does not know the architecture or rejects the config.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind: the code may come with the checkpoint
        raise cannot_build(directory, error) from error


def cannot_build(directory: Path, error: Exception) -> UserError:
    """The error for a config.json of which transformers, or the code that comes with the checkpoint, makes no model."""
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        return UserError(
            f"{directory}: the model is code that comes with the checkpoint. Read the code, and if you trust it, write "
            "model.trust_remote_code: true."
        )
    return UserError(
        f"{directory / CONFIG}: transformers cannot build this model ({type(error).__name__}: {one_line(error)}). "
        "Correct the file or update transformers."
    )


def _remedy_without_config(directory: Path) -> str:
    if (directory / ADAPTER).exists():
        return f"There is an adapter beside it ({ADAPTER}). Merge it into its model, and name the merged checkpoint."
    if snapshots := list((directory / "snapshots").glob("*")):
        newest = max(snapshots, key=lambda path: path.stat().st_mtime)
        return f"This is a folder of the Hub's cache: name one of its snapshots, such as {newest}."
    return "model.checkpoint must name a transformers checkpoint."


def num_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of decoder layers in a config.json, also if the text model's config is nested.

    Raises:
        UserError: if the config does not state it.
    """
    for part in (config, config.get("text_config") or {}):
        for key in NUM_LAYERS:
            if isinstance(part, dict) and isinstance(part.get(key), int):
                return _at_least_one(key, part[key])
        for key in LAYER_LISTS:
            if isinstance(part, dict) and isinstance(part.get(key), list):
                return _at_least_one(key, len(part[key]))
    raise UserError(
        "config.yaml: model.checkpoint: num_hidden_layers is missing in its config.json. "
        "Name the checkpoint of a decoder that transformers knows."
    )


def layer_types(config: Mapping[str, Any]) -> list[Any]:
    """Returns the type of each decoder layer, as far as a config.json lists them, also if the text model's is nested."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    listed = (part.get(key) for part in parts for key in LAYER_LISTS)
    return next((types for types in listed if isinstance(types, list)), [])


def _at_least_one(key: str, layers: int) -> int:
    if layers < 1:
        raise UserError(
            f"config.yaml: model.checkpoint: its config.json has {layers} layers ({key}). Copy the file again."
        )
    return layers


NUM_LAYERS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
"""Keys for the number of layers, in the order in which they count: LongCat's num_hidden_layers counts its layers twice."""

LAYER_LISTS = ("layers_block_type", "layer_types")
"""Keys for a list with an entry for each layer, where the number itself is not stated, as in Nemotron H."""


def shards(directory: Path) -> list[str]:
    """Returns the file names of the checkpoint's shards.

    Raises:
        UserError: if there are no safetensors, the index is unreadable or names files outside this directory, or an
            adapter lies beside them: transformers would apply it, and Layerproof does not.
    """
    if (directory / ADAPTER).exists():
        raise UserError(
            f"{directory / ADAPTER}: is an adapter beside the model, which Layerproof does not apply. Merge it into the "
            "model (merge_and_unload of peft) and name the merged checkpoint, or move the adapter elsewhere."
        )
    if (directory / INDEX).exists():
        try:
            names = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
            elsewhere = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{directory / INDEX}: cannot be read ({error}). Copy the file again.") from None
        if not names:
            raise UserError(f"{directory / INDEX}: lists no tensors. Copy the file again.")
        if elsewhere:
            raise UserError(
                f"{directory / INDEX}: names {elsewhere[0]} in another directory. Put all shards beside the index."
            )
        return names
    if (directory / SINGLE).exists():
        return [SINGLE]
    raise UserError(f"{directory}: contains neither {INDEX} nor {SINGLE}. {_remedy_without_weights(directory)}")


def _remedy_without_weights(directory: Path) -> str:
    for name in sorted(path.name for path in directory.iterdir()):
        if name.startswith(OF_TRAINING):
            continue
        if SHARD.fullmatch(name):
            return f"There is {name}, without the index. Copy the index, too."
        if name.endswith(OTHER_FORMS):
            return f"Layerproof does not read {name}. Save the model as transformers does (save_pretrained), and name that."
    return "model.checkpoint must name safetensors."


def read_shard_header(path: Path) -> dict[str, TensorOnDisk]:
    """Lists the tensors of one safetensors file; reads only its header.

    Raises:
        StageError: if the file is missing, unreadable, truncated or not in safetensors format.
    """
    try:
        with open(path, "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise StageError(f"{path}: is a pointer of Git LFS in place of the tensors. Run git lfs pull there.")
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        base = 8 + length
        found = {
            name: TensorOnDisk(
                name,
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                base + entry["data_offsets"][0],
                base + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        for tensor in found.values():
            of_one = itemsize(tensor.dtype)  # 0 for half-byte dtypes, which no stage uses
            if of_one and tensor.end - tensor.start != math.prod(tensor.shape) * of_one:
                raise StageError(
                    f"{path}: {tensor.name} has the wrong byte length for its shape. Copy the shard again."
                )
        return found
    except FileNotFoundError:
        raise StageError(f"{path}: does not exist, but the index names it. Copy the shard again.") from None
    except OSError as error:
        raise StageError(f"{path}: cannot be read ({error.strerror}). Copy the shard again.") from None
    except (struct.error, ValueError, MemoryError, OverflowError, AttributeError, TypeError, KeyError, IndexError):
        raise StageError(f"{path}: has no readable header (truncated?). Copy the shard again.") from None


def describe(
    stage: str,
    parameters: Mapping[str, str],
    found: Mapping[str, TensorOnDisk],
    expected: Mapping[str, str],
    damaged: Mapping[str, str],
) -> dict[str, Any]:
    """The entry of a stage in `loading.describe_stages`; digests are computed on the declared threads."""

    def of_tensor(name: str) -> dict[str, Any]:
        if name not in found:
            shard = expected[name]
            raise StageError(
                damaged.get(shard) or f"{shard}: tensor {name} is missing; the index names it. Copy the shard again."
            )
        tensor = found[name]
        return {
            "file": tensor.file.name,
            "parameter": parameters[name],
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "sha256": tensor.sha256(),
        }

    try:
        tensors = dict(zip(parameters, mapped(of_tensor, parameters), strict=True))
    except (StageError, OSError) as error:
        return {"error": f"{stage}: {error}"}
    content = {name: [entry["dtype"], entry["shape"], entry["sha256"]] for name, entry in tensors.items()}
    return {"digest": digest_of(content), "tensors": tensors}


@dataclass(frozen=True)
class TensorOfStage:
    """A tensor that is read from its shard when indexed, like a slice of safetensors.

    A safetensors slice keeps the pages it read in memory until its shard is closed, so a copy of the data would need
    twice the memory. This class opens the shard for one tensor only.
    """

    file: Path
    name: str
    dtype: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads the tensor's part at `index` (`...` for all of it), as it is on disk.

        Raises:
            StageError: if the shard cannot be opened.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, framework="pt") as shard:
                return shard.get_slice(self.name)[index].clone()
        except (SafetensorError, OSError) as error:
            raise StageError(f"{self.file}: cannot be opened ({error}). Copy the shard again.") from None

    def get_dtype(self) -> str:
        """Returns the safetensors dtype; transformers calls this method by this name."""
        return self.dtype


def tensors_of_stage(directory: Path, description: Mapping[str, Any]) -> dict[str, TensorOfStage]:
    """Returns a stage's tensors by their names on disk, without reading them.

    Raises:
        StageError: if the stage's description contains an error.
    """
    if "error" in description:
        raise StageError(description["error"])
    return {
        name: TensorOfStage(directory / entry["file"], name, entry["dtype"])
        for name, entry in description["tensors"].items()
    }


@dataclass(frozen=True)
class StageWeights(Mapping[str, "torch.Tensor"]):
    """A stage's tensors by name, as they are on disk; each access reads the tensor again."""

    tensors: Mapping[str, TensorOfStage]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name][...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def stage_signatures(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns a digest by stage that is equal for stages of the same kind.

    Layers are of the same kind if their tensors have the same names, apart from numbers, and the same dtypes and
    shapes. A stage that is not a layer is a kind of its own. If a shard cannot be read, every stage is a kind of its
    own.

    This reads only the shards' headers, so it works before results/weights/ exists.
    """
    by_layer: dict[str, set[tuple[Any, ...]]] = {}
    for name in shards(directory):
        try:
            found = read_shard_header(directory / name)
        except StageError:
            return {name: name for name in names}
        for tensor in found.values():
            if match := LAYER_NUMBER.search(tensor.name):
                rest = tensor.name.replace(match[0], "", 1).translate(NO_DIGITS)
                by_layer.setdefault(match[1], set()).add((rest, tensor.dtype, tensor.shape))
    numbers = {name: str(int(name.rpartition("_")[2])) for name in names if name.startswith("layer_")}
    return {name: digest_of(sorted(by_layer.get(numbers.get(name, ""), {(name,)}), key=str)) for name in names}
