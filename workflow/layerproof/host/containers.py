"""The images that jobs run in (`--sdm apptainer`), and what a container sees of its host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerproof.errors import UserError
from layerproof.files import digest_of, read_json, write_json
from layerproof.rerun.records import describe_output

NVIDIA_DRIVER = Path("/dev/nvidiactl")
OF_THE_IMAGE = "/usr"
"""Where an image has its own files, which those of the host must not hide."""


def digest(image: str, known: Path) -> str:
    """The SHA-256 of an image, as `sha256:…`: of a file its content, of one to be pulled what its name ends with.

    The folder `known` keeps that of a file with its size and time, so that gigabytes are read once.

    Raises:
        UserError: if the image is a file that is not there.
    """
    if "://" in image:
        return image.rpartition("@")[2]
    path = Path(image).absolute()
    if not path.is_file():
        raise UserError(
            f"config.yaml: containers: {image} is not there. Build it (containers/README.md), or name another image."
        )
    note = known / f"{digest_of(str(path))[:16]}.json"
    status = path.stat()
    description = read_json(note) if note.exists() else {}
    if [description.get(key) for key in ("size", "mtime_ns")] != [status.st_size, status.st_mtime_ns]:
        description = describe_output(path)
        write_json(note, description)
    return f"sha256:{description['sha256']}"


def arguments(used: Iterable[Path]) -> list[str]:
    """Arguments of `apptainer exec` with which a container sees these files and directories where the host has them, and
    the driver of an NVIDIA GPU. The working directory and /tmp are seen anyway.
    """
    here = Path.cwd()
    folders = {folder for path in used for folder in _folders(path)}
    folders = {
        folder for folder in folders if not folder.is_relative_to(here) and not folder.is_relative_to(OF_THE_IMAGE)
    }
    outermost = sorted(folder for folder in folders if not any(parent in folders for parent in folder.parents))
    return [
        *(f"--bind {shlex.quote(str(folder))}" for folder in outermost),
        *(["--nv"] if NVIDIA_DRIVER.exists() else []),
    ]


def _folders(path: Path) -> Iterator[Path]:
    """The directories in which a file, or a directory and its files, are; of links also those in which they end."""
    if path.exists():
        for one in [path, *(path.iterdir() if path.is_dir() else ())]:
            real = Path(os.path.realpath(one))
            yield real if real.is_dir() else real.parent
        path = path.absolute()
        yield path if path.is_dir() else path.parent
