"""What a run says of its progress, and its last words, given what Snakemake reports."""

import json
import time

import pytest

import reports
from layerproof.files import write_json
from layerproof.terminal import summary
from layerproof.terminal.progress import Plan, Progress, RunningJob, last_line

STAGES = ("embed", "layer_000", "layer_001", "norm", "lm_head")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def progress(*targets):
    return Progress(Plan(lambda: targets, STAGES, lambda: {"golden": "CPU", "port": "XLA:CPU"}))


def job(folder, *stages, rule="rule", ending="json"):
    outputs = tuple(f"results/{folder}/{stage}.{ending}" for stage in stages)
    logs = tuple(f"results/logs/{folder}/{stage}.log" for stage in stages)
    return RunningJob(rule, outputs, logs, time.monotonic())


def leave(comparisons, chains=(), diagnoses=()):
    """Leaves the results of a run."""
    for one in comparisons:
        write_json(summary.RESULTS / f"compare/{one['stage']}.json", one)
    for one in diagnoses:
        write_json(summary.RESULTS / f"diagnosis/{one['stage']}.json", one)
    write_json(summary.VERDICTS, reports.collect(comparisons, chains, diagnoses))
    summary.REPORT.touch()


def words(lines):
    return [line.split(maxsplit=2)[2].strip() if line[:1] == " " else line for line in lines]


def test_a_run_says_what_it_runs_on_and_each_kind_of_job_once():
    run = progress()
    (opening,) = run.plan_jobs({"port_stage": 5, "compare_stage": 5, "total": 10})
    assert opening == (
        "Layerproof: 10 jobs for 5 stages (embed, layer_000 to layer_001, norm, lm_head), golden on CPU, port on XLA:CPU"
    )
    assert words(run.start(1, job("port", "embed", ending="h5"))) == ["port: embed ..."]
    assert words(run.start(2, job("port", "layer_000", ending="h5"))) == []
    assert words(run.start(3, job("compare", "embed", "layer_000"))) == ["comparison: 2 stages, embed to layer_000 ..."]


def test_a_comparison_says_its_verdict_and_how_many_stages_are_left():
    leave([reports.compared("embed"), reports.compared("layer_000", wrong=("attn.q", "out"))])
    run = progress()
    list(run.plan_jobs({"compare_stage": 5}))
    list(run.start(1, job("compare", "embed", "layer_000")))
    first, second = words(run.finish(1))
    assert first.startswith("embed      pass     1 tap, with at most ") and "(4 stages left, about " in first
    assert second.startswith("layer_000  fail     attn.q ") and "times too far off  (3 stages left" in second


def test_taps_that_the_port_does_not_hand_over_are_counted_apart():
    names = ("attn.q", "attn.k", "out")
    leave([reports.compared("layer_000", missing=("attn.q", "attn.k"), names=names)])
    run = progress()
    list(run.start(1, job("compare", "layer_000")))
    (line,) = words(run.finish(1))
    assert line.startswith("layer_000  pass     1 tap (2 missing), with at most ")


def test_the_estimate_counts_the_jobs_that_are_left():
    run = progress()
    assert run.estimate() is None
    list(run.plan_jobs({"port_stage": 4}))
    run.started -= 20
    started = job("port", "embed", rule="port_stage")
    started.started -= 20
    list(run.start(1, started))
    list(run.finish(1))
    assert run.estimate() == pytest.approx(60, rel=0.05), "three more of 20 s, one at a time"
    list(run.start(2, job("port", "layer_000", rule="port_stage")))
    run.running[2].started -= 15
    assert run.estimate() == pytest.approx(45, rel=0.05)


def test_a_long_job_is_told_with_the_last_line_of_its_log(folder):
    run = progress()
    list(run.plan_jobs({"golden_stage": 5}))
    running = job("golden", "embed", "layer_000", ending="h5")
    list(run.start(1, running))
    log = folder / running.logs[1]
    log.parent.mkdir(parents=True)
    log.write_text("2026-11-27 09:21:48 golden/layer_000: runs its variants, for the noise\n")
    assert words([run.still()]) == [
        "0 of 5 jobs done; golden: 2 stages, embed to layer_000 (runs its variants, for the noise)"
    ]


def test_a_warning_on_a_host_is_said_when_it_is_found():
    text = "model-00002.safetensors does not exist, but the index names it"
    checks = [
        {"name": "disk", "status": "ok", "text": "enough", "remedy": None},
        {"name": "checkpoint", "status": "warn", "text": text, "remedy": "Copy it."},
    ]
    write_json(summary.RESULTS / "preflight/golden.json", {"checks": checks})
    run = progress()
    list(run.plan_jobs({"preflight_golden": 1, "compare_stage": 5}))
    list(run.start(1, job("preflight", "golden")))
    assert words(run.finish(1)) == [f"warning: checkpoint: {text}. Copy it."]
    write_json(summary.RESULTS / "preflight/port.json", {"checks": checks})
    list(run.start(2, job("preflight", "port")))
    assert list(run.finish(2)) == [], "it is the same checkpoint"


def test_the_last_words_are_the_verdict_the_report_and_what_to_do():
    comparisons, chains = reports.good()
    leave(comparisons, chains)
    run = progress("results/report.html")
    list(run.plan_jobs({"report": 1}))
    list(run.start(1, job("", "report", ending="html")))
    list(run.finish(1))
    assert run.is_finished
    headline, report, command = run.conclude()
    assert headline.startswith("PASS: All 5 stages")
    assert report == "Report: results/report.html"
    assert command.startswith("Next: ")


def test_a_run_that_finds_nothing_to_do_says_so_and_the_verdict():
    comparisons, _ = reports.bad()
    leave(comparisons)
    run = progress("results/report.html")
    run.note("Nothing to be done (all requested files are present and up to date).")
    first, headline, *_, last = run.conclude()
    assert first == "Everything is up to date." and headline.startswith("ERROR (2 of 5 stages): ")
    assert last == "Next: correct the port, then layerproof run results/compare/layer_000.json"


def test_a_captured_model_that_goes_wrong_is_captured_again():
    comparisons, (chain,) = reports.good()
    leave(comparisons, [chain | {"chain": "captured", "status": "fail", "first_wrong": "layer_001"}])
    last = summary.answer([]).lines[-1]
    assert last == (
        "Next: correct the port, capture its tensors again, then layerproof run results/compare/chain/captured.json"
    )


def test_a_chain_that_broke_is_not_kept_as_proof():
    comparisons, _ = reports.good()
    leave(comparisons, [reports.chain(comparisons, broken="layer_001")])
    answer = summary.answer([])
    assert answer.overall == "error"
    assert answer.lines[-1] == "Next: correct what could not be compared, then layerproof run"


def test_a_run_says_what_changed_since_the_one_before():
    comparisons, _ = reports.good()
    leave([reports.compared("embed"), reports.compared("layer_000", wrong=("out",)), *comparisons[2:]])
    run = progress()
    list(run.plan_jobs({"report": 1}))
    leave(comparisons)
    list(run.start(1, job("", "report", ending="html")))
    list(run.finish(1))
    assert "Since the run before, fixed: layer_000" in run.conclude()


@pytest.mark.parametrize("why", ["failed", "stopped"])
def test_a_run_that_did_not_finish_has_no_verdict(folder, why):
    comparisons, chains = reports.good()
    leave(comparisons, chains)
    run = progress()
    list(run.plan_jobs({"compare_stage": 5, "report": 1}))
    failing = job("compare", "layer_001")
    list(run.start(1, failing))
    if why == "stopped":
        assert list(run.warn("Terminating processes on user request, this might take some time.")) == []
        assert list(run.fail(1, failing)) == []
    if why == "failed":
        log = folder / failing.logs[0]
        log.parent.mkdir(parents=True)
        log.write_text("2026-11-27 09:21:48 compare/layer_001: runs because it has not run before\nerror: disk full\n")
        assert words(run.fail(1, failing)) == ["comparison: layer_001 failed"]
        assert list(run.warn("Cannot restore results/compare/layer_001.json: no backup found.")) == []
        list(run.stop("WorkflowError", "At least one job did not complete successfully."))
    assert not run.is_finished
    first, *rest = run.conclude()
    said = "did not finish, 1 job failed" if why == "failed" else "was stopped"
    assert first == f"NO VERDICT: the run {said} (0 of 6 jobs done)."
    assert not any("PASS" in line for line in rest)
    assert why == "stopped" or f"error: disk full. Log: {failing.logs[0]}" in rest[0]
    assert (
        rest[-1]
        == f"Next: {'correct that, then ' * (why == 'failed')}layerproof run, which goes on where this run ended"
    )


def test_a_job_that_succeeds_when_it_is_tried_again_did_not_fail():
    run = progress()
    list(run.plan_jobs({"port_stage": 1}))
    again = job("port", "embed", ending="h5")
    list(run.start(1, again))
    list(run.fail(1, again))
    list(run.start(1, again))
    list(run.finish(1))
    assert run.is_finished and not run.failed


def test_an_unknown_target_is_answered_with_the_stages_there_are():
    run = progress("results/compare/layer_099.json")
    list(
        run.stop(
            "MissingRuleException",
            "MissingRuleException:\nNo rule to produce results/compare/layer_099.json (if you use ...)",
        )
    )
    (line,) = run.conclude()
    assert line.startswith(
        "error: results/compare/layer_099.json: no rule makes this file. The stages of this run are embed,"
    )


def test_an_error_of_snakemake_is_told_as_it_is():
    run = progress()
    list(run.stop("AmbiguousRuleException", "two rules make this"))
    assert list(run.conclude()) == ["two rules make this"]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("2026-11-27 09:21:48 port/embed: done after 2 s\n", "done after 2 s"),
        ("Loading:   0%\rLoading:  50%\rLoading: 100%\n", "Loading: 100%"),
        ("one\n\n \n", "one"),
        ("", ""),
    ],
)
def test_the_last_line_of_a_log(folder, text, last):
    (folder / "log").write_text(text)
    assert last_line(folder / "log") == last
    assert last_line(folder / "none") == ""


# The answer for single files


@pytest.mark.parametrize(
    ("target", "overall", "line"),
    [
        ("results/compare/layer_000.json", "fail", "FAIL: layer_000: router.scores "),
        ("results/compare/embed.json", "pass", "PASS: embed agrees with the golden, with at most "),
        ("results/compare/layer_001.json", "error", "ERROR: layer_001: error, ValueError at port.py:7: no weights"),
        ("results/diagnosis/layer_000.json", "fail", "FAIL: layer_000: router.scores "),
        ("results/report.html", "error", "ERROR (2 of 5 stages): layer_000 is the first stage"),
        ("results/archive/mine.zip", "error", "ERROR (2 of 5 stages): layer_000 is the first stage"),
        ("all", "error", "ERROR (2 of 5 stages): layer_000 is the first stage"),
    ],
)
def test_each_target_has_its_answer(target, overall, line):
    comparisons, _ = reports.bad()
    leave(comparisons, diagnoses=[reports.diagnosis("layer_000", ("router.scores", "a softmax"), ("out", None))])
    found = summary.answer([target])
    assert found.overall == overall and found.lines[0].startswith(line)


def test_a_comparison_alone_does_not_speak_of_an_old_diagnosis():
    comparisons, _ = reports.bad()
    leave(comparisons, diagnoses=[reports.diagnosis("layer_000", ("attn.q", "no bias"))])
    found = summary.answer(["results/compare/layer_000.json"])
    assert "attn.q" not in found.lines[0] and found.lines[1].startswith(
        "Next: layerproof run results/diagnosis/layer_000"
    )


def test_a_chain_and_a_bisection_have_answers():
    _, (chain,) = reports.good()
    write_json(summary.RESULTS / "compare/chain/all.json", chain)
    found = summary.answer(["results/compare/chain/all.json"])
    assert found.overall == "pass" and found.lines[0].startswith("PASS: chain all ran through 5 stages")
    entry = {"status": "fail", "own_input": True, "why": "the error is 2.96 times what is allowed"}
    wrong = {"chain": "captured", "status": "fail", "first_wrong": "layer_001"}
    for stages, told in (
        ({"layer_001": entry}, "FAIL: chain captured goes wrong at layer_001: the error is 2.96 times what is allowed"),
        ({"layer_001": entry | {"own_input": False}}, "FAIL: chain captured goes wrong by layer_001 at the latest"),
    ):
        write_json(summary.RESULTS / "compare/chain/captured.json", chain | wrong | {"stages": stages})
        assert summary.answer(["results/compare/chain/captured.json"]).lines == (told,)
    comparisons, _ = reports.good()
    write_json(summary.RESULTS / "compare/chain/all.json", reports.chain(comparisons, broken="layer_001"))
    found = summary.answer(["results/compare/chain/all.json"])
    assert found == summary.Answer("error", ("ERROR: chain all broke at layer_001: the port ran out of memory",))
    bisection = {"first_wrong": "layer_001", "last_right": "layer_000"}
    summary.BISECTION.write_text(json.dumps(bisection))
    found = summary.answer(["results/bisect.json"])
    assert found.overall == "fail" and "after layer_000, by layer_001" in found.lines[0]


def test_other_files_are_just_named():
    write_json(summary.RESULTS / "prediction.json", {})
    assert summary.answer(["results/prediction.json"]) == summary.Answer(None, ("Wrote results/prediction.json",))
    assert [summary.exit_code(overall) for overall in (None, "pass", "fail", "error")] == [0, 0, 1, 2]
