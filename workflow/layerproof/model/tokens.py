"""Prompts as token ids: padded on the right to one length, with a mask of the tokens that are not padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layerproof.errors import UserError, one_line
from layerproof.files import read_json, write_json
from layerproof.model.checkpoint import transformers_config
from layerproof.model.inputs import read_prompts, read_token_ids, vocabulary_of


@dataclass(frozen=True)
class Tokens:
    """`ids` int64 and `valid` bool, both [batch, seq]."""

    ids: np.ndarray
    valid: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Reads the tokens that `make` wrote to results/tokens.json."""
        content = read_json(path)
        return pad(content["ids"], content["pad_id"])


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Tokens:
    """Pads rows of ids of different length on the right, to one array.

    With padding on the right, the causal mask alone keeps padding out of the other tokens, and every query sees at
    least one key.
    """
    length = max(map(len, rows))
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    valid = np.zeros((len(rows), length), dtype=bool)
    for row, values in enumerate(rows):
        ids[row, : len(values)] = values
        valid[row, : len(values)] = True
    return Tokens(ids, valid)


def make(
    output: Path,
    directory: Path,
    config: Mapping[str, Any],
    prompts: Path | None,
    token_ids: Path | None,
    max_tokens: int,
    trust_remote_code: bool,
) -> None:
    """Writes results/tokens.json from prompts (with the checkpoint's tokenizer) or token ids, cut to `max_tokens`.

    Raises:
        UserError: if the input is unusable or the checkpoint has no tokenizer.
    """
    vocabulary = vocabulary_of(config)
    pad_id = config.get("pad_token_id")
    pad_id = pad_id if pad_id in range(vocabulary) else 0  # some configs have no pad token, or -1
    texts: list[str] = []
    if token_ids is not None:
        rows = read_token_ids(token_ids, vocabulary)
    else:
        assert prompts is not None  # the schema requires one of the two
        texts = read_prompts(prompts)
        from transformers import AutoTokenizer

        transformers_config(directory, trust_remote_code)  # without a right one no tokenizer is found
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        except Exception as error:  # of any kind: the code may come with the checkpoint
            raise UserError(
                f"{directory}: has no usable tokenizer ({one_line(error)}). Set inputs.token_ids instead."
            ) from None
        rows = [tokenizer(text)["input_ids"] for text in texts]
        if not all(rows):
            raise UserError(
                f"{prompts}: the tokenizer returns no tokens for prompt {rows.index([]) + 1}. Remove that prompt."
            )
        for number, row in enumerate(rows, start=1):
            if max(row) >= vocabulary:
                raise UserError(
                    f"{directory}: the tokenizer makes {max(row)} of a word in prompt {number}, but the model's ids end at "
                    f"{vocabulary - 1} (vocab_size). Copy the tokenizer that belongs to the model."
                )
        if tokenizer.pad_token_id in range(vocabulary):
            pad_id = tokenizer.pad_token_id
    for number, row in enumerate(rows, start=1):
        if len(row) > max_tokens:
            print(f"prompt {number}: {len(row)} tokens, cut to {max_tokens} (inputs.max_tokens)")
    write_json(output, {"ids": [row[:max_tokens] for row in rows], "pad_id": pad_id, "texts": texts})
