"""A job: what it is to do, in one small file that the planner writes and the job reads.

`.layerproof/jobs/NAME.json` holds the settings that the job's output depends on, why it runs, and a token that changes
if and only if the job must run again whatever its inputs are. NAME is the job's output under results/ without its
ending, such as `port/layer_003`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerproof import config
from layerproof.errors import UserError
from layerproof.files import read_json, write_json

RECORDS = Path("results/records")
"""Mirrors results/ with what each output was made from."""


@dataclass(frozen=True)
class Job:
    """One job. `settings` is a part of config.yaml, `arguments` what else the planner decides, such as which stages are
    compared. `versions` are those of the packages that the job's numbers depend on, or the digest of its container.
    `plan` is new whenever the planner wants the job started, so that Snakemake sees another file.
    """

    name: str
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    versions: Mapping[str, str]
    token: str
    why: str
    plan: str

    @property
    def stage(self) -> str:
        """The stage of a job that runs one: `layer_003` of `port/layer_003`."""
        return self.name.rpartition("/")[2]

    @property
    def record(self) -> Path:
        return RECORDS / f"{self.name}.json"

    @functools.cached_property
    def config(self) -> config.Config:
        """The settings, typed. Reading one that is not among them raises AttributeError."""
        return config.loaded(self.settings)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's directory; absolute, because a port, or code that comes with a checkpoint, may change
        directory.
        """
        return Path(self.config.model.checkpoint).absolute()

    @classmethod
    def read(cls, path: Path) -> Job:
        """
        Raises:
            UserError: if there is no job file at `path`.
        """
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: is not a job file ({error}). Run layerproof run -- -n to write it.") from None

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))
