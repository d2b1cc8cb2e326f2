"""Tensors that NxD Inference captured from a whole compiled model, compared as a chain of their own.

The library's capture hook (`tensor_capture_config`, `get_tensor_capture_hook`) saves the first output of each module
that is named there. The prefill is step 1, saved as `captured_tensors_cte_step_1_module_NAME_output.pt`. The logits are
not among them: in the prefill, `lm_head` computes only those of the last token, and each rank only a slice of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from layerproof.errors import StageError

if TYPE_CHECKING:
    from layerproof.model.tokens import Tokens


def make_stage(stage: str, file: Path, tokens: Tokens, output: Path) -> None:
    """Writes `port/out` from a captured tensor [batch, seq, features], without its padding.

    Raises:
        StageError: if the file does not contain such a tensor, or has fewer sequences or tokens than
            results/tokens.json.
    """
    import torch

    from layerproof.taps import OUT
    from layerproof.tensors import hdf5

    try:
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # any error of a foreign or damaged file; torch's advice is to execute its contents
        raise StageError(f"{file}: cannot be read as a tensor ({type(error).__name__}). Capture it again.") from error
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise StageError(f"{file}: contains no tensor of floats. Capture it again.")
    if tensor.numel() == 1:
        raise StageError(
            f"{file}: contains one number, as NxD Inference saves for a module that did not run. Correct its name in "
            "modules_to_capture."
        )
    batch, length = tokens.ids.shape
    if tensor.ndim != 3 or tensor.shape[0] < batch or tensor.shape[1] < length:
        raise StageError(
            f"{file}: has shape {list(tensor.shape)}, but the run has {batch} prompts of up to {length} tokens. Capture all "
            "prompts of results/tokens.json as one batch, padded on the right, without sequence parallelism."
        )
    array = hdf5.to_array(hdf5.storable(tensor[:batch, :length]))
    hdf5.write(output, {"port": {OUT: array}}, valid=tokens.valid, attributes={"stage": stage})
