"""What the report says about weights, memory and disk: results/audit.json in words."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from layerproof.files import size
from layerproof.model.stages import layer_of, ranges
from layerproof.report.words import counted, with_period


def section(audit: Mapping[str, Any], pruned: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of results/audit.json for the report.

    It has `rows` for the table of weights, `warnings`, `findings` and `notes` as sentences, what the `run` needs, and
    `machines`.
    """
    run = audit["run"]
    return {
        "warnings": [with_period(f"{warning[0].upper()}{warning[1:]}") for warning in audit["warnings"]],
        "rows": _rows(audit["stages"]),
        "findings": _sentences(audit["stages"], notes=False),
        "notes": _sentences(audit["stages"], notes=True),
        "run": {
            "Golden, largest stage": _size(run["golden"]),
            "Golden, full model in one process": _size(run["whole"]),
            "Port, largest stage": _size(run["port"]),
            "Tensors of this run in results/": _size(run["files"]),
            "Kept of these with compare.taps: auto, if all stages pass": _size(run["kept"]),
            **_freed([one for stage in pruned for one in stage["files"].values()]),
        },
        "machines": run["machines"],
    }


def lines(section: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a `section` for a terminal."""
    for row in section["rows"]:
        weights = f"{row['disk']} on disk; {row['golden']} in the golden; {row['port']} in the port"
        yield f"{row['stages']}: {weights}; golden job {row['golden_job']}, port job {row['port_job']}, files {row['files']}"
    for part in ("warnings", "findings", "notes"):
        yield from (f"{part[:-1]}: {sentence}" for sentence in section[part])
    yield from (f"{topic}: {text}" for topic, text in section["run"].items())
    for row in section["machines"]:
        stage, full = ("fits" if row[what] else "does not fit" for what in ("stage", "whole"))
        devices = counted(row["devices"], "device")
        yield f"{row['machine']}, {row['side']}: a stage {stage}; the full model {full} (it needs {devices})"


def _size(count: float | None) -> str:
    return "not known" if count is None else size(count)


def _freed(files: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """By how much pruning made files smaller."""
    if not files:
        return {}
    before, after = (sum(file[key] for file in files) for key in ("whole_bytes", "bytes"))
    return {"Dropped from stages that pass": f"{size(before - after)} of {size(before)}"}


def _rows(audited: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row for consecutive stages with the same weights. The sizes of their files differ only by their names."""
    rows = {stage: _row(entry) for stage, entry in audited.items()}
    groups = [list(group) for _, group in groupby(rows, key=lambda stage: rows[stage])]
    return [
        {"stages": ranges(group), **rows[group[0]], "files": size(max(audited[stage]["files"] for stage in group))}
        for group in groups
    ]


def _row(audited: Mapping[str, Any]) -> dict[str, str]:
    predicted = audited["predicted"]
    return {
        **{side: _by_dtype(audited[side]) for side in ("disk", "golden", "port")},
        **{f"{side}_job": size(predicted[side]) if predicted else "–" for side in ("golden", "port")},
    }


def _by_dtype(found: Mapping[str, int] | None) -> str:
    if not found:
        return "–"
    return ", ".join(f"{size(count)} {dtype}" for dtype, count in sorted(found.items(), key=lambda item: -item[1]))


def _sentences(audited: Mapping[str, Any], notes: bool) -> list[str]:
    """Each finding once, with all stages that have it."""
    by_text: dict[str, list[str]] = {}
    for stage, entry in audited.items():
        for finding in entry["findings"]:
            if finding["note"] == notes:
                by_text.setdefault(finding["text"].replace(f".{layer_of(stage)}.", ".N."), []).append(stage)
    return [f"{ranges(stages)}: {text}" for text, stages in by_text.items()]
