"""What goes wrong between ranks. This module does not import torch."""


class DistributedError(RuntimeError):
    """Ranks could not form a group, or do not agree on one; the message says why, in one line."""
