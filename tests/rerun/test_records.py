"""When a job is stale and why, and the stamps by which the planner learns what it cannot see itself."""

import dataclasses
import hashlib
import os
import sys
import time
from pathlib import Path

import pytest

from layerproof.files import sha256
from layerproof.rerun import fingerprint, recorder, records
from layerproof.rerun.planner import Stamps
from layerproof.rerun.records import NEW, Record, describe_output, described, is_whole, why_stale
from layerproof.tensors import pruning


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A recorded job with one input, two outputs and the code of one function."""
    monkeypatch.setattr(recorder, "STARTED", time.time() + 3600)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Job(tmp_path)


class Job:
    def __init__(self, directory):
        self.records = directory / "records"
        self.path = self.records / "port/layer_000.json"
        self.code = directory / "code.py"
        self.input = directory / "input.h5"
        self.outputs = [directory / "a.h5", directory / "b.h5"]
        self.spec = {"stage": "layer_000", "limit": 1.5}
        self.code.write_text("def work():\n    return 1\n")
        self.input.write_bytes(b"input")
        for path in self.outputs:
            path.write_bytes(b"output of " + path.name.encode())
        self.record = Record(
            verb="port",
            spec=self.spec,
            stamp="old",
            inputs={str(self.input): sha256(self.input)},
            outputs=described(self.outputs),
            code={entry: fingerprint.current(entry) for entry in [f"{self.code}::work", f"{self.code}::"]},
            error=None,
            run={"wall_s": 1.5},
        )
        self.record.write(self.path)

    def stale(self, **changes):
        arguments = {"spec": self.spec, "stamp": "old", "inputs": [self.input], "outputs": self.outputs} | changes
        return why_stale(Record.read(self.path), **arguments)

    def rewrite(self, **changes):
        dataclasses.replace(self.record, **changes).write(self.path)

    def stamp(self):
        return stamps(self).value("port/layer_000")


def stamps(job, wants_whole=lambda job: False):
    return Stamps(job.records, job.records.parent / "stamps", job.records.parent / "seen", wants_whole)


def damage(path):
    """Flips a bit and puts size and times back."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def touch(path):
    os.utime(path, (time.time() + 100,) * 2)


def test_round_trip(job):
    assert Record.read(job.path) == job.record


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"schema_version": 2}', '{"schema_version": 1}', '{"schema_version": 1, "x": 2}']
)
def test_record_that_cannot_be_used(job, text):
    job.path.write_text(text)
    assert Record.read(job.path) is None
    assert job.stale() == "it has not run before"
    assert job.stamp() == NEW


def test_record_of_another_schema(job):
    job.path.write_text(job.path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    assert Record.read(job.path) is None


def test_nothing_changed(job):
    assert job.stale() is None


def test_touched_files_are_no_change(job):
    for path in (job.input, job.code, *job.outputs):
        touch(path)
    assert job.stale() is None
    assert job.stamp() == "old"


def test_never_run(job):
    job.path.unlink()
    assert job.stale() == "it has not run before"


def test_failed_before(job):
    job.rewrite(error="no such head")
    assert job.stale() == "it failed before"


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ({"stage": "layer_000", "limit": 2}, "limit"),
        ({"stage": "layer_000"}, "limit"),
        ({"stage": "layer_000", "limit": 1.5, "more": None}, "more"),
    ],
)
def test_settings_changed(job, spec, key):
    job.rewrite(spec=job.spec)
    assert job.stale(spec=spec).startswith("its settings changed")
    if spec.get(key, "") is not None:
        assert f"({key})" in job.stale(spec=spec)


def test_stamp_changed(job):
    assert "forced" in job.stale(stamp="other")


def test_set_of_outputs_changed(job):
    assert job.stale(outputs=job.outputs[:1]) == "its set of outputs changed"
    assert job.stale(outputs=[*job.outputs, job.input]) == "its set of outputs changed"
    assert job.stale(outputs=job.outputs[::-1]) is None


def test_code_changed(job):
    job.code.write_text("def work():\n    return 2\n")
    assert job.stale() == f"its code changed ({job.code}::work)"


def test_comment_in_the_code(job):
    job.code.write_text("# comment\ndef work():\n    return 1\n")
    assert job.stale() is None


def test_input_changed(job):
    job.input.write_bytes(b"other")
    assert job.stale() == f"its inputs changed ({job.input})"


def test_input_added_and_removed(job):
    assert str(job.outputs[0]) in job.stale(inputs=[job.input, job.outputs[0]])
    assert job.stale(inputs=[]) == f"its inputs changed ({job.input})"


def test_output_missing(job):
    job.outputs[1].unlink()
    assert job.stale() == f"its output is missing or damaged ({job.outputs[1]})"


@pytest.mark.parametrize(
    "spoil", [damage, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"longer" * 9)]
)
def test_output_damaged(job, spoil):
    spoil(job.outputs[0])
    assert job.stale() == f"its output is missing or damaged ({job.outputs[0]})"


def test_an_output_is_read_once_for_its_size_and_time(job, monkeypatch):
    """Snakemake gives it another time than its record has."""
    for path in job.outputs:
        touch(path)
    assert job.stamp() == "old"
    with monkeypatch.context() as patch:
        patch.setattr(records, "sha256", lambda path: pytest.fail("is read again"))
        assert job.stamp() == "old"
    damage(job.outputs[0])
    assert job.stamp() == "old" and not is_whole(job.outputs[0], job.record.outputs[str(job.outputs[0])])
    touch(job.outputs[0])
    assert job.stamp() != "old"


def test_of_a_job_each_output_is_read_once(job, monkeypatch):
    """Also where one is damaged."""
    read = []
    monkeypatch.setattr(records, "sha256", lambda path: read.append(path) or sha256(path))
    damage(job.outputs[0])
    assert job.stamp() != "old" and read == job.outputs


@pytest.mark.parametrize("note", ["", "{", '{"a.h5": 1}'])
def test_a_note_of_what_was_read_may_be_lost_or_half_written(job, note):
    assert job.stamp() == "old"
    (seen,) = (job.records.parent / "seen").rglob("*.json")
    seen.write_text(note)
    assert job.stamp() == "old"


def test_outputs_that_are_not_there_are_not_described(job):
    job.outputs[1].unlink()
    assert set(described(job.outputs)) == {str(job.outputs[0])}


def test_stamp_of_a_job_without_a_record(job):
    assert stamps(job).value("port/none") == "new"


def test_stamp_file_is_written_when_the_job_has_to_run_and_only_then(job):
    def stamp_file():
        path = Path(stamps(job).file("port/layer_000", job.spec))
        return path, path.stat().st_mtime_ns, path.read_text()

    first = stamp_file()
    assert stamp_file() == first
    job.outputs[0].unlink()
    missing = stamp_file()
    assert missing[2] != first[2]
    again = stamp_file()
    assert again[1] > missing[1] and again[2] != missing[2], "Snakemake takes a killed job for one that ran"


def test_a_job_runs_if_what_it_was_made_from_is_not_what_is_there(job):
    """As after it was killed, when Snakemake puts the output back that was there before."""
    made = dataclasses.replace(job.record, inputs={}, outputs={str(job.input): describe_output(job.input)})
    made.write(job.records / "golden/layer_000.json")
    before = Path(stamps(job).file("port/layer_000", job.spec)).read_text()
    assert Path(stamps(job).file("port/layer_000", job.spec)).read_text() == before
    assert not stamps(job).is_stale("port/layer_000", job.spec)

    job.input.write_bytes(b"made again")
    made = dataclasses.replace(made, outputs={str(job.input): describe_output(job.input)})
    made.write(job.records / "golden/layer_000.json")
    assert Path(stamps(job).file("port/layer_000", job.spec)).read_text() != before
    assert stamps(job).is_stale("port/layer_000", job.spec)
    assert job.stamp() == "old", "which a job on another host finds while others run"


def test_stamp_file_follows_the_settings(job):
    def content(spec):
        return Path(stamps(job).file("port/layer_000", spec)).read_text()

    before = content(job.spec)
    assert content({"stage": "layer_000"}) == before, "a job's record may hold more than its rule's settings"
    assert content({"limit": 2.0}) != before


def trim(job):
    """Puts a file in the place of the first output that stands for it and has its time."""
    output = job.outputs[0]
    status, digest = output.stat(), sha256(output)
    own = hashlib.sha256(b"rest").hexdigest()
    head = f"{pruning.MAGIC.decode()} {digest} {status.st_size} {own}".encode()
    output.write_bytes(head.ljust(pruning.BLOCK_BYTES, b"\0") + b"rest")
    os.utime(output, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_trimmed_file_is_as_good_as_the_whole_one(job):
    job.rewrite(inputs={str(job.outputs[0]): sha256(job.outputs[0])})
    trim(job)
    assert job.stale(inputs=[job.outputs[0]]) is None, "neither as output nor as input"
    assert job.stamp() == "old"
    damage(job.outputs[0])
    assert "damaged" in job.stale(inputs=[job.outputs[0]])
    touch(job.outputs[0])
    assert job.stamp() != "old"


def test_a_trimmed_file_is_made_again_where_the_whole_one_is_wanted(job):
    def wanted(name):
        assert name == "port/layer_000"
        return True

    assert stamps(job, wanted).value("port/layer_000") == "old"
    trim(job)
    again = stamps(job, wanted)
    assert again.value("port/layer_000") != "old"
    assert not again.is_stale("port/layer_000", job.spec), "by itself it would not have to run"
    assert again.is_stale("port/layer_000", {"limit": 2.0}) and again.is_stale("port/none", {})


def test_stamp_is_stable(job):
    assert job.stamp() == job.stamp() == "old"


def test_stamp_follows_the_code_there_and_back(job):
    text = job.code.read_text()
    job.code.write_text("def work():\n    return 2\n")
    edited = job.stamp()
    assert edited != "old" and job.stamp() == edited
    job.code.write_text("def work():\n    return 3\n")
    assert job.stamp() not in ("old", edited)
    job.code.write_text(text)
    assert job.stamp() == "old"


def test_stamp_of_a_damaged_output(job):
    content = job.outputs[0].read_bytes()
    job.outputs[0].write_bytes(content[:-1])
    damaged = job.stamp()
    assert damaged != "old" and job.stamp() == damaged
    job.outputs[0].write_bytes(content)
    assert job.stamp() == "old"


def test_stamp_of_an_output_of_another_size_and_equal_time(job):
    status = job.outputs[0].stat()
    job.outputs[0].write_bytes(b"short")
    os.utime(job.outputs[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert job.stamp() != "old"


def test_stamp_of_the_same_damage_done_again(job):
    content = job.outputs[0].read_bytes()
    job.outputs[0].write_bytes(b"")
    first = job.stamp()
    job.outputs[0].write_bytes(content)
    job.rewrite(stamp=first, outputs=described(job.outputs))
    assert job.stamp() == first
    job.outputs[0].write_bytes(b"")
    assert job.stamp() not in ("old", first)


def test_stamp_of_a_missing_output(job):
    content = job.outputs[0].read_bytes()
    job.outputs[0].unlink()
    missing = job.stamp()
    assert missing != "old" and job.stamp() == missing
    job.outputs[0].write_bytes(content)
    assert job.stamp() == "old"


def test_stamp_of_a_failed_job_is_new_each_time_it_failed(job):
    job.rewrite(error="no such head")
    first = job.stamp()
    assert first != "old" and job.stamp() == first
    job.rewrite(error="no such head", stamp=first)
    assert job.stamp() not in ("old", first)


def test_a_job_is_current_with_the_stamp_it_was_run_with(job):
    """After an edit the planner's stamp becomes the record's, and stays it."""
    job.code.write_text("def work():\n    return 2\n")
    stamp = job.stamp()
    assert job.stale(stamp=stamp) is not None
    job.rewrite(stamp=stamp, code={entry: fingerprint.current(entry) for entry in job.record.code})
    assert job.stamp() == stamp
    assert job.stale(stamp=stamp) is None
