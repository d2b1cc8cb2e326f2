import torch.distributed as dist

_TENSOR_MODEL_PARALLEL_GROUP = None


def initialize_model_parallel(tensor_model_parallel_size=1, **others):
    global _TENSOR_MODEL_PARALLEL_GROUP
    assert _TENSOR_MODEL_PARALLEL_GROUP is None, "tensor model parallel group is already initialized"
    assert dist.get_world_size() == tensor_model_parallel_size
    _TENSOR_MODEL_PARALLEL_GROUP = dist.group.WORLD


def model_parallel_is_initialized():
    return _TENSOR_MODEL_PARALLEL_GROUP is not None


def get_tensor_model_parallel_size():
    assert _TENSOR_MODEL_PARALLEL_GROUP is not None, "tensor model parallel group is not initialized"
    return dist.get_world_size()
