"""A file is read once for its digest, and again after anything that may have changed it."""

import hashlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerproof import digests

RESULT = Path("results/golden/layer_000.h5")


@pytest.fixture
def result(tmp_path, monkeypatch):
    """A result in the working directory, and how often a file was read for its digest."""
    monkeypatch.chdir(tmp_path)
    RESULT.parent.mkdir(parents=True)
    RESULT.write_bytes(b"one")
    return RESULT


@pytest.fixture
def read(monkeypatch):
    files = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: files.append(file.name) or real(file, name))
    return files


def test_a_result_is_read_once(result, read):
    wanted = hashlib.sha256(b"one").hexdigest()
    assert [digests.sha256(result) for _ in range(3)] == [wanted] * 3
    assert read == [str(result)]


@pytest.mark.parametrize("as_before", [False, True], ids=["", "size and times put back"])
@pytest.mark.parametrize("replaced", [False, True], ids=["in place", "replaced"])
def test_what_was_written_since_is_read_again(result, as_before, replaced):
    digests.sha256(result)
    status = result.stat()
    time.sleep(0.02)
    target = result.with_suffix(".new") if replaced else result
    target.write_bytes(b"two")
    if as_before:
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(target, result)
    assert digests.sha256(result) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.slow
@given(contents=st.lists(st.binary(max_size=2), min_size=2, max_size=4), new=st.lists(st.booleans(), min_size=4))
def test_an_output_written_as_fast_as_can_be_is_never_taken_for_another(tmp_path_factory, contents, new):
    """By the process that made it, which does not wait for the clock of the file system, and by others."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("fast"))
    try:
        for content, is_new in zip(contents, new, strict=False):
            Path("a.h5").write_bytes(content)
            digest = digests.sha256_of_new if is_new else digests.sha256
            assert digest(Path("a.h5")) == hashlib.sha256(content).hexdigest()
    finally:
        os.chdir(before)


def test_a_new_output_is_digested_without_waiting_and_read_once(result, read, monkeypatch):
    result.write_bytes(b"two")
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", None)
        assert digests.sha256_of_new(result) == hashlib.sha256(b"two").hexdigest()
    digests.sha256(result)
    assert len(read) == 1


def test_a_file_system_without_exact_times_is_waited_for(result, monkeypatch):
    waited = []
    real, sleep = os.utime, time.sleep
    monkeypatch.setattr(os, "utime", lambda path, ns: real(path, ns=tuple(time // 10**6 * 10**6 for time in ns)))
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(seconds) or sleep(seconds))
    digests.sha256_of_new(result)
    assert waited


@pytest.mark.slow
@given(contents=st.lists(st.binary(max_size=2), min_size=2, max_size=4))
def test_a_file_that_is_written_as_fast_as_can_be_is_never_taken_for_another(tmp_path_factory, contents):
    """The clock of the file system may give several versions one time."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("fast"))
    try:
        for content in contents:
            Path("a.h5").write_bytes(content)
            assert digests.sha256(Path("a.h5")) == hashlib.sha256(content).hexdigest()
    finally:
        os.chdir(before)


def test_the_time_that_snakemake_gives_an_output_costs_nothing_if_it_is_told(result, read):
    digests.sha256(result)
    os.utime(result)
    digests.keep_after_touch(result)
    digests.sha256(result)
    assert len(read) == 1
    os.utime(result)
    digests.sha256(result)
    assert len(read) == 2


def test_an_output_that_was_replaced_or_removed_is_not_kept(result):
    digests.sha256(result)
    result.with_suffix(".new").write_bytes(b"two")
    os.replace(result.with_suffix(".new"), result)
    digests.keep_after_touch(result)
    assert digests.sha256(result) == hashlib.sha256(b"two").hexdigest()
    result.unlink()
    digests.keep_after_touch(result)
    with pytest.raises(FileNotFoundError):
        digests.sha256(result)


@pytest.mark.parametrize("note", ["", "{", '{"a.h5": 1}', "[1]", "null"])
def test_a_note_may_be_lost_or_half_written(result, note):
    wanted = digests.sha256(result)
    (path,) = digests.NOTES.rglob("*.json")
    path.write_text(note)
    assert digests.sha256(result) == wanted


def test_files_elsewhere_get_no_note(result):
    for path in (result.absolute(), Path("results/../results/golden/layer_000.h5")):
        assert digests.sha256(path) == hashlib.sha256(b"one").hexdigest()
    assert not digests.NOTES.exists()


def test_where_no_note_can_be_left_the_file_is_read_again(result, read):
    digests.NOTES.parent.write_text("a file where the folder would be")
    assert digests.sha256(result) == digests.sha256(result)
    assert len(read) == 2
