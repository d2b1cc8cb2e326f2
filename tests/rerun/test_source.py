"""What a file was reduced to is kept, and counts only for the content that it has."""

import os
import shutil

import pytest

from layerproof.rerun import source

MODULE = "import math\n\nFACTOR = 2\n\n\ndef area(radius):\n    return FACTOR * math.pi * radius\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "NOTES", tmp_path / "notes")
    file = tmp_path / "own.py"
    file.write_text(MODULE)
    return file


@pytest.fixture
def parsed(monkeypatch):
    """One item for each time that a file was parsed."""
    trees = []
    real = source.reduced
    monkeypatch.setattr(source, "reduced", lambda tree: trees.append(tree) or real(tree))
    return trees


def in_another_process(file):
    source._parse_version.cache_clear()
    return source.parse_file(str(file))


def test_a_file_is_parsed_by_the_first_process_that_asks(file, parsed):
    found = [in_another_process(file) for _ in range(3)]
    assert len(parsed) == 1
    assert found[0] == found[1] == found[2] and found[0].functions == {"area"}
    assert found[0].digests.keys() == found[0].uses.keys() == {"", "area", "=area", "=math", "=FACTOR"}


def test_a_copy_of_a_folder_takes_what_is_kept_along(file, parsed, monkeypatch):
    found = in_another_process(file)
    copy = file.parent.with_name("copy")
    shutil.copytree(file.parent, copy)
    monkeypatch.setattr(source, "NOTES", copy / "notes")
    assert in_another_process(copy / file.name) == found and len(parsed) == 1


def test_an_edit_is_seen_though_size_and_time_are_as_before(file, parsed):
    before, status = in_another_process(file), file.stat()
    file.write_text(MODULE.replace("2", "3"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = in_another_process(file)
    assert {entry for entry in before.digests if before.digests[entry] != after.digests[entry]} == {"=FACTOR"}
    assert len(parsed) == 2


def test_another_version_of_the_reduction_counts_for_nothing(file, parsed, monkeypatch):
    in_another_process(file)
    monkeypatch.setattr(source, "_digest_of_this_module", lambda: "of another release")
    in_another_process(file)
    assert len(parsed) == 2


@pytest.mark.parametrize("damage", [b"", b"\x80\x05no pickle", b"\x80\x04K\x01."])
def test_a_damaged_note_is_written_anew(file, parsed, damage):
    whole = in_another_process(file)
    (note,) = (file.parent / "notes").iterdir()
    note.write_bytes(damage)
    assert in_another_process(file) == in_another_process(file) == whole
    assert len(parsed) == 2


def test_where_notes_cannot_be_written_each_process_parses(file, parsed):
    (file.parent / "notes").write_text("no folder")
    assert in_another_process(file) == in_another_process(file)
    assert len(parsed) == 2
