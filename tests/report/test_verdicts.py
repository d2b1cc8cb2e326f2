"""Every comparison to one verdict, and the form that programs rely on."""

import itertools
import json

import jsonschema
import pytest

import reports
from layerproof.report.verdicts import collect

NUMBER = {"type": ["number", "null"]}
TEXT = {"type": ["string", "null"]}
STATUS = {"enum": ["pass", "fail", "error", "missing"]}


def exactly(properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def optional(schema):
    return {"anyOf": [{"type": "null"}, schema]}


def by_name(schema):
    return {"type": "object", "additionalProperties": schema}


CHAINED = exactly(
    {"R": NUMBER, "gain": NUMBER, "role": {"enum": ["injects", "amplifies", "transmits", "recovers", None]}}
)
CAUSE = exactly(
    {
        "name": {"type": "string"},
        "text": {"type": "string"},
        "R_explained": NUMBER,
        "excess": NUMBER,
        "runner_up": optional(exactly({"name": {"type": "string"}, "R_explained": NUMBER, "excess": NUMBER})),
        "estimate": {"type": ["object", "null"]},
    }
)
CULPRIT = {"tap": {"type": "string"}, "cause": TEXT, "rank": {"type": ["integer", "null"]}}
WORST = exactly({"group": {"type": "string"}, "index": {}, "R": {"type": "number"}})
OUTPUT = {"R": NUMBER, "excess": NUMBER}
TAP = exactly({"status": STATUS, "reason": TEXT, **OUTPUT, "worst": optional(WORST), "layout": TEXT})
STAGE = exactly(
    {
        "status": STATUS,
        "reason": TEXT,
        "isolated": exactly({**OUTPUT, "outputs": by_name(exactly(OUTPUT)), "taps": by_name(TAP)}),
        "chained": optional(CHAINED),
        "routing": {"type": ["object", "null"]},
        "culprits": {"type": "array", "items": exactly(CULPRIT)},
        "cause": optional(CAUSE),
    }
)
CHAIN = exactly({"status": STATUS, "first_wrong": TEXT, "logits": {"type": ["object", "null"]}})
TEXTS = {"type": "array", "items": {"type": "string"}}
PLACE = exactly({"file": {"type": "string"}, "function": {"type": "string"}})
FAILURE = exactly(
    {
        "status": STATUS,
        "stages": TEXTS,
        "tap": TEXT,
        "excess": NUMBER,
        "cause": TEXT,
        "text": {"type": "string"},
        "help": TEXTS,
        "place": optional(PLACE),
    }
)
SCHEMA = exactly(
    {
        "schema_version": {"const": 3},
        "overall": {"enum": ["pass", "fail", "error"]},
        "headline": {"type": "string"},
        "details": TEXTS,
        "failures": {"type": "array", "items": FAILURE},
        "first_culprit": optional(exactly({"stage": {"type": "string"}, **CULPRIT})),
        "stages": by_name(STAGE),
        "chains": by_name(CHAIN),
    }
)
"""verdicts.json as the contract has it."""


def tap(status="pass", **more):
    return {"status": status, "reason": None if status == "pass" else "why", "R": 1.0, "excess": None, **more}


def comparison(stage, status="pass", taps=None):
    if taps is None:
        taps = {"out": tap(status)}
    return {
        "stage": stage,
        "status": status,
        "reason": None if status == "pass" else "why",
        "taps": taps,
        "routing": None,
    }


def chain(name="0-1", status="pass", **stages):
    return {"chain": name, "status": status, "first_wrong": None, "stages": stages, "logits": None}


def chained(R=1.4, role="transmits"):
    return {"status": "pass", "R": R, "gain": 1.1, "role": role, "local_error": 0.1, "reason": None}


def checked(comparisons, chains=(), diagnoses=()):
    verdicts = collect(comparisons, list(chains), list(diagnoses))
    jsonschema.validate(json.loads(json.dumps(verdicts, allow_nan=False)), SCHEMA)
    return verdicts


@pytest.mark.parametrize("states", itertools.product(["pass", "fail", "error", "missing"], repeat=3))
def test_overall_and_first_culprit(states):
    verdicts = checked([comparison(f"layer_{index:03d}", state) for index, state in enumerate(states)])
    expected = "error" if {"error", "missing"} & set(states) else "fail" if "fail" in states else "pass"
    assert verdicts["overall"] == expected
    if "fail" in states:
        first = f"layer_{states.index('fail'):03d}"
        assert verdicts["first_culprit"] == {"stage": first, "tap": "out", "cause": None, "rank": None}
    else:
        assert verdicts["first_culprit"] is None
    assert [entry["status"] for entry in verdicts["stages"].values()] == list(states)


def test_no_stage_is_an_error():
    assert checked([])["overall"] == "error"
    assert checked([], [chain()])["overall"] == "error"


@pytest.mark.parametrize(("status", "overall"), [("pass", "pass"), ("missing", "error"), ("error", "error")])
def test_status_of_a_chain_counts(status, overall):
    assert checked([comparison("embed")], [chain(status="pass"), chain("2-3", status)])["overall"] == overall


def test_culprit_is_the_first_failing_tap_of_the_first_failing_stage():
    verdicts = checked(
        [
            comparison("embed"),
            comparison("layer_000", "pass", {"attn.q": tap("missing"), "out": tap()}),
            comparison("layer_001", "fail", {"attn.q": tap("pass"), "attn.out": tap("fail"), "out": tap("fail")}),
            comparison("layer_002", "fail", {"input_norm": tap("fail"), "out": tap("fail")}),
        ]
    )
    assert verdicts["first_culprit"] == {"stage": "layer_001", "tap": "attn.out", "cause": None, "rank": None}


def test_culprit_is_what_the_diagnosis_found_wrong_of_itself():
    taps = {"input_norm": tap(), "attn.q": tap("fail"), "out": tap("fail")}
    failing = [comparison("layer_001", "fail", taps), comparison("layer_002")]
    found = reports.diagnosis("layer_001", ("input_norm", "no weight"), ("out", None))
    verdicts = checked(failing, diagnoses=[found, reports.diagnosis("layer_002")])
    first = {"tap": "input_norm", "cause": "router_softmax", "rank": None}
    assert verdicts["first_culprit"] == {"stage": "layer_001", **first}
    stage = verdicts["stages"]["layer_001"]
    assert stage["culprits"] == [first, {"tap": "out", "cause": None, "rank": None}]
    assert (stage["cause"]["name"], stage["cause"]["runner_up"]["R_explained"]) == ("router_softmax", 41.0)
    assert verdicts["stages"]["layer_002"]["cause"] is None


def test_stage_that_could_not_be_diagnosed_is_blamed_by_its_first_failing_tap():
    failing = [comparison("layer_001", "fail", {"attn.q": tap("pass"), "out": tap("fail")})]
    verdicts = checked(failing, diagnoses=[reports.diagnosis("layer_001", reason="the golden ran out of memory")])
    assert verdicts["first_culprit"] == {"stage": "layer_001", "tap": "out", "cause": None, "rank": None}


def test_stages_keep_their_order():
    order = ["embed", "layer_001", "layer_000", "norm", "lm_head"]
    assert list(checked(list(map(comparison, order)))["stages"]) == order


def test_stage_that_was_not_compared_keeps_its_reason():
    entry = checked([comparison("layer_000", "error", {})])["stages"]["layer_000"]
    assert (entry["status"], entry["reason"]) == ("error", "why")
    nothing = {"R": None, "excess": None}
    assert entry["isolated"] == {**nothing, "outputs": {"out": nothing}, "taps": {}}


def test_values_of_the_output_are_those_of_its_tap():
    taps = {"attn.q": tap(R=9.0, excess=8.0), "out": tap(R=1.25, excess=0.5)}
    isolated = checked([comparison("layer_000", taps=taps)])["stages"]["layer_000"]["isolated"]
    out = {"R": 1.25, "excess": 0.5}
    plain = {"status": "pass", "reason": None, "worst": None, "layout": None}
    assert isolated == {
        **out,
        "outputs": {"out": out},
        "taps": {"attn.q": {**plain, "R": 9.0, "excess": 8.0}, "out": {**plain, **out}},
    }


def test_worst_group_is_the_one_with_the_largest_R():
    groups = {
        "worst_token": {"index": [0, 17], "R": 1.3},
        "worst_block": {"index": 3, "R": 2.5, "channels": [0, 8]},
        "worst_head": {"index": 2, "R": 1.9},
    }
    names = {"worst_token": "token", "worst_block": "channel_block", "worst_head": "head"}
    for key, name in names.items():
        higher = groups | {key: groups[key] | {"R": 9.0}}
        taps = {"out": tap(**higher), "attn.q": tap(worst_token=None, worst_head=None)}
        isolated = checked([comparison("layer_000", taps=taps)])["stages"]["layer_000"]["isolated"]
        assert isolated["taps"]["out"]["worst"] == {"group": name, "index": groups[key]["index"], "R": 9.0}
        assert isolated["taps"]["attn.q"]["worst"] is None
        assert isolated["R"] == 1.0


def test_chained_values_come_from_the_longest_chain():
    chains = [
        chain("0-0", layer_000=chained(R=2.0)),
        chain("all", embed=chained(), layer_000=chained(R=3.0, role="amplifies")),
        chain("1-1", layer_001=chained(R=4.0)),
    ]
    stages = checked([comparison("layer_000"), comparison("layer_002")], chains)["stages"]
    assert stages["layer_000"]["chained"] == {"R": 3.0, "gain": 1.1, "role": "amplifies"}
    assert stages["layer_002"]["chained"] is None


def test_chained_values_of_a_stage_that_only_a_shorter_chain_has():
    chains = [chain("0-1", layer_000=chained(), layer_001=chained()), chain("5-5", layer_005=chained(R=4.0))]
    assert checked([comparison("layer_005")], chains)["stages"]["layer_005"]["chained"]["R"] == 4.0


def test_chained_stage_that_failed_has_no_numbers():
    broken = {"status": "error", "reason": "x", "local_error": None, "gain": None, "role": None}
    entry = checked([comparison("layer_000")], [chain(status="error", layer_000=broken)])["stages"]["layer_000"]
    assert entry["chained"] == {"R": None, "gain": None, "role": None}
