"""Runs the real DAG in a copy of the repository and tells which jobs really ran."""

import compileall
import contextlib
import fcntl
import functools
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import yaml

import models
import warm_server
from configs import QUICK
from environments import CACHE, environment
from layerproof.compare.stage import compare_taps
from layerproof.measure.noise import noise_of_taps
from layerproof.rerun import source
from layerproof.tensors.tensor import Tensor
from layerproof.warm import VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
JOURNALS = ("logs/", "benchmarks/", "records/")


@dataclass(frozen=True)
class Run:
    """One call of snakemake: the outputs that were replaced, the jobs that Snakemake started, what it printed, its exit
    code, and its own log.
    """

    made: frozenset[str]
    started: int
    text: str
    returncode: int
    log: str


@functools.cache
def prepare_copies() -> None:
    """Compiles the library and what measures, and reads its source, which takes 15 seconds, so that copies of the workflow
    take what came of it along.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "copies.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compileall.compile_dir(REPOSITORY / "workflow", quiet=1)
        for file in (REPOSITORY / "workflow").rglob("*.py"):
            source.parse_file(str(file))
        compile_kernels()


def compile_kernels() -> None:
    """Has numba compile all that the default run calls; its files lie beside the source."""
    valid = np.ones((2, 5), bool)
    noise = np.random.default_rng(0).standard_normal((3, 2, 5, 8)).astype(np.float32)
    choice = Tensor(np.zeros((2, 5, 1), np.int32), "int32")

    def taps(values: np.ndarray) -> dict[str, Tensor]:
        halves = Tensor((values.view(np.uint32) >> 16).astype(np.uint16), "bfloat16")
        return {"router.scores": Tensor(values, "float32"), "router.choice": choice, "out": halves}

    truth = {name: Tensor(noise[0], "float32") for name in ("router.scores", "out")} | {"router.choice": choice}
    golden, variant = (taps(noise[0] + noise[row] / 100) for row in (1, 2))
    bands = noise_of_taps(golden, [variant], truth, valid)
    for port in (variant, truth):
        compare_taps("layer_000", port, golden, truth, bands, valid, 1.5)


class Workflow:
    """A copy of the workflow in a folder of its own, with its own config.yaml."""

    cold = False
    """Whether Snakemake starts its Python anew, and its jobs a server of their own, as for a user."""
    quick = True
    """Whether XLA compiles in a hurry."""

    def __init__(self, directory: Path, **config) -> None:
        self.directory = directory
        prepare_copies()
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "Snakefile", directory)
        for folder in ("workflow", "profiles", "docs", source.NOTES.relative_to(REPOSITORY)):
            shutil.copytree(REPOSITORY / folder, directory / folder)
        self.results = directory / "results"
        self.config = yaml.safe_load((REPOSITORY / "config.yaml").read_text())
        self.configure(**config)

    def configure(self, **sections) -> None:
        """Sets keys of config.yaml by section; a value that is no mapping replaces what was there."""
        for section, values in sections.items():
            before = self.config.get(section) or {}
            self.config[section] = before | values if isinstance(values, dict) else values
        (self.directory / "config.yaml").write_text(yaml.safe_dump(self.config))

    def run(self, *arguments: str, target: str = "results/report.html", check: bool = True) -> Run:
        """Calls snakemake as a user does and compares the results before and after; targets are parted by spaces."""
        before = self._state()
        with contextlib.ExitStack() as held:
            # Snakemake removes some outputs before their job: while they are open, no other file gets their inode.
            for name in before:
                held.enter_context(open(self.results / name, "rb"))
            process = subprocess.run(self.command(*arguments, target=target), **self.options(warm_jobs=not self.cold))
            after = self._state()
        if check and process.returncode:
            raise AssertionError(process.stdout + self._snakemakes_log() + self._logs())
        made = frozenset(name for name, state in after.items() if before.get(name) != state)
        log = process.stdout if "-n" in arguments or "--dry-run" in arguments else self._snakemakes_log()
        started = sum(line.startswith("Finished jobid:") for line in log.splitlines())
        return Run(made, started, process.stdout, process.returncode, log)

    def start(self, command: list[str] | None = None, warm_jobs: bool = False, **options) -> subprocess.Popen:
        """Snakemake beside the test, which waits for something before it reads what is `printed`: a pipe would be full by
        then, and snakemake wait for its reader.
        """
        with open(self.directory / "printed.txt", "w") as file:
            options = self.options(warm_jobs) | {"stdout": file} | options
            return subprocess.Popen(command or self.command(), **options)

    def printed(self) -> str:
        return (self.directory / "printed.txt").read_text()

    def command(self, *arguments: str, target: str = "results/report.html", cold: bool = False) -> list[str]:
        arguments = ("-m", "snakemake", "--cores", "1", *arguments, "--", *target.split())
        return [sys.executable, *arguments] if cold or self.cold else warm_server.command(*arguments)

    def options(self, warm_jobs: bool = False) -> dict:
        """Of subprocess; without warm jobs each starts its own Python, unless the workflow is `cold`."""
        warm_start = {} if self.cold else {VARIABLE: warm_server.server() if warm_jobs else "off"}
        return {
            "cwd": self.directory,
            "env": environment() | (QUICK if self.quick else {}) | warm_start,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }

    def edit(self, file: str, *replacements: tuple[str, str]) -> None:
        """Replaces text that is there exactly once."""
        path = self.directory / file
        text = path.read_text()
        for old, new in replacements:
            assert text.count(old) == 1, f"{file}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        path.write_text(text)

    def log(self, name: str) -> str:
        return (self.results / "logs" / f"{name}.log").read_text()

    def _state(self) -> dict[str, tuple[int, int]]:
        """Inode and size by output: a job replaces its output by a new file, one that returns early does not."""
        return {
            name: (path.stat().st_ino, path.stat().st_size)
            for path in self.results.rglob("*")
            if path.is_file() and not (name := str(path.relative_to(self.results))).startswith(JOURNALS)
        }

    def _snakemakes_log(self) -> str:
        """All that Snakemake said of its last call; nothing of a dry run, which leaves no log."""
        logs = sorted((self.directory / ".snakemake/log").glob("*.log"))
        return logs[-1].read_text() if logs else ""

    def _logs(self) -> str:
        return "".join(f"\n== {path}\n{path.read_text()[-2000:]}" for path in self.results.glob("logs/**/*.log"))


def at_work(workflow, process, words, log):
    """The process of the job whose command line has these words, once its log says that it runs."""
    since, deadline = time.time(), time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            if log.stat().st_mtime > since - 0.01 and "runs because" in log.read_text():
                jobs = running(workflow, words)
                if outermost := [job for job in jobs if job.ppid() not in {other.pid for other in jobs}]:
                    return outermost[0]
        time.sleep(0.005)
    raise AssertionError(f"{words} was not seen")


def running(workflow, words):
    """Processes of Python in the workflow's folder whose command line holds these words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of one that has ended
            ours = "python" in process.name() and process.cwd() == str(workflow.directory)
            found += [process] if ours and words in " ".join(process.cmdline()) else []
    return found


def dense_and_moe(directory: Path, **config) -> Workflow:
    """The workflow of a model with a dense layer and two MoE layers, and of a port of it."""
    models.save("qwen3_moe", directory / "model")
    shutil.copy(REPOSITORY / "tests/ports/qwen3_moe.py", directory / "port.py")
    (directory / "ids.json").write_text(json.dumps([list(range(3, 20)), [5, 9, 2, 40, 41]]))
    inputs = {"prompts": None, "token_ids": "ids.json"}
    port = {"module": "port.py", "options": {"level": 1}}
    return Workflow(directory, model={"checkpoint": "model"}, inputs=inputs, port=port, **config)


def change_tensor(workflow, name, change):
    """Rewrites the shard that holds a tensor; `change` returns None to leave the tensor out."""
    from safetensors.torch import load_file, save_file

    for shard in (workflow.directory / "model").glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            changed = change(tensors.pop(name))
            save_file(tensors | ({} if changed is None else {name: changed}), shard, metadata={"format": "pt"})
            return shard.name
    raise AssertionError(name)
