"""Comparisons, chains and verdicts as a run leaves them, made of small random tensors."""

from pathlib import Path

import numpy as np

from configs import config_with
from layerproof.diagnose.result import undiagnosed
from layerproof.measure.metrics import judge
from layerproof.paths import CAUSES, GLOSSARY
from layerproof.report import page, verdicts
from layerproof.tensors.tensor import Tensor

LIMIT = 1.5
TAPS = ("attn.q", "attn.q_rot", "router.scores", "mlp.out", "out")
CONFIG = {
    "model": {"checkpoint": "models/small"},
    "inputs": {"prompts": "prompts.txt"},
    "chains": ["all"],
    "port": {"module": "ports/small.py"},
    "compare": {"limit": LIMIT},
}


def config(**sections):
    """The settings of the run, with other values for some sections."""
    return config_with(**CONFIG | sections)


def tap(name, error=1.0):
    """A judged tap [2, 6, 16] whose last prompt has 4 tokens; `error` is that of the port in units of the golden's."""
    random = np.random.default_rng(len(name))
    truth = random.standard_normal((2, 6, 16)).astype(np.float32)
    noise = 2**-7 * np.abs(truth) * random.standard_normal(truth.shape)
    port, golden = (Tensor((truth + part).astype(np.float32), "float32") for part in (error * noise, noise[::-1, ::-1]))
    valid = np.ones((2, 6), bool)
    valid[1, 4:] = False
    return judge(port, golden, Tensor(truth, "float32"), valid, LIMIT)


def compared(stage, wrong=(), missing=(), names=None):
    """A stage that ran, of which the taps in `wrong` fail and those in `missing` are not handed over."""
    names = names or (TAPS if stage.startswith("layer") else ("out",))
    taps = {name: tap(name, 40.0 if name in wrong else 0.9) for name in names}
    taps |= {name: {"status": "missing", "reason": "the port does not hand over this tap"} for name in missing}
    failed = [name for name in taps if taps[name]["status"] == "fail"]
    statistics = {name: {"mean": 0.0, "std": 1.0, "min": -3.0, "max": 3.0, "nan": 0.0, "inf": 0.0} for name in taps}
    return {
        "schema_version": 1,
        "stage": stage,
        "status": "fail" if failed else taps["out"]["status"],
        "reason": f"{failed[0]}: {taps[failed[0]]['reason']}" if failed else None,
        "taps": taps,
        "routing": None,
        "choices": {},
        "logits": logits() if stage == "lm_head" else None,
        "statistics": {"golden": statistics, "port": {name: statistics[name] for name in names}},
        "golden": {"stage": stage, "device": "CPU"},
        "port": {"stage": stage, "device": "XLA:CPU", "kind": stage[:5], "compilations": 1, "taps_change_output": 0.0},
    }


def stopped(stage, reason, status="error"):
    """A stage whose port could not run."""
    taps = {name: {"status": status, "reason": reason} for name in TAPS}
    empty = {"routing": None, "choices": {}}
    return {"schema_version": 1, "stage": stage, "status": status, "reason": reason, "taps": taps, **empty}


def logits():
    return {
        "kl": {"mean": 1e-5, "max": 2e-4},
        "top_k": {"k": 5, "shared": 0.98},
        "argmax": 1.0,
        "greedy": {"golden": [3, 5], "port": [3, 4], "equal": False},
    }


def chain(comparisons, broken=None):
    """The chain of all stages; it ends at `broken`."""
    stages, error = {}, None
    for depth, comparison in enumerate(comparisons):
        if comparison["stage"] == broken:
            error = "the port ran out of memory"
        entry = {"status": "pass", "reason": None, "local_error": 0.004, "gain": None, "role": None}
        if error:
            entry |= {"status": "error" if comparison["stage"] == broken else "missing", "reason": error}
        else:
            entry |= {"R": 1.0 + depth, "propagated_error": 0.004 * 1.1**depth, "gain": 1.1, "role": "transmits"}
        stages[comparison["stage"]] = entry
    status = "error" if error else "pass"
    return {
        "schema_version": 1,
        "chain": "all",
        "status": status,
        "first_wrong": None,
        "stages": stages,
        "logits": None if error else logits(),
    }


def collect(comparisons, chains=(), diagnoses=()):
    return verdicts.collect(comparisons, chains, diagnoses)


def diagnosis(stage, *culprits, reason=None):
    """A diagnosis of culprits (tap, text of the cause or None)."""
    return undiagnosed(stage, reason) | {
        "culprits": [
            {
                "tap": tap,
                "forced": True,
                "R": 40.0,
                "excess": 26.7,
                "at": None,
                "cause": text and cause(text),
                "nearest": None
                if text
                else {
                    "name": "rope_sign",
                    "text": "rotated q in the opposite direction",
                    "R_explained": 19.9,
                    "excess": 13.3,
                },
                "tried": 20,
                "findings": [] if text else ["Only head 1 of 8 is wrong."],
            }
            for tap, text in culprits
        ],
        "together": {"causes": ["router_softmax"], "R_explained": 0.97, "excess": 0.65, "explains": True}
        if culprits
        else None,
    }


def cause(text, name="router_softmax"):
    runner_up = {"name": "router_no_activation", "text": "no sigmoid", "R_explained": 41.0, "excess": 27.3}
    return {"name": name, "text": text, "R_explained": 1.02, "excess": 0.68, "runner_up": runner_up}


def good():
    """Comparisons and chains of a port that passes."""
    comparisons = [compared(stage) for stage in ("embed", "layer_000", "layer_001", "norm", "lm_head")]
    return comparisons, [chain(comparisons)]


def bad():
    """Of a port whose first layer is wrong and whose second cannot run."""
    comparisons = [
        compared("embed"),
        compared("layer_000", wrong=("router.scores", "out"), missing=("mlp.gate",)),
        stopped("layer_001", "ValueError at port.py:7: no weights"),
        compared("norm"),
        compared("lm_head"),
    ]
    return comparisons, [chain(comparisons, broken="layer_001")]


def audit(comparisons, *findings):
    """The books of these stages, all alike; a finding (kind, text, whether a note) is every layer's."""
    found = [{"kind": kind, "note": note, "text": text} for kind, text, note in findings]
    entry = {"disk": {"BF16": 7_340_000_000, "F32": 3_146_752}, "golden": {"bfloat16": 7_341_573_376}}
    entry |= {"predicted": {"golden": 7_900_000_000, "port": 7_600_000_000}, "files": 40_000_000}
    port = {"bfloat16": 7_341_572_352, "float32": 2_048}
    stages = {
        one["stage"]: entry | {"port": port, "findings": found if one["stage"].startswith("layer") else []}
        for one in comparisons
    }
    machine = {"machine": "8 x A100 80 GB", "side": "golden", "stage": True, "whole": False, "devices": 9}
    totals = {
        "golden": 7_900_000_000,
        "port": 7_600_000_000,
        "whole": 730_000_000_000,
        "files": 2_500_000_000,
        "kept": 250_000_000,
    }
    return {"schema_version": 1, "warnings": [], "stages": stages, "run": {**totals, "machines": [machine]}}


def preflights():
    found = {
        "name": "device",
        "status": "warn",
        "text": "a GPU that torch does not see",
        "remedy": "Install a torch for it.",
    }
    host = {"checks": [found], "hardware": {"Processor": "Graviton", "Cores": "64"}}
    software = {
        "golden": {"Python": "3.11.2", "transformers": "5.23.0"},
        "port": {"Python": "3.12.11", "neuronx-cc": "2.24"},
    }
    return [{"schema_version": 1, "side": side, "software": software[side], **host} for side in ("golden", "port")]


def page_inputs(
    comparisons, chains=(), plots=None, unused=(), diagnoses=(), findings=(), pruned=(), results=None, **config
):
    """What a report of this run is made of."""
    return page.Inputs(
        verdicts=collect(comparisons, chains, diagnoses),
        comparisons=comparisons,
        chains=chains,
        diagnoses=diagnoses,
        plots=plots or {},
        unused=unused,
        audit=audit(comparisons, *findings),
        pruned=[{"files": files} for files in pruned],
        preflights=preflights(),
        config=config_with(**CONFIG | config),
        software={"Python": "3.12.11"},
        glossary=GLOSSARY,
        causes=CAUSES,
        results=results or Path("results"),
    )
