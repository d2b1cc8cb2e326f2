"""Compares the two sides of a stage tap by tap, and chained stages with the golden's trajectory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np

from layerproof.compare.bisect import Strayed
from layerproof.compare.ranks import Ranks
from layerproof.compare.relaid import LAST_TOKENS, PADDED_LEFT, as_golden, at_last_tokens
from layerproof.errors import StageError, StageMissing
from layerproof.measure.logits import compare_logits
from layerproof.measure.metrics import compare, judge
from layerproof.measure.noise import Noise
from layerproof.measure.noise_file import read_noise
from layerproof.measure.routing import (
    AFTER_ROUTER,
    CHOICE,
    Routing,
    choices_of_taps,
    compare_choices,
    compare_margins,
    experts_chosen,
    is_in_order,
    reached,
    ruled_out_as,
    selection_of,
)
from layerproof.measure.rule import is_compared, is_nowhere_finite
from layerproof.model.stages import LM_HEAD
from layerproof.taps import OUT, PAD_ON_THE_RIGHT, Fed, is_choice, is_output
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor, is_same
from layerproof.threads import mapped

SCHEMA_VERSION = 1
CHANGED_BY = 2.0
"""A stage amplifies if the propagated error grows by more than this factor, and recovers if it shrinks by as much."""
UNDECIDED = "choices before it are nearly tied at every token. Use more tokens."
"""Why a tap is an error of which no token is left to compare."""
STATISTICS = ("count", "mean", "std", "min", "max", "nan", "inf")


def compare_stage(
    stage: str, golden: Path, noise: Path | None, port: Path, valid: np.ndarray, limit: float
) -> dict[str, Any]:
    """Returns the content of results/compare/STAGE.json; every tap of the golden ends as pass, fail, error or missing.

    Without `noise`, the golden's own error is the only measure of noise.

    The stage is `error` if its port or golden failed or cannot be read, `missing` if there is nothing to compare
    because another stage failed, `fail` if any tap fails, and otherwise the status of its output, normally `pass`.
    """
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "stage": stage,
        "taps": {},
        "routing": None,
        "choices": {},
    }
    try:
        with hdf5.reading(golden) as golden_file:
            wanted = hdf5.taps(golden_file, "golden")
            truth = hdf5.taps(golden_file, "truth")
            bands = read_noise(noise) if noise else {}
            fed = hdf5.feeds(golden_file)
            result["statistics"] = {"golden": _statistics(_expected(wanted, {}, fed))}
            result["golden"] = hdf5.attributes(golden_file)
            try:
                with hdf5.reading(port) as port_file:
                    found = hdf5.taps(port_file, "port")
                    result["statistics"]["golden"] = _statistics(_expected(wanted, found, fed))
                    result["statistics"]["port"] = _statistics(found)
                    result["port"] = hdf5.attributes(port_file)
                    result["port"]["places"] = hdf5.document_if_there(port_file, hdf5.PLACES) or {}
                    of_ranks = Ranks.of(port_file)
                    moved = result["port"].get("other_choices", ())
                    result |= compare_taps(stage, found, wanted, truth, bands, valid, limit, of_ranks, fed, moved)
            except StageError as error:
                hdf5.check(golden)  # shows damage to the golden's data, which is not an error of the port's file
                result["taps"] = {name: _failed(error) for name in _expected(wanted, {}, fed)}
                raise
    except StageError as error:
        return result | _failed(error)
    return result


def _expected(wanted: Mapping[str, Tensor], found: Collection[str], fed: Sequence[Fed]) -> dict[str, Tensor]:
    """The golden's taps that a port hands over or must hand over."""
    optional = _optional(fed)
    return {name: tensor for name, tensor in wanted.items() if name in found or name not in optional}


def _optional(fed: Sequence[Fed]) -> set[str]:
    return {one.name for one in fed if one.optional}


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
    fed: Sequence[Fed] = (),
    moved: Sequence[int] = (),
) -> dict[str, Any]:
    """Compares a stage's tensors, in the order of `wanted`: status, taps, routing and errors.

    A tap whose layout is not the golden's is read in the golden's, and has its own as `layout`.

    `noise` may cover all taps, some or none; `fed` says what feeds each tap, and which taps a port need not hand over.
    `moved` are the tokens, counted over batch and seq, at which the port's output with taps is another one than without.
    Taps are compared on the declared threads.

    Raises:
        StageError: if no choice is nearly tied at one of the tokens `moved`.
    """
    found, layouts = as_golden(found, wanted)
    if OUT in found:
        out, valid = at_last_tokens(stage, found[OUT], wanted[OUT], valid)
        layouts |= {OUT: LAST_TOKENS} if out is not found[OUT] else {}
        found = found | {OUT: out}
    optional = _optional(fed)
    before = choices_of_taps(list(wanted), fed)
    selections = {selection_of(name) for name in wanted if is_choice(name)}
    reach = {one.name: one.reach for one in fed}
    routings = _routings(found, wanted, truth, valid, noise, before, reach)
    _check_moved(moved, routings, valid)
    routing = routings.get(CHOICE)
    experts = experts_chosen(truth) if routing else None

    def selection(name: str) -> Tensor:
        return ruled_out_as(found[name], wanted[name], truth[name])

    def of_tap(name: str) -> dict[str, Any]:
        if name not in found:
            return {"status": "missing", "reason": "the port does not hand over this tap"}
        masks = [routings[choice].left_out for choice in before[name]]
        left_out = reached(np.logical_or.reduce(masks), reach.get(name, 0)) if masks else None
        counted = valid
        if left_out is not None and name in selections:
            counted = valid & ~left_out  # an earlier choice rules out others there, with an Inf
        sides = wanted[name], truth[name], counted, limit, left_out, noise.get(name)
        mine = selection(name) if name == selection_of(CHOICE) and CHOICE in found else found[name]
        tap = judge(mine, *sides, experts=experts if name in AFTER_ROUTER else None)
        if is_nowhere_finite(tap) and left_out is not None and valid.any() and left_out[valid].all():
            tap |= {"status": "error", "reason": UNDECIDED}
        elif name in optional and is_nowhere_finite(tap):  # the scores of an indexer with nothing to choose from
            tap |= {"status": "pass", "reason": None}
        if tap["status"] == "fail" and is_compared(tap) and _is_golden(mine, wanted[name], counted):
            # A lookup has no variants: its noise is fitted to the golden's error alone, whose worst may exceed the limit.
            tap |= {"status": "pass", "reason": None, "excess": 1.0}
        if name in routings and routings[name].compared:
            reason = routings[name].reason(name)
            tap |= {"status": "fail" if reason else "pass", "reason": reason}
        if ranks:
            summed = ranks.summed.get(name)
            is_sum_right = summed is not None and judge(summed, *sides)["status"] == "pass"
            if reason := ranks.reason(name, found[name], wanted[name], is_sum_right):
                tap |= {"status": "fail", "reason": reason}
            elif tap["status"] == "fail" and (why := ranks.explanation(name, found[name], wanted[name], valid)):
                tap["reason"] = f"{tap['reason']}; {why}"
        if layouts.get(name) == PADDED_LEFT:
            tap["reason"] = f"{tap['reason']}: its prompts lie behind the padding. {PAD_ON_THE_RIGHT}"
        elif name in layouts:
            tap["layout"] = layouts[name]
        return tap

    compared = list(_expected(wanted, found, fed))
    taps = dict(zip(compared, mapped(of_tap, compared), strict=True))
    for choice, one in routings.items():
        name = selection_of(choice)
        prepares = taps.get(name, {})
        is_off = is_compared(prepares) and (prepares["excess"] or 0) > 1
        if not (one.compared and is_off and _is_right(choice, taps)):
            continue
        # Margins are what decides themselves. Selection values may be on another scale, say, but in this order.
        if name == choice or is_in_order(selection(name), truth[name], valid & ~one.left_out, one.noise_margin):
            prepares |= {"status": "pass", "reason": None, "excess": 1.0}
    failed = [name for name, tap in taps.items() if tap["status"] == "fail"]
    status = "fail" if failed else taps[OUT]["status"]
    reason = f"{failed[0]}: {taps[failed[0]]['reason']}" if failed else taps[OUT]["reason"]
    return {
        "status": status,
        "reason": reason,
        "taps": taps,
        "routing": routing.summary() if routing else None,
        "choices": {name: one.summary() for name, one in routings.items() if name != CHOICE},
        "local_error": _local_error(taps[OUT], routing, found, wanted, truth, valid),
        "logits": compare_logits(found[OUT], wanted[OUT], valid) if stage == LM_HEAD and OUT in found else None,
    }


def _is_right(choice: str, taps: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a choice passes, and the weights that a router makes of it, if the port hands them over."""
    made = (choice, "router.weights") if choice == CHOICE else (choice,)
    return all(taps[name]["status"] in ("pass", "missing") for name in made if name in taps)


def _check_moved(moved: Sequence[int], routings: Mapping[str, Routing], valid: np.ndarray) -> None:
    tokens = np.zeros(valid.size, bool)
    tokens[list(moved)] = True
    wrong = tokens.reshape(valid.shape) & valid
    for routing in routings.values():
        wrong &= ~routing.undecided
    if wrong.any():
        batch, seq = np.argwhere(wrong)[0]
        raise StageError(
            f"taps change the stage's output for {int(wrong.sum())} of {int(valid.sum())} tokens at which no choice is "
            f"nearly tied, first [{batch},{seq}]. Make forward compute the same without taps."
        )


def _is_golden(mine: Tensor, golden: Tensor, counted: np.ndarray) -> bool:
    return mine.dtype == golden.dtype and is_same(mine, golden, counted)


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


def _routings(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    valid: np.ndarray,
    noise: Mapping[str, Noise],
    before: Mapping[str, Sequence[str]],
    reach: Mapping[str, int],
) -> dict[str, Routing]:
    """Compares every choice of a stage, in order; tokens that an earlier choice leaves out do not count.

    A choice that is handed over to later stages is compared as what it is, in whatever order it is.
    """
    routings: dict[str, Routing] = {}
    handed = {name: _handed_choice(name, wanted, before) for name in wanted}
    for name in (name for name in wanted if is_choice(name) or handed[name]):
        earlier = [routings[choice].left_out for choice in before[name] if choice in routings]
        counted = valid & ~reached(np.logical_or.reduce([np.zeros_like(valid), *earlier]), reach.get(name, 0))
        later = next((tap for tap in noise if name in before.get(tap, ())), None)
        variant_flips = counted & ~noise[later].compared if later else None
        selection = selection_of(handed[name] or name)
        if wanted[name].dtype_class == "float":
            routings[name] = compare_margins(found.get(name), wanted[name], truth[name], counted, variant_flips)
        else:
            sides = found.get(name), wanted[name], truth[name], wanted.get(selection), truth.get(selection)
            routings[name] = compare_choices(*sides, counted, variant_flips)
    return routings


def _handed_choice(name: str, wanted: Mapping[str, Tensor], before: Mapping[str, Sequence[str]]) -> str | None:
    """The choice that an output of integers besides `out` is; None for any other tap."""
    if not is_output(name) or wanted[name].dtype_class != "integer":
        return None
    return next((choice for choice in reversed(before[name]) if wanted[choice].shape == wanted[name].shape), None)


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
    own: Mapping[str, tuple[Path, Path]] | None = None,
    limit: float | None = None,
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

    Pass `noise`, by stage, for a chain that is not a run of the port that was compared in isolation. Then a stage in
    `own` is `wrong` if it fails against these files of a golden and its noise, which ran from the stage's own input in
    the chain, with `limit`; `excess` says by how much. Another stage is `wrong` if it strays further than a variant of
    the golden on its own outputs allows (bisect.py). `first_wrong` is the first such stage, and the chain fails if there
    is one.
    """
    own = own or {}
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
                mine, counted = at_last_tokens(stage, mine, wanted, valid)
                metrics = compare(mine, wanted, hdf5.tap(golden_file, f"truth/{OUT}"), counted)
                if noise:
                    entry |= _strayed(mine, wanted, hdf5.read(noise[stage], "chained/out"), counted)
                if stage == LM_HEAD:
                    logits = compare_logits(mine, wanted, counted)
            after = metrics["rel_l2"]
            entry |= {"R": metrics["R"], "propagated_error": after, "nonfinite": metrics["nonfinite"]["port"]}
            entry["gain"] = after / before if before and after is not None else None
            entry["role"] = _role(alone["status"], entry["gain"])
            before = after
            if stage in own and limit is not None:
                entry |= _from_own_input(stage, *own[stage], chained[stage], valid, limit)
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


def _from_own_input(
    stage: str, golden: Path, noise: Path, chained: Path, valid: np.ndarray, limit: float
) -> dict[str, Any]:
    """Judges a stage of a chain as one that runs alone, from its own input; of its taps a chain has the output alone.

    Says nothing if the input could not be read.

    Raises:
        StageError: if the golden failed on this input.
    """
    found = compare_stage(stage, golden, noise, chained, valid, limit)
    if found["status"] == "missing":
        return {}
    if found["status"] == "error":
        raise StageError(found["reason"])
    out = found["taps"][OUT]
    return {"own_input": True, "wrong": out["status"] == "fail", "why": out["reason"], "excess": out.get("excess")}


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
