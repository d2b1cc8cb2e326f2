"""A job that ran: one input, two outputs, the code of one function, and the record of it all."""

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

from layerproof.files import sha256
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.planner import Planner
from layerproof.rerun.records import Record, described, why_stale
from layerproof.tensors import pruning

NAME = "port/layer_000"
JOB = Job(
    name=NAME,
    settings={"compare": {"limit": 1.5}, "parallel": {"tp": 1}},
    arguments={"fed_by": ["embed"]},
    versions={"torch": "2.9.0"},
    token="old",
    why="it has not run before",
    plan="old",
)


class RecordedJob:
    """The job, its files below a directory, and its record."""

    def __init__(self, directory: Path) -> None:
        self.records, self.files = directory / "results/records", directory / "jobs"
        self.path, self.job_file = (folder / f"{NAME}.json" for folder in (self.records, self.files))
        self.code = directory / "code.py"
        self.input = directory / "input.h5"
        self.outputs = [directory / "a.h5", directory / "b.h5"]
        self.job = JOB
        self.code.write_text("def work():\n    return 1\n")
        self.input.write_bytes(b"input")
        self.job.write(self.job_file)
        self.run()

    def run(self, error: str | None = None) -> None:
        """Makes the outputs and the record as the job of the job file does."""
        self.job = Job.read(self.job_file)
        wait_for_the_next_tick()
        for path in self.outputs:
            path.write_bytes(b"output of " + path.name.encode())
        self.record = Record(
            job=self.job,
            inputs={str(self.input): sha256(self.input)},
            outputs=described(self.outputs),
            code={entry: fingerprint.current(entry) for entry in [f"{self.code}::work", f"{self.code}::"]},
            error=error,
            run={"wall_s": 1.5},
        )
        self.record.write(self.path)

    def rewrite(self, **changes) -> None:
        """Changes fields of the record."""
        replace(self.record, **changes).write(self.path)

    def input_is_made_by(self, name: str) -> None:
        """Leaves the record of a job that made the input as it is now."""
        job = replace(JOB, name=name)
        Record(job, inputs={}, outputs=described([self.input]), code={}, error=None).write(
            self.records / f"{name}.json"
        )

    def why_stale(self, inputs=None, outputs=None, **changes) -> str | None:
        """Why the job would run that has these other fields."""
        inputs = [self.input] if inputs is None else inputs
        outputs = self.outputs if outputs is None else outputs
        return why_stale(Record.read(self.path), replace(JOB, **changes), inputs, outputs)

    def planner(self, wants_taps=lambda name: False) -> Planner:
        """A planner as a new call of snakemake has it."""
        return Planner(self.records, self.files, wants_taps)

    def why(self, wants_taps=lambda name: False, **changes) -> tuple[str | None, bool]:
        """What a new planner says of the job that has these other fields."""
        return self.planner(wants_taps).why(replace(JOB, **changes))

    def plan(self, wants_taps=lambda name: False, rerun_requested=False, **changes) -> Job:
        """The job that a new planner writes."""
        job = replace(JOB, **changes)
        described = job.settings, job.arguments, job.versions
        path = self.planner(wants_taps).job_file(job.name, *described, rerun_requested)
        assert path == str(self.files / f"{job.name}.json")
        return Job.read(Path(path))

    def prune_output(self) -> None:
        """Puts a pruned file in the place of the first output, with its time."""
        output = self.outputs[0]
        status, digest = output.stat(), sha256(output)
        own = hashlib.sha256(b"rest").hexdigest()
        head = f"{pruning.MAGIC.decode()} {digest} {status.st_size} {own}".encode()
        output.write_bytes(head.ljust(pruning.BLOCK_BYTES, b"\0") + b"rest")
        os.utime(output, ns=(status.st_atime_ns, status.st_mtime_ns))


def damage(path: Path) -> None:
    """Flips a bit and puts size and times back."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def wait_for_the_next_tick() -> None:
    """What is written from now on is younger than all files, also where the clock of the file system ticks slowly."""
    time.sleep(0.02)


def touch(path: Path) -> None:
    os.utime(path, (time.time() + 100,) * 2)
