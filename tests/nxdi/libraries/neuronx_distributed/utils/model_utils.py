import contextlib

from torch import nn


@contextlib.contextmanager
def init_on_device(device, include_buffers=False, force_custom_init_on_device=False):
    """Parameters are put on the device when they are registered; buffers keep their values where they are."""
    register = nn.Module.register_parameter

    def register_empty(module, name, parameter):
        if parameter is not None and parameter.device != device:
            attributes = vars(parameter)
            parameter = nn.Parameter(parameter.to(device), requires_grad=parameter.requires_grad)
            vars(parameter).update(attributes)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register
