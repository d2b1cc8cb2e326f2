"""The shapes of the JSON files that stages leave: comparisons, diagnoses and verdicts. docs/contracts.md says what they
mean."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

Status = Literal["pass", "fail", "error", "missing"]
"""How a stage or a tap ended."""
Group = Literal["token", "channel_block", "head", "expert"]
"""What the elements of a tap are grouped by, to find where its error is."""


class Worst(TypedDict):
    """The group of a tap with the largest R."""

    group: Group
    index: int | list[int]
    R: float


class Tap(TypedDict):
    """A tap in verdicts.json. `layout` names the layout of the port's tensor where it is not the golden's but was
    recognised.
    """

    status: Status
    reason: str | None
    R: float | None
    excess: float | None
    worst: Worst | None
    layout: str | None


class Output(TypedDict):
    """An output of a stage, by its name."""

    R: float | None
    excess: float | None


class Isolated(TypedDict):
    """The isolated run of a stage. `R` and `excess` are those of its output `out`."""

    R: float | None
    excess: float | None
    outputs: dict[str, Output]
    taps: dict[str, Tap]


class Chained(TypedDict):
    """A stage in the longest chain that runs it."""

    R: float | None
    gain: float | None
    role: Literal["injects", "amplifies", "transmits", "recovers"] | None


class RunnerUp(TypedDict):
    """The second best explanation of a tap."""

    name: str
    R_explained: float
    excess: float | None


class Cause(TypedDict):
    """A known mistake that explains a tap: put into the golden, it leaves the port `excess` times too far off (None for
    a tap of integers). `estimate` holds what was measured of it, such as the value that the port used.
    """

    name: str
    text: str
    R_explained: float
    excess: float | None
    runner_up: RunnerUp | None
    estimate: dict[str, Any] | None


class NamedCulprit(TypedDict):
    """A tap at which a stage goes wrong by itself, and the name of the cause; `rank` is the rank at fault, if only one
    is.
    """

    tap: str
    cause: str | None
    rank: int | None


class FirstCulprit(NamedCulprit):
    """The first culprit of the run."""

    stage: str


class StageVerdict(TypedDict):
    """A stage in verdicts.json."""

    status: Status
    reason: str | None
    isolated: Isolated
    chained: Chained | None
    routing: dict[str, Any] | None
    culprits: list[NamedCulprit]
    cause: Cause | None


class Failure(TypedDict):
    """Stages that do not pass and are alike. `excess` is the largest of theirs, and None where the failure has no number.
    `cause` names a known mistake. `text` says in sentences what is wrong, and `help` what would show more. `place` is the
    function that hands the tap over in the first of the stages, by `file` and `function`.
    """

    status: Status
    stages: list[str]
    tap: str | None
    excess: float | None
    cause: str | None
    text: str
    help: list[str]
    place: dict[str, str] | None


class ChainVerdict(TypedDict):
    """A chain in verdicts.json."""

    status: Status
    first_wrong: str | None
    logits: dict[str, Any] | None


class Verdicts(TypedDict):
    """results/verdicts.json, schema 3. `headline` is the verdict in a sentence, and `details` are the sentences after it."""

    schema_version: int
    overall: Literal["pass", "fail", "error"]
    headline: str
    details: list[str]
    failures: list[Failure]
    first_culprit: FirstCulprit | None
    stages: dict[str, StageVerdict]
    chains: dict[str, ChainVerdict]


class Comparison(TypedDict):
    """results/compare/STAGE.json. The metrics of a tap are documented at `layerproof.measure.metrics.compare`."""

    schema_version: int
    stage: str
    status: Status
    reason: str | None
    taps: dict[str, dict[str, Any]]
    routing: dict[str, Any] | None
    choices: NotRequired[dict[str, dict[str, Any]]]
    local_error: NotRequired[float | None]
    logits: NotRequired[dict[str, Any] | None]
    statistics: NotRequired[dict[str, dict[str, dict[str, float]]]]
    golden: NotRequired[dict[str, Any]]
    port: NotRequired[dict[str, Any]]


class ChainComparison(TypedDict):
    """results/compare/chain/A-B.json."""

    schema_version: int
    chain: str
    status: Status
    first_wrong: str | None
    stages: dict[str, dict[str, Any]]
    logits: dict[str, Any] | None


class Elsewhere(TypedDict):
    """A stage of the same kind, and how many times too far off its output is with the same mistake in the golden's code."""

    stage: str
    excess: float | None


class Culprit(TypedDict):
    """A tap at which a stage goes wrong by itself, in results/diagnosis/STAGE.json.

    `elsewhere` is where else the cause would show; `instead` is the best cause that would not, and only with `elsewhere`.
    """

    tap: str
    forced: bool
    R: float | None
    excess: float | None
    at: str | None
    cause: Cause | None
    elsewhere: Elsewhere | None
    instead: Cause | None
    nearest: dict[str, Any] | None
    tried: int
    findings: list[str]


class Diagnosis(TypedDict):
    """results/diagnosis/STAGE.json."""

    schema_version: int
    stage: str
    culprits: list[Culprit]
    together: dict[str, Any] | None
    reason: str | None
