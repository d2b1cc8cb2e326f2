"""Backends that this build of torch does not have: gloo does the work."""

from torch.distributed import distributed_c10d as c10d


class StandIn:
    """Replaces torch's class for XPUs."""

    class Options:
        pass

    def __new__(cls, store, rank, size, options):
        return c10d.ProcessGroupGloo(store, rank, size, options._timeout)


def stand_in(backend):
    """Has torch take gloo for a backend that is not here."""
    if backend == "xccl":
        c10d._XCCL_AVAILABLE, c10d.ProcessGroupXCCL = True, StandIn
    else:

        def create(store, rank, size, timeout):
            return c10d.ProcessGroupGloo(store, rank, size, timeout)

        c10d.Backend.register_backend(backend, create, devices=["cpu"])
