"""The files that config.yaml names as inputs: prompts as text, or token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import read_json


def read_prompts(path: Path) -> list[str]:
    """Reads one prompt per paragraph: empty lines separate prompts, and line breaks inside a prompt stay.

    Raises:
        UserError: if the file cannot be read as UTF-8 or contains no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error}). inputs.prompts must name a UTF-8 file.") from None
    prompts = [part.strip("\n") for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
    if not prompts:
        raise UserError(f"{path}: contains no prompt. Write at least one, and separate prompts by empty lines.")
    return prompts


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """The size of the vocabulary, by a checkpoint's config.json.

    Raises:
        UserError: if the config does not state it.
    """
    size = (config.get("text_config") or config).get("vocab_size") or config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise UserError(
            "config.yaml: model.checkpoint: its config.json states no vocab_size of at least 1. Copy the file again."
        )
    return size


def read_token_ids(path: Path, vocabulary: int) -> list[list[int]]:
    """Reads token ids from a JSON file: a list of lists of integers.

    Raises:
        UserError: if the file contains anything else, or an id is outside the vocabulary.
    """
    try:
        rows = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON ({error}). inputs.token_ids must name a file with [[1, 2, 3], ...]."
        ) from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise UserError(f"{path}: is not a list of lists of token ids. Write [[1, 2, 3], [4, 5]].")
    for number, row in enumerate(rows):
        if not row:
            raise UserError(f"{path}: row {number} is empty. Write at least one token id, or remove the row.")
        for value in row:
            if type(value) is not int or not 0 <= value < vocabulary:
                raise UserError(f"{path}: row {number} contains {value!r}. Write integers from 0 to {vocabulary - 1}.")
    return rows
