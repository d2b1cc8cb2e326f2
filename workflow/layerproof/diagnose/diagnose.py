"""Why a stage fails: at which taps it goes wrong by itself, and which known mistake explains what it does there.

The port ran teacher-forced, with the golden's tap in place of each of its own, so a tap is wrong only because of the
code between it and the taps before it. Each fault of the dictionary is put into the golden stage, teacher-forced in the
same way, at the taps that are wrong. The fault whose output matches the port's within the noise names the mistake.
Finally, all causes found are put in at once, and the unforced output of that stage is compared with the port's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerproof.compare.audit import moved_by_compiling
from layerproof.compare.relaid import PADDED_LEFT, as_golden, at_last_tokens, can_be_forced
from layerproof.compare.stage import compare_taps
from layerproof.config import Config, changed
from layerproof.diagnose.faults import DICTIONARY, Fault, GoldenStage, NotApplicable
from layerproof.diagnose.findings import findings
from layerproof.diagnose.result import undiagnosed
from layerproof.golden import stage as golden_stage
from layerproof.golden.variants import last_bits_changed, variants
from layerproof.measure.groups import R_MAX
from layerproof.measure.metrics import judge
from layerproof.measure.noise import Noise, measure, noise_of_taps
from layerproof.measure.noise_file import read_noise
from layerproof.measure.routing import AFTER_ROUTER, CHOICE, experts_chosen, flips, reached
from layerproof.measure.rule import excess, failing_limit
from layerproof.model import handed, loading
from layerproof.model.experts import EXPERT_BY_EXPERT, register
from layerproof.model.tokens import Tokens
from layerproof.taps import OUT, Fed, canonical_after, merged, unseen_before
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor, is_finite
from layerproof.wording import times

PAIRED = 6
"""How many of the best single faults are tried in pairs with all others."""

ONLY_COMPILED = (
    "Uncompiled, the stage gives another tensor here, and teacher-forced it is right everywhere: look for the mistake in "
    "tracing and compiling, not in its mathematics."
)
NAMED_FROM = 2.0
"""How many times above its limit a tap must be before a cause is named: below, noise chooses among the explanations."""
JUST_ABOVE = "The error is only {} what is allowed: too little to tell one cause from another, so none is named."
NEAR = 2.0
"""A fault that does not explain a tap is reported if it reduces the port's own R by more than this factor."""

Taps = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FailedStage:
    """A failed stage and everything that its diagnosis needs; `settings` contain the config's `golden` and `model`."""

    name: str
    directory: Path
    descriptions: Mapping[str, Mapping[str, Any]]
    tokens: Tokens
    previous: Path | None
    settings: Config
    limit: float


@dataclass(frozen=True)
class _Bench:
    """The golden stage in its own dtype and in fp32, and everything that the port is compared with.

    `forced` are the golden's taps that golden and port were forced with; `truth` are the taps of the fp32 golden in that
    run, `noise` is the noise of its variants, `port` are the port's taps, and `feeds` says what feeds each tap.
    """

    golden: GoldenStage
    exact: GoldenStage
    forced: Taps
    truth: Mapping[str, Tensor]
    noise: Mapping[str, Noise]
    port: Mapping[str, Tensor]
    feeds: Sequence[Fed]
    valid: np.ndarray
    limit: float


@dataclass(frozen=True)
class _Attempt:
    """Faults tried together: R of the port's tap against the golden's with them, how many times too far off it is (None
    for integers), and whether it is within the noise.
    """

    faults: tuple[Fault, ...]
    R: float
    excess: float | None
    explains: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(fault.name for fault in self.faults))

    def summary(self, tap: str) -> dict[str, Any]:
        """Describes faults that were tried at this tap.

        If a fault would show at an earlier tap that was not handed over, it says at which.
        """
        texts = [fault.text if fault.tap == tap else f"{fault.text} (at {fault.tap})" for fault in self.faults]
        return {
            "name": "+".join(self.names),
            "text": " and ".join(texts),
            "R_explained": self.R,
            "excess": self.excess,
        }

    def as_cause(self, tap: str, runner_up: Mapping[str, Any] | None) -> dict[str, Any]:
        return self.summary(tap) | {"runner_up": runner_up}


@dataclass(frozen=True)
class Files:
    """Files that a diagnosis reads: the golden's file, its noise, and the port's isolated and teacher-forced runs."""

    golden: Path
    noise: Path
    port: Path
    forced: Path


@dataclass(frozen=True)
class Sibling:
    """A stage of the same kind as one that fails, with the files of its golden and of the golden's noise."""

    stage: FailedStage
    golden: Path
    noise: Path


def diagnose(
    stage: FailedStage, comparison: Mapping[str, Any], files: Files, sibling: Sibling | None = None
) -> dict[str, Any]:
    """The content of results/diagnosis/STAGE.json for a stage whose comparison fails.

    `culprits` are taps at which the port goes wrong by itself, in the order that data flows. Each has `tap`, `forced`
    (False for the first tap that fails, if none fails when teacher-forced), the `R` of that run that decides, the group
    that it is `at` (None for the whole tap), `cause` (`name`, `text`, `R_explained`, `runner_up`) or None, `tried` (the
    number of faults), `nearest` (the best of them if none explains the tap), and `findings`, sentences on where its
    error is. `elsewhere` says that the cause would show in the `sibling` too, if it is a mistake in code, and `instead` is
    the best of the causes that would not; of these the verdict chooses, which knows how the sibling fared. `together` has
    the causes, and R of the port's isolated output against the golden with all of them.

    Raises:
        StageError: if a file is damaged, the port could not be forced, or the golden cannot run.
    """
    found, explaining = _diagnose(stage, comparison, files)  # lets go of its stage before the sibling is loaded
    if sibling and any(explaining):
        try:
            shows = _Elsewhere.of(sibling)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the diagnosis is done
            print(f"what the causes would do in {sibling.stage.name} is not known: {error}")
            return found
        for culprit, attempts in zip(found["culprits"], explaining, strict=True):
            if attempts and (place := shows.place(attempts[0].faults)):
                better = next((one for one in attempts[1:] if not shows.place(one.faults)), None)
                culprit |= {"elsewhere": place, "instead": better and better.as_cause(culprit["tap"], None)}
    return found


def _diagnose(
    stage: FailedStage, comparison: Mapping[str, Any], files: Files
) -> tuple[dict[str, Any], list[list[_Attempt]]]:
    """The diagnosis, and for each culprit the attempts that explain it, best first."""
    device = golden_stage.resolve_device(stage.settings.golden.device)
    wanted = hdf5.read_group(files.golden, "golden")
    with hdf5.reading(files.golden) as file:
        feeds = hdf5.feeds(file)
    given = hdf5.read_group(files.forced, "port")
    isolated, _ = as_golden(hdf5.read_group(files.port, "port"), wanted)
    forced, layouts = as_golden(given, wanted)
    isolated[OUT], valid = at_last_tokens(stage.name, isolated[OUT], wanted[OUT], stage.tokens.valid)
    forced[OUT], _ = at_last_tokens(stage.name, forced[OUT], wanted[OUT], stage.tokens.valid)
    # A tap that the port did not hand over in a layout that is the golden's without doubt could not be forced on the port,
    # so it is not forced on the golden either.
    golden_taps = {
        name: hdf5.to_torch(tensor).to(device)
        for name, tensor in wanted.items()
        if name != OUT and name in given and can_be_forced(name, given[name], wanted)
    }
    bf16, exact = load(stage, device)

    def run(x: Any) -> dict[str, Tensor]:
        """The forced golden; if the last bits of its input are changed, so are those of its forced taps."""
        given = golden_taps if x is bf16.x else {name: _changed(tensor) for name, tensor in golden_taps.items()}
        return _arrays(bf16.run(given, x=x))

    others = [taps for _, taps in variants(bf16.model, run, bf16.x)]
    local_truth = _arrays(exact.run(golden_taps))
    wanted = {name: tensor for name, tensor in wanted.items() if all(name in one for one in (local_truth, *others))}
    local_noise = noise_of_taps(wanted, others, local_truth, valid, feeds)
    bench = _Bench(bf16, exact, golden_taps, local_truth, local_noise, forced, feeds, valid, stage.limit)
    alone = replace(bench, forced={}, noise=read_noise(files.noise), port=isolated)
    local = compare_taps(stage.name, forced, wanted, local_truth, local_noise, valid, stage.limit, fed=feeds)["taps"]
    wrong = [name for name, tap in local.items() if tap["status"] == "fail"]
    # A tap that could not be read could not be forced either: what lies behind it is not known.
    wrong = [name for name in wrong if layouts.get(name) == PADDED_LEFT] or wrong
    if wrong:
        culprits = [_explain(bench, name, local[name], True) for name in wrong]
    else:
        # Errors of several taps add up, or one lies where no tap is forced: only the first failing tap is known.
        first = next(name for name, tap in comparison["taps"].items() if tap["status"] == "fail")
        # Not the truth in the golden's file, which other functions computed: a fault must differ from the truth only by
        # its effect.
        truth = _arrays(exact.run({}))
        noise = _without_flips(alone.noise, isolated.get(CHOICE), truth.get(CHOICE), feeds)
        culprits = [_explain(replace(alone, truth=truth, noise=noise), first, comparison["taps"][first], False)]
        if first in _moved_by_compiling(files.port):
            culprits[0][0]["findings"].insert(0, ONLY_COMPILED)
    causes = tuple(dict.fromkeys(fault for _, explaining in culprits for one in explaining[:1] for fault in one.faults))
    found = {"culprits": [culprit for culprit, _ in culprits], "together": _together(alone, causes)}
    return undiagnosed(stage.name) | found, [explaining for _, explaining in culprits]


def _moved_by_compiling(port: Path) -> list[str]:
    with hdf5.reading(port) as file:
        tracing = hdf5.document_if_there(file, hdf5.COMPILED)
    return moved_by_compiling(tracing) if tracing else []


def load(stage: FailedStage, device: torch.device) -> tuple[GoldenStage, GoldenStage]:
    """The golden stage, in its own dtype and in fp32, in a form into which faults can be put."""
    golden = _load_golden(stage, device)
    description, settings = stage.descriptions[stage.name], _for_faults(stage.settings)
    exact = golden_stage.exact(
        golden.model, stage.name, stage.directory, description, device, settings, with_others=True
    )
    x = None if golden.x is None else golden.x.float()
    same = golden.handed, golden.ids, golden.valid, golden.load, golden.read, golden.own_taps
    return golden, GoldenStage(exact, stage.name, x, *same)


def _for_faults(settings: Config) -> Config:
    """Faults change the mask of the eager attention, which always has one, and the gate of experts that run one by one."""
    forms = changed(settings.golden, attn_implementation="eager", experts_implementation=EXPERT_BY_EXPERT)
    return changed(settings, golden=forms)


def _load_golden(stage: FailedStage, device: torch.device) -> GoldenStage:
    """The golden stage in its own dtype alone."""
    register()
    settings = _for_faults(stage.settings)
    dtype = getattr(torch, settings.golden.dtype)
    description = stage.descriptions[stage.name]
    model = golden_stage.load(stage.name, stage.directory, description, device, dtype, settings, with_others=True)
    fed = handed.stage_input(stage.previous, stage.name)
    x = hdf5.to_torch(fed.out).to(device) if fed else None
    given = {name: hdf5.to_torch(tensor).to(device) for name, tensor in fed.handed.items()} if fed else {}
    ids, valid = torch.from_numpy(stage.tokens.ids).to(device), torch.from_numpy(stage.tokens.valid).to(device)

    def load_another(model: Any, name: str) -> None:
        golden_stage.load_another(model, name, stage.directory, stage.descriptions[name], device, dtype)

    def read(parameter: str, ending: str, change: Any) -> torch.Tensor:
        return loading.load_changed(model, parameter, stage.directory, description, device, ending, change)

    return GoldenStage(model, stage.name, x, given, ids, valid, load_another, read, settings.golden.taps)


def _arrays(taps: Taps) -> dict[str, Tensor]:
    return {name: hdf5.to_array(taps[name]) for name in merged([list(taps)])}


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    return last_bits_changed(tensor) if tensor.is_floating_point() else tensor


def _without_flips(
    noise: Mapping[str, Noise], choice: Tensor | None, truth: Tensor | None, feeds: Sequence[Fed]
) -> dict[str, Noise]:
    """The noise without tokens whose experts the port chooses otherwise: taps after the router differ there anyway."""
    if choice is None or truth is None or choice.shape != truth.shape:
        return dict(noise)
    flipped, reach = flips(choice, truth), {one.name: one.reach for one in feeds}
    return {
        name: replace(one, compared=one.compared & ~reached(flipped, reach.get(name, 0)))
        if name in AFTER_ROUTER
        else one
        for name, one in noise.items()
    }


@dataclass(frozen=True)
class _Elsewhere:
    """The golden's stage into which the causes of another one are put, too, and what its output is compared with."""

    golden: GoldenStage
    taps: Mapping[str, Tensor]
    wanted: Tensor
    truth: Tensor
    noise: Noise
    valid: np.ndarray
    limit: float

    @classmethod
    def of(cls, sibling: Sibling) -> _Elsewhere:
        stage = sibling.stage
        golden = _load_golden(stage, golden_stage.resolve_device(stage.settings.golden.device))
        wanted, truth = (hdf5.read(sibling.golden, f"{group}/{OUT}") for group in ("golden", "truth"))
        noise = read_noise(sibling.noise)[OUT]
        return cls(golden, _arrays(golden.run({})), wanted, truth, noise, stage.tokens.valid, stage.limit)

    def place(self, faults: Sequence[Fault]) -> dict[str, Any] | None:
        """The stage and how many times too far off its output is, if faults in the code would make it fail."""
        try:
            if not self.golden.are_of_code(faults):
                return None
            taps = _arrays(self.golden.run({}, faults))
        except torch.OutOfMemoryError:
            raise
        except Exception as reason:  # as in _try
            print(f"{faults[-1].name} in {self.golden.name}: does not apply, {reason}")
            return None
        left_out = ~self.noise.compared
        if CHOICE in taps and CHOICE in self.taps and taps[CHOICE].shape == self.taps[CHOICE].shape:
            left_out = left_out | flips(taps[CHOICE], self.taps[CHOICE])
        result = judge(taps[OUT], self.wanted, self.truth, self.valid, self.limit, left_out & self.valid, self.noise)
        return {"stage": self.golden.name, "excess": result["excess"]} if result["status"] == "fail" else None


def _explain(bench: _Bench, tap: str, result: Mapping[str, Any], forced: bool) -> tuple[dict[str, Any], list[_Attempt]]:
    """A culprit, and the attempts that explain it, best first, with faults that may show at this tap first.

    No fault is named for a tap just above its limit: too many explain an effect that small.
    """
    above = excess(result, bench.limit) if result.get("kind") == "float" else None
    # What fails by a NaN, say, may be within its limit elsewhere.
    just_above = above if above is not None and 1 < above < NAMED_FROM else None
    attempts = _attempts(bench, tap) if just_above is None else []
    explaining = [attempt for attempt in attempts if attempt.explains]
    best = explaining[0] if explaining else None
    near = attempts[0] if attempts and not best and _own_R(result) / NEAR > attempts[0].R else None
    runner_up = next((one.summary(tap) for one in attempts if best and one.names != best.names), None)
    R, _, where = failing_limit(result, bench.limit)
    culprit = {
        "tap": tap,
        "forced": forced,
        "R": R,
        "excess": above,
        "at": where,
        "cause": best.as_cause(tap, runner_up) if best else None,
        "elsewhere": None,
        "instead": None,
        "nearest": near.summary(tap) if near else None,
        "tried": len({fault for attempt in attempts for fault in attempt.faults}),
        "findings": findings(
            bench.port[tap],
            bench.truth[tap],
            bench.noise[tap].compared if tap in bench.noise else bench.valid,
            bench.valid,
            bench.noise.get(tap),
            _head_dim(bench, tap),
            experts_chosen(bench.truth) if tap in AFTER_ROUTER else None,
            bench.limit,
        ),
    }
    if just_above is not None:
        culprit["findings"].insert(0, JUST_ABOVE.format(times(just_above)))
    return culprit, explaining


def _own_R(result: Mapping[str, Any]) -> float:
    """R of a tap in the units of attempts: for floats the noise, for integers the number of tokens that differ."""
    if result.get("kind") == "exact":
        return float(result["mismatches"]["port_truth"])
    return float(result.get("weighted_R") or result.get("R") or R_MAX)


def _head_dim(bench: _Bench, tap: str) -> int | None:
    if not tap.startswith("attn.") or tap == "attn.out" or "attn.q_rot" not in bench.truth:
        return None
    return bench.truth["attn.q_rot"].shape[-1]


def _attempts(bench: _Bench, tap: str) -> list[_Attempt]:
    """Attempts with faults that may show first at this tap, best first; tries more faults until one explains it.

    Of those with the same R, by three digits, the dictionary's first comes first: they may be the same mathematics, as
    weights of a softmax that are not normalised or are normalised over all experts.
    """
    places = unseen_before(tap, bench.forced, bench.feeds) | canonical_after(tap, bench.feeds)
    known = [fault for fault in DICTIONARY if fault.tap in places]
    attempts: list[_Attempt] = []
    for round in ("quick", "slow", "pairs"):
        more = (
            _pairs(attempts) if round == "pairs" else [(fault,) for fault in known if fault.slow == (round == "slow")]
        )
        attempts += [attempt for faults in more if (attempt := _try(bench, faults, tap))]
        attempts.sort(key=lambda attempt: (not attempt.explains, float(f"{attempt.R:.3g}")))
        if attempts and attempts[0].explains:
            break
    return attempts


def _pairs(attempts: Sequence[_Attempt]) -> list[tuple[Fault, ...]]:
    singles = [attempt.faults[0] for attempt in attempts if not attempt.faults[0].slow]
    pairs = [
        (first, second)
        for first, second in itertools.combinations(singles, 2)
        if first in singles[:PAIRED] and first.name != second.name
    ]
    # A fault may hide another, so their order matters. The dictionary's is the order in which data flows.
    return [tuple(sorted(pair, key=DICTIONARY.index)) for pair in pairs]


def _try(bench: _Bench, faults: tuple[Fault, ...], tap: str) -> _Attempt | None:
    """How well faults explain the port's tap; None if they do not apply or change nothing there."""
    try:
        exact = hdf5.to_array(bench.exact.run(bench.forced, faults, until=tap)[tap])
        if _same(exact, bench.truth[tap]):
            return None
        rounded = hdf5.to_array(bench.golden.run(bench.forced, faults, until=tap)[tap])
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as reason:  # NotApplicable, or a model that the fault was not written for: it says nothing about the port
        known = isinstance(reason, NotApplicable)
        print(f"{faults[-1].name} at {tap}: does not apply, {'' if known else type(reason).__name__ + ': '}{reason}")
        return None
    attempt = _judge(bench, faults, bench.port[tap], rounded, exact, bench.noise.get(tap))
    left = f"R {attempt.R:.4g}" if attempt.excess is None else f"{times(attempt.excess)} what is allowed"
    print(f"{' + '.join(fault.name for fault in faults)} at {tap}: {left}")
    return attempt


def _same(one: Tensor, other: Tensor) -> bool:
    mine, its = one.data[...], other.data[...]
    return one.shape == other.shape and np.array_equal(mine, its, equal_nan=one.dtype_class == "float")


def _judge(
    bench: _Bench, faults: tuple[Fault, ...], port: Tensor, rounded: Tensor, exact: Tensor, known: Noise | None
) -> _Attempt:
    """Judges the port's tensor against the faulty golden's, with this golden's noise and the bands of the right one."""
    if rounded.dtype_class == "float" and rounded.shape == exact.shape:
        compared = known.compared if known else bench.valid
        noise = measure([rounded], exact, compared)
        noise = replace(noise, band=known.band) if known else noise
    else:
        noise = None
    left_out = bench.valid & ~noise.compared if noise else None
    valid = bench.valid & _mostly_finite(port, bench.valid)
    result = judge(port, rounded, exact, valid, bench.limit, left_out, noise)
    R = result.get("weighted_R") if result["kind"] == "float" else result["mismatches"]["port_truth"]
    if R is None or not result["count"]:
        return _Attempt(faults, R_MAX, None, explains=False)
    own = judge(rounded, rounded, exact, valid, bench.limit, left_out, noise)["weighted_R"] if noise else 1.0
    return _Attempt(faults, float(R) / max(own, 1.0), result["excess"], result["status"] == "pass")


def _mostly_finite(port: Tensor, valid: np.ndarray) -> np.ndarray:
    """The tokens without NaN and Inf, bool [batch, seq], if they are most of the valid ones; otherwise all tokens.

    A mistake that divides by zero at some tokens is recognised by its effect at the others.
    """
    if port.dtype_class != "float" or port.shape[:2] != valid.shape:
        return np.ones_like(valid)
    finite = np.all(is_finite(port.floats(port.data[...])).reshape(*valid.shape, -1), axis=-1)
    return finite if 2 * int((finite & valid).sum()) > int(valid.sum()) else np.ones_like(valid)


def _together(bench: _Bench, faults: tuple[Fault, ...]) -> dict[str, Any] | None:
    """Puts all causes into the golden at once, unforced: does its output become the port's?"""
    if not faults or OUT not in bench.port:
        return None
    try:
        exact, rounded = (_arrays(stage.run({}, faults)) for stage in (bench.exact, bench.golden))
    except NotApplicable as reason:
        print(f"the causes cannot be combined: {reason}")
        return None
    alike = bench.valid
    if CHOICE in exact and CHOICE in bench.port and bench.port[CHOICE].shape == exact[CHOICE].shape:
        alike = alike & ~flips(bench.port[CHOICE], exact[CHOICE]) & ~flips(rounded[CHOICE], exact[CHOICE])
    attempt = _judge(
        bench, faults, bench.port[OUT], rounded[OUT], exact[OUT], replace(bench.noise[OUT], compared=alike)
    )
    return {
        "causes": list(attempt.names),
        "R_explained": attempt.R,
        "excess": attempt.excess,
        "explains": attempt.explains,
    }
