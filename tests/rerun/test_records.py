"""When a job is stale, and why."""

import json
import sys
import time
from dataclasses import replace

import pytest

from layerproof.errors import UserError
from layerproof.files import sha256
from layerproof.rerun import recorder
from layerproof.rerun.records import Record, described
from recorded import JOB, RecordedJob, damage, touch


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A recorded job with one input, two outputs and the code of one function."""
    monkeypatch.setattr(recorder, "STARTED", time.time() + 3600)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return RecordedJob(tmp_path)


def test_a_record_that_json_cannot_hold_is_an_error_of_one_line(job, tmp_path):
    settings = {"port": {"options": {"dtype": object()}}}
    record = replace(job.record, job=replace(JOB, settings=settings))
    with pytest.raises(UserError, match=r"record\.json: cannot be written \(.*not JSON serializable"):
        record.write(tmp_path / "record.json")
    assert not (tmp_path / "record.json").exists()


def test_round_trip(job):
    assert Record.read(job.path) == job.record
    assert Record.read(job.path).job == JOB


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"schema_version": 1}',
        '{"schema_version": 2}',
        '{"schema_version": 2, "x": 2}',
        '{"schema_version": 2, "job": null}',
        '{"schema_version": 2, "job": {"name": "port/layer_000"}}',
    ],
)
def test_record_that_cannot_be_used(job, text):
    job.path.write_text(text)
    assert Record.read(job.path) is None
    assert job.why_stale() == "it has not run before"


@pytest.mark.parametrize("change", [{"schema_version": 1}, {"schema_version": 3}, {"job": None}, {"more": 1}])
def test_record_of_another_schema(job, change):
    job.path.write_text(json.dumps(json.loads(job.path.read_text()) | change))
    assert Record.read(job.path) is None


def test_nothing_changed(job):
    assert job.why_stale() is None


def test_touched_files_are_no_change(job):
    for path in (job.input, job.code, *job.outputs):
        touch(path)
    assert job.why_stale() is None


def test_never_run(job):
    job.path.unlink()
    assert job.why_stale() == "it has not run before"


def test_failed_before(job):
    job.rewrite(error="no such head")
    assert job.why_stale() == "it failed before"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"settings": {"compare": {"limit": 2}, "parallel": {"tp": 1}}}, "compare.limit"),
        ({"settings": {"compare": {}, "parallel": {"tp": 1}}}, "compare.limit"),
        ({"settings": {"parallel": {"tp": 1}}}, "compare"),
        ({"settings": {**JOB.settings, "more": None}}, "more"),
        ({"settings": {**JOB.settings, "compare": {"limit": 1.5, "taps": "all"}}}, "compare.taps"),
        ({"settings": {"compare": {"limit": 2}, "parallel": {"tp": 2}}}, "compare.limit, parallel.tp"),
        ({"settings": {**JOB.settings, "compare": None}}, "compare"),
        ({"arguments": {"fed_by": []}}, "fed_by"),
        ({"versions": {"torch": "2.10.0"}}, "torch"),
        ({"versions": {"container": "sha256:1"}, "arguments": {"fed_by": []}}, "container, fed_by, torch"),
    ],
)
def test_settings_changed(job, change, names):
    assert job.why_stale(**change) == f"its settings changed ({names})"


def test_settings_with_keys_in_another_order_are_no_change(job):
    assert job.why_stale(settings=dict(reversed(JOB.settings.items()))) is None


def test_token_changed(job):
    assert job.why_stale(token="other", why="a rerun was requested") == "a rerun was requested"


def test_a_plan_alone_is_no_change(job):
    assert job.why_stale(plan="other", why="its inputs changed (input.h5)") is None


def test_set_of_outputs_changed(job):
    assert job.why_stale(outputs=job.outputs[:1]) == "its set of outputs changed"
    assert job.why_stale(outputs=[*job.outputs, job.input]) == "its set of outputs changed"
    assert job.why_stale(outputs=job.outputs[::-1]) is None


def test_code_changed(job):
    job.code.write_text("def work():\n    return 2\n")
    assert job.why_stale() == f"its code changed ({job.code}::work)"


def test_comment_in_the_code(job):
    job.code.write_text("# comment\ndef work():\n    return 1\n")
    assert job.why_stale() is None


def test_input_changed(job):
    job.input.write_bytes(b"other")
    assert job.why_stale() == f"its inputs changed ({job.input})"


def test_input_added_and_removed(job):
    assert str(job.outputs[0]) in job.why_stale(inputs=[job.input, job.outputs[0]])
    assert job.why_stale(inputs=[]) == f"its inputs changed ({job.input})"


def test_output_missing(job):
    job.outputs[1].unlink()
    assert job.why_stale() == f"its output is missing or damaged ({job.outputs[1]})"


@pytest.mark.parametrize(
    "spoil", [damage, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"longer" * 9)]
)
def test_output_damaged(job, spoil):
    spoil(job.outputs[0])
    assert job.why_stale() == f"its output is missing or damaged ({job.outputs[0]})"


def test_outputs_that_do_not_exist_are_not_described(job):
    job.outputs[1].unlink()
    assert set(described(job.outputs)) == {str(job.outputs[0])}


def test_a_pruned_file_is_as_good_as_the_original(job):
    job.rewrite(inputs={str(job.outputs[0]): sha256(job.outputs[0])})
    job.prune_output()
    assert job.why_stale(inputs=[job.outputs[0]]) is None, "neither as output nor as input"
    damage(job.outputs[0])
    assert "damaged" in job.why_stale(inputs=[job.outputs[0]])
