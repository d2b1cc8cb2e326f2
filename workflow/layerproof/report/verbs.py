"""Verbs that collect the results and report them."""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path

from layerproof.errors import UserError
from layerproof.failures import as_stage_error
from layerproof.files import read_json, write_json, write_text
from layerproof.report import manifest, verdicts
from layerproof.report.ruled_out import without_ruled_out
from layerproof.rerun.command import (
    Verbs,
    add_job_verb,
    add_person_verb,
    of_stage,
    of_stages,
    only_job,
    run_tasks,
    task,
)
from layerproof.rerun.job import Job
from layerproof.rerun.jobs import Task
from layerproof.rerun.records import Record
from layerproof.tensors import pruning


def add_verbs(verbs: Verbs) -> None:
    """Adds `audit`, `prune`, `verdicts`, plots, `report`, `manifest`, `archive`, `verify`, `rerun` and `gate` to the
    command line.
    """
    add_job_verb(
        verbs,
        "audit",
        audit,
        "Reports what became of the weights, and how much memory and disk the jobs need (results/audit.json).",
        *("weights", "golden", "port", "prediction"),
        example="layerproof audit",
        exits="0 if nothing was found; 1 if there is a finding; 2 if no audit exists yet",
    )
    text = "Drops the taps of stages that pass, except their outputs and the statistics of all."
    add_job_verb(verbs, "prune", prune, text, "comparison", "diagnosis", "golden", "port")
    files = "comparisons", "chains", "diagnoses"
    add_job_verb(verbs, "verdicts", collect_verdicts, "Collects all comparisons in one verdict.", *files)
    add_job_verb(verbs, "plot-stage", plot_stage, "Draws the errors of stages.", "comparison")
    text = "Draws the map of all stages and the errors along depth."
    add_job_verb(verbs, "plot-model", plot_model, text, "comparisons", "chains")
    files = (
        *files,
        "plots",
        "records",
        "templates",
        "glossary",
        "causes",
        "verdicts",
        "unused",
        "audit",
        "pruned",
        "preflights",
    )
    add_job_verb(verbs, "report", write_report, "Writes the report.", *files)
    verb = verbs.add_parser("manifest", description="Lists every file of results/ with its digest.")
    verb.set_defaults(action=write_manifest)
    verb.add_argument("output", type=Path)
    verb = verbs.add_parser("archive", description="Packs the results and their manifest in one zip file.")
    verb.set_defaults(action=write_archive)
    verb.add_argument("output", type=Path)
    verb.add_argument("--manifest", type=Path, required=True)
    verb = add_person_verb(
        verbs,
        "verify",
        verify,
        "Finds files that were changed, removed or added since the manifest was written, or in an archive.",
        example="layerproof verify results/archive/2026-11-26.zip",
        exits="0 if every file is as it was; 1 if one differs; 2 if the manifest is missing or unusable",
    )
    verb.add_argument("manifest", type=Path, nargs="?", default=Path("results/manifest.json"), help="or an archive")
    verb = add_person_verb(
        verbs,
        "rerun",
        rerun,
        "Makes verdicts and report again from the tensors in an archive, and says whether they are the same.",
        example="layerproof rerun results/archive/2026-11-26.zip --into checked",
        exits="0 if the verdicts are the same; 1 if they differ; 2 if the archive cannot be used",
    )
    verb.add_argument("archive", type=Path)
    verb.add_argument("--into", type=Path, metavar="FOLDER", help="keep what is made; by default a temporary folder")
    verb = add_person_verb(
        verbs,
        "diff",
        diff,
        "Compares two runs: which verdicts turned, whose error grew or shrank, which jobs ran, which versions differ. A run "
        "is a folder of results, an archive, or a git revision that holds results/.",
        example="layerproof diff results/archive/before.zip results --page diff.html",
        exits="0 if no verdict turned; 1 if one did; 2 if a run cannot be read",
    )
    verb.add_argument("before", help="a folder of results, an archive, or a git revision")
    verb.add_argument("after", help="another one")
    verb.add_argument("--page", type=Path, metavar="FILE", help="write the difference as a page of its own, too")
    verb = add_person_verb(
        verbs,
        "gate",
        gate,
        "Turns the verdict into an exit code, for CI, and says which stages do not pass, where and why.",
        example="layerproof gate --github --junit layerproof.xml",
        exits="0 if the port passes; 1 if it fails; 2 if a stage could not be compared, or the verdict is outdated",
    )
    text = "by default results/verdicts.json"
    verb.add_argument("verdicts", type=Path, nargs="?", default=Path("results/verdicts.json"), help=text)
    verb.add_argument("--markdown", action="store_true", help="print the verdict as Markdown")
    verb.add_argument("--github", action="store_true", help="print annotations for GitHub, and write the job's summary")
    verb.add_argument("--junit", type=Path, metavar="FILE", help="write a test report with one case a stage and tap")


def audit(args: argparse.Namespace) -> int | None:
    """As a job of the workflow or, without an output, by hand: prints what results/audit.json says."""
    if not args.outputs:
        return _print_audit(Path("results/audit.json"))
    job = only_job(args)
    (output,) = args.outputs

    def work() -> None:
        from layerproof.compare import audit

        golden, port = ({path.stem: path for path in paths} for paths in (args.golden, args.port))
        descriptions = {path.stem: read_json(path) for path in args.weights}
        try:
            content = audit.audit(descriptions, golden, port, read_json(args.prediction), job.config.port.dtype)
        except Exception as error:  # the run can do without it
            traceback.print_exc()
            content = audit.unknown(str(as_stage_error(error)))
        for stage, entry in content["stages"].items():
            for finding in entry["findings"]:
                print(f"{stage}: {finding['text']}")
        write_json(output, content)

    run_tasks(args, [task(args, job, [*args.weights, *args.golden, *args.port, args.prediction], work)])
    return None


def _print_audit(path: Path) -> int:
    from layerproof.report import weights

    try:
        section = weights.section(read_json(path), [])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Run layerproof run {path}.") from None
    print(*weights.lines(section), sep="\n")
    return int(bool(section["findings"]))


def prune(args: argparse.Namespace) -> None:
    """Drops the taps of stages that pass. Not in the job that made them: others read them first."""

    def task_of(job: Job) -> Task:
        comparison, diagnosis, golden, port = (
            of_stage(paths, job.stage) for paths in (args.comparison, args.diagnosis, args.golden, args.port)
        )
        (output,) = of_stages(args.outputs, [job.stage])
        files = [golden, port] if read_json(comparison)["status"] == "pass" else []
        if any(pruning.read(path) is None for path in files):  # also such as were made again, with the content they had
            output.unlink(missing_ok=True)

        def work() -> None:
            pruned = [pruning.prune(path) for path in files]
            kept = {str(p.path): {"bytes": p.path.stat().st_size, "whole_bytes": p.original_bytes} for p in pruned}
            write_json(output, {"schema_version": 1, "files": kept})

        return task(args, job, [comparison, diagnosis, golden, port], work)

    run_tasks(args, list(map(task_of, args.job)))


def collect_verdicts(args: argparse.Namespace) -> None:
    job = only_job(args)
    (output,) = args.outputs

    def work() -> None:
        files = (args.comparisons, args.chains, args.diagnoses)
        comparisons, chains, diagnoses = (list(map(read_json, paths)) for paths in files)
        found = without_ruled_out(diagnoses, comparisons)
        write_json(output, verdicts.collect(comparisons, chains, found, limit=job.config.compare.limit))

    run_tasks(args, [task(args, job, [*args.comparisons, *args.chains, *args.diagnoses], work)])


def plot_stage(args: argparse.Namespace) -> None:
    def task_of(job: Job) -> Task:
        comparison, (output,) = of_stage(args.comparison, job.stage), of_stages(args.outputs, [job.stage])

        def work() -> None:
            from layerproof.report import plots

            plots.plot_stage(read_json(comparison), output)

        return task(args, job, [comparison], work)

    run_tasks(args, list(map(task_of, args.job)))


def plot_model(args: argparse.Namespace) -> None:
    job = only_job(args)
    heat_map, depth = args.outputs

    def work() -> None:
        from layerproof.report import plots

        comparisons = list(map(read_json, args.comparisons))
        plots.plot_map(comparisons, heat_map)
        plots.plot_depth(comparisons, list(map(read_json, args.chains)), depth)

    run_tasks(args, [task(args, job, [*args.comparisons, *args.chains], work)])


def write_report(args: argparse.Namespace) -> None:
    job = only_job(args)
    (output,) = args.outputs

    def work() -> None:
        from layerproof import environment
        from layerproof.report import page

        comparisons = list(map(read_json, args.comparisons))
        for comparison, path in zip(comparisons, args.records, strict=True):
            record = Record.read(path)
            if record is not None and "port" in comparison:
                comparison["port"]["compilations"] = record.run.get("compilations")
        run = page.Inputs(
            verdicts=read_json(args.verdicts),
            comparisons=comparisons,
            chains=list(map(read_json, args.chains)),
            diagnoses=without_ruled_out(list(map(read_json, args.diagnoses)), comparisons),
            plots={path.stem: path for path in args.plots},
            unused=read_json(args.unused),
            audit=read_json(args.audit),
            pruned=list(map(read_json, args.pruned)),
            preflights=list(map(read_json, args.preflights)),
            config=job.config,
            software=environment.software(job.versions),
            glossary=args.glossary,
            causes=args.causes,
            results=output.parent,
        )
        write_text(output, page.render(args.templates[0], run))

    # Not the records: they hold times, which are no reason to write the report again.
    files = [
        *args.templates,
        args.glossary,
        args.causes,
        args.verdicts,
        args.unused,
        args.audit,
        *args.pruned,
        *args.preflights,
    ]
    inputs = [*files, *args.comparisons, *args.chains, *args.diagnoses, *args.plots]
    run_tasks(args, [task(args, job, inputs, work)])


def write_manifest(args: argparse.Namespace) -> None:
    manifest.write(args.output)


def write_archive(args: argparse.Namespace) -> None:
    from layerproof.report import archive

    archive.write(args.manifest, args.output)


def verify(args: argparse.Namespace) -> int:
    from layerproof.report import archive

    return archive.verify(args.manifest)


def rerun(args: argparse.Namespace) -> int:
    from layerproof.report import rebuild

    return rebuild.rerun(args.archive, args.into)


def diff(args: argparse.Namespace) -> int:
    from layerproof.report import diff

    found = diff.difference(diff.read(args.before), diff.read(args.after))
    print(*found.lines(), sep="\n")
    if args.page:
        write_text(args.page, found.page())
    return int(bool(found.turned))


def gate(args: argparse.Namespace) -> int:
    from layerproof.report import gate

    verdicts = gate.read(args.verdicts)
    if reason := gate.why_outdated(args.verdicts):
        raise UserError(f"{args.verdicts}: is outdated: {reason}. Run layerproof run.")
    if args.junit:
        gate.write_junit(verdicts, args.junit)
    if args.github:
        gate.write_job_summary(verdicts)
        print(*gate.github(verdicts), sep="\n")
    print(*([gate.markdown(verdicts)] if args.markdown else gate.lines(verdicts)), sep="\n")
    return gate.EXIT[verdicts["overall"]]
