"""A Slurm of this machine alone, with the partitions gpu, trn and cpu; its GPU is fake."""

import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
from runs import REPOSITORY

NAME = "ClusterName=layerproof"
CONFIGURATION = """
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmdPort={port_of_node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=2
MinJobAge=3600
InactiveLimit=0
GresTypes=gpu
NodeName=localhost CPUs=64 RealMemory=500000 Gres=gpu:1 State=UNKNOWN
PartitionName=gpu Nodes=localhost
PartitionName=trn Nodes=localhost
PartitionName=cpu Nodes=localhost Default=YES
"""
"""cred_expire: so long, and by default two minutes, waits a job before it starts again after its node was lost."""
GRES = """
Name=gpu File=/dev/null
"""
PATIENCE = 900
"""Seconds."""

T = TypeVar("T")


SYSTEM = Path("/etc/slurm")
"""Where its commands look for it; another place would have to be named in jobs, too, from which the plugin takes it away."""


class Slurm:
    """Its daemons, started on entry and ended on exit."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Slurm":
        subprocess.run(["bash", REPOSITORY / "tests/slurm/install-slurm.sh"], check=True)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)  # munge's socket is for all
        values = {"folder": self.folder, "port": self.port, "port_of_node": self.port + 1}
        settings = SYSTEM / "slurm.conf"
        if settings.exists() and (NAME not in settings.read_text() or self._is_up()):
            raise AssertionError(f"{settings} is of another Slurm. Run these tests on a host that has none.")
        SYSTEM.mkdir(exist_ok=True)
        settings.write_text(NAME + CONFIGURATION.format(**values))
        (SYSTEM / "gres.conf").write_text(GRES)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        munge = {
            f"--{name}={self.folder}/munge.{name.split('-')[0]}"
            for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")
        }
        self.start("munged", "--foreground", "--force", *munge)
        self.start("slurmctld", "-D", "-c")
        self.start("slurmd", "-D")
        self.wait_for_node("idle")
        return self

    def __exit__(self, *error: object) -> None:
        subprocess.run(["scancel", "--quiet", "--user=root"], check=False)
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()
        for name in ("slurm.conf", "gres.conf"):  # with which every call of Snakemake would wait for an answer
            (SYSTEM / name).unlink()

    def _is_up(self) -> bool:
        """Whether a slurmctld of other tests answers, and not one that was killed and left its configuration."""
        return not subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode

    def start(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self.processes[name] = subprocess.Popen(
                [f"/usr/sbin/{name}", *arguments], stdout=output, stderr=output, start_new_session=True
            )

    def run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    def jobs(self, directory: Path) -> list[dict[str, str]]:
        """What Slurm says of every submission from a directory, the first one first; of a group `Comment` is
        rule_GROUP_RULES.
        """
        lines = self.run("scontrol", "--oneliner", "show", "jobs").splitlines()
        jobs = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines if line.startswith("JobId")]
        return [job for job in jobs if job["WorkDir"] == str(directory)]

    def wait_for_job(self, rules: str, directory: Path, unless: Callable[[], str | bool]) -> str:
        """The number of the first submission of these rules from a directory, once it runs; an error with the words of
        `unless`, which says why none will come.
        """
        return self._wait(
            lambda: next(
                (
                    job["JobId"]
                    for job in self.jobs(directory)
                    if job["Comment"].startswith(rules) and job["JobState"] == "RUNNING"
                ),
                None,
            ),
            f"no job {rules} runs",
            unless,
        )

    def wait_for_node(self, state: str) -> None:
        def seen() -> bool:
            answer = subprocess.run(
                ["sinfo", "--noheader", "--format=%T", "--partition=cpu"], capture_output=True, text=True
            )
            return answer.stdout.startswith(state)

        self._wait(seen, f"the node is not {state}")

    def kill_node(self) -> None:
        """As if it had lost its power: the daemon and all jobs."""
        self.processes["slurmd"].kill()
        self.processes["slurmd"].wait()
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "slurmstepd":
                for one in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()

    def _wait(self, condition: Callable[[], T], message: str, unless: Callable[[], str | bool] = lambda: False) -> T:
        for _ in range(PATIENCE):
            if found := condition():
                return found
            if why := unless():
                raise AssertionError(f"{message}: {why}")
            time.sleep(1)
        logs = "".join(f"\n== {path}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
        raise AssertionError(f"{message}{logs}")
