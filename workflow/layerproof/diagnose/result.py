"""What results/diagnosis/STAGE.json says of a stage that has no diagnosis."""

from __future__ import annotations

from typing import Any

SCHEMA_VERSION = 1


def undiagnosed(stage: str, reason: str | None = None) -> dict[str, Any]:
    """The content of results/diagnosis/STAGE.json for a stage that does not fail, or cannot be diagnosed for this reason."""
    return {"schema_version": SCHEMA_VERSION, "stage": stage, "culprits": [], "together": None, "reason": reason}
