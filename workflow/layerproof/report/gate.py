"""The verdict for those who do not open the page: exit code, terminal, pull request, and test reports of CI."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

from layerproof import config
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.files import read_json, write_text
from layerproof.model.captured import CHAIN as CAPTURED
from layerproof.model.resolve import resolve
from layerproof.model.stages import ranges
from layerproof.report.source import CodeFrame, code_frame
from layerproof.report.verdicts import SCHEMA_VERSION
from layerproof.report.words import counted
from layerproof.rerun.records import Record, as_asked_now, behind, read_all, why_stale
from layerproof.shapes import Failure, Verdicts
from layerproof.wording import times

EXIT = {"pass": 0, "fail": 1, "error": 2}
"""Exit codes by verdict."""
CONFIG = Path("config.yaml")
TABLE_HEAD = "| stages | status | tap | times too far off | cause | what is wrong | source |\n" + "|" + "---|" * 7


def read(path: Path) -> Verdicts:
    """The content of a verdicts.json.

    Raises:
        UserError: if the file is not one of this schema.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no verdict yet. Run layerproof run.")
    try:
        verdicts = read_json(path)
        if not isinstance(verdicts, dict) or verdicts.get("schema_version") != SCHEMA_VERSION:
            raise ValueError("another schema")
        if lacking := Verdicts.__annotations__.keys() - verdicts.keys():
            raise ValueError(f"no {min(lacking)}")
        if verdicts["overall"] not in EXIT:
            raise ValueError(f"overall is {verdicts['overall']}")
        return cast("Verdicts", verdicts)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: is not a verdicts.json of schema {SCHEMA_VERSION} ({error}). Run layerproof run again."
        ) from None


def why_outdated(path: Path) -> str | None:
    """Why verdicts do not hold for what is at hand, or None: their records name other code, settings or inputs.

    Verdicts without records beside them, such as those of another machine, are taken as they are.
    """
    records = read_all(path.parent / "records")
    if "verdicts" not in records or not CONFIG.exists():
        return None
    run = resolve(config.read(CONFIG))
    settings = config.as_json(run.settings)
    verdicts = read(path)
    for what, asked in (("stages", run.stages), ("chains", run.chains)):
        if set(asked) != set(verdicts[what]):
            other = ", ".join(sorted(set(asked) ^ set(verdicts[what]))[:3])
            return f"config.yaml asks for other {what} now ({other})"
    installed = package_versions()
    for name, record in behind(records, ["verdicts"]).items():
        now = as_asked_now(record.job, settings, installed)
        as_if_right = replace(record, error=None)  # a stage that ended as an error has a verdict, too
        reason = why_stale(as_if_right, now, map(Path, record.inputs), map(Path, record.outputs))
        if reason or (reason := _why_other_checkpoint(record)):
            return f"{name} would run, because {reason}"
    return None


def _why_other_checkpoint(record: Record) -> str | None:
    """Whether the files of the checkpoint are other ones by size and time, which is what a job that reads hundreds of
    gigabytes goes by.
    """
    if record.job.name != "weights":
        return None
    for name, size, time in record.job.arguments.get("files", ()):
        try:
            found = os.stat(Path(record.job.settings["model"]["checkpoint"]) / name)
        except OSError:
            return f"its checkpoint changed ({name} is missing)"
        if (found.st_size, found.st_mtime_ns) != (size, time):
            return f"its checkpoint changed ({name})"
    return None


def frame_of(failure: Failure) -> CodeFrame | None:
    """The source that hands over the tap at which these stages fail, as it is now."""
    return code_frame(failure["place"], failure["tap"]) if failure["tap"] else None


def shows_old_lines(report: Path, verdicts: Path) -> bool:
    """Whether a report shows other lines of source than are there now, because a comment or an edit of no consequence has
    moved or changed them.
    """
    try:
        failures, page = read(verdicts)["failures"], report.read_text(encoding="utf-8")
    except (UserError, OSError):
        return False
    frames = [frame for failure in failures if (frame := frame_of(failure))]
    texts = [f"{frame.file}:{frame.line}</code>" for frame in frames]
    texts += [html.escape(line) for frame in frames for _, line in frame.lines]
    return any(text.replace("&#x27;", "&#39;").replace("&quot;", "&#34;") not in page for text in texts)


def where(failure: Failure) -> str:
    """`file:line` of the tap at which these stages fail, or an empty string."""
    frame = frame_of(failure)
    return f"{frame.file}:{frame.line}" if frame else ""


def how_bad(failure: Failure) -> str:
    """`147 times too far off`, or the status of what has no number."""
    if failure["excess"] is None or failure["excess"] <= 1:
        return failure["status"]
    up_to = "up to " if len(failure["stages"]) > 1 else ""
    return f"{up_to}{times(failure['excess'])} too far off"


def lines(verdicts: Verdicts) -> Iterator[str]:
    """Yields the verdict as lines for a terminal: the headline, and one line for each group of stages that fail alike."""
    failed = sum(stage["status"] != "pass" for stage in verdicts["stages"].values())
    count = f" ({failed} of {counted(len(verdicts['stages']), 'stage')})" if failed else ""
    yield f"{verdicts['overall'].upper()}{count}: {verdicts['headline']}"
    if verdicts["overall"] == "pass" and CAPTURED in verdicts["chains"]:  # the headline is on the stages that ran here
        yield from (f"  {sentence}" for sentence in verdicts["details"] if "captured" in sentence)
    for failure in verdicts["failures"]:
        yield "  " + failure_line(failure)


def failure_line(failure: Failure) -> str:
    """Stages, tap, number, cause and place of a failure; without a cause, its reason."""
    place = where(failure)
    what = " ".join([f"{ranges(failure['stages'])}:", *([failure["tap"]] if failure["tap"] else []), how_bad(failure)])
    return ", ".join([what, *([why] if (why := _why(failure)) else []), *([place] if place else [])])


def _why(failure: Failure) -> str:
    """The cause, or else the first sentence on the error; of what has no number, all of them."""
    if failure["cause"]:
        return failure["cause"]
    if not failure["tap"]:
        text = failure["text"].rstrip(".")
        return _within(text) if failure["status"] == "fail" else text  # an error may begin with a name
    text = failure["text"].partition(". ")[0].rstrip(".")
    if re.match(r"(in \w+: )?the error is", text.lower()) and failure["excess"] is not None:
        return ""  # the number says it
    return _within(text)


def _within(text: str) -> str:
    """A sentence as part of another one: with a small letter first, unless it begins with a name such as R, NaN or RoPE."""
    first, rest = text[:1], text.partition(" ")[0][1:]
    return f"{first.lower()}{text[1:]}" if rest == rest.lower() and (rest or first == "A") else text


def markdown(verdicts: Verdicts) -> str:
    """The verdict as Markdown, for people and for programs that read text."""
    text = [f"**{verdicts['overall']}**: {verdicts['headline']}", ""]
    if verdicts["failures"]:
        text += [TABLE_HEAD, *map(_row, verdicts["failures"])]
    return "\n".join(text)


def markdown_of(failure: Failure, with_source: bool = True) -> str:
    """One failure as Markdown, for an issue: the table with its row, and the source."""
    frame = frame_of(failure) if with_source else None
    source = (
        ["", f"{code(where(failure))} in {code(frame.function)}:", "", "```python", frame.text(), "```"]
        if frame
        else []
    )
    return "\n".join([TABLE_HEAD, _row(failure), *source])


def _row(failure: Failure) -> str:
    """A row of the table in Markdown."""
    excess = "" if failure["excess"] is None else times(failure["excess"]).removesuffix(" times")
    cells = [
        ranges(failure["stages"]),
        failure["status"],
        code(failure["tap"]),
        excess,
        code(failure["cause"]),
        " ".join([failure["text"], *failure["help"]]),
        code(where(failure)),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def github(verdicts: Verdicts) -> Iterator[str]:
    """Yields workflow commands of GitHub Actions, one annotation for each failure, at the line that hands its tap over.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    for failure in verdicts["failures"]:
        frame = frame_of(failure)
        at = f"file={_property(frame.file)},line={frame.line}," if frame else ""
        title = " ".join([ranges(failure["stages"]), failure["tap"] or failure["status"]])
        message = " ".join([f"{how_bad(failure).capitalize()}.", failure["text"], *failure["help"]])
        yield f"::error {at}title={_property(title)}::{_message(message)}"
    if not verdicts["failures"]:
        yield f"::notice title=Layerproof::{_message(verdicts['headline'])}"


def write_job_summary(verdicts: Verdicts) -> None:
    """Appends the verdict to the summary page of the GitHub job, if this process runs in one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"## Layerproof\n\n{markdown(verdicts)}\n")


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def write_junit(verdicts: Verdicts, output: Path) -> None:
    """Writes the verdict as JUnit XML: a suite for each stage, and in it a case for each tap.

    A tap that was not compared is skipped, and a stage without taps is a case of its own.
    """
    root = ElementTree.Element("testsuites", name="layerproof")
    for stage, entry in verdicts["stages"].items():
        taps: Mapping[str, Any] = entry["isolated"]["taps"] or {"stage": entry}
        states = [tap["status"] for tap in taps.values()]
        counts = {"failures": "fail", "errors": "error", "skipped": "missing"}
        numbers = {name: str(states.count(status)) for name, status in counts.items()}
        suite = ElementTree.SubElement(root, "testsuite", {"name": stage, "tests": str(len(taps)), **numbers})
        for name, tap in taps.items():
            case = ElementTree.SubElement(suite, "testcase", classname=stage, name=name)
            kind = {"fail": "failure", "error": "error", "missing": "skipped"}.get(tap["status"])
            if kind:
                ElementTree.SubElement(case, kind, message=_xml_text(tap["reason"] or ""))
    ElementTree.indent(root)
    write_text(output, ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n")


def _xml_text(text: str) -> str:
    """Text without the control characters that XML cannot contain."""
    return "".join(character for character in text if character in "\t\n" or ord(character) >= 32)


def changes(before: Verdicts, now: Verdicts) -> list[str]:
    """What changed since another run, in sentences: stages that were fixed, that broke, and that are further or less far
    off than before by a factor of 2.
    """
    both = [stage for stage in now["stages"] if stage in before["stages"]]
    was, is_ = ({stage: one["stages"][stage]["status"] for stage in both} for one in (before, now))
    found = {
        "fixed": [stage for stage in both if was[stage] != "pass" and is_[stage] == "pass"],
        "broken": [stage for stage in both if was[stage] == "pass" and is_[stage] != "pass"],
        "worse": [stage for stage in both if _factor(before, now, stage) > 2],
        "better, but not right yet": [stage for stage in both if 0 < _factor(before, now, stage) < 0.5],
    }
    return [f"{what}: {ranges(stages)}" for what, stages in found.items() if stages]


def _factor(before: Verdicts, now: Verdicts, stage: str) -> float:
    """By how much the largest excess of a stage that fails in both runs grew; 1 if one has no number."""
    sides = [one["stages"][stage] for one in (before, now)]
    if any(side["status"] != "fail" for side in sides):
        return 1.0
    before_taps, now_taps = (side["isolated"]["taps"] for side in sides)
    # A tap that was not handed over before is no news.
    common = [name for name, tap in now_taps.items() if tap["excess"] and before_taps.get(name, {}).get("excess")]
    most = [max((taps[name]["excess"] or 0.0 for name in common), default=0.0) for taps in (before_taps, now_taps)]
    return most[1] / most[0] if all(most) else 1.0


def chain_of(failure: Failure, verdicts: Verdicts) -> str | None:
    """The chain that a failure is of; None if its stage fails alone, too."""
    stage = failure["stages"][0]
    if verdicts["stages"][stage]["status"] != "pass":
        return None
    return next((name for name, chain in verdicts["chains"].items() if chain["first_wrong"] == stage), None)


def next_command(failure: Failure, verdicts: Verdicts) -> str:
    """The cheapest command that shows whether a fix of a failure is one."""
    chain = chain_of(failure, verdicts)
    return f"layerproof run results/compare/{f'chain/{chain}' if chain else failure['stages'][0]}.json"
