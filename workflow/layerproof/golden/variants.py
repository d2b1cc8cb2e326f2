"""Ways to run the golden that are as right as the first. Differences between them are noise, not mistakes.

- `implementations`: transformers' other attention and expert functions
- `stepwise`: softmax, activations, norms after their statistics, and products with an addition as single operations,
  each rounded, as compilers build them; and the weights of chosen experts in the dtype of the activations from the
  scores on, as in serving libraries
- `split`: `stepwise`, and also every product with a weight as the sum of two halves, each rounded, over a permuted
  order of the terms, as in tensor parallelism and tiling; and those inside attention that transformers has only once
- `input`: the last bit of one in twelve numbers of the input changed, which amounts to one more rounding; an input that is
  wider than the model, as of models that keep their residuals in fp32, rounded to the model's dtype, as ports get it
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from layerproof.model.parts import parts_of
from layerproof.model.stages import EMBED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OTHER_ATTENTION = {"eager": "sdpa", "sdpa": "eager"}
OTHER_EXPERTS = {"eager": "batched_mm", "grouped_mm": "eager", "batched_mm": "eager"}

VARIANTS = ("implementations", "stepwise", "split", "input")

Run = Callable[[torch.Tensor | None], Any]


def variants(model: PreTrainedModel, run: Run, stage_input: torch.Tensor | None) -> Iterator[tuple[str, Any]]:
    """Yields the name and the result of `run(stage_input)` for every variant of the model.

    The input of `embed` is None, and token ids have no last bits to change. A lookup has no variants at all.
    """
    if stage_input is None and len(parts_of(model).outside[EMBED]) == 1:
        return
    attention, experts = _named(model)
    with _implementations(model, OTHER_ATTENTION.get(attention), OTHER_EXPERTS.get(experts)):
        yield "implementations", run(stage_input)
    with _implementations(model, "eager", "eager"), Stepwise(model.dtype):
        yield "stepwise", run(stage_input)
    with split(model):
        yield "split", run(stage_input)
    if stage_input is not None:
        yield "input", run(rounded_once_more(stage_input, model.dtype))


@contextlib.contextmanager
def split(model: PreTrainedModel) -> Iterator[None]:
    """Runs the variant `split` inside the block: of all variants, it differs most from the golden."""
    with _implementations(model, "eager", "eager"), Stepwise(model.dtype), _Split(of_any=not model._supports_sdpa):
        yield


@contextlib.contextmanager
def _implementations(model: PreTrainedModel, attention: str | None, experts: str | None) -> Iterator[None]:
    """Uses another attention and experts function inside the block.

    None, or a function that the model does not have, leaves the present one in place.
    """
    before = _named(model)
    _set(model, attention, experts)
    try:
        yield
    finally:
        _set(model, *before)


def _named(model: PreTrainedModel) -> tuple[str, str]:
    """The names of the attention and experts functions that a model runs with."""
    config = cast("Any", model.config.get_text_config())
    return config._attn_implementation or "", config._experts_implementation or ""


def _set(model: PreTrainedModel, attention: str | None, experts: str | None) -> None:
    for setter, name in ((model.set_attn_implementation, attention), (model.set_experts_implementation, experts)):
        if name:
            with contextlib.suppress(ValueError, ImportError):
                setter(name)


def rounded_once_more(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The input of a model of this dtype as `input` changes it."""
    return x.to(dtype).to(x.dtype) if x.dtype.itemsize > dtype.itemsize else last_bits_changed(x)


def last_bits_changed(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """`x` with one in twelve of its numbers moved to a neighbour in its dtype, up or down at random.

    The rms of the change equals that of a rounding: one step in one of twelve numbers, where a rounding is uniform over
    a step.
    """
    generator = torch.Generator().manual_seed(seed)
    host = x.cpu()
    drawn = torch.rand(host.shape, generator=generator)
    towards = torch.where(drawn < 1 / 24, torch.inf, -torch.inf).to(host.dtype)
    return torch.where(drawn < 1 / 12, torch.nextafter(host, towards), host).to(x.device)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x * _sigmoid(x)


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    return x / 2 * (1 + (x * math.sqrt(0.5)).erf())


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    return torch.where(x * beta > threshold, x, (x * beta).exp().log1p() / beta)


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """A LayerNorm whose statistics are in fp32, and whose steps after them are rounded."""
    dims = tuple(range(-len(normalized_shape), 0))
    variance, mean = torch.var_mean(x.float(), dims, correction=0, keepdim=True)
    result = ((x.float() - mean) * (variance + eps).rsqrt()).to(x.dtype)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    result = (x.float() * (x.float().square().mean(dims, keepdim=True) + small).rsqrt()).to(x.dtype)
    return result if weight is None else result * weight


def _addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return input * beta + (mat1 @ mat2) * alpha


def _baddbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _addmm(input, batch1, batch2, beta=beta, alpha=alpha)


STEPS: dict[str, Callable[..., Any]] = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
}
"""Functions as single operations, by torch's name for them."""


class Stepwise(TorchFunctionMode):
    """Runs the variant `stepwise` inside the block, if attention and experts are eager; `dtype` is the activations'."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "softmax":
            positional = [argument for argument in args[1:] if isinstance(argument, torch.dtype)]
            x = args[0].to(kwargs.get("dtype") or next(iter(positional), args[0].dtype))
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            exponentials = (x - x.amax(dim, keepdim=True)).exp()
            return exponentials / _sum(exponentials, dim)
        if name in STEPS:
            return STEPS[name](*args, **kwargs)
        result = func(*args, **kwargs)
        if name == "topk":
            return torch.return_types.topk((result[0].to(self.dtype), result[1]))
        if name == "gather" and result.is_floating_point():
            return result.to(self.dtype)
        return result


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums along a dim, which stays; each sum is rounded to the dtype of `x`.

    fp32 is summed in pairs, and a shorter dtype one by one, as XLA does on the CPU: only then does the order matter.
    """
    if x.dtype.itemsize < torch.float32.itemsize:
        return functools.reduce(torch.add, x.split(1, dim))
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        first, second, odd = x.split([half, half, x.shape[dim] - 2 * half], dim)
        x = torch.cat((first + second, odd), dim)
    return x


class _Split(TorchFunctionMode):
    """Splits products with matrices, or products `of_any` tensors."""

    def __init__(self, of_any: bool) -> None:
        super().__init__()
        self.of_any = of_any
        self.halves: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.linear and len(args) >= 2:
            x, weight = args[:2]
            first, second = self._halves(x.shape[-1], x.device)
            total = func(x[..., first], weight[..., first]) + func(x[..., second], weight[..., second])
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return total if bias is None else total + bias
        if name == "addmm" and len(args) == 3:
            added, x, weight = cast("Any", args)
            return added * kwargs.get("beta", 1) + self._product(torch.mm, x, weight) * kwargs.get("alpha", 1)
        if name in ("matmul", "__matmul__", "mm") and len(args) == 2 and self._is_split(args[1]):
            return self._product(func, *args)
        return func(*args, **kwargs)

    def _is_split(self, second: torch.Tensor) -> bool:
        return second.ndim == 2 or (self.of_any and second.ndim > 2)

    def _product(self, func: Callable, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first, second = self._halves(x.shape[-1], x.device)
        return func(x[..., first], other[..., first, :]) + func(x[..., second], other[..., second, :])

    def _halves(self, terms: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if (terms, device) not in self.halves:
            order = torch.randperm(terms, generator=torch.Generator().manual_seed(0)).to(device)
            self.halves[terms, device] = order[: terms // 2], order[terms // 2 :]
        return self.halves[terms, device]
