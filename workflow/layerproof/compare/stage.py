"""Compares the two sides of a stage tap by tap, and chained stages with the golden's trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np

from layerproof.compare.bisect import Strayed
from layerproof.compare.ranks import Ranks
from layerproof.errors import StageError, StageMissing
from layerproof.measure.logits import compare_logits
from layerproof.measure.metrics import compare, judge
from layerproof.measure.noise import Noise
from layerproof.measure.noise_file import read_noise
from layerproof.measure.routing import AFTER_ROUTER, Routing, compare_choices, experts_chosen, ruled_out_as
from layerproof.model.stages import LM_HEAD
from layerproof.taps import OUT
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor
from layerproof.threads import mapped

SCHEMA_VERSION = 1
CHANGED_BY = 2.0
"""A stage amplifies if the propagated error grows by more than this factor, and recovers if it shrinks by as much."""
STATISTICS = ("count", "mean", "std", "min", "max", "nan", "inf")


def compare_stage(
    stage: str, golden: Path, noise: Path | None, port: Path, valid: np.ndarray, limit: float
) -> dict[str, Any]:
    """Returns the content of results/compare/STAGE.json; every tap of the golden ends as pass, fail, error or missing.

    Without `noise`, the golden's own error is the only measure of noise.

    The stage is `error` if its port or golden failed or cannot be read, `missing` if there is nothing to compare
    because another stage failed, `fail` if any tap fails, and otherwise the status of its output, normally `pass`.
    """
    result: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "stage": stage, "taps": {}, "routing": None}
    try:
        with hdf5.reading(golden) as golden_file:
            wanted = hdf5.taps(golden_file, "golden")
            truth = hdf5.taps(golden_file, "truth")
            bands = read_noise(noise) if noise else {}
            result["statistics"] = {"golden": _statistics(wanted)}
            result["golden"] = hdf5.attributes(golden_file)
            try:
                with hdf5.reading(port) as port_file:
                    found = hdf5.taps(port_file, "port")
                    result["statistics"]["port"] = _statistics(found)
                    result["port"] = hdf5.attributes(port_file)
                    result["port"]["places"] = hdf5.document_if_there(port_file, hdf5.PLACES) or {}
                    of_ranks = Ranks.of(port_file)
                    result |= compare_taps(stage, found, wanted, truth, bands, valid, limit, of_ranks)
            except StageError as error:
                hdf5.check(golden)  # shows damage to the golden's data, which is not an error of the port's file
                result["taps"] = {name: _failed(error) for name in wanted}
                raise
    except StageError as error:
        return result | _failed(error)
    return result


def _failed(error: StageError) -> dict[str, Any]:
    return {"status": "missing" if isinstance(error, StageMissing) else "error", "reason": str(error)}


def compare_taps(
    stage: str,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    noise: Mapping[str, Noise],
    valid: np.ndarray,
    limit: float,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Compares a stage's tensors, in the order of `wanted`: status, taps, routing and errors.

    `noise` may cover all taps, some or none. Taps are compared on the declared threads.
    """
    routing = _routing(found, wanted, truth, valid, valid & ~noise[OUT].compared if OUT in noise else None)
    experts = experts_chosen(truth) if routing else None

    def of_tap(name: str) -> dict[str, Any]:
        if name not in found:
            return {"status": "missing", "reason": "the port does not hand over this tap"}
        left_out = routing.left_out if routing and name in AFTER_ROUTER else None
        sides = wanted[name], truth[name], valid, limit, left_out, noise.get(name)
        mine = found[name]
        if name == "router.selection" and "router.choice" in found:
            mine = ruled_out_as(mine, wanted[name], truth[name])
        tap = judge(mine, *sides, experts=experts if name in AFTER_ROUTER else None)
        if left_out is not None and valid.any() and left_out[valid].all():
            tap["reason"] = "nothing was compared: experts are nearly tied at every token. Use more tokens."
        if routing and routing.compared and name == "router.choice":
            reason = routing.reason()
            tap |= {"status": "fail" if reason else "pass", "reason": reason}
        if ranks:
            summed = ranks.summed.get(name)
            is_sum_right = summed is not None and judge(summed, *sides)["status"] == "pass"
            if reason := ranks.reason(name, found[name], wanted[name], is_sum_right):
                tap |= {"status": "fail", "reason": reason}
        return tap

    taps = dict(zip(wanted, mapped(of_tap, wanted), strict=True))
    failed = [name for name, tap in taps.items() if tap["status"] == "fail"]
    status = "fail" if failed else taps[OUT]["status"]
    reason = f"{failed[0]}: {taps[failed[0]]['reason']}" if failed else taps[OUT]["reason"]
    return {
        "status": status,
        "reason": reason,
        "taps": taps,
        "routing": routing.summary() if routing else None,
        "local_error": _local_error(taps[OUT], routing, found, wanted, truth, valid),
        "logits": compare_logits(found[OUT], wanted[OUT], valid) if stage == LM_HEAD and OUT in found else None,
    }


def _local_error(
    out: Mapping[str, Any],
    routing: Routing | None,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    valid: np.ndarray,
) -> float | None:
    """Returns the relative L2 between port and golden over all valid tokens, including flipped ones.

    A chain's propagated error includes flipped tokens too. `out` is the comparison of the output without them.
    """
    if routing is None or not routing.left_out.any():
        return out.get("rel_l2")
    if OUT not in found or (found[OUT].shape, found[OUT].dtype_class) != (wanted[OUT].shape, wanted[OUT].dtype_class):
        return None
    return compare(found[OUT], wanted[OUT], truth[OUT], valid)["rel_l2"]


def _routing(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    valid: np.ndarray,
    variant_flips: np.ndarray | None,
) -> Routing | None:
    if "router.choice" not in wanted:
        return None
    return compare_choices(
        found.get("router.choice"),
        wanted["router.choice"],
        truth["router.choice"],
        wanted.get("router.selection"),
        truth.get("router.selection"),
        valid,
        variant_flips,
    )


def _statistics(taps: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Returns the statistics of every tensor, as stored in its file."""
    attributes: dict[str, Any] = {name: cast("h5py.Dataset", tap.data).attrs for name, tap in taps.items()}
    return {name: {key: float(attributes[name][key]) for key in STATISTICS if key in attributes[name]} for name in taps}


def compare_chain(
    chain: str,
    stages: Sequence[str],
    golden: Mapping[str, Path],
    chained: Mapping[str, Path],
    isolated: Mapping[str, Mapping[str, Any]],
    valid: np.ndarray,
    noise: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Returns the content of results/compare/chain/A-B.json, from files and isolated comparisons by stage.

    By stage:
        R: of the chained output, against the truth
        propagated_error: relative L2 of the chained output to the golden's trajectory
        local_error: relative L2 of the isolated run
        gain: ratio of the propagated error out to in; None for the first stage and after an exact one
        role: `injects` if the stage fails in isolation, `amplifies` or `recovers` if the gain is beyond CHANGED_BY,
            otherwise `transmits`

    If the chain includes `lm_head`, the result also says how well the logits agree.

    Pass `noise`, by stage, for a chain that is not a run of the port that was compared in isolation. Then a stage is
    `wrong` if it strays further than a variant of the golden on its own outputs allows (bisect.py). `first_wrong` is
    the first such stage, and the chain fails if there is one.
    """
    results: dict[str, dict[str, Any]] = {}
    before = None
    logits = None
    for stage in stages:
        alone = isolated[stage]
        local = alone.get("local_error")
        entry: dict[str, Any] = {"status": "pass", "reason": None, "local_error": local, "gain": None, "role": None}
        try:
            with hdf5.reading(golden[stage]) as golden_file, hdf5.reading(chained[stage]) as chain_file:
                mine, wanted = hdf5.tap(chain_file, f"port/{OUT}"), hdf5.tap(golden_file, f"golden/{OUT}")
                metrics = compare(mine, wanted, hdf5.tap(golden_file, f"truth/{OUT}"), valid)
                if noise:
                    entry |= _strayed(mine, wanted, hdf5.read(noise[stage], "chained/out"), valid)
                if stage == LM_HEAD:
                    logits = compare_logits(mine, wanted, valid)
            after = metrics["rel_l2"]
            entry |= {"R": metrics["R"], "propagated_error": after, "nonfinite": metrics["nonfinite"]["port"]}
            entry["gain"] = after / before if before and after is not None else None
            entry["role"] = _role(alone["status"], entry["gain"])
            before = after
        except (StageError, ValueError) as error:
            entry |= _failed(error if isinstance(error, StageError) else StageError(f"{stage}: {error}"))
            before = None
        results[stage] = entry
    states = {entry["status"] for entry in results.values()}
    first = next((stage for stage, entry in results.items() if entry.get("wrong")), None)
    status = next((state for state in ("error", "missing") if state in states), "fail" if first else "pass")
    return {
        "schema_version": SCHEMA_VERSION,
        "chain": chain,
        "status": status,
        "first_wrong": first,
        "stages": results,
        "logits": logits,
    }


def _strayed(mine: Tensor, wanted: Tensor, variant: Tensor, valid: np.ndarray) -> dict[str, Any]:
    found, allowed = Strayed.measure(mine, wanted, valid), Strayed.measure(variant, wanted, valid)
    return {"wrong": found.is_wrong(allowed), **found.numbers("port"), **allowed.numbers("variant")}


def _role(isolated_status: str, gain: float | None) -> str:
    if isolated_status == "fail":
        return "injects"
    if gain is not None and gain > CHANGED_BY:
        return "amplifies"
    if gain is not None and gain < 1 / CHANGED_BY:
        return "recovers"
    return "transmits"
