"""Runs one stage of a port on forked ranks against its golden, with a mistake or without."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bugs.harness import SETTINGS, Model
from configs import REPOSITORY, config_with
from layerproof.compare.stage import compare_stage
from layerproof.diagnose.diagnose import FailedStage, Files, diagnose
from layerproof.errors import StageError
from layerproof.measure.rule import LIMIT
from layerproof.model import handed
from layerproof.port import shards
from layerproof.port import stage as port_stage
from layerproof.port.ranks import Crew, Work
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5

PORT = REPOSITORY / "workflow/ports/minimax_m2_parallel.py"


@dataclass(frozen=True)
class Judged:
    """What is said of a stage that ranks ran. `error` ended it, if it has neither comparison nor diagnosis."""

    comparison: Mapping[str, Any] | None
    diagnosis: Mapping[str, Any] | None
    error: str | None = None

    @property
    def failed(self) -> list[str]:
        taps = self.comparison["taps"] if self.comparison else {}
        return [name for name, tap in taps.items() if tap["status"] == "fail"]

    @property
    def text(self) -> str:
        """All that it says in words."""
        if self.comparison is None:
            return str(self.error)
        reasons = [tap["reason"] for tap in self.comparison["taps"].values() if tap["reason"]]
        culprits = self.diagnosis["culprits"] if self.diagnosis else []
        return "\n".join([*reasons, *(finding for culprit in culprits for finding in culprit["findings"])])

    @property
    def causes(self) -> list[str]:
        culprits = self.diagnosis["culprits"] if self.diagnosis else []
        return [culprit["cause"]["name"] for culprit in culprits if culprit["cause"]]


def judge(model: Model, stage: str, source: str | None, axes: Mapping[str, int], directory: Path) -> Judged:
    """Runs a stage of the port with this source over these axes, and judges it as the workflow does.

    Without a source the port is the model of transformers, by its own plan.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port: dict[str, Any] = {"backend": "transformers", "module": None}
    if source is not None:
        shutil.copy(REPOSITORY / "workflow/ports/minimax_m2.py", directory)
        (directory / "port.py").write_text(source)
        port = {"module": str(directory / "port.py")}
    settings = config_with(port=port, parallel=dict(axes))
    files = Files(
        golden=model.directory / f"golden/{stage}.h5",
        noise=model.directory / f"noise/{stage}.h5",
        port=directory / "port.h5",
        forced=directory / "forced.h5",
    )
    description, fed = model.description(stage), handed.stage_input(model.previous(stage), stage)

    @cache
    def start() -> Runner:
        return Runner.start(model.checkpoint, model.prompts, settings)

    def part_of(path: Path, rank: int) -> Path:
        return path.with_suffix(f".{rank}.h5")

    def make(rank: int) -> None:
        port_stage.make_stage(start(), stage, description, fed, part_of(files.port, rank))

    def force(rank: int) -> None:
        wanted = hdf5.read_group(files.golden, "golden")
        output = part_of(files.forced, rank)
        port_stage.teacher_force_stage(start(), stage, description, fed, wanted, output)

    crew = Crew("fork", settings.parallel.of_stage, works={"make": Work(make), "force": Work(force)})

    def run(work: str, output: Path) -> None:
        crew.run(work)
        shards.join([part_of(output, rank) for rank in range(crew.count)], output, model.prompts.valid, crew.axes)

    try:
        run("make", files.port)
        comparison = compare_stage(stage, files.golden, files.noise, files.port, model.prompts.valid, LIMIT)
        if comparison["status"] != "fail":
            return Judged(comparison, None)
        run("force", files.forced)
    except StageError as error:
        return Judged(None, None, str(error))
    finally:
        crew.end()
    descriptions = {name: model.description(name) for name in model.stages}
    subject = FailedStage(stage, model.checkpoint, descriptions, model.prompts, model.previous(stage), SETTINGS, LIMIT)
    return Judged(comparison, diagnose(subject, comparison, files, None))
