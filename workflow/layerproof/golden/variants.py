"""Ways to run the golden that are as right as the first. Differences between them are noise, not mistakes.

- `implementations`: transformers' other attention and expert functions
- `stepwise`: softmax, silu and sigmoid as single operations, each rounded, as compilers build them; and the weights of
  chosen experts in the dtype of the activations from the scores on, as in serving libraries
- `split`: `stepwise`, and also every product with a weight as the sum of two halves, each rounded, over a permuted
  order of the terms, as in tensor parallelism and tiling
- `input`: the last bit of one in twelve numbers of the input changed, which amounts to one more rounding
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
    """Yields the name and the result of `run(stage_input)` for every variant of the model.

    The input of `embed` is None. It is a lookup, so it has no variants.
    """
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
    """Runs the variant `split` inside the block: of all variants, it differs most from the golden."""
    with _implementations(model, "eager", "eager"), Stepwise(stage_input.dtype), _Split(stage_input.device):
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
    """Sums along a dim, which stays, in pairs; each sum is rounded to the dtype of `x`."""
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
