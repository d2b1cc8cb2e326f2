"""The port and how its stages run. A port imports `Stage` from here."""

from layerproof.port.contract import Stage

__all__ = ["Stage"]
