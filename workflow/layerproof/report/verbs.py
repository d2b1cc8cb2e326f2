"""Verbs that collect the results and report them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from layerproof.errors import UserError
from layerproof.files import read_json, write_json, write_text
from layerproof.report import manifest, verdicts
from layerproof.rerun import jobs
from layerproof.rerun.command import Verbs, add_job_verb, job_of, one_output
from layerproof.rerun.records import Record
from layerproof.tensors import pruning

if TYPE_CHECKING:
    pass


def add_verbs(verbs: Verbs) -> None:
    """Adds `audit`, `trim`, `verdicts`, plots, `report`, `manifest`, `archive`, `verify` and `gate` to the command line."""
    text = "Holds each stage's weights on disk, in the golden and in the port against each other."
    add_job_verb(verbs, "audit", make_audit, text, "weights", "golden", "port", "prediction", by_hand=True)
    text = "Drops the taps of a stage that passes, but its outputs and the statistics of all."
    add_job_verb(verbs, "trim", make_trimmed, text, "comparison", "diagnoses", "golden", "port")
    files = "comparisons", "chains", "diagnoses"
    add_job_verb(verbs, "verdicts", make_verdicts, "Collects all comparisons in one verdict.", *files)
    add_job_verb(verbs, "plot-stage", make_stage_plot, "Draws the errors of one stage.", "comparisons")
    text = "Draws the map of all stages and the errors along depth."
    add_job_verb(verbs, "plot-model", make_model_plots, text, "comparisons", "chains")
    files = *files, "plots", "records", "template", "verdicts", "unused", "audit", "trimmed", "preflights"
    add_job_verb(verbs, "report", make_report, "Writes the report.", *files)
    verb = verbs.add_parser("manifest", help="Lists every file of results/ with its digest.")
    verb.set_defaults(action=make_manifest)
    verb.add_argument("output", type=Path)
    verb.add_argument("--spec", type=json.loads, required=True, help="resolved config, as JSON")
    verb = verbs.add_parser("archive", help="Packs the results and their manifest in one zip file.")
    verb.set_defaults(action=make_archive)
    verb.add_argument("output", type=Path)
    verb.add_argument("--manifest", type=Path, required=True)
    verb = verbs.add_parser("verify", help="Finds files that were changed, removed or added since the manifest.")
    verb.set_defaults(action=verify)
    verb.add_argument("manifest", type=Path, nargs="?", default=Path("results/manifest.json"), help="or an archive")
    verb = verbs.add_parser("gate", help="Exits with 0 on pass, 1 on fail and 2 on error.")
    verb.set_defaults(action=gate)
    verb.add_argument("verdicts", type=Path, nargs="?", default=Path("results/verdicts.json"))


def make_audit(args: argparse.Namespace) -> int | None:
    """As a job of the workflow or, without an output, by hand: the audit of results/ is told on the terminal."""
    if not args.outputs:
        return _tell_audit(Path("results/audit.json"))
    output = one_output(args)

    def work() -> None:
        from layerproof.compare import audit

        golden, port = ({path.stem: path for path in paths} for paths in (args.golden, args.port))
        descriptions = {path.stem: read_json(path) for path in args.weights}
        content = audit.audit(descriptions, golden, port, read_json(args.prediction), args.spec["port_dtype"])
        for stage, entry in content["stages"].items():
            for finding in entry["findings"]:
                print(f"{stage}: {finding['text']}")
        write_json(output, content)

    jobs.run(job_of(args, [*args.weights, *args.golden, *args.port, args.prediction]), work)
    return None


def _tell_audit(path: Path) -> int:
    from layerproof.report import weights as report_weights

    try:
        section = report_weights.section(read_json(path), [])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Run snakemake --cores 1 {path}.") from None
    print(*report_weights.lines(section), sep="\n")
    return int(bool(section["findings"]))


def make_trimmed(args: argparse.Namespace) -> None:
    """Drops the taps of a stage that passes. Not the job of the one that made them: others read them first."""
    (output,) = args.outputs
    files = [*args.golden, *args.port] if read_json(args.comparison)["status"] == "pass" else []
    if any(pruning.read(path) is None for path in files):  # also such as were made again, with the content they had
        output.unlink(missing_ok=True)

    def work() -> None:
        trimmed = [pruning.trim(path) for path in files]
        kept = {str(one.path): {"bytes": one.path.stat().st_size, "whole_bytes": one.whole_bytes} for one in trimmed}
        write_json(output, {"schema_version": 1, "files": kept})

    jobs.run(job_of(args, [args.comparison, *args.diagnoses, *args.golden, *args.port]), work)


def make_verdicts(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        files = (args.comparisons, args.chains, args.diagnoses)
        write_json(output, verdicts.collect(*(list(map(read_json, paths)) for paths in files)))

    jobs.run(job_of(args, [*args.comparisons, *args.chains, *args.diagnoses]), work)


def make_stage_plot(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        from layerproof.report import plots

        plots.plot_stage(read_json(args.comparisons[0]), output)

    jobs.run(job_of(args, args.comparisons), work)


def make_model_plots(args: argparse.Namespace) -> None:
    heat_map, depth = args.outputs

    def work() -> None:
        from layerproof.report import plots

        comparisons = list(map(read_json, args.comparisons))
        plots.plot_map(comparisons, heat_map)
        plots.plot_depth(comparisons, list(map(read_json, args.chains)), depth)

    jobs.run(job_of(args, [*args.comparisons, *args.chains]), work)


def make_report(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        from layerproof.report import page

        comparisons = list(map(read_json, args.comparisons))
        for comparison, path in zip(comparisons, args.records, strict=True):
            record = Record.read(path)
            if record is not None and "port" in comparison:
                comparison["port"]["compilations"] = record.run.get("compilations")
        html = page.render(
            args.template,
            read_json(args.verdicts),
            comparisons,
            list(map(read_json, args.chains)),
            list(map(read_json, args.diagnoses)),
            {path.stem: path for path in args.plots},
            read_json(args.unused),
            read_json(args.audit),
            list(map(read_json, args.trimmed)),
            list(map(read_json, args.preflights)),
            args.spec,
        )
        write_text(output, html)

    # Not the records: they hold times, which are no reason to write the report again.
    files = [args.template, args.verdicts, args.unused, args.audit]
    jobs.run(
        job_of(
            args,
            [*files, *args.trimmed, *args.preflights, *args.comparisons, *args.chains, *args.diagnoses, *args.plots],
        ),
        work,
    )


def make_manifest(args: argparse.Namespace) -> None:
    manifest.write(args.output, args.spec)


def make_archive(args: argparse.Namespace) -> None:
    manifest.archive(args.manifest, args.output)


def verify(args: argparse.Namespace) -> int:
    return manifest.verify(args.manifest)


def gate(args: argparse.Namespace) -> int:
    return verdicts.gate(args.verdicts)
