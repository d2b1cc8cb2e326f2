import hashlib
import os
from pathlib import Path

import pytest

from layerproof.errors import UserError
from layerproof.host import containers


def test_an_image_is_told_by_its_content_and_read_once(tmp_path, monkeypatch):
    image = tmp_path / "port.sif"
    image.write_bytes(b"one")
    known = tmp_path / "known"
    assert containers.digest(str(image), known) == f"sha256:{hashlib.sha256(b'one').hexdigest()}"

    monkeypatch.setattr(containers, "sha256", lambda path: pytest.fail("read again"))
    assert containers.digest(str(image), known) == f"sha256:{hashlib.sha256(b'one').hexdigest()}"
    monkeypatch.undo()

    image.write_bytes(b"two")
    assert containers.digest(str(image), known) == f"sha256:{hashlib.sha256(b'two').hexdigest()}"
    os.utime(image, (1, 1))
    assert containers.digest(str(image), known) == f"sha256:{hashlib.sha256(b'two').hexdigest()}"
    monkeypatch.setattr(containers, "sha256", lambda path: pytest.fail("read again"))
    assert containers.digest(str(image), known) == f"sha256:{hashlib.sha256(b'two').hexdigest()}"


def test_images_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "port.sif").write_bytes(b"same" + folder.encode())
    a, b = (containers.digest(str(tmp_path / folder / "port.sif"), tmp_path / "known") for folder in ("a", "b"))
    assert a != b


def test_an_image_that_is_pulled_is_told_by_its_name(tmp_path):
    name = f"docker://somewhere/neuron@sha256:{'0' * 64}"
    assert containers.digest(name, tmp_path) == f"sha256:{'0' * 64}"


def test_an_image_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"port.sif does not exist\. Build it"):
        containers.digest(str(tmp_path / "port.sif"), tmp_path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(containers, "NVIDIA_DRIVER", tmp_path / "nvidiactl")
    return tmp_path


def bound(*paths):
    return containers.arguments(paths)


def test_what_lies_elsewhere_is_seen(here):
    port = here / "ports" / "port.py"
    port.parent.mkdir()
    port.touch()
    assert bound(port) == [f"--bind {port.parent}"]
    assert bound(port.parent, port) == [f"--bind {port.parent}"]
    assert bound(here, port) == [f"--bind {here}"]
    (here / "with space").mkdir()
    assert bound(here / "with space") == [f"--bind '{here / 'with space'}'"]


def test_what_is_here_or_nowhere_or_of_the_image_is_not_named(here):
    (here / "here" / "port.py").touch()
    assert bound(here / "here" / "port.py", here / "nowhere", Path("a.module"), Path("/usr/lib")) == []


def test_links_are_followed_to_where_they_end(here):
    """As in the cache of a hub, where a checkpoint's files are links to another folder."""
    (here / "blobs").mkdir()
    (here / "blobs" / "shard").touch()
    (here / "model").mkdir()
    (here / "model" / "model.safetensors").symlink_to("../blobs/shard")
    assert bound(here / "model") == [f"--bind {here / 'blobs'}", f"--bind {here / 'model'}"]
    (here / "here" / "linked").symlink_to(here / "model")
    assert f"--bind {here / 'model'}" in containers.arguments([here / "here" / "linked"])


def test_the_driver_of_a_gpu_is_handed_in(here):
    assert containers.arguments([]) == []
    (here / "nvidiactl").touch()
    assert containers.arguments([]) == ["--nv"]
