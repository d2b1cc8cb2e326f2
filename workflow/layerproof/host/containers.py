"""The images that jobs run in (`--sdm apptainer`), and what a container sees of its host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerproof.digests import sha256
from layerproof.errors import UserError
from layerproof.files import digest_of, read_json, write_json

NVIDIA_DRIVER = Path("/dev/nvidiactl")
OF_THE_IMAGE = "/usr"
"""The folder of an image's own files, which files of the host must not hide."""


def digest(image: str, known: Path) -> str:
    """The SHA-256 of an image, as `sha256:…`.

    For a file, it is that of the content; for an image to pull, the one at the end of its name. The folder `known`
    stores the digests of files with their size and time, so that gigabytes are read only once.

    Raises:
        UserError: if the image is a file that does not exist.
    """
    if "://" in image:
        return image.rpartition("@")[2]
    path = Path(image).absolute()
    if not path.is_file():
        raise UserError(
            f"config.yaml: containers: {image} does not exist. Build it (containers/README.md), or name another image."
        )
    note = known / f"{digest_of(str(path))[:16]}.json"
    status = path.stat()
    description = read_json(note) if note.exists() else {}
    if [description.get(key) for key in ("size", "mtime_ns")] != [status.st_size, status.st_mtime_ns]:
        description = {"sha256": sha256(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
        write_json(note, description)
    return f"sha256:{description['sha256']}"


def arguments(used: Iterable[Path]) -> list[str]:
    """Arguments of `apptainer exec` for a container that uses these files and directories.

    The container sees them under the host's paths, and also the driver of an NVIDIA GPU. It sees the working directory
    and /tmp anyway.
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
    """Yields the directories of a file, or of a directory and its files; for links also those of their targets."""
    if path.exists():
        for one in [path, *(path.iterdir() if path.is_dir() else ())]:
            real = Path(os.path.realpath(one))
            yield real if real.is_dir() else real.parent
        path = path.absolute()
        yield path if path.is_dir() else path.parent
