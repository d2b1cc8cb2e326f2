"""The tensor type that files store and comparisons read: numpy data with the dtype that it represents.

A tap has the layout [batch, seq, features...]. Readers go through blocks of tokens, so memory does not grow with batch
or seq.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from layerproof.wording import brackets

if TYPE_CHECKING:
    from collections.abc import Iterator


CHUNK_ELEMENTS = 1 << 19  # elements of one tensor in memory at a time; a single token may have more
FLOAT32_MAX = float(np.finfo(np.float32).max)
STORAGE = {
    "bfloat16": np.dtype(np.uint16),  # the bits, because numpy has no bfloat16
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}


class ShapeMismatch(ValueError):
    """Tensors have different shapes where the same shape is required."""


class DtypeMismatch(ValueError):
    """A dtype is not of the expected class (float, integer, boolean); a different width of float is not a mismatch."""


class Array(Protocol):
    """The interface of stored data: an h5py dataset or a numpy array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True)
class Tensor:
    """Stored data [batch, seq, features...] and the dtype that it represents (bfloat16 is stored as uint16 bits).

    Raises:
        DtypeMismatch: if the dtype is unknown or the data is not in the storage dtype that STORAGE requires.
    """

    data: Array
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE:
            raise DtypeMismatch(f"dtype {self.dtype} is not one of {', '.join(STORAGE)}")
        if self.data.dtype != STORAGE[self.dtype]:
            raise DtypeMismatch(f"{self.dtype} must be stored as {STORAGE[self.dtype]}, not as {self.data.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype_class(self) -> str:
        """One of float, integer and boolean."""
        if self.dtype == "bool":
            return "boolean"
        return "float" if "float" in self.dtype else "integer"

    def read(self, batch: slice, seq: slice) -> np.ndarray:
        """Reads the raw values of a block of tokens, as [tokens, features]."""
        block = self.data[batch, seq]
        return block.reshape(block.shape[0] * block.shape[1], math.prod(block.shape[2:]))

    def floats(self, raw: np.ndarray) -> np.ndarray:
        """Converts raw values to fp64, in the same shape."""
        with np.errstate(invalid="ignore"):  # a signalling NaN in the data is not an error
            return self.as_numpy(raw).astype(np.float64)

    def as_numpy(self, raw: np.ndarray) -> np.ndarray:
        """Converts raw values to a dtype that numpy can compute with, in the same shape."""
        return (raw.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else raw


def bf16_ulp(values: np.ndarray) -> np.ndarray:
    """Returns the bf16 step at each fp64 value: 2^(floor(log2|x|) - 7), 2^-133 for bf16 subnormals, 0 for zero."""
    _, exponent = np.frexp(values)  # |x| = m 2^exponent with m in [1/2, 1), so floor(log2|x|) is exponent - 1
    return np.where(values == 0, 0.0, np.ldexp(1.0, np.maximum(exponent - 8, -133)))


def statistics(tensor: Tensor, valid: np.ndarray | None = None, chunk_elements: int = CHUNK_ELEMENTS) -> dict[str, Any]:
    """Computes {count, mean, std, min, max, nan, inf} of a tensor [batch, seq, features...] over its valid tokens.

    The tensor may have any dtype. The first five cover finite elements only, in fp64; std is the population's. mean,
    std, min and max are None if there are no finite elements.

    Raises:
        ValueError: if valid is not bool [batch, seq].
    """
    valid = np.ones(tensor.shape[:2], bool) if valid is None else valid
    check_valid(valid, tensor)
    moments, nan, inf = _Moments(), 0, 0
    for batch, seq in blocks(tensor.shape, chunk_elements):
        values = tensor.floats(tensor.read(batch, seq)[valid[batch, seq].reshape(-1)])
        finite = is_finite(values)
        nan += int(np.count_nonzero(np.isnan(values)))
        inf += int(np.count_nonzero(~finite & ~np.isnan(values)))
        moments.add(values[finite])
    if not moments.count:
        return {"count": 0, "mean": None, "std": None, "min": None, "max": None, "nan": nan, "inf": inf}
    return {
        "count": moments.count,
        "mean": moments.mean,
        "std": math.sqrt(moments.centred / moments.count),
        "min": moments.low,
        "max": moments.high,
        "nan": nan,
        "inf": inf,
    }


def check_valid(valid: np.ndarray, tensor: Tensor) -> None:
    if valid.dtype != np.bool_ or valid.shape != tensor.shape[:2]:
        found = f"{valid.dtype} {brackets(valid.shape)}"
        raise ValueError(f"valid is {found} where a tensor {brackets(tensor.shape)} needs bool [batch,seq]")


def blocks(shape: tuple[int, ...], chunk_elements: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of batch and seq that cut a tensor, in order, into blocks of about `chunk_elements` elements."""
    if math.prod(shape) == 0:
        return
    batch, seq = shape[:2]
    tokens = max(1, chunk_elements // math.prod(shape[2:]))
    rows, columns = max(1, tokens // seq), min(seq, tokens)
    for row in range(0, batch, rows):
        for column in range(0, seq, columns):
            yield slice(row, min(row + rows, batch)), slice(column, min(column + columns, seq))


def token_numbers(batch: slice, seq: slice, length: int) -> np.ndarray:
    """Returns the flat numbers of a block's tokens in [batch, length], row by row: [tokens]."""
    return np.add.outer(np.arange(batch.start, batch.stop) * length, np.arange(seq.start, seq.stop)).reshape(-1)


def is_finite(values: np.ndarray) -> np.ndarray:
    """Marks the fp64 values within the range of fp32, so that no sum of squares overflows; False at NaN."""
    return np.abs(values) <= FLOAT32_MAX


class _Moments:
    """Mean, centred second moment and range of numbers, merged chunk by chunk.

    Each chunk is centred, because raw sums of squares cancel where the mean is large compared with the spread.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.centred = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: np.ndarray) -> None:
        """Adds values, fp64 [elements], all finite."""
        if not values.size:
            return
        mean = float(values.mean())
        residual = values - mean
        shift = mean - self.mean
        total = self.count + values.size
        self.centred += float(np.square(residual).sum()) + shift * shift * (self.count * (values.size / total))
        self.mean += shift * (values.size / total)
        self.count = total
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))


def is_same(tensor: Tensor, other: Tensor, compared: np.ndarray | None = None) -> bool:
    """Whether two tensors of one shape store the same numbers, at the tokens in `compared`, bool [batch, seq], or at all.

    If they do not, the first block usually shows it.
    """
    for piece in blocks(tensor.shape, CHUNK_ELEMENTS):
        keep = slice(None) if compared is None else compared[piece].reshape(-1)
        if not np.array_equal(tensor.read(*piece)[keep], other.read(*piece)[keep]):
            return False
    return True
