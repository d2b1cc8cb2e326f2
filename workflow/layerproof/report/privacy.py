"""What `report.share` leaves out, for those who attach a report or an archive to a public issue: the port's source, prompts
and local paths.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from layerproof.config import Config, changed
from layerproof.paths import WORKFLOW

LEFT_OUT = "left out (report.share)"


def public(config: Config) -> Config:
    """The settings without the folders of files."""
    inputs, port, containers = config.inputs, config.port, config.containers
    return changed(
        config,
        model=changed(config.model, checkpoint=Path(config.model.checkpoint).name),
        inputs=changed(inputs, prompts=_name(inputs.prompts), token_ids=_name(inputs.token_ids)),
        golden=changed(config.golden, storage=config.golden.storage and LEFT_OUT),
        port=changed(port, module=_name(port.module), captured=_name(port.captured)),
        containers=changed(
            containers, **{side: Path(getattr(containers, side)).name for side in ("golden", "port", "cpu")}
        ),
    )


def _name(path: str | None) -> str | None:
    return path and Path(path).name


def without_paths(text: str) -> str:
    """A text without the folders of this host: of this run, of its user, of Layerproof and of Python's packages."""
    own = (Path.cwd(), Path.home(), WORKFLOW, sys.prefix, sys.base_prefix, tempfile.gettempdir())
    for folder in sorted({str(one) for one in own} - {"/"}, key=len, reverse=True):
        text = re.sub(rf"{re.escape(folder)}(?:/[\w.+-]+)*/(?=[\w.+-])", "", text).replace(folder, "…")
    return text
