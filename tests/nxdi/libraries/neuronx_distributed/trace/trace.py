"""From a converted state dict to one rank's part of it."""

import torch


def get_sharded_checkpoint(checkpoint, model, rank, tp_degree, is_cached=False):
    """Changes `checkpoint` in place: hooks of the modules, then what the model does not have, then the rank's part."""
    _invoke_preshard_hook(model, checkpoint, "")
    wanted = model.state_dict()
    for name in [name for name in checkpoint if name not in wanted]:
        del checkpoint[name]
    for name, parameter in model.named_parameters():
        if name in checkpoint and getattr(parameter, "tensor_model_parallel", False):
            stride, count = parameter.partition_stride, parameter.num_partitions
            parts = torch.chunk(checkpoint[name], stride * count, dim=parameter.partition_dim)
            checkpoint[name] = torch.cat(parts[rank::count], parameter.partition_dim) if stride > 1 else parts[rank]
        elif name in checkpoint and name.endswith("rank"):
            checkpoint[name] = checkpoint[name][rank : rank + 1]
        if name in checkpoint and checkpoint[name].shape != parameter.shape:
            raise RuntimeError(f"expected shape {parameter.shape} for {name} but found {checkpoint[name].shape}")


def _invoke_preshard_hook(module, checkpoint, prefix):
    """A module with a hook changes what it needs; its children are its own affair."""
    if hasattr(module, "preshard_hook"):
        module.preshard_hook(checkpoint, f"{prefix}weight")
        return
    for name, child in module.named_children():
        _invoke_preshard_hook(child, checkpoint, f"{prefix}{name}.")
