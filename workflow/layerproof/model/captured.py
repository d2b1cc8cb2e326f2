"""Finds the files that NxD Inference captured from a compiled full model, by stage."""

from __future__ import annotations

import re
from pathlib import Path

from layerproof.errors import UserError
from layerproof.model.stages import EMBED, NORM, layer_stage

CHAIN = "captured"
FILE = re.compile(
    r"captured_tensors_cte_step_1_module_(?:[A-Za-z_]+\.)*(?:embed_tokens|layers\.(?P<layer>\d+)|(?P<norm>norm))_output\.pt"
)


def find(folder: Path) -> dict[str, Path]:
    """Finds the files in a folder that contain the output of a stage, by stage.

    Raises:
        UserError: if there is no such file, or more than one for a stage.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if match := FILE.fullmatch(path.name):
            layer = match["layer"]
            stage = layer_stage(int(layer)) if layer else NORM if match["norm"] else EMBED
            if stage in found:
                raise UserError(
                    f"{path}: is the output of {stage}, and so is {found[stage].name}. Remove one of the two files."
                )
            found[stage] = path
    if not found:
        raise UserError(
            f"{folder}: contains no file such as captured_tensors_cte_step_1_module_layers.0_output.pt. List embed_tokens, "
            "layers.0 and so on, and norm in modules_to_capture (docs/nxdi.md)."
        )
    return found
