"""What the planner writes into job files, so that Snakemake starts the jobs that may have to run, and only those."""

import os
import sys
import time
from dataclasses import replace

import pytest

from layerproof.files import sha256
from layerproof.rerun import fingerprint, recorder, records
from layerproof.rerun.records import described
from recorded import JOB, NAME, RecordedJob, damage, touch, wait_for_the_next_tick

CHANGED = {"settings": {"compare": {"limit": 2.0}, "parallel": {"tp": 1}}}
"""Another setting of the job."""
UNCHANGED = (None, False)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A recorded job with one input, two outputs and the code of one function."""
    monkeypatch.setattr(recorder, "STARTED", time.time() + 3600)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return RecordedJob(tmp_path)


def of_output(path):
    return f"its output is missing or damaged ({path})", True


def is_older_than_outputs(job):
    return all(job.job_file.stat().st_mtime_ns < path.stat().st_mtime_ns for path in job.outputs)


def edit_code(job):
    job.code.write_text("def work():\n    return 2\n")


def lose_an_output(job):
    job.outputs[1].unlink()


def lose_the_record(job):
    job.path.unlink()


def fail(job):
    job.run(error="no such head")


OWN_REASONS = {
    "it has not run before": lose_the_record,
    "it failed before": fail,
    "its code changed": edit_code,
    "its output is missing or damaged": lose_an_output,
}
"""Why a job must run whatever its inputs are, with what makes it so."""


# Without a reason


def test_nothing_changed(job):
    before = job.job_file.read_bytes(), job.job_file.stat().st_mtime_ns
    assert job.why() == UNCHANGED
    assert job.plan() == job.record.job
    assert (job.job_file.read_bytes(), job.job_file.stat().st_mtime_ns) == before


def test_touched_files_are_no_change(job):
    for path in (job.input, job.code, *job.outputs):
        touch(path)
    assert job.why() == UNCHANGED
    assert job.plan() == job.record.job


def test_settings_with_keys_in_another_order_are_no_change(job):
    before = job.job_file.read_bytes()
    job.plan(settings=dict(reversed(JOB.settings.items())))
    assert job.job_file.read_bytes() == before


@pytest.mark.parametrize("content", [None, "", "[]", '{"name": "port/layer_000"}'])
def test_a_job_file_that_is_lost_or_broken_is_written_as_it_was(job, content):
    before = job.job_file.read_bytes()
    if content is None:
        job.job_file.unlink()
    else:
        job.job_file.write_text(content)
    job.plan()
    assert job.job_file.read_bytes() == before and is_older_than_outputs(job)


def test_a_dry_plan_with_other_settings_leaves_no_trace(job):
    before = job.job_file.read_bytes()
    assert job.plan(**CHANGED).settings == CHANGED["settings"]
    assert job.job_file.read_bytes() != before and not is_older_than_outputs(job)
    job.plan()
    assert job.job_file.read_bytes() == before and is_older_than_outputs(job)


@pytest.mark.parametrize("reason", [reason for reason in OWN_REASONS if reason != "it failed before"])
def test_a_dry_plan_of_a_job_that_is_put_right_again_leaves_no_trace(job, reason):
    before = job.job_file.read_bytes()
    kept = {path: (path.read_bytes(), path.stat()) for path in (job.path, job.code, *job.outputs)}
    OWN_REASONS[reason](job)
    assert job.plan().token != JOB.token
    for path, (content, status) in kept.items():
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    job.plan()
    assert job.job_file.read_bytes() == before and is_older_than_outputs(job)


# With a reason of its own


@pytest.mark.parametrize(("reason", "cause"), OWN_REASONS.items(), ids=OWN_REASONS)
def test_a_job_that_must_run_gets_another_token_at_every_plan(job, reason, cause):
    """Snakemake takes a killed job for one that ran."""
    cause(job)
    why, must = job.why()
    assert why.startswith(reason) and must
    planned, times = [], []
    for _ in range(3):
        planned.append(job.plan())
        times.append(job.job_file.stat().st_mtime_ns)
        wait_for_the_next_tick()
    assert {one.why for one in planned} == {why}
    assert len({one.token for one in planned} | {JOB.token}) == len({one.plan for one in planned} | {JOB.plan}) == 4
    assert times[0] < times[1] < times[2]
    assert job.why_stale(token=planned[-1].token, why=why) is not None


@pytest.mark.parametrize("cause", OWN_REASONS.values(), ids=OWN_REASONS)
def test_a_job_that_ran_with_its_token_is_up_to_date(job, cause):
    cause(job)
    planned = job.plan()
    job.run()
    assert job.record.job == planned
    assert job.why_stale(token=planned.token) is None and job.why() == UNCHANGED
    assert job.plan() == planned and is_older_than_outputs(job)


def test_a_job_without_a_record(job):
    planned = job.plan(name="port/none", arguments={"fed_by": []})
    assert (planned.name, planned.why) == ("port/none", "it has not run before")
    assert (planned.settings, planned.arguments, planned.versions) == (JOB.settings, {"fed_by": []}, JOB.versions)
    assert planned.token


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"schema_version": 1}', '{"schema_version": 2}'])
def test_a_record_that_cannot_be_used_is_none(job, text):
    job.path.write_text(text)
    assert job.why() == ("it has not run before", True)
    assert job.plan().token != JOB.token


def test_code_there_and_back(job):
    text = job.code.read_text()
    edit_code(job)
    assert job.why() == (f"its code changed ({job.code}::work)", True)
    job.code.write_text("# comment\n" + text)
    assert job.why() == UNCHANGED


def test_a_job_that_failed_has_a_new_token_each_time(job):
    tokens = set()
    for _ in range(3):
        job.run(error="no such head")
        assert job.why() == ("it failed before", True)
        tokens.add(job.plan().token)
    assert len(tokens | {JOB.token}) == 4


def test_damage_there_and_back(job):
    content = job.outputs[0].read_bytes()
    job.outputs[0].write_bytes(content[:-1])
    assert job.why() == of_output(job.outputs[0])
    job.outputs[0].write_bytes(content)
    assert job.why() == UNCHANGED
    job.outputs[0].unlink()
    assert job.why() == of_output(job.outputs[0])


def test_an_output_of_another_size_and_equal_time(job):
    assert job.why() == UNCHANGED
    status = job.outputs[0].stat()
    job.outputs[0].write_bytes(b"short")
    os.utime(job.outputs[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert job.why() == of_output(job.outputs[0])


def test_the_same_damage_done_again_is_another_token(job):
    job.outputs[0].write_bytes(b"")
    first = job.plan().token
    job.run()
    assert job.record.job.token == first and job.plan().token == first
    job.outputs[0].write_bytes(b"")
    assert job.plan().token not in (JOB.token, first)


def test_a_rerun_that_was_requested(job):
    first, second = (job.plan(rerun_requested=True) for _ in range(2))
    assert first.why == second.why == "a rerun was requested"
    assert len({first.token, second.token, JOB.token}) == 3
    assert job.why_stale(token=second.token, why=second.why) == "a rerun was requested"
    assert job.plan() == JOB and is_older_than_outputs(job), "the request was for that call alone"


# Without a reason of its own: the job decides by content


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (CHANGED, "compare.limit"),
        ({"settings": {"parallel": {"tp": 1}}}, "compare"),
        ({"arguments": {"fed_by": []}}, "fed_by"),
        ({"versions": {"torch": "2.10.0", "torch_xla": "2.10.0"}}, "torch, torch_xla"),
    ],
)
def test_a_job_whose_settings_alone_changed_keeps_its_token_and_gets_a_new_plan(job, change, names):
    assert job.why(**change) == (f"its settings changed ({names})", False)
    first, second = job.plan(**change), job.plan(**change)
    assert first.token == second.token == JOB.token
    assert len({first.plan, second.plan, JOB.plan}) == 3
    assert replace(second, plan=JOB.plan, why=JOB.why) == replace(JOB, **change)
    assert second.why == f"its settings changed ({names})"
    assert not is_older_than_outputs(job)
    assert "its settings changed" in job.why_stale(**change)
    job.run()
    assert job.plan(**change) == second and is_older_than_outputs(job)


def test_a_job_whose_inputs_alone_changed_keeps_its_token_and_gets_a_new_plan(job):
    """As after it was killed, when Snakemake puts the output back that was there before."""
    job.input_is_made_by("golden/layer_000")
    assert job.why() == UNCHANGED and job.plan() == JOB and not job.planner().is_stale(JOB)

    job.input.write_bytes(b"made again")
    job.input_is_made_by("golden/layer_000")
    why = f"its inputs changed ({job.input})"
    assert job.why() == (why, False) and job.planner().is_stale(JOB)
    first, second = job.plan(), job.plan()
    assert first.token == second.token == JOB.token and first.why == second.why == why
    assert len({first.plan, second.plan, JOB.plan}) == 3 and not is_older_than_outputs(job)
    assert job.why_stale() == why

    job.input.write_bytes(b"input")
    job.input_is_made_by("golden/layer_000")
    assert job.why_stale(plan=second.plan) is None, "the job finds its input as it was"
    assert job.plan() == JOB and is_older_than_outputs(job)


def test_an_input_that_no_job_makes_is_left_to_snakemake(job):
    job.input.write_bytes(b"other prompts")
    assert job.why() == UNCHANGED


def test_a_reason_of_its_own_comes_before_settings_and_inputs(job):
    lose_an_output(job)
    assert job.why(**CHANGED) == of_output(job.outputs[1])
    assert job.plan(**CHANGED).token != JOB.token


# What the planner keeps


def test_a_job_file_is_written_once_in_a_process(job):
    lose_an_output(job)
    planner = job.planner()
    given = NAME, JOB.settings, JOB.arguments, JOB.versions, False
    path = planner.job_file(*given)
    before = job.job_file.read_bytes(), job.job_file.stat()
    assert planner.job_file(*given) == path == str(planner.path(NAME)) == str(job.job_file)
    assert (job.job_file.read_bytes(), job.job_file.stat()) == before


def test_of_a_job_each_output_is_read_once(job, monkeypatch):
    """Also where one is damaged."""
    read = []
    monkeypatch.setattr(records, "sha256", lambda path: read.append(path) or sha256(path))
    damage(job.outputs[0])
    planner = job.planner()
    assert planner.why(JOB) == of_output(job.outputs[0]) and planner.is_stale(JOB)
    assert not planner.has_run_with(JOB) and read == job.outputs


# Questions of the rules


@pytest.mark.parametrize("cause", OWN_REASONS.values(), ids=OWN_REASONS)
def test_a_job_with_a_reason_of_its_own_is_stale_and_has_not_run(job, cause):
    assert not job.planner().is_stale(JOB) and job.planner().has_run_with(JOB)
    cause(job)
    assert job.planner().is_stale(JOB) and not job.planner().has_run_with(JOB)


def test_a_job_with_other_settings_is_stale_and_has_not_run_with_them(job):
    other = replace(JOB, **CHANGED)
    assert job.planner().is_stale(other) and not job.planner().has_run_with(other)
    none = replace(JOB, name="port/none")
    assert job.planner().is_stale(none) and not job.planner().has_run_with(none)


def test_a_job_has_run_with_its_settings_also_where_its_inputs_changed(job):
    job.input.write_bytes(b"made again")
    job.input_is_made_by("golden/layer_000")
    assert job.planner().is_stale(JOB) and job.planner().has_run_with(JOB)


def test_a_pruned_file_is_as_good_as_the_original(job):
    job.rewrite(inputs={str(job.outputs[0]): sha256(job.outputs[0])})
    job.prune_output()
    assert job.why() == UNCHANGED
    damage(job.outputs[0])
    touch(job.outputs[0])
    assert job.why() == of_output(job.outputs[0])


def test_a_pruned_file_is_made_again_where_the_original_is_wanted(job):
    def wanted(name):
        assert name == NAME
        return True

    assert job.why(wanted) == UNCHANGED
    job.prune_output()
    why = "the taps that were dropped from its output are needed again"
    assert job.why(wanted) == (why, True)
    assert not job.planner(wanted).is_stale(JOB), "by itself it would not have to run"
    first, second = job.plan(wanted), job.plan(wanted)
    assert first.why == second.why == why and len({first.token, second.token, JOB.token}) == 3
    assert job.why_stale(token=second.token, why=why) == why
    assert job.planner(wanted).is_stale(replace(JOB, **CHANGED))


def test_a_job_is_up_to_date_with_the_token_it_ran_with(job):
    """After an edit the planner's token becomes the record's, and stays it."""
    edit_code(job)
    planned = job.plan()
    assert job.why_stale(token=planned.token, why=planned.why) is not None
    code = {entry: fingerprint.current(entry) for entry in job.record.code}
    job.rewrite(job=planned, code=code, outputs=described(job.outputs))
    assert job.plan() == planned
    assert job.why_stale(token=planned.token) is None
