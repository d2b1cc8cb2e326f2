"""Judges the unmodified model of a type as its own port, by the product's own code in one process."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from families import configs, detection
from families.one_process import Run, drawn_prompts
from layerproof.errors import StageError, UserError, one_line
from layerproof.files import write_json
from layerproof.model import checkpoint
from layerproof.model.resolve import resolve

SPREADS = (1, 0.5, 0.25)
"""How far drawn weights lie apart, at first and after logits that are not finite."""


@dataclass
class Row:
    """What is known of one type.

    `outcome` is passed, false alarm, not the model (the golden's logits are others), refused, not on XLA, error, crashed,
    or not run (plain transformers cannot). `modules` counts those with weights of their own. `mistake` says what was put
    into one stage, and whether it was found.
    """

    model_type: str
    seed: int
    outcome: str
    sentence: str | None = None
    taps: int = 0
    modules: int = 0
    without_tap: list[str] = field(default_factory=list)
    stages: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    trace: str | None = None
    mistake: dict[str, Any] | None = None


def judge(model_type: str, seed: int, directory: Path, with_mistake: bool = True) -> Row:
    """The row of one type, with a drawn mistake or without: whatever its run does, a row comes back."""
    started = time.perf_counter()
    said = io.StringIO()
    row = Row(model_type, seed, "crashed")
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                save(model_type, directory / "checkpoint", seed)
            except Exception as error:
                row.outcome, row.sentence = "not run", f"{type(error).__name__}: {one_line(error)}"
                row.trace = traceback.format_exc()
                return row
            _judge(row, directory, with_mistake)
    except StageError as error:
        row.outcome, row.sentence = "error", str(error)
        row.trace = traceback.format_exc()
    except UserError as error:
        row.outcome, row.sentence = "refused", str(error)
        row.trace = traceback.format_exc()
    except Exception as error:
        row.outcome, row.sentence = "crashed", f"{type(error).__name__}: {one_line(error)}"
        row.trace = traceback.format_exc()
    row.seconds = round(time.perf_counter() - started, 1)
    return row


def save(model_type: str, directory: Path, seed: int, sizes: Mapping[str, int] | None = None) -> None:
    """Writes a bf16 checkpoint whose every parameter, norms and biases too, is drawn at random; runs it once.

    `sizes` are those of `configs.small`.

    Weights are drawn again, half as far apart, until the logits are finite in fp32 and bf16.

    Raises:
        Exception: if plain transformers cannot build, run or save it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    for spread in SPREADS:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configs.small(model_type, **(sizes or {})), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    scale = 0.3 if any(part in parameter for part in ("norm", "bias", "sinks")) else 0.08
                    tensor.add_(torch.randn_like(tensor) * scale * spread)
                elif parameter.endswith("tid2eid"):  # the experts of each token id, all of them the first at first
                    tensor.copy_(torch.rand(len(tensor), 8).argsort(-1)[:, : tensor.shape[1]])
        ids = torch.randint(3, 90, (2, 16))
        if _is_finite(model, ids):
            model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="200KB")
            if _is_finite(whole(directory), ids):
                return
    raise ValueError("the logits are not finite")


def _is_finite(model: Any, ids: Any) -> bool:
    import torch

    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return bool(torch.isfinite(logits).all())


def _judge(row: Row, directory: Path, with_mistake: bool) -> None:
    prompts = drawn_prompts(row.seed)
    write_json(directory / "ids.json", prompts.ids.tolist())
    inputs = {"prompts": None, "token_ids": str(directory / "ids.json")}
    resolve(
        {"model": {"checkpoint": str(directory / "checkpoint")}, "inputs": inputs, "port": {"backend": "transformers"}}
    )
    run = Run.of(directory, prompts)
    for stage in run.stages:
        (directory / "doing").write_text(f"golden/{stage}")
        run.golden(stage)
        (directory / "doing").write_text(f"port/{stage}")
        comparison = run.port(stage)
        row.taps += len(comparison["taps"])
        modules = run.modules(stage)
        row.modules += len(modules)
        row.without_tap += [f"{stage}: {name}" for name, has_tap in modules.items() if not has_tap]
        row.stages[stage] = comparison["status"]
        if comparison["status"] != "pass":
            row.outcome, row.sentence = "false alarm", f"{row.sentence or ''}{stage}: {comparison['reason']} "
    if row.outcome == "crashed":
        row.outcome = "passed"
    if not run.is_the_model(whole(run.checkpoint)):
        row.outcome, row.sentence = "not the model", "the golden's logits are not those of the whole model"
    if row.outcome == "passed" and with_mistake:
        (directory / "doing").write_text("its mistake")
        row.mistake = detection.of_one(run, row.seed)


def whole(directory: Path, dtype: str = "bfloat16") -> Any:
    """The model as transformers loads it."""
    import torch
    import transformers

    architecture = getattr(transformers, checkpoint.read_config(directory)["architectures"][0])
    return architecture.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)
