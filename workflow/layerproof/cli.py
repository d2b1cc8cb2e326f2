"""The verbs and their command line.

Heavy imports are inside the verbs: a job that has nothing to do returns before any of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof import client, fingerprint, jobs, manifest, ranks, stored, trimming, verdicts, worker
from layerproof.errors import StageError, UserError
from layerproof.files import digest_of, read_json, write_json, write_text
from layerproof.fingerprint import unrecorded
from layerproof.records import Record

if TYPE_CHECKING:
    from layerproof.metrics import Tensor
    from layerproof.port import Runner
    from layerproof.whole import Whole


def make_checkpoint(args: argparse.Namespace) -> None:
    def work() -> None:
        with unrecorded():
            from layerproof import tiny

        tiny.make(args.outputs[0].parent, seed=args.spec["seed"], form=args.spec["form"])

    jobs.run(_job(args, args.inputs), work)


def make_weights(args: argparse.Namespace) -> None:
    directory = Path(args.spec["checkpoint_dir"])
    # A shard may be hundreds of gigabytes: its time and size tell whether to read it, its content what has changed.
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in args.inputs if path.exists()]

    *stages, unused = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof.loading import describe_stages

        trust = args.spec["trust_remote_code"]
        by_stage, left = describe_stages(directory, [output.stem for output in stages], trust)
        for output, content in [*((output, by_stage[output.stem]) for output in stages), (unused, left)]:
            if not output.exists() or read_json(output) != content:
                write_json(output, content)
        for name in left:
            print(f"{name}: is in the checkpoint, but no stage loads it")

    jobs.run(_job(args, (), files=files), work)


def make_tokens(args: argparse.Namespace) -> None:
    def work() -> None:
        from layerproof import tokens
        from layerproof.checkpoint import read_config

        directory = Path(args.spec["checkpoint_dir"])
        inputs = args.spec["inputs"]
        tokens.make(
            args.outputs[0],
            directory,
            read_config(directory),
            Path(inputs["prompts"]) if inputs["prompts"] else None,
            Path(inputs["token_ids"]) if inputs["token_ids"] else None,
            inputs["max_tokens"],
            args.spec["trust_remote_code"],
        )

    jobs.run(_job(args, args.inputs), work)


def make_golden(args: argparse.Namespace) -> None:
    """Stages of the golden, each fed by the one before; of each its taps, and in a second file its noise.

    A whole model is loaded by the first stage that has to run and is all the others'.
    """
    weights = {path.stem: path for path in args.weights}
    # Absolute and before anything is loaded, since code that comes with a checkpoint may change the directory.
    checkpoint, prompts = _checkpoint(args), args.tokens.absolute()

    @fingerprint.cached
    def start() -> Whole | Exception:
        """What it fails of is kept, too: it would take as long for the next stage, and fail again."""
        with unrecorded():
            from layerproof import tokens, whole

        try:
            return whole.Whole.start(checkpoint, tokens.Tokens.read(prompts), args.spec)
        except Exception as error:
            return error

    def make_stage(
        spec: Mapping[str, Any], weights: Path, before: tuple[Path | None, ...], outputs: tuple[Path, ...]
    ) -> None:
        with unrecorded():
            from layerproof import golden, tokens

        description, ids = read_json(weights), tokens.Tokens.read(prompts)
        previous, previous_noise = (path and path.absolute() for path in before)
        output, noise = (path.absolute() for path in outputs)
        model = start() if spec["mode"] == "whole" else None
        if isinstance(model, Exception):
            raise model
        files = previous, previous_noise, output, noise
        golden.make_stage(spec["stage"], checkpoint, description, ids, *files, settings=spec, whole=model)

    tasks: list[tuple[jobs.Job, jobs.Work]] = []
    before = _only(args.previous), _only(args.noise)
    files = zip(args.outputs[: len(args.record)], args.outputs[len(args.record) :], strict=True)
    for outputs, stamp, record in zip(files, args.stamp, args.record, strict=True):
        stage = outputs[0].stem
        compared = [stage] if stage in args.spec["compared"] else []
        spec = args.spec | {"stage": stage, "compared": compared}
        inputs = tuple(path for path in (weights[stage], args.tokens, args.config, *before) if path)
        job = jobs.Job(args.verb, spec, stamp, inputs, outputs, record)
        tasks.append((job, functools.partial(make_stage, spec, weights[stage], before, outputs)))
        before = outputs
    args.apart(tasks, _leave_error)


def store(args: argparse.Namespace) -> None:
    stored.pack(args.output, args.record, args.weights)


def take_preflight(args: argparse.Namespace) -> None:
    jobs.run(_job(args, [args.stored]), lambda: _made(stored.unpack(args.stored, args.outputs)))


def take_golden(args: argparse.Namespace) -> None:
    """The golden of a stage as another host stored it, if that had the same to make it from as this one has."""
    (weights,) = args.weights
    before = [*args.previous, *args.noise]
    own = stored.Own(weights, args.tokens, args.config, before)
    job = _job(args, [args.stored, weights, args.tokens, args.config, *before])

    damaged = read_json(weights).get("error")

    def work() -> Mapping[str, Any]:
        if damaged:  # as the golden's own job has it
            raise StageError(damaged)
        stored.check(args.stored, own, args.spec)
        return _made(stored.unpack(args.stored, args.outputs))

    jobs.run(job, work, functools.partial(_leave_error, job) if damaged else None)


def _made(record: Record) -> dict[str, Any]:
    """What a taken job's own record keeps of how it was made; the code that made it counts as the job's own."""
    made = {
        "settings": record.spec,
        "inputs": record.inputs,
        "outputs": {name: description["sha256"] for name, description in record.outputs.items()},
        "code": digest_of(record.code),
        **record.run,
    }
    return {"made": made, jobs.CODE: stored.library_code(record)}


def make_port(args: argparse.Namespace) -> None:
    """Stages of the port: the first is fed by the golden, each of the others by the one before.

    Each stage has its own stamp and record, so only those that changed, and those that their change reaches, run again.
    """
    weights = {path.stem: path for path in args.weights}

    @fingerprint.cached
    def start() -> Runner:
        with unrecorded():
            from layerproof import port, tokens

        return port.Runner.start(_checkpoint(args), tokens.Tokens.read(args.tokens), args.spec)

    def read(weights: Path, before: Path | None, source: str) -> tuple[Any, Tensor | None]:
        """What a stage is made of; what it lacks is told before minutes are spent on a device."""
        from layerproof import tensors

        description = read_json(weights)
        if "error" in description:
            raise StageError(description["error"])
        return description, tensors.read_stage_input(before, source) if before else None

    def make_stage(weights: Path, before: Path | None, source: str, output: Path) -> Mapping[str, Any]:
        with unrecorded():
            from layerproof import port

        output = output.absolute()  # before the port's code runs, which may change the directory
        run = port.chain_stage if "chain" in args.spec else port.make_stage
        description, fed = read(weights, before, source)
        return run(start(), weights.stem, description, fed, output)

    def trace_stage(weights: Path, before: Path | None, source: str) -> tuple[dict[str, Any], str]:
        with unrecorded():
            from layerproof import distributed, port, tokens

        description, fed = read(weights, before, source)
        distributed.pretend()
        runner = port.Runner.start(_checkpoint(args), tokens.Tokens.read(args.tokens), args.spec | {"device": "CPU"})
        return port.trace_stage(runner, weights.stem, description, fed)

    tasks: list[tuple[jobs.Job, jobs.Work]] = []
    before, source = _only(args.previous), "golden/out"
    for output, stamp, record in zip(args.outputs, args.stamp, args.record, strict=True):
        inputs = tuple(path for path in (weights[output.stem], args.tokens, args.config, before) if path)
        job = jobs.Job(args.verb, args.spec | {"stage": output.stem}, stamp, inputs, (output,), record)
        files = weights[output.stem], before, source
        trace = functools.partial(trace_stage, *files) if "chain" not in args.spec else None
        make = functools.partial(make_stage, *files)
        tasks.append((job, functools.partial(_by_ranks, args, make, output, trace)))
        before, source = output, "port/out"
    args.apart(tasks, _leave_error)


def make_captured(args: argparse.Namespace) -> None:
    """A chain of what another program captured; a stage whose file cannot be used ends as error, and the others go on."""

    def work(file: Path, output: Path) -> None:
        with unrecorded():
            from layerproof import captured, tokens

        captured.make_stage(output.stem, file, tokens.Tokens.read(args.tokens), output)

    for output, file, stamp, record in zip(args.outputs, args.captured, args.stamp, args.record, strict=True):
        job = jobs.Job(args.verb, args.spec | {"stage": output.stem}, stamp, (file, args.tokens), (output,), record)
        jobs.run(job, functools.partial(work, file, output), functools.partial(_leave_error, job))


def make_forced(args: argparse.Namespace) -> None:
    """A stage that does not fail leaves an empty file: there is nothing to find out."""
    output = args.outputs[0].absolute()
    stage = output.stem
    previous = _only(args.previous)

    def force(output: Path) -> None:  # reads all its files before the port's code runs, which may change the directory
        with unrecorded():
            from layerproof import port, tensors, tokens

        golden = tensors.read_group(args.golden[0], "golden")
        fed = tensors.read_stage_input(previous, "golden/out") if previous else None
        prompts, description = tokens.Tokens.read(args.tokens), read_json(args.weights[0])
        runner = port.Runner.start(_checkpoint(args), prompts, args.spec)
        port.force_stage(runner, stage, description, fed, golden, output)

    def work() -> Mapping[str, Any]:
        from layerproof import tensors

        if read_json(args.comparison)["status"] == "fail":
            trimming.require_whole(args.golden)
            return _by_ranks(args, force, output)
        if not tensors.is_empty(output):  # an equal output is left alone, and what depends on it
            tensors.write(output, {}, attributes={"stage": stage})
        return {}

    inputs = [args.comparison, *args.golden, *args.weights, args.tokens, args.config, *args.previous]
    args.apart([(_job(args, inputs), work)], _leave_error)


def make_diagnosis(args: argparse.Namespace) -> None:
    output = args.outputs[0].absolute()
    stage, previous = args.spec["stage"], _only(args.previous)

    def work() -> None:
        comparison = read_json(args.comparison)
        nothing = verdicts.undiagnosed(stage)
        if comparison["status"] != "fail":
            if not output.exists() or read_json(output) != nothing:
                write_json(output, nothing)
            return
        with unrecorded():
            import transformers.modeling_utils  # noqa: F401

        trimming.require_whole([*args.golden, *args.port])
        # Recorded: the dictionary of faults is filled when it is imported, by functions that no other code names.
        from layerproof import diagnose, tokens

        subject = diagnose.Stage(
            stage,
            _checkpoint(args),
            {path.stem: read_json(path) for path in args.weights},
            tokens.Tokens.read(args.tokens),
            previous and previous.absolute(),
            args.spec,
            args.spec["limit"],
        )
        files = diagnose.Files(args.golden[0], args.noise[0], args.port[0], args.forced[0])
        write_json(output, diagnose.diagnose(subject, comparison, files))

    def leave_error(job: jobs.Job, error: StageError) -> None:
        write_json(output, verdicts.undiagnosed(stage, str(error)))

    inputs = [args.comparison, *args.golden, *args.noise, *args.port, *args.forced, *args.weights, args.tokens]
    job = _job(args, [*inputs, args.config, *args.previous])
    args.apart([(job, work)], leave_error)


def make_comparison(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof import compare, tokens

        trimming.require_whole([*args.golden, *args.port])
        valid = tokens.Tokens.read(args.tokens).valid
        content = compare.compare_stage(
            args.spec["stage"], args.golden[0], args.noise[0], args.port[0], valid, args.spec["limit"]
        )
        write_json(output, content)

    jobs.run(_job(args, [*args.golden, *args.noise, *args.port, args.tokens]), work)


def make_chain_comparison(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof import compare, tokens

        content = compare.compare_chain(
            args.spec["chain"],
            args.spec["stages"],
            {path.stem: path for path in args.golden},
            {path.stem: path for path in args.port},
            {path.stem: read_json(path) for path in args.comparisons},
            tokens.Tokens.read(args.tokens).valid,
            {path.stem: path for path in args.noise},
        )
        write_json(output, content)

    jobs.run(_job(args, [*args.golden, *args.port, *args.comparisons, *args.noise, args.tokens]), work)


def make_bisection(args: argparse.Namespace) -> None:
    output = args.outputs[0].absolute()
    golden, noise = ({path.stem: path.absolute() for path in paths} for paths in (args.golden, args.noise))
    previous = _only(args.previous)

    def work() -> Mapping[str, Any]:
        with unrecorded():
            from layerproof import bisect, tensors, tokens

        prompts = tokens.Tokens.read(args.tokens)
        descriptions = {path.stem: read_json(path) for path in args.weights}
        fed = tensors.read_stage_input(previous, "golden/out") if previous else None
        count, done = args.spec["tp"], []

        @fingerprint.cached
        def start() -> Runner:
            from layerproof import port

            return port.Runner.start(_checkpoint(args), prompts, args.spec)

        def run_here(stages: Sequence[str]) -> Tensor:
            from layerproof import port

            return port.run_chain(start(), descriptions, fed, stages)

        def run(stages: Sequence[str]) -> Tensor:
            if count == 1:
                return run_here(stages)
            made = ranks.run(count, lambda rank: run_here(stages))
            done.extend(made)
            return made[0].value

        content = bisect.bisect(args.spec["stages"], run, golden, noise, prompts.valid)
        left_out = args.spec["left_out"]  # chains have no gap
        if left_out:
            print(f"{', '.join(left_out)}: behind a gap in layers (config.yaml), so not looked at")
        write_json(output, content | {"left_out": left_out})
        return {jobs.CODE: ranks.code_of(done)}

    jobs.run(_job(args, [*args.golden, *args.noise, *args.weights, args.tokens, args.config, *args.previous]), work)


def make_prediction(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof import prediction, tokens

        descriptions = {path.stem: read_json(path) for path in args.weights}
        prompts = tokens.Tokens.read(args.tokens)
        write_json(output, prediction.predict(_checkpoint(args), descriptions, prompts, args.spec))

    jobs.run(_job(args, [*args.weights, args.tokens, args.config]), work)


def _one_output(args: argparse.Namespace) -> Path:
    """Of a verb that may be called by hand, without.

    Raises:
        UserError: if it is no job's call.
    """
    if args.spec is None or args.record is None or len(args.outputs) > 1:
        raise UserError(f"{args.verb}: a file to write wants --spec and --record, too. Leave it out to look by hand.")
    return args.outputs[0]


def _prediction(path: Path) -> Any:
    """What results/prediction.json says; None if it is not there.

    Raises:
        UserError: if it is damaged.
    """
    try:
        return read_json(path) if path.exists() else None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}). Delete it and run again.") from None


def make_preflight(args: argparse.Namespace) -> int | None:
    """Checks of a side as a job of the workflow or, without an output, by hand: told on the terminal and kept nowhere."""
    from layerproof import checks, preflight, surroundings

    def look(config: Mapping[str, Any], checkpoint: Path, results: Path) -> list[checks.Check]:
        prediction = _prediction(args.prediction)
        found = preflight.check_side(args.side, config, checkpoint, results, prediction)
        print(*checks.lines(found), sep="\n", flush=True)
        return found

    if not args.outputs:
        from layerproof.config import read, resolve

        resolved = resolve(read(args.config))
        found = look(resolved.resolved, Path(resolved.checkpoint), Path("results"))
        return int(any(check.status == checks.FAIL for check in found))

    output = _one_output(args)

    def work() -> None:
        found = look(args.spec, _checkpoint(args), output.parent.parent)
        failed = [check for check in found if check.status == checks.FAIL]
        if failed:
            raise UserError(f"the {args.side} cannot run on this host: {' '.join(checks.lines(failed))}")
        content = {
            "schema_version": 1,
            "side": args.side,
            "checks": [asdict(check) for check in found],
            "software": surroundings.software(args.spec),
            "hardware": surroundings.hardware(),
        }
        write_json(output, content)

    jobs.run(_job(args, [args.prediction]), work)
    return None


def make_audit(args: argparse.Namespace) -> int | None:
    """As a job of the workflow or, without an output, by hand: the audit of results/ is told on the terminal."""
    if not args.outputs:
        return _tell_audit(Path("results/audit.json"))
    output = _one_output(args)

    def work() -> None:
        with unrecorded():
            from layerproof import audit

        golden, port = ({path.stem: path for path in paths} for paths in (args.golden, args.port))
        descriptions = {path.stem: read_json(path) for path in args.weights}
        content = audit.audit(descriptions, golden, port, read_json(args.prediction), args.spec["port_dtype"])
        for stage, entry in content["stages"].items():
            for finding in entry["findings"]:
                print(f"{stage}: {finding['text']}")
        write_json(output, content)

    jobs.run(_job(args, [*args.weights, *args.golden, *args.port, args.prediction]), work)
    return None


def _tell_audit(path: Path) -> int:
    from layerproof import report_audit

    try:
        section = report_audit.section(read_json(path), [])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Run snakemake --cores 1 {path}.") from None
    print(*report_audit.lines(section), sep="\n")
    return int(bool(section["findings"]))


def make_trimmed(args: argparse.Namespace) -> None:
    """Drops the taps of a stage that passes. Not the job of the one that made them: others read them first."""
    (output,) = args.outputs
    files = [*args.golden, *args.port] if read_json(args.comparison)["status"] == "pass" else []
    if any(trimming.read(path) is None for path in files):  # also such as were made again, with the content they had
        output.unlink(missing_ok=True)

    def work() -> None:
        trimmed = [trimming.trim(path) for path in files]
        kept = {str(one.path): {"bytes": one.path.stat().st_size, "whole_bytes": one.whole_bytes} for one in trimmed}
        write_json(output, {"schema_version": 1, "files": kept})

    jobs.run(_job(args, [args.comparison, *args.diagnoses, *args.golden, *args.port]), work)


def make_verdicts(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        files = (args.comparisons, args.chains, args.diagnoses)
        write_json(output, verdicts.collect(*(list(map(read_json, paths)) for paths in files)))

    jobs.run(_job(args, [*args.comparisons, *args.chains, *args.diagnoses]), work)


def make_stage_plot(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof import plots

        plots.plot_stage(read_json(args.comparisons[0]), output)

    jobs.run(_job(args, args.comparisons), work)


def make_model_plots(args: argparse.Namespace) -> None:
    heat_map, depth = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof import plots

        comparisons = list(map(read_json, args.comparisons))
        plots.plot_map(comparisons, heat_map)
        plots.plot_depth(comparisons, list(map(read_json, args.chains)), depth)

    jobs.run(_job(args, [*args.comparisons, *args.chains]), work)


def make_report(args: argparse.Namespace) -> None:
    (output,) = args.outputs

    def work() -> None:
        with unrecorded():
            from layerproof import report

        comparisons = list(map(read_json, args.comparisons))
        for comparison, path in zip(comparisons, args.records, strict=True):
            record = Record.read(path)
            if record is not None and "port" in comparison:
                comparison["port"]["compilations"] = record.run.get("compilations")
        html = report.render(
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
        _job(
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


def run_in_turn(args: argparse.Namespace) -> int:
    codes = (subprocess.run(["bash", "-c", line]).returncode for line in args.lines)
    return next(filter(None, codes), 0)


def _by_ranks(
    args: argparse.Namespace,
    make: Callable[[Path], Mapping[str, Any] | None],
    output: Path,
    trace: Callable[[], tuple[dict[str, Any], str]] | None = None,
) -> Mapping[str, Any]:
    """A file of the port that `make` writes: here, or by several ranks a part each, which are put together. With `trace`
    and `port.compile` these tell of their graphs, too. Returns facts for the record.
    """
    count = args.spec["tp"]
    if count == 1:
        return make(output) or {}
    with unrecorded():
        if client.is_cpu(
            args.spec["device"]
        ):  # once for the ranks of all stages; on other devices each has to begin anew
            worker.import_packages(worker.PACKAGES)
    parts = [output.with_name(f"{output.name}.{rank}.tmp") for rank in range(count)]

    def join(graphs: Sequence[tuple[dict[str, Any], str]]) -> None:
        with unrecorded():
            from layerproof import shards, tokens

        shards.join(parts, output, tokens.Tokens.read(args.tokens).valid, graphs)

    try:
        made = ranks.run(count, lambda rank: make(parts[rank]))
        traced = ranks.run(count, lambda rank: trace()) if trace and args.spec["compile"] else []
        joined = ranks.run(1, lambda rank: join([one.value for one in traced]))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    facts = {"ranks": count, "peak_rss_bytes": sum(one.peak_rss_bytes for one in made)}
    return {**(made[0].value or {}), **facts, jobs.CODE: ranks.code_of([*made, *traced, *joined])}


def _job(args: argparse.Namespace, inputs: Sequence[Path], **more: Any) -> jobs.Job:
    (stamp,), (record,) = args.stamp, args.record
    return jobs.Job(args.verb, args.spec | more, stamp, tuple(inputs), tuple(args.outputs), record)


def _checkpoint(args: argparse.Namespace) -> Path:
    """The checkpoint's directory; absolute, since a port or code that comes with a checkpoint may change the directory."""
    return Path(args.spec["checkpoint_dir"]).absolute()


def _only(paths: Sequence[Path]) -> Path | None:
    """The file of a flag that may name one or none, as `--previous` of the first stage."""
    return paths[0] if paths else None


def _leave_error(job: jobs.Job, error: StageError) -> None:
    from layerproof import tensors

    for output in job.outputs:
        tensors.write_error(output, error)


ONE_FILE = ("stored", "tokens", "config", "template", "verdicts", "unused", "comparison", "audit", "prediction")
"""Flags that name one file; the others name any number."""


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The command line; every flag that names several files takes them one after the other."""
    top = argparse.ArgumentParser(
        prog="layerproof", description="Finds the layer where a port goes wrong, and says why."
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def job_verb(name: str, action: Any, text: str, *files: str, by_hand: bool = False) -> argparse.ArgumentParser:
        text += " Without an output, by hand." if by_hand else ""
        verb = verbs.add_parser(name, help=text, description=text)
        verb.set_defaults(action=action)
        verb.add_argument("outputs", nargs="*" if by_hand else "+", type=Path, help="files to write")
        verb.add_argument("--spec", type=json.loads, required=not by_hand, help="settings of the job, as JSON")
        verb.add_argument(
            "--stamp", nargs="+", default=["new"], help="changes when a job must run again (see records.py)"
        )
        verb.add_argument(
            "--record", nargs="+", type=Path, required=not by_hand, help="where to keep what each job was run with"
        )
        for file in files:
            one = file in ONE_FILE
            many: dict[str, Any] = {} if one else {"nargs": "*", "default": []}
            verb.add_argument(f"--{file}", type=Path, required=one and not by_hand, **many)
        return verb

    job_verb("checkpoint", make_checkpoint, "Makes the default checkpoint, a small MiniMax-M2.", "inputs")
    job_verb("weights", make_weights, "Lists each stage's tensors in a checkpoint, with digests.", "inputs")
    job_verb("tokens", make_tokens, "Turns prompts into padded token ids.", "inputs")
    job_verb("golden", make_golden, "Runs stages of the golden.", "weights", "tokens", "config", "previous", "noise")
    job_verb(
        "take-golden",
        take_golden,
        "Takes the golden of a stage that another host stored, if it was made from the same.",
        *("stored", "weights", "tokens", "config", "previous", "noise"),
    )
    job_verb("take-preflight", take_preflight, "Takes what was found of the golden's host before it began.", "stored")
    job_verb(
        "port",
        make_port,
        "Runs stages of the port: the first on the golden's input, each of the others on the output of the one before.",
        *("weights", "tokens", "config", "previous"),
    )
    job_verb(
        "captured", make_captured, "Reads what was captured of a whole compiled model as a chain.", "captured", "tokens"
    )
    job_verb("compare", make_comparison, "Compares the two sides of a stage.", "golden", "noise", "port", "tokens")
    job_verb(
        "compare-chain",
        make_chain_comparison,
        "Compares a chain with the golden's trajectory.",
        *("golden", "port", "comparisons", "noise", "tokens"),
    )
    job_verb(
        "force",
        make_forced,
        "Runs a stage of the port that fails with the golden's tap in place of each of its own.",
        *("comparison", "golden", "weights", "tokens", "config", "previous"),
    )
    job_verb(
        "diagnose",
        make_diagnosis,
        "Finds which known mistake a stage that fails behaves like.",
        *("comparison", "golden", "noise", "port", "forced", "weights", "tokens", "config", "previous"),
    )
    job_verb(
        "bisect",
        make_bisection,
        "Finds the first stage at which the port goes wrong on its own outputs, by halving.",
        *("golden", "noise", "weights", "tokens", "config", "previous"),
    )
    job_verb(
        "predict",
        make_prediction,
        "Predicts the memory of each job and the disk of the run.",
        *("weights", "tokens", "config"),
    )
    job_verb(
        "audit",
        make_audit,
        "Holds each stage's weights on disk, in the golden and in the port against each other.",
        *("weights", "golden", "port", "prediction"),
        by_hand=True,
    )
    job_verb(
        "trim",
        make_trimmed,
        "Drops the taps of a stage that passes, but its outputs and the statistics of all.",
        *("comparison", "diagnoses", "golden", "port"),
    )
    job_verb(
        "verdicts", make_verdicts, "Collects all comparisons in one verdict.", "comparisons", "chains", "diagnoses"
    )
    job_verb("plot-stage", make_stage_plot, "Draws the errors of one stage.", "comparisons")
    job_verb(
        "plot-model",
        make_model_plots,
        "Draws the map of all stages and the errors along depth.",
        "comparisons",
        "chains",
    )
    job_verb(
        "report",
        make_report,
        "Writes the report.",
        *("template", "verdicts", "unused", "audit"),
        *("trimmed", "preflights", "comparisons", "chains", "diagnoses", "plots", "records"),
    )

    verb = job_verb("preflight", make_preflight, "Checks whether this host can run a side.", by_hand=True)
    verb.add_argument("--side", choices=("golden", "port"), required=True)
    verb.add_argument("--config", type=Path, default=Path("config.yaml"), help="which settings to check by hand")
    verb.add_argument("--prediction", type=Path, default=Path("results/prediction.json"))

    verb = verbs.add_parser("store", help="Packs what a job made, for hosts that share no file system with this one.")
    verb.set_defaults(action=store)
    verb.add_argument("output", type=Path)
    verb.add_argument("--record", type=Path, required=True, help="of the job")
    verb.add_argument("--weights", type=Path, help="of the stage that the job made: results/weights/STAGE.json")
    verb = verbs.add_parser("in-turn", help="Runs jobs of several stages one after the other, until one fails.")
    verb.set_defaults(action=run_in_turn)
    verb.add_argument("lines", nargs="+", help="their command lines")
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
    return top


def run(argv: Sequence[str], apart: jobs.Apart = jobs.run_apart) -> int:
    """Runs a verb and returns its exit code; a user's error is one line and exit code 2.

    `apart` runs the jobs of verbs that may take their process down with them.
    """
    args = parser().parse_args(argv)
    args.apart = apart
    try:
        return args.action(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or args.verb}: {error.strerror or error}. Correct this and run again.",
            file=sys.stderr,
        )
        return 2
