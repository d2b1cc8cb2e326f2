"""The plots and the report: what they say of every way that a run can end, and that they hold up on a real model."""

import copy
import html
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

import reports
from layerproof import cli
from layerproof.compare.relaid import LAST_TOKENS
from layerproof.files import size, write_json
from layerproof.measure.metrics import judge
from layerproof.model import stages
from layerproof.paths import GLOSSARY, TEMPLATES
from layerproof.report import page, plots
from layerproof.report import weights as report_weights
from layerproof.report.coverage import what_was_compared, what_was_not_compared
from layerproof.report.words import number, share
from layerproof.tensors.tensor import Tensor


def sentences(comparisons, chains=(), diagnoses=()):
    verdicts = reports.collect(comparisons, chains, diagnoses)
    return [verdicts["headline"], *verdicts["details"]]


def not_looked_at(comparisons, chains):
    return what_was_not_compared(comparisons, chains, reports.config())


def render(*run, **more):
    return page.render(TEMPLATES[0], reports.page_inputs(*run, **more))


def words(html):
    """What a reader sees of a page, in one line."""
    return " ".join(re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]*>", " ", html, flags=re.DOTALL).split())


# The verdict in a sentence


def test_a_pass_names_its_scope_and_how_close_it_came():
    comparisons, chains = reports.good()
    headline, margin, end_to_end = sentences(comparisons, chains)
    assert re.fullmatch(
        r"All 5 stages and 13 taps agree with the golden, with at most \d[\d.]* % of the allowed error "
        r"\([\w.]+ of \w+\)\.",
        headline,
    )
    assert margin.startswith(
        "A tap fails above 1.5 times the error of legitimate variants of the golden, or above 2 times"
    )
    assert "chain all" in end_to_end and "100 %" in end_to_end
    covered = what_was_compared(comparisons, chains, reports.config())["Covered"]
    assert covered == "4 kinds of stage × 2 prefill lengths (4, 6 tokens) × 5 taps, where a stage has them"


def test_the_margin_of_a_pass_is_that_of_its_worst_group_too():
    comparisons, chains = reports.good()
    tap = comparisons[1]["taps"]["mlp.out"]
    tap |= {"band": {"weighted": 2.0, "token": 3.0}, "weighted_R": 1.5, "worst_token": {"index": [0, 3], "R": 5.7}}
    headline, *_ = sentences(comparisons, chains)
    stage = comparisons[1]["stage"]
    assert headline.endswith(f", with at most 95 % of the allowed error (mlp.out of {stage} at token [0,3]).")


def test_one_stage_that_passes_is_named():
    headline, *_ = sentences([reports.compared("layer_000")])
    assert headline.startswith("layer_000 alone and 5 taps agree with the golden, with at most ")


def test_a_pass_does_not_claim_taps_that_it_never_saw():
    headline, *_ = sentences([reports.compared("layer_000", missing=("mlp.gate", "mlp.up"))])
    assert "1 stage and 5 taps agree" in headline and "2 taps could not be compared" in headline
    assert "All " not in headline


def test_a_failure_names_the_first_culprit_and_what_is_allowed():
    comparisons = [reports.compared("layer_000"), reports.compared("layer_001", wrong=("mlp.out", "out"))]
    headline, counts = sentences(comparisons)
    assert re.fullmatch(
        r"layer_001 is the first stage that goes wrong, at mlp.out: the error is \d\d\.\d times what is allowed\.",
        headline,
    )
    assert counts == "1 of 2 stages fails."


def test_a_failure_without_R_says_its_reason():
    comparison = reports.compared("layer_000", wrong=("out",))
    comparison["taps"]["out"] |= {"R": None, "reason": "the port has shape [2,6,8] where the golden has [2,6,16]"}
    headline, *_ = sentences([comparison])
    assert headline == (
        "layer_000 is the first stage that goes wrong, at out: the port has shape [2,6,8] where the golden has [2,6,16]."
    )


def test_a_failure_beside_an_error_tells_both():
    headline, counts, error = sentences(*reports.bad())
    assert headline.startswith("layer_000 is the first stage that goes wrong, at router.scores")
    assert counts == "1 of 5 stages fails."
    assert error == "layer_001 could not be compared: ValueError at port.py:7: no weights."


def test_an_error_names_the_stage_and_the_message_before_those_that_follow_from_it():
    comparisons = [
        reports.compared("embed"),
        reports.stopped("layer_000", "no input, because an earlier stage failed", "missing"),
        reports.stopped("layer_001", "RuntimeError at port.py:9: out of memory"),
    ]
    headline, more, rest = sentences(comparisons)
    assert headline == "layer_001 could not be compared: RuntimeError at port.py:9: out of memory."
    assert (more, rest) == ("Nor could 1 more stage.", "The other 1 stage passes.")


def test_errors_are_told_by_their_reason_and_before_what_goes_wrong_behind_them():
    comparisons = [
        reports.stopped("embed", "embed: no table"),
        reports.stopped("layer_000", "layer_000: the port is not deterministic"),
        reports.stopped("layer_001", "layer_001: the port is not deterministic"),
        reports.compared("layer_002", wrong=("out",)),
    ]
    assert sentences(comparisons)[:3] == [
        "embed could not be compared: no table.",
        "layer_000 to layer_001 could not be compared: the port is not deterministic.",
        "layer_002 is the first stage of those that ran that goes wrong, at out: the error is "
        f"{comparisons[3]['taps']['out']['excess']:.3g} times what is allowed.",
    ]


@pytest.mark.parametrize("comparisons", [[], [reports.stopped("layer_000", "it is gone")]], ids=["no stage", "no tap"])
def test_an_empty_comparison_is_no_pass(comparisons):
    headline, *_ = sentences(comparisons)
    assert headline == "No stage was compared, so the port has no verdict."
    assert "No stage was compared" in words(render(comparisons))


def test_a_chain_that_breaks_is_no_pass():
    comparisons, _ = reports.good()
    headline, *_ = sentences(comparisons, [reports.chain(comparisons, broken="layer_001")])
    assert headline == "Every stage passes alone, but chain all broke at layer_001: the port ran out of memory."


# Why: the answer of a colleague

SOFTMAX = "a softmax over the experts in place of the sigmoid"


def captured(comparisons, first_wrong=None):
    chain = reports.chain(comparisons) | {"chain": "captured", "logits": None}
    return chain | ({"status": "fail", "first_wrong": first_wrong} if first_wrong else {})


def test_a_captured_model_that_goes_wrong_is_no_pass():
    comparisons, chains = reports.good()
    headline, because, _ = sentences(comparisons, [*chains, captured(comparisons, "layer_001")])
    assert headline == (
        "Every stage passes alone, but the captured compiled model goes wrong after layer_000, by layer_001 at the latest."
    )
    assert "Look at what compiling the full model adds" in because


def test_of_a_captured_model_with_a_file_that_cannot_be_used_the_rest_is_told():
    comparisons, _ = reports.good()
    chain = captured(comparisons, "layer_001")
    chain["stages"]["layer_000"] = {"status": "error", "reason": "layers.0_output.pt: cannot be read as a tensor"}
    headline, wrong, _ = sentences(comparisons, [chain | {"status": "error"}])
    assert "chain captured broke at layer_000" in headline
    assert wrong == "The captured compiled model goes wrong after embed, by layer_001 at the latest."
    right = chain | {"status": "error", "first_wrong": None}
    _, told, _ = sentences(comparisons, [right])
    assert "strays no further" in told and "layer_000" not in told
    assert any(one.startswith("Chain captured lacks layer_000:") for one in not_looked_at(comparisons, [right]))


def test_a_captured_stage_with_its_input_is_told_with_by_how_much_it_is_wrong():
    comparisons, _ = reports.good()
    right = captured(comparisons)
    for stage in ("embed", "layer_001"):
        right["stages"][stage] |= {"own_input": True, "wrong": False, "why": None, "excess": 0.5}
    told = sentences(comparisons, [right])
    assert "The captured compiled model is right from the captured inputs of embed, layer_001." in told
    assert any(one.startswith("layer_000, norm, lm_head got an input that was not captured") for one in told), told
    wrong = captured(comparisons, "layer_001")
    why = "the error is 5.1 times what is allowed"
    wrong["stages"]["layer_001"] |= {"own_input": True, "wrong": True, "why": why, "excess": 5.1}
    headline, *_ = sentences(comparisons, [wrong])
    assert headline == (
        f"Every stage passes alone, but the captured compiled model goes wrong at layer_001: from its captured input, {why}."
    )


def test_a_captured_model_is_told_beside_what_passes_and_what_fails():
    comparisons, chains = reports.good()
    assert any(
        "strays no further than a correct port does" in one for one in sentences(comparisons, [captured(comparisons)])
    )
    text = render(comparisons, [*chains, captured(comparisons)])
    assert "whether captured is right does" in text and "results/chain/captured" not in text
    comparisons = [reports.compared("layer_000"), reports.compared("layer_001", wrong=("mlp.out", "out"))]
    told = sentences(comparisons, [captured(comparisons, "layer_000")])
    assert "The captured compiled model goes wrong by layer_000 at the latest." in told


def test_a_cause_is_told_with_how_well_it_explains_and_how_well_the_next_does():
    comparisons = [reports.compared("layer_000", wrong=("router.scores", "out"))]
    headline, fits, *_ = sentences(comparisons, diagnoses=[reports.diagnosis("layer_000", ("router.scores", SOFTMAX))])
    assert headline == (
        f"layer_000 is the first stage that goes wrong, at router.scores: it behaves as if the port had {SOFTMAX}."
    )
    assert fits == (
        "With this mistake put into the golden, the port matches it within the noise; the next best of 20 candidates is "
        "27.3 times too far off."
    )


def test_a_stage_without_a_cause_tells_where_its_error_is_and_what_is_nearest():
    comparisons = [reports.compared("layer_000", wrong=("attn.q_rot", "out"))]
    headline, because, nearest, *_ = sentences(
        comparisons, diagnoses=[reports.diagnosis("layer_000", ("attn.q_rot", None))]
    )
    assert headline == "layer_000 is the first stage that goes wrong, at attn.q_rot: only head 1 of 8 is wrong."
    assert re.fullmatch(r"The error is \d\d.\d times what is allowed\.", because)
    assert nearest == (
        "None of the 20 known mistakes that were tried explains it; the nearest, as if the port had rotated q in the "
        "opposite direction, leaves 13.3 times what is allowed."
    )


def test_an_error_that_lies_everywhere_is_told_by_its_size():
    diagnosis = reports.diagnosis("layer_000", ("out", None))
    diagnosis["culprits"][0]["findings"] = []
    headline, nearest, *_ = sentences([reports.compared("layer_000", wrong=("out",))], diagnoses=[diagnosis])
    assert re.fullmatch(r"layer_000 .* goes wrong, at out: the error is \d\d.\d times what is allowed\.", headline)
    assert nearest.startswith("None of the 20 known mistakes")


def test_nan_is_told_also_where_a_cause_is_known():
    comparisons = [reports.compared("layer_000", wrong=("router.scores", "out"))]
    reason = "the port is NaN at [0,0,1] where the golden is finite and the truth is finite (9 such elements)"
    tap = comparisons[0]["taps"]["router.scores"]
    tap["reason"] = reason
    tap["nonfinite"]["port_differs"]["count"] = 9
    headline, _, because, *_ = sentences(
        comparisons, diagnoses=[reports.diagnosis("layer_000", ("router.scores", SOFTMAX))]
    )
    assert f"as if the port had {SOFTMAX}" in headline
    assert because == f"That holds where it is not NaN or Inf. T{reason[1:]}."
    headline, *_ = sentences(comparisons, diagnoses=[reports.diagnosis("layer_000", ("router.scores", None))])
    assert headline == f"layer_000 is the first stage that goes wrong, at router.scores: {reason}."


def test_a_fault_that_is_not_near_is_not_told_of():
    diagnosis = reports.diagnosis("layer_000", ("attn.q_rot", None))
    diagnosis["culprits"][0]["nearest"] = None
    comparisons = [reports.compared("layer_000", wrong=("attn.q_rot", "out"))]
    said = sentences(comparisons, diagnoses=[diagnosis])
    assert "None of the 20 known mistakes that were tried explains it or comes near." in said
    diagnosis["culprits"][0] |= {"tried": 0, "findings": ["It has shape [1, 2] where the golden has [2, 1]."]}
    assert not [sentence for sentence in sentences(comparisons, diagnoses=[diagnosis]) if "known mistake" in sentence]


def test_every_mistake_of_another_stage_is_told():
    comparisons = [reports.compared(stage, wrong=("attn.q", "out")) for stage in ("layer_000", "layer_001")]
    twice = ("attn.q", "no bias"), ("attn.k", "no bias"), ("mlp.out", "gate and up swapped")
    diagnoses = [reports.diagnosis("layer_000", ("attn.q", SOFTMAX)), reports.diagnosis("layer_001", *twice)]
    assert (
        "layer_001 fails at attn.q and attn.k, as if the port had no bias; and at mlp.out, as if the port had gate and up "
        "swapped." in sentences(comparisons, diagnoses=diagnoses)
    )


def test_a_cause_that_leaves_nothing_explains_exactly():
    diagnosis = reports.diagnosis("layer_000", ("router.scores", SOFTMAX))
    diagnosis["culprits"][0]["cause"]["R_explained"] = 2e-5
    comparisons = [reports.compared("layer_000", wrong=("router.scores", "out"))]
    assert (
        "With this mistake put into the golden, the port matches it exactly; the next best of 20 candidates is"
        in sentences(comparisons, diagnoses=[diagnosis])[1]
    )


def test_what_else_is_wrong_is_told_once_for_all_stages_that_are_wrong_alike():
    stages = ["layer_000", "layer_001", "layer_002"]
    comparisons = [reports.compared(stage, wrong=("attn.q", "out")) for stage in stages]
    twice = ("attn.q", "no bias"), ("attn.q_rot", "no bias"), ("mlp.out", "gate and up swapped"), ("out", None)
    diagnoses = [reports.diagnosis(stage, *twice) for stage in stages[:2]]
    diagnoses.append(reports.diagnosis("layer_002", ("attn.q", SOFTMAX)))
    assert sentences(comparisons, diagnoses=diagnoses)[2:-1] == [
        "attn.q_rot is wrong in the same way.",
        "In this stage mlp.out is wrong too, as if the port had gate and up swapped.",
        "In this stage out is wrong by itself too.",
        "layer_001 fails in the same way.",
        f"layer_002 fails at attn.q, as if the port had {SOFTMAX}.",
    ]


def test_stages_behind_the_culprit_that_are_right_only_pass_the_error_on():
    comparisons = [reports.compared("layer_000", wrong=("out",)), reports.compared("norm"), reports.compared("lm_head")]
    assert "norm and lm_head are right and only pass the error on." in sentences(
        comparisons, [reports.chain(comparisons)]
    )
    assert not any("pass the error on" in sentence for sentence in sentences(comparisons))


def test_the_page_shows_each_culprit_and_what_all_causes_together_explain():
    comparisons = [
        reports.compared("layer_000", wrong=("router.scores", "out")),
        reports.compared("layer_001", wrong=("out",)),
    ]
    diagnoses = [
        reports.diagnosis("layer_000", ("router.scores", SOFTMAX), ("out", None)),
        reports.diagnosis("layer_001", reason="the port ran out of memory"),
    ]
    text = words(render(comparisons, diagnoses=diagnoses))
    wrong = "Wrong by itself, 26.7 times what is allowed with the golden&#39;s taps before it."
    assert (
        f"router.scores : {wrong} As if the port had {SOFTMAX} (router_softmax): with this mistake put into the golden"
        in text
    )
    assert "out : Also wrong, although the mistakes found explain the output" in text
    assert "With this mistake put in, the golden gives the port&#39;s output." in text
    assert "Not diagnosed: the port ran out of memory." in text
    diagnoses[0]["culprits"][0]["excess"] = 0.64  # of what is not NaN
    text = words(render(comparisons, diagnoses=diagnoses))
    assert f"router.scores : Wrong by itself. As if the port had {SOFTMAX}" in text


# What was not looked at


def test_layers_that_were_left_out_are_told_if_there_are_any():
    everything, _ = reports.good()
    assert "Layers other than" not in words(render(everything, layers="0-1"))
    gap = [one for one in everything if one["stage"] != "layer_001"] + [reports.compared("layer_002")]
    for some in (gap, everything[1:2]):
        assert "Layers other than 0,2 were not compared" in words(render(some, layers="0,2"))


def test_what_was_not_compared_is_listed_with_its_reason():
    text = words(render(*reports.bad(), layers="0-1"))
    for sentence in (
        "mlp.gate of layer_000 was not compared: the port does not hand over this tap.",
        "layer_001 was not compared: ValueError at port.py:7: no weights.",
        "Chain all ends at layer_001: the port ran out of memory.",
        "all (5 stages); their R and gain do not affect the verdict",
        "Positions from 6 on: no prompt is longer.",
    ):
        assert sentence in text


def test_modules_without_a_tap_are_told():
    stages = [reports.compared(f"layer_00{layer}") for layer in range(2)]
    for stage in stages:
        stage["golden"] = (stage.get("golden") or {}) | {"without_tap": "feed_forward.experts"}
    (told,) = [one for one in not_looked_at(stages, []) if one.startswith("No tap shows")]
    assert told.startswith("No tap shows feed_forward.experts at work (layer_000 to layer_001)")


def test_logits_of_the_last_tokens_alone_are_told():
    head = reports.compared("lm_head")
    head["taps"]["out"]["layout"] = LAST_TOKENS
    assert any("logits of each prompt's last token and no others" in one for one in not_looked_at([head], []))
    assert not any("layout" in one for one in not_looked_at([head], []))


def test_experts_that_no_token_went_to_are_told():
    stages = [reports.compared(f"layer_00{layer}") for layer in range(3)]
    for stage, ratios in zip(stages, ([1.0, None, 0.9, None], [1.0, None, 1.0, 1.0], [1.0] * 4), strict=True):
        stage["taps"]["mlp.out"]["expert_R"] = ratios
    assert "In layer_000 to layer_001, 1 to 2 of the 4 experts received no token that was compared." in words(
        render(stages)
    )
    assert "experts received no token" not in words(render(stages[2:]))


def test_ranks_are_told_and_what_they_were_not_run_on():
    comparison, ranks = reports.compared("layer_000"), {"parallel": {"tp": 4}}
    comparison["port"]["device"] = "cpu"
    text = words(render([comparison], **ranks))
    assert "bfloat16 on 4 ranks (tp 4, by fork) on cpu" in text
    assert "ranks ran on the CPU, in torch alone: no device and none of its collectives were checked" in text
    assert "ranks" not in words(render([comparison]))
    comparison["port"]["device"] = "NEURON"
    assert "in torch alone" not in words(render([comparison], **ranks))


def test_a_tap_that_only_the_port_has_is_listed():
    comparison = reports.compared("layer_000")
    comparison["statistics"]["port"]["mlp.up"] = comparison["statistics"]["port"]["out"]
    text = words(render([comparison]))
    assert "mlp.up of layer_000 was not compared: the golden has no such tap." in text
    assert "No chain was run" in text


# The page


def test_a_reason_cannot_inject_markup():
    comparisons = [reports.stopped("layer_000", "<script>alert(1)</script> & more"), reports.compared("layer_001")]
    html = render(comparisons)
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; more") >= 2


def test_the_page_says_what_to_do_next(tmp_path):
    (tmp_path / "port.py").write_text("class Moe:\n    def route(self, x):\n        return tap('router.scores', x)\n")
    comparisons = [reports.compared("layer_000", wrong=("router.scores", "out"))]
    place = {"file": str(tmp_path / "port.py"), "function": "Moe.route"}
    comparisons[0]["port"]["places"] = {"router.scores": place}
    html = render(comparisons, diagnoses=[reports.diagnosis("layer_000", ("router.scores", SOFTMAX))])
    text = words(html)
    assert f"{tmp_path / 'port.py'}:3 in Moe.route" in text and "&gt;    3          return tap(" in html
    assert "layerproof run results/compare/layer_000.json" in text
    assert 'href="logs/port/layer_000.log"' in html
    assert "What it is." in text and "What to check." in text, "what docs/causes.md says of the cause"


def test_a_page_to_share_has_no_source_no_log_and_no_folders(tmp_path):
    (tmp_path / "port.py").write_text("class Moe:\n    def route(self, x):\n        return tap('router.scores', x)\n")
    comparisons = [
        reports.compared("layer_000", wrong=("router.scores", "out")),
        reports.stopped("layer_001", f"{tmp_path}/deep/port.py: no weights") | {"golden": {}},
    ]
    place = {"file": str(tmp_path / "port.py"), "function": "Moe.route"}
    comparisons[0]["port"]["places"] = {"router.scores": place}
    log = tmp_path / "logs/port/layer_001.log"
    log.parent.mkdir(parents=True)
    log.write_text("a secret prompt\n")
    settings = {"model": {"checkpoint": f"{tmp_path}/model"}, "inputs": {"prompts": f"{tmp_path}/prompts.txt"}}
    settings |= {"port": {"module": f"{tmp_path}/port.py"}}
    whole = render(comparisons, results=tmp_path, **settings)
    assert str(tmp_path) in whole and "return tap(" in whole and "a secret prompt" in whole
    public = render(comparisons, results=tmp_path, **settings, report={"share": True})
    assert str(tmp_path) not in public and "return tap(" not in public and "a secret prompt" not in public
    assert "port.py: no weights" in public and "router.scores" in public


def test_an_error_shows_the_traceback_of_its_log(tmp_path):
    log = tmp_path / "logs/port/layer_000.log"
    log.parent.mkdir(parents=True)
    log.write_text("start\n" * 99 + "Traceback (most recent call last):\n  File <x>\nValueError: no weights\n")
    stopped = reports.stopped("layer_000", "ValueError at port.py:7: no weights") | {"golden": {}}
    text = render([stopped], results=tmp_path)
    assert "Traceback (most recent call last):\n  File &lt;x&gt;\nValueError: no weights" in text
    assert "start\n" not in text


def test_stages_that_fail_alike_are_shown_once():
    stages = [f"layer_{layer:03d}" for layer in range(62)]
    comparisons = [reports.compared(stage, wrong=("router.scores", "out")) for stage in stages]
    diagnoses = [reports.diagnosis(stage, ("router.scores", SOFTMAX), ("out", None)) for stage in stages]
    html = render(comparisons, diagnoses=diagnoses)
    assert html.count('<article class="finding') == 1 and "62 stages fail alike" in html
    assert len(html) < 3_000_000


def test_every_stage_says_how_to_run_it_again():
    html = render(*reports.bad())
    assert "layerproof run results/compare/layer_001.json -- --forcerun results/port/layer_001.h5" in html
    assert "layerproof run results/compare/chain/all.json -- --forcerun results/chain/all/layer_001.h5" in html


def test_the_page_states_compilations_logits_thresholds_and_where_it_was_made():
    text = words(render(*reports.bad()))
    for part in (
        "4 graphs compiled for 4 kinds of stage",
        "2 prompts of 4 to 6 tokens, 10 in all, from prompts.txt",
        "1 of 2 (prompt 1: 4 for 5)",
        "which do not affect the verdict",
        "checkpoint: models/small",
        "Processor",
        "Commit",
    ):
        assert part in text


def test_the_page_fetches_nothing(tmp_path):
    comparisons, chains = reports.good()
    plots.plot_depth(comparisons, chains, tmp_path / "depth.svg")
    html = render(comparisons, chains, plots={"depth": tmp_path / "depth.svg"})
    assert "data:image/svg+xml;base64," in html
    assert not re.search(r"""(src|href|action|url)\s*[=(]\s*["']?(https?:)?//""", html)


def test_taps_without_metrics_are_shown_with_their_reason(tmp_path):
    comparison = reports.compared("layer_000")
    ones, wide = (Tensor(np.ones((2, 6, size), np.float32), "float32") for size in (16, 8))
    broken = Tensor(np.where(np.arange(16) == 3, np.nan, ones.data).astype(np.float32), "float32")
    everywhere = np.ones((2, 6), bool)
    comparison["taps"]["mlp.out"] = judge(broken, ones, ones, everywhere, reports.LIMIT)
    comparison["taps"]["out"] = judge(wide, ones, ones, everywhere, reports.LIMIT)
    comparison |= {"status": "fail", "reason": "mlp.out"}
    plots.plot_stage(comparison, tmp_path / "layer_000.svg")
    plots.plot_map([comparison], tmp_path / "map.svg")
    plots.plot_depth([comparison], [], tmp_path / "depth.svg")
    text = words(render([comparison], (), {path.stem: path for path in tmp_path.iterdir()}))
    assert "the port has shape [2,6,8] where the golden has [2,6,16]" in text
    assert "port: 12 NaN, 0 Inf, first [0,0,3]" in text


def test_flipped_experts_are_told_with_their_margins():
    comparison = reports.compared("layer_000")
    comparison["routing"] = {
        "tokens": 10,
        "flips": 2,
        "excused": 1,
        "golden_flips": 0,
        "left_out": 1,
        "noise_margin": 0.00816,
        "largest_margin": 0.2811,
    }
    text = words(render([comparison]))
    assert "chooses other experts than the truth for 2 of 10 tokens" in text
    assert "flips is a near-tie and excused: the noise explains margins up to 0.00816, the largest is 0.281." in text
    assert "Taps after the router leave out 1 token whose experts were nearly tied (layer_000)." in text


def test_an_unknown_choice_of_the_port_is_told():
    comparison = reports.compared("layer_000")
    port = dict.fromkeys(("flips", "excused", "noise_margin", "largest_margin"))
    comparison["routing"] = {"tokens": 10, "golden_flips": 1, "left_out": 1, **port}
    text = words(render([comparison]))
    assert "choice of experts is unknown" in text and "leave out 1 token" in text


def test_tokens_that_any_other_choice_leaves_out_are_told():
    comparison = reports.compared("layer_000")
    comparison["choices"] = {"self_attn.indexer.choice": {"left_out": 12}, "self_attn.other.choice": {"left_out": 0}}
    text = words(render([comparison]))
    assert "Taps after self_attn.indexer.choice leave out 12 tokens whose places were nearly tied (layer_000)." in text
    assert "self_attn.other" not in text


def test_tensors_that_no_stage_loads_are_told():
    comparisons, chains = reports.good()
    assert "by no stage" not in words(render(comparisons, chains))
    text = words(render(comparisons, chains, unused=["model.mtp.weight"]))
    assert "No stage loads 1 tensor of the checkpoint: model.mtp.weight." in text
    text = words(render(comparisons, chains, unused=[f"mtp.{index}" for index in range(7)]))
    assert "No stage loads 7 tensors of the checkpoint: mtp.0, mtp.1, mtp.2, mtp.3, mtp.4 and 2 more" in text


def test_equal_runs_make_equal_pages():
    assert render(*reports.bad()) == render(*copy.deepcopy(reports.bad()))


# Words and numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (12, "12"),
        (388.7268, "389"),
        (1.0, "1.00"),
        (0.00464, "0.00464"),
        (1234.5, "1234"),
        (1e9, "1.00e9"),
        (-2.3461e-7, "-2.35e-7"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_a_share_is_100_percent_only_if_it_is_all():
    assert [share(value) for value in (1.0, 0.99999, 0.9459, None)] == ["100 %", "99.9 %", "94.5 %", "–"]


def test_ranges_put_layers_together():
    names = ["embed", "layer_000", "layer_001", "layer_002", "layer_007", "norm"]
    assert stages.ranges(names) == "embed, layer_000 to layer_002, layer_007, norm"


# Weights and memory


def test_weights_are_told_once_for_stages_that_are_alike():
    comparisons, chains = reports.good()
    page = words(render(comparisons, chains))
    weights = "7.34 GB BF16, 3.15 MB F32 7.34 GB bfloat16 7.34 GB bfloat16, 2.05 kB float32"
    assert page.count(f"{weights} 7.9 GB 7.6 GB 40 MB") == 1
    assert "No problem was found" in page
    assert "8 x A100 80 GB golden fits does not fit 9" in page


def test_stages_that_are_alike_share_a_row_whatever_their_files_take():
    books = reports.audit(reports.good()[0])
    books["stages"]["layer_001"]["files"] = 41_000_000
    (row,) = report_weights.section(books, [])["rows"]
    assert row["files"] == "41 MB"


def test_of_a_stage_whose_weights_cannot_be_read_the_table_says_nothing():
    books = reports.audit(reports.good()[0])
    nothing = {"disk": {}, "golden": None, "port": None, "predicted": None}
    books["stages"]["layer_001"] |= nothing
    rows = {row["stages"]: row for row in report_weights.section(books, [])["rows"]}
    assert set(rows["layer_001"].values()) == {"layer_001", "–", "40 MB"}


def test_the_audit_is_told_by_hand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["audit"]) == 2
    assert "Run layerproof run results/audit.json" in capsys.readouterr().err
    for found, code in ((), 0), ([("upcast", "w: float32", False)], 1):
        write_json(tmp_path / "results/audit.json", reports.audit(reports.good()[0], *found))
        assert cli.run(["audit"]) == code
        told = capsys.readouterr().out
        assert "7.34 GB bfloat16 in the golden" in told and (
            "finding: layer_000 to layer_001: w: float32" in told
        ) == bool(code)
        assert "8 x A100 80 GB, golden: a stage fits; the full model does not fit (it needs 9 devices)" in told


def test_what_was_dropped_of_stages_that_pass_is_told():
    comparisons, chains = reports.good()
    assert "Dropped from stages" not in render(comparisons, chains)
    files = {"a.h5": {"bytes": 1_000_000, "whole_bytes": 5_000_000}, "b.h5": {"bytes": 0, "whole_bytes": 2_000_000}}
    page = words(render(comparisons, chains, pruned=[files, {}]))
    assert "Dropped from stages that pass 6 MB of 7 MB" in page
    assert "Kept of these with compare.taps: auto, if all stages pass 250 MB" in page


def test_a_finding_is_told_once_with_all_stages_that_have_it():
    comparisons = [reports.compared(f"layer_00{layer}") for layer in range(3)]
    findings = [("never read", "b: on disk, but never read by convert().", False), ("origin", "c: unknown.", True)]
    page = words(render(comparisons, findings=findings))
    assert "layer_000 to layer_002: b: on disk, but never read by convert()." in page
    assert "No problem was found" not in page
    assert page.index("Notes: fine in many ports") < page.index("layer_000 to layer_002: c: unknown.")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (7_341_573_376, "7.34 GB"), (2.5e15, "2.5e+03 TB")]
)
def test_sizes(count, text):
    assert size(count) == text


# The plots


def drawn_map(directory, comparisons):
    plots.plot_map(comparisons, directory / "map.svg")
    return directory / "map.svg"


def texts(svg):
    """The text in an SVG; fails if it is not XML."""
    return " ".join(" ".join(node.itertext()) for node in ElementTree.parse(svg).iter() if node.tag.endswith("}text"))


def test_a_stage_plot_shows_both_sides_and_every_prompt(tmp_path):
    plots.plot_stage(reports.compared("layer_000"), tmp_path / "plot.svg")
    shown = texts(tmp_path / "plot.svg")
    for part in ("port − truth", "golden − truth", "prompt 0", "prompt 1", "R by token"):
        assert part in shown


@pytest.mark.parametrize(
    "comparison",
    [
        reports.stopped("layer_000", "it fell over"),
        reports.stopped("layer_000", "it fell over", "missing"),
        reports.stopped("layer_000", "it fell over") | {"taps": {}},
    ],
    ids=["error", "missing", "no taps"],
)
def test_a_stage_without_numbers_becomes_a_plot_that_says_so(tmp_path, comparison):
    plots.plot_stage(comparison, tmp_path / "plot.svg")
    assert texts(tmp_path / "plot.svg") == "layer_000: no errors to draw. it fell over"
    sign = {"error": "E", "missing": "M"}[comparison["status"]]
    assert sign in texts(drawn_map(tmp_path, [comparison])).split()


def test_a_stage_whose_tensors_are_equal_says_so(tmp_path):
    comparison = reports.compared("embed")
    comparison["taps"]["out"] = reports.tap("out", error=0.0)
    exact = comparison["taps"]["out"]
    exact["histogram"]["golden"] = exact["histogram"]["port"]
    exact["abs"]["max"] = 0.0
    plots.plot_stage(comparison, tmp_path / "plot.svg")
    assert "port, golden and truth are equal" in texts(tmp_path / "plot.svg")


def test_a_long_prompt_is_drawn_by_its_worst_tokens(tmp_path):
    comparison = reports.compared("layer_000")
    comparison["taps"]["out"]["token_R"] = [[1.0] * 4095 + [77.0] for _ in range(20)]
    plots.plot_stage(comparison, tmp_path / "plot.svg")
    assert "8 worst of 20 prompts, worst of each 16 positions" in texts(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size < 200_000


def test_the_map_does_not_rely_on_colour(tmp_path):
    comparisons, _ = reports.bad()
    shown = texts(drawn_map(tmp_path, comparisons)).split()
    failed = sum(tap["status"] == "fail" for comparison in comparisons for tap in comparison["taps"].values())
    assert shown.count("×") == failed + 1  # and one in the legend
    assert shown.count("E") == len(reports.TAPS) + 1
    assert shown.count("M") == 1 + 1


def test_the_depth_plot_works_without_chains_and_without_any_number(tmp_path):
    comparisons, chains = reports.bad()
    for name, given in (("with", chains), ("without", [])):
        plots.plot_depth(comparisons, given, tmp_path / f"{name}.svg")
    assert "Gain" in texts(tmp_path / "with.svg") and "Gain" not in texts(tmp_path / "without.svg")
    plots.plot_depth([reports.stopped("layer_000", "it fell over")], [], tmp_path / "none.svg")
    assert "hatched" in texts(tmp_path / "none.svg")


def test_equal_input_makes_equal_bytes(tmp_path):
    comparisons, chains = reports.bad()
    for attempt in ("first", "second"):
        plots.plot_stage(comparisons[1], tmp_path / attempt / "stage.svg")
        plots.plot_map(comparisons, tmp_path / attempt / "map.svg")
        plots.plot_depth(comparisons, chains, tmp_path / attempt / "depth.svg")
    for name in ("stage.svg", "map.svg", "depth.svg"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_model_of_62_layers_stays_readable(tmp_path):
    layers = [reports.compared(f"layer_{layer:03d}", wrong=("out",) if layer > 40 else ()) for layer in range(62)]
    comparisons = [reports.compared("embed"), *layers, reports.compared("norm"), reports.compared("lm_head")]
    chains = [reports.chain(comparisons)]
    heat_map = drawn_map(tmp_path, comparisons)
    plots.plot_depth(comparisons, chains, tmp_path / "depth.svg")
    assert heat_map.stat().st_size < 1_000_000
    labels = texts(heat_map).split()
    assert {"embed", "0", "5", "60", "norm", "lm_head"} <= set(labels) and "layer_001" not in labels
    html = render(comparisons, chains, {"map": heat_map, "depth": tmp_path / "depth.svg"})
    assert "65: embed, layer_000 to layer_061, norm, lm_head" in html
    assert len(html) < 5_000_000


def test_the_config_that_a_page_shows_can_be_run_again():
    """Texts that YAML would take for something else are in quotes."""
    options = {"flags": ["a: b", "null", {"level": "1"}], "on": "yes"}
    page = render([reports.compared("embed")], port=reports.CONFIG["port"] | {"options": options})
    shown = next(part for part in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL) if part.startswith("model:"))
    assert yaml.safe_load(html.unescape(shown))["port"]["options"] == options


def test_the_words_of_the_page_are_those_of_the_glossary():
    html = render(*reports.good())
    entries = re.findall(r"^\*\*(.+?)\.\*\*", GLOSSARY.read_text(), re.MULTILINE)
    assert {"R", "Band", "Culprit", "Tap"} <= set(entries)
    for word in entries:
        assert f"<dt>{word}</dt>" in html
    assert 'href="#words"' in html and "](" not in html.partition("<script")[0]
