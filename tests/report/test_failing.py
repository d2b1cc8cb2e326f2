"""What does not pass, with stages that fail alike as one entry."""

import reports


def failures(*comparisons, chains=(), diagnoses=()):
    return reports.collect(list(comparisons), list(chains), list(diagnoses))["failures"]


def stages(found):
    return [(one["status"], one["tap"], one["stages"]) for one in found]


def test_a_pass_has_none():
    assert failures(*reports.good()[0]) == []


def test_stages_are_alike_by_tap_and_cause():
    names = [f"layer_{layer:03d}" for layer in range(4)]
    comparisons = [reports.compared(name, wrong=("attn.q", "out")) for name in names]
    causes = [reports.cause("no bias", name) for name in ("bias_dropped", "bias_dropped", "weight_transposed")]
    diagnoses = [reports.diagnosis(name, ("attn.q", "no bias")) for name in names[:3]]
    for diagnosis, cause in zip(diagnoses, causes, strict=True):
        diagnosis["culprits"][0]["cause"] = cause
    diagnoses.append(reports.diagnosis(names[3], ("attn.q", None)))
    found = failures(*comparisons, diagnoses=diagnoses)
    assert stages(found) == [
        ("fail", "attn.q", names[:2]),
        ("fail", "attn.q", names[2:3]),
        ("fail", "attn.q", names[3:]),
    ]
    assert [one["cause"] for one in found] == ["bias_dropped", "weight_transposed", None]


def test_the_number_of_a_group_is_that_of_its_worst_stage():
    near, far = (reports.compared(stage, wrong=("out",)) for stage in ("layer_000", "layer_001"))
    far["taps"]["out"]["excess"] = 900.0
    (one,) = failures(near, far)
    assert one["excess"] == 900.0 and one["stages"] == ["layer_000", "layer_001"]


def test_what_is_said_of_the_first_of_a_group_is_not_said_of_the_others():
    comparisons = [reports.compared(f"layer_00{layer}", wrong=["attn.q"]) for layer in range(3)]
    comparisons[1]["taps"]["attn.q"]["reason"] = "the port is NaN at [0,0,1] where the golden is finite"
    alike, not_finite = failures(*comparisons)
    assert alike["stages"] == ["layer_000", "layer_002"] and alike["text"].startswith("the error is")
    comparisons[2]["taps"]["attn.q"]["reason"] = "only the first position is right"
    alike, not_finite = failures(*comparisons)
    assert alike["stages"] == ["layer_000", "layer_002"] and alike["text"].startswith("In layer_000: the error is")
    assert not_finite["stages"] == ["layer_001"] and not_finite["text"].startswith("the port is NaN")


def test_errors_are_alike_by_their_reason_without_numbers():
    comparisons = [
        reports.stopped("layer_000", "layer_000: RuntimeError at port.py:9: size 3"),
        reports.stopped("layer_001", "layer_001: RuntimeError at port.py:9: size 5"),
        reports.stopped("layer_002", "no input, because layer_001 failed", "missing"),
        reports.stopped("norm", "no input, because layer_002 failed", "missing"),
        reports.stopped("lm_head", "out of memory"),
    ]
    assert stages(failures(*comparisons)) == [
        ("error", None, ["layer_000", "layer_001"]),
        ("missing", None, ["layer_002", "norm"]),
        ("error", None, ["lm_head"]),
    ]


def test_a_culprit_without_a_cause_says_what_to_hand_over():
    comparison = reports.compared("layer_000", wrong=("attn.q_rot", "out"), missing=("attn.q_norm",))
    comparison["port"]["backend"] = "xla"
    (one,) = failures(comparison, diagnoses=[reports.diagnosis("layer_000", ("attn.q_rot", None))])
    assert one["help"] == [
        "The port does not hand over attn.q_norm, where the mistake may lie as well. To look there, add lines such "
        'as x = tap("attn.q_norm", x) to forward (from layerproof.taps import tap).'
    ]
    comparison["port"]["backend"] = "transformers"
    (one,) = failures(comparison, diagnoses=[reports.diagnosis("layer_000", ("attn.q_rot", None))])
    assert one["help"] == [], "there is no file of the user's to add it to"


def test_a_captured_chain_is_an_entry_of_its_own():
    comparisons, chains = reports.good()
    wrong = chains[0] | {"chain": "captured", "status": "fail", "first_wrong": "layer_001"}
    (one,) = failures(*comparisons, chains=[wrong])
    assert (one["status"], one["stages"], one["tap"]) == ("fail", ["layer_001"], None)
