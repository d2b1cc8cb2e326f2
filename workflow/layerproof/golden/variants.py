"""The golden run in other ways that are as right as the first: what differs between them is noise, and no mistake.

- `implementations`: transformers' other attention and expert functions
- `stepwise`: softmax, silu and sigmoid as products of single operations, each rounded, as compilers make them; and the
  weights of chosen experts in the type of the activations from the scores on, as serving libraries have them
- `split`: besides, every product with a weight as the sum of two halves, each rounded, over a permuted order of the
  terms, as tensor parallelism and tiling make them
- `input`: the last bit of one in twelve numbers of the input changed, which is as much as one more rounding
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OTHER_ATTENTION = {"eager": "sdpa", "sdpa": "eager"}
OTHER_EXPERTS = {"eager": "batched_mm", "grouped_mm": "eager", "batched_mm": "eager"}

VARIANTS = ("implementations", "stepwise", "split", "input")

Run = Callable[[torch.Tensor | None], Any]


def variants(model: PreTrainedModel, run: Run, stage_input: torch.Tensor | None) -> Iterator[tuple[str, Any]]:
    """Name and result of `run(stage_input)` in every way that the model has; None is the input of `embed`, a lookup."""
    if stage_input is None:
        return
    attention, experts = _named(model)
    with _implementations(model, OTHER_ATTENTION.get(attention), OTHER_EXPERTS.get(experts)):
        yield "implementations", run(stage_input)
    with _implementations(model, "eager", "eager"), Stepwise(stage_input.dtype):
        yield "stepwise", run(stage_input)
    with split(model, stage_input):
        yield "split", run(stage_input)
    yield "input", run(last_bits_changed(stage_input))


@contextlib.contextmanager
def split(model: PreTrainedModel, stage_input: torch.Tensor) -> Iterator[None]:
    """The variant of this name inside the block: of all, the one that differs most from the golden."""
    with _implementations(model, "eager", "eager"), Stepwise(stage_input.dtype), _Split(stage_input.device):
        yield


@contextlib.contextmanager
def _implementations(model: PreTrainedModel, attention: str | None, experts: str | None) -> Iterator[None]:
    """Another attention and experts function inside the block; None, or what the model has not, leaves it as it is."""
    before = _named(model)
    _set(model, attention, experts)
    try:
        yield
    finally:
        _set(model, *before)


def _named(model: PreTrainedModel) -> tuple[str, str]:
    """The attention and experts function that a model runs with."""
    config = cast("Any", model.config.get_text_config())
    return config._attn_implementation or "", config._experts_implementation or ""


def _set(model: PreTrainedModel, attention: str | None, experts: str | None) -> None:
    for setter, name in ((model.set_attn_implementation, attention), (model.set_experts_implementation, experts)):
        if name:
            with contextlib.suppress(ValueError, ImportError):
                setter(name)


def last_bits_changed(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """`x` with one in twelve of its numbers moved to a neighbour of its dtype, up or down at random.

    The rms of the change is that of a rounding: a step in one of twelve, where a rounding is uniform over a step.
    """
    generator = torch.Generator().manual_seed(seed)
    host = x.cpu()
    drawn = torch.rand(host.shape, generator=generator)
    towards = torch.where(drawn < 1 / 24, torch.inf, -torch.inf).to(host.dtype)
    return torch.where(drawn < 1 / 12, torch.nextafter(host, towards), host).to(x.device)


class Stepwise(TorchFunctionMode):
    """The variant of this name inside the block, where attention and experts are eager; `dtype` is that of activations."""

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
        if name == "silu":
            return args[0] * (1 / (1 + (-args[0]).exp()))
        if name == "sigmoid":
            return 1 / (1 + (-args[0]).exp())
        result = func(*args, **kwargs)
        if name == "topk":
            return torch.return_types.topk((result[0].to(self.dtype), result[1]))
        if name == "gather" and result.is_floating_point():
            return result.to(self.dtype)
        return result


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along a dim that is kept, in pairs, each sum rounded to the dtype of `x`."""
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        first, second, odd = x.split([half, half, x.shape[dim] - 2 * half], dim)
        x = torch.cat((first + second, odd), dim)
    return x


class _Split(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.halves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.linear and len(args) >= 2:
            x, weight = args[:2]
            first, second = self._halves(x.shape[-1])
            total = func(x[..., first], weight[..., first]) + func(x[..., second], weight[..., second])
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return total if bias is None else total + bias
        if name in ("matmul", "__matmul__", "mm") and len(args) == 2 and args[1].ndim == 2:
            x, weight = args
            first, second = self._halves(x.shape[-1])
            return func(x[..., first], weight[first]) + func(x[..., second], weight[second])
        return func(*args, **kwargs)

    def _halves(self, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
        if terms not in self.halves:
            order = torch.randperm(terms, generator=torch.Generator().manual_seed(0)).to(self.device)
            self.halves[terms] = order[: terms // 2], order[terms // 2 :]
        return self.halves[terms]
