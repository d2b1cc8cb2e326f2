"""The port, and how its stages are run. A port imports `Stage` from here."""

from layerproof.port.contract import Stage

__all__ = ["Stage"]
