"""`make same BASE=COMMIT`: does the default workflow still write what it wrote at another commit?

Both run at once, each in a folder of its own, and every file of results/ that differs is listed. Left out are logs/,
benchmarks/ and manifest.json. Of records only inputs, outputs and settings are compared. What the host has free, and when a
checkpoint was written, does not count. Neither folder is a git checkout, so reports name no commit.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
LEFT_OUT = ("logs/", "benchmarks/", "archive/", "manifest.json", "MANIFEST.sha256", "README.md")
HOST = ("preflight/", "report.html")
"""Files that say what the host has free."""
SIZE = re.compile(rb"[\d.]+ [kMGT]?i?B\b")
COMMAND = ("snakemake", "--cores", "1", "--quiet", "all", "--", "results/report.html")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout


def copy_commit(commit: str, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")


def copy_working_tree(folder: Path) -> None:
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)


def content(path: Path, name: str) -> Any:
    """What is compared of a file: its bytes, or of a record what does not change from run to run."""
    if not name.startswith("records/"):
        return SIZE.sub(b"", path.read_bytes()) if name.startswith(HOST) else path.read_bytes()
    record = json.loads(path.read_text())
    job = record.get("job") or {"settings": record.get("spec")}
    settings = [job["settings"], {key: value for key, value in job.get("arguments", {}).items() if key != "files"}]
    if name.removeprefix("records/").startswith(("preflight/", "report.json")):
        return settings
    return record["inputs"], {name: output["sha256"] for name, output in record["outputs"].items()}, settings


def files(results: Path) -> dict[str, Path]:
    names = {str(path.relative_to(results)): path for path in results.rglob("*") if path.is_file()}
    return {name: path for name, path in names.items() if not name.startswith(LEFT_OUT)}


def differences(base: Path, head: Path) -> Iterator[str]:
    """A line for each file that only one of two results/ folders has, or that differs."""
    before, after = files(base), files(head)
    for name in sorted({*before, *after}):
        if name not in after:
            yield f"gone     {name}"
        elif name not in before:
            yield f"new      {name}"
        elif content(before[name], name) != content(after[name], name):
            yield f"differs  {name}"


def main(base: str) -> int:
    with tempfile.TemporaryDirectory(prefix="layerproof-same-") as temporary:
        folders = {name: Path(temporary) / name for name in ("base", "head")}
        for folder in folders.values():
            folder.mkdir()
        copy_commit(base, folders["base"])
        copy_working_tree(folders["head"])
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        runs = [subprocess.Popen(COMMAND, cwd=folder, env=environment) for folder in folders.values()]
        if codes := [run.wait() for run in runs if run.wait()]:
            print(f"a run failed with exit code {codes[0]}")
            return 2
        found = list(differences(*(folder / "results" for folder in folders.values())))
        count = len(files(folders["head"] / "results"))
    print(*found, f"{len(found)} of {count} files differ from {base}", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
