"""The golden: one stage of the trusted model, in its own dtype and in fp32 as the truth, from the same input."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import str_to_torch_dtype

from layerproof.config import Config, changed
from layerproof.errors import StageError, UserError
from layerproof.golden import feeds
from layerproof.golden.layer_taps import modules_without_tap
from layerproof.golden.transformers_stage import run_stage, stage_module
from layerproof.golden.variants import split, variants
from layerproof.golden.whole import FullModel, device_of
from layerproof.measure.noise import noise_of_taps
from layerproof.measure.noise_file import write_noise
from layerproof.measure.routing import CHOICE, selection_of
from layerproof.model import handed, loading
from layerproof.model.experts import EXPERT_BY_EXPERT
from layerproof.model.stages import layer_of
from layerproof.model.tokens import Tokens
from layerproof.taps import OUT, Fed, is_choice, is_output, merged
from layerproof.tensors import hdf5

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Taps = dict[str, hdf5.Tensor]


def resolve_device(name: str) -> torch.device:
    """The torch device for `golden.device`: `cpu`, `cuda` or `auto` (CUDA if available).

    Raises:
        UserError: if the config asks for CUDA and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError('config.yaml: golden.device: is "cuda", but torch finds no CUDA device. Write "auto" or "cpu".')
    return torch.device("cuda" if name != "cpu" and available else "cpu")


OWN = f"golden/{OUT}"
"""The tensor in the file of the stage before that a stage reads: the golden's own output."""


def make_stage(
    stage: str,
    directory: Path,
    description: Mapping[str, Any],
    tokens: Tokens,
    previous: Path | None,
    previous_noise: Path | None,
    output: Path,
    noise: Path,
    settings: Config,
    with_taps: bool = True,
    full_model: FullModel | None = None,
    reads: str = OWN,
) -> None:
    """Runs a stage of the golden and writes `golden/TAP` in its dtype and `truth/TAP` in fp32.

    It also writes how the model stores the weights (`loading.weights_in_memory`), what feeds each tap
    (`feeds.measure`), and to `noise` how far legitimate variants of the golden are from the truth. That is a file of its
    own, so that it is not an input of the port.

    The input is what it `reads` from the previous stage's file, `golden/out` as a rule: the golden follows its own
    trajectory, and the truth of every stage starts from the same input. One variant follows its own trajectory too,
    `chained/out` in the noise files: it shows how far a correct port may stray in a chain. `settings` contain the
    config's `golden` and `model.trust_remote_code`. A stage that only feeds others runs without truth, noise and taps
    (`with_taps` is False).

    With `full_model`, the stage runs where its weights are, and its output is the one from the run of the
    full model. The file's attribute `alone` is the relative L2 between that output and the one of the stage run alone.

    Raises:
        StageError: if weights or input are missing or damaged.
    """
    device = device_of(full_model.model, stage) if full_model else resolve_device(settings.golden.device)
    fed = handed.stage_input(previous, stage, reads)
    dtype = getattr(torch, settings.golden.dtype)
    stage_input = hdf5.to_torch(fed.out).to(device) if fed else None
    if stage_input is not None and reads != OWN:
        stage_input = _narrowed(stage_input, dtype)
    given = {name: hdf5.to_torch(tensor).to(device) for name, tensor in fed.handed.items()} if fed else {}
    ids, valid = torch.from_numpy(tokens.ids).to(device), torch.from_numpy(tokens.valid).to(device)

    def run(model: PreTrainedModel, stage_input: torch.Tensor | None) -> Taps:
        taps = run_stage(model, stage, stage_input, ids, valid, own_taps=settings.golden.taps, handed=given)
        return {name: hdf5.to_array(taps[name]) for name in merged([list(taps)])}

    model = full_model.model if full_model else load(stage, directory, description, device, dtype, settings)
    log.info("golden/%s: weights loaded, runs on %s", stage, _device_name(device))
    try:
        golden = run(model, stage_input)
    except IndexError as error:
        raise _too_long(stage, model, tokens) or error from None
    except RuntimeError as error:
        is_of_memory = isinstance(error, torch.OutOfMemoryError)
        if is_of_memory or reads == OWN or stage_input is None or stage_input.dtype == dtype:
            raise
        raise StageError(
            f"{stage}: its captured input is {hdf5.dtype_name(stage_input)}, with numbers that {settings.golden.dtype} does "
            "not have, in which the golden computes. Capture the tensors that the port computes with."
        ) from error
    attributes: dict[str, Any] = {"stage": stage, "device": _device_name(device)}
    if full_model:
        attributes["alone"] = full_model.change(stage, hdf5.to_torch(golden[OUT]))
        golden[OUT] = hdf5.to_array(full_model.outputs[stage])
    strayed = golden[OUT]
    if previous_noise is not None:
        chained = hdf5.to_torch(hdf5.read(previous_noise, "chained/out")).to(device)
        with split(model):
            strayed = run(model, chained)[OUT]
    documents: dict[str, Any] = {hdf5.WEIGHTS: loading.weights_in_memory(model, stage)}
    documents[hdf5.SOURCES] = handed.sources(previous, output, "golden", golden)
    if not with_taps:
        alone = {"golden": {name: tensor for name, tensor in golden.items() if is_output(name)}}
        hdf5.write(output, alone, valid=tokens.valid, attributes=attributes, documents=documents)
        write_noise(noise, {}, [], strayed)
        return
    log.info("golden/%s: runs its variants, for the noise", stage)
    others = dict(variants(model, functools.partial(run, model), stage_input))
    log.info("golden/%s: runs in fp32, for the truth", stage)
    truth_input = None if stage_input is None else stage_input.float()
    twin = exact(model, stage, directory, description, device, settings)
    truth = run(twin, truth_input)
    # Some modules run only for some values, such as experts that loops over the chosen ones call.
    alike = [
        name for name in golden if all(_is_alike(golden[name], taps.get(name)) for taps in (truth, *others.values()))
    ]
    measured_feeds = feeds.measure(twin, stage, truth_input, ids, valid, alike, settings.golden.taps, given)
    measured_feeds = _without_unused_choices(measured_feeds)
    golden = {fed.name: golden[fed.name] for fed in measured_feeds}
    documents[hdf5.TAPS] = [
        {key: value for key, value in asdict(one).items() if value or key != "reach"} for one in measured_feeds
    ]
    if layer_of(stage) is not None:
        untapped = modules_without_tap(stage_module(model, stage))
        attributes |= {"without_tap": ", ".join(untapped)} if untapped else {}
    groups = {"golden": golden, "truth": {name: truth[name] for name in golden}}
    hdf5.write(output, groups, valid=tokens.valid, attributes=attributes, documents=documents)
    measured = noise_of_taps(golden, list(others.values()), truth, tokens.valid, measured_feeds)
    write_noise(noise, measured, list(others), strayed)


def _narrowed(captured: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A captured tensor in the golden's dtype if that has all of its numbers: people save what they capture as fp32."""
    narrow = captured.to(dtype)
    same = (narrow == captured) | (narrow.isnan() & captured.isnan())
    return narrow if same.all() else captured


def _too_long(stage: str, model: PreTrainedModel, tokens: Tokens) -> StageError | None:
    """The error if the prompts are longer than the model's table of positions, which may be why a lookup failed."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = tokens.ids.shape[1]
    if positions is None or length <= positions:
        return None
    return StageError(
        f"{stage}: a prompt has {length} tokens, but the model has a table of {positions} positions. Write "
        f"inputs.max_tokens: {positions}."
    )


def _without_unused_choices(taps: list[Fed]) -> list[Fed]:
    """Leaves out choices that nothing depends on, such as of a top-k whose values alone are used."""
    used = {name for one in taps for name in one.fed_by}
    unused = {one.name for one in taps if is_choice(one.name) and one.name not in (*used, CHOICE)}
    return [one for one in taps if one.name not in unused and one.name not in map(selection_of, unused)]


def _is_alike(tensor: hdf5.Tensor, other: hdf5.Tensor | None) -> bool:
    return other is not None and (other.shape, other.dtype_class) == (tensor.shape, tensor.dtype_class)


def load(
    stage: str,
    directory: Path,
    description: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    settings: Config,
    with_others: bool = False,
) -> PreTrainedModel:
    """Loads the golden model with this stage's weights; `with_others` builds it for `load_another`.

    Raises:
        StageError: as `loading.load_stage` does.
    """
    model = _meta_model(directory, stage, dtype, settings, with_others)
    loading.load_stage(model, stage, directory, description, device)
    return model


def exact(
    model: PreTrainedModel,
    stage: str,
    directory: Path,
    description: Mapping[str, Any],
    device: torch.device,
    settings: Config,
    with_others: bool = False,
) -> PreTrainedModel:
    """The model that computes the truth of a stage: fp32, with the same weights as `model`, which `load` returned.

    A tensor with the weights of all experts keeps its dtype and is shared with `model`. Each expert is widened where it
    is used, because an fp32 copy would take twice the memory of the whole layer. Only tensors that `model` stores in a
    narrower dtype than the checkpoint, such as an fp32 router, are read from the checkpoint again. `with_others` is
    that of `load`.

    Raises:
        StageError: as `loading.load_stage` does.
    """
    is_one_by_one = settings.golden.experts_implementation == EXPERT_BY_EXPERT
    experts_form = EXPERT_BY_EXPERT if is_one_by_one else "eager"
    eager = changed(settings, golden=changed(settings.golden, experts_implementation=experts_form))
    twin = _meta_model(directory, stage, torch.float32, eager, with_others)
    kept = lossless(description, model.dtype)
    experts = keep_experts(twin, stage, kept, model.dtype)
    state = model.state_dict()
    if any(state[name].is_meta for name in kept):  # offloaded
        state = load(stage, directory, description, device, model.dtype, settings).state_dict()
    loading.load_stage(twin, stage, directory, description, device, {name: state[name] for name in kept})
    for module in experts:
        _widen_on_use(module)
    return twin


def load_another(
    model: PreTrainedModel,
    stage: str,
    directory: Path,
    description: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Loads one more stage's weights into a model that `load` or `exact` built `with_others`; `dtype` is the golden's.

    Raises:
        StageError: as `loading.load_stage` does.
    """
    keep_experts(model, stage, lossless(description, dtype), dtype)
    loading.load_stage(model, stage, directory, description, device)


def _meta_model(
    directory: Path, stage: str, dtype: torch.dtype, settings: Config, with_others: bool
) -> PreTrainedModel:
    implementations, trust = settings.golden.implementations, settings.model.trust_remote_code
    if with_others:
        return loading.meta_model(directory, trust, dtype, **implementations)
    return loading.meta_stage(directory, stage, trust, dtype, **implementations)


def lossless(description: Mapping[str, Any], dtype: torch.dtype) -> set[str]:
    """The parameters and buffers of a stage that a model of this dtype stores without rounding."""
    on_disk: dict[str, set[str]] = {}
    for entry in description.get("tensors", {}).values():
        on_disk.setdefault(entry["parameter"], set()).add(entry["dtype"])

    def fits(word: str) -> bool:
        return torch.promote_types(str_to_torch_dtype[word], dtype) == dtype

    # Quantised values are 8 bits wide. Their scales round them, in the golden as in the port.
    return {name for name, words in on_disk.items() if any(map(_is_quantised, words)) or all(map(fits, words))}


def _is_quantised(word: str) -> bool:
    return word.startswith(("F8", "F4", "I8", "U8"))


def keep_experts(
    model: PreTrainedModel, stage: str, lossless: Collection[str], dtype: torch.dtype
) -> list[torch.nn.Module]:
    """Converts the stage's modules that store all experts in one tensor to `dtype`, and returns them.

    These are modules of transformers' experts interface. Leaves out those whose weights this would round.
    """
    names = {module: name for name, module in model.named_modules()}
    experts = [
        module
        for module in stage_module(model, stage).modules()
        if hasattr(module, "is_transposed")
        and hasattr(module, "num_experts")
        and all(f"{names[module]}.{name}" in lossless for name, _ in module.named_parameters(recurse=False))
    ]
    for module in experts:
        module.to(dtype)
    return experts


@dataclass(frozen=True)
class _WidenedOnUse:
    """Stands in for a bf16 parameter [experts, ...]; indexing it by expert returns that expert's part in fp32."""

    parameter: torch.Tensor

    def __getitem__(self, expert: torch.Tensor | int) -> torch.Tensor:
        return self.parameter[expert].float()


def _widen_on_use(experts: torch.nn.Module) -> None:
    """Makes experts compute in fp32 from bf16 weights, one expert at a time; in place.

    An fp32 copy of all experts would take twice the memory of the whole layer. transformers' eager experts function and
    ours read weights by expert and in no other way.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        delattr(experts, name)
        experts.__dict__[name] = _WidenedOnUse(parameter.detach())


def raw_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer of a loaded module as memory stores it: not widened, even if it is widened on use."""
    value = getattr(module, name)
    return value.parameter if isinstance(value, _WidenedOnUse) else value.detach()


@contextlib.contextmanager
def with_weights(module: torch.nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    """Replaces a parameter or buffer of a loaded module inside the block."""
    before = getattr(module, name)
    holder: Any = module._parameters if name in module._parameters else module._buffers
    after: Any = torch.nn.Parameter(value, requires_grad=False) if name in module._parameters else value
    if isinstance(before, _WidenedOnUse):
        holder, after = module.__dict__, _WidenedOnUse(value)
    holder[name] = after
    try:
        yield
    finally:
        holder[name] = before


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
