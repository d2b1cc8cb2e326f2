"""The content of results/diagnosis/STAGE.json for a stage without a diagnosis."""

from __future__ import annotations

from layerproof.shapes import Diagnosis

SCHEMA_VERSION = 1


def undiagnosed(stage: str, reason: str | None = None) -> Diagnosis:
    """The content of results/diagnosis/STAGE.json for a stage that does not fail or cannot be diagnosed.

    `reason` says why it cannot be diagnosed.
    """
    return {"schema_version": SCHEMA_VERSION, "stage": stage, "culprits": [], "together": None, "reason": reason}
