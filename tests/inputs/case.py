"""One input of the table: a small checkpoint and prompts that a row changes, and what Layerproof makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs import REPOSITORY
from families.one_process import Run
from layerproof.model import loading, tokens
from layerproof.model.checkpoint import INDEX, SINGLE, num_layers, read_config
from layerproof.model.resolve import resolve
from layerproof.model.stages import all_stages
from layerproof.paths import TINY_CHECKPOINT
from models import COMMON, save_drawn

PROMPTS = "The cat sat on the mat.\n\nA second prompt, longer than the first one.\n"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def make_base(folder: Path) -> None:
    """A Llama of one layer in one file, with the tokenizer of the model that comes with Layerproof."""
    tokenizer = json.loads((REPOSITORY / TINY_CHECKPOINT / "tokenizer.json").read_text())
    words = max(tokenizer["model"]["vocab"].values()) + 1
    config = COMMON | {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8, "vocab_size": words}
    save_drawn("llama", config, folder, shard_size="1GB")
    for name in TOKENIZER:
        shutil.copy(REPOSITORY / TINY_CHECKPOINT / name, folder)


@dataclass
class Case:
    """A copy of the base checkpoint in `folder / "checkpoint"` and its prompts; `settings` is the content of config.yaml."""

    folder: Path
    base: Path
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shutil.copytree(self.base, self.checkpoint)
        self.write("prompts.txt", PROMPTS)
        self.settings |= {
            "model": {"checkpoint": str(self.checkpoint)},
            "inputs": {"prompts": str(self.folder / "prompts.txt")},
            "golden": {"device": "cpu"},
            "port": {"backend": "transformers"},
        }

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def set(self, **sections: Mapping[str, Any]) -> None:
        """Sets keys of config.yaml by section."""
        for name, values in sections.items():
            self.settings[name] = {**self.settings.get(name, {}), **values}

    def moved(self, name: str) -> Path:
        """Moves the checkpoint to another place in the folder and names it in config.yaml."""
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        self.checkpoint.rename(place)
        self.set(model={"checkpoint": str(place)})
        return place

    def write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def config(self, *without: str, **values: Any) -> None:
        """Changes keys of the checkpoint's config.json and removes others."""
        path = self.checkpoint / "config.json"
        content = json.loads(path.read_text()) | values
        path.write_text(json.dumps({key: value for key, value in content.items() if key not in without}))

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint / SINGLE)

    def save(self, tensors: Mapping[str, torch.Tensor]) -> None:
        save_file({name: one.contiguous() for name, one in tensors.items()}, self.checkpoint / SINGLE, {"format": "pt"})

    def change(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Changes the tensors of the checkpoint in place."""
        tensors = self.tensors()
        change(tensors)
        self.save(tensors)

    def split(self, files: int = 3) -> dict[str, str]:
        """Splits the checkpoint into shards with an index, as transformers names them; returns the index's map."""
        tensors = self.tensors()
        names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
        shards = {name: {key: tensors[key] for key in list(tensors)[at::files]} for at, name in enumerate(names)}
        for name, part in shards.items():
            save_file(part, self.checkpoint / name, {"format": "pt"})
        (self.checkpoint / SINGLE).unlink()
        weight_map = {key: name for name, part in shards.items() for key in part}
        self.index(weight_map)
        return weight_map

    def index(self, weight_map: Any) -> None:
        (self.checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def judge(self) -> None:
        """Runs every stage as the jobs of a run do, and compares the golden's logits with those of the whole model.

        Raises:
            UserError: what a user would read.
            AssertionError: if a stage does not pass, or the golden is not the model.
        """
        settings = resolve(self.settings).settings
        directory, inputs, trust = Path(settings.model.checkpoint), settings.inputs, settings.model.trust_remote_code
        given = [Path(name) if name else None for name in (inputs.prompts, inputs.token_ids)]
        config = read_config(directory)
        tokens.make(self.folder / "tokens.json", directory, config, *given, inputs.max_tokens, trust)
        prompts = tokens.Tokens.read(self.folder / "tokens.json")
        descriptions, _ = loading.describe_stages(directory, all_stages(num_layers(config)), trust)
        run = Run(self.folder, directory, prompts, settings, descriptions)
        for stage in run.stages:
            run.golden(stage)
            compared = run.port(stage)
            assert compared["status"] == "pass", f"{stage}: {compared['reason']}"
        assert run.is_the_model(self._whole(directory, trust)), "the golden's logits are not the whole model's"

    def _whole(self, directory: Path, trust: bool) -> Any:
        """The model as transformers loads it in bf16, dequantised if it has to be."""
        from transformers import AutoModelForCausalLM

        dequantizing = loading.dequantizing(directory, trust)
        options = {"quantization_config": dequantizing} if dequantizing else {}
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, trust_remote_code=trust, **options
        ).eval()
