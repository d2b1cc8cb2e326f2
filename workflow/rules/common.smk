# config.yaml -> CONFIG (checked and typed), the stages, and what rules are made of: job(), layerproof(), previous_golden().

import functools
import itertools
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from snakemake.logging import logger as snakemake_logger

RULES = Path(str(workflow.current_basedir)).resolve()
# In a clone the library lies beside the rules; of the installed package the rules are a part.
LIBRARY = str(RULES.parent if (RULES.parent / "layerproof").is_dir() else RULES.parents[3])
if LIBRARY not in sys.path:
    sys.path.insert(0, LIBRARY)

from layerproof import devices, running
from layerproof.config import as_json, read, selected
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.host import containers
from layerproof.model import captured, checkpoint, stages
from layerproof.model.resolve import resolve
from layerproof.paths import CAUSES, GLOSSARY, TEMPLATES, WORKFLOW
from layerproof.report import gate
from layerproof.rerun.job import RECORDS, Job
from layerproof.rerun.planner import Planner
from layerproof.terminal import summary
from layerproof.terminal.progress import Plan


def or_exit(function, *arguments):
    """What a function of the library returns. If it raises a user's error, its line is all that is printed."""
    try:
        return function(*arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


for config_file in [*workflow.configfiles, "config.yaml"]:
    if os.path.exists(config_file):  # Snakemake reports a missing one, but not what is wrong in one that exists
        or_exit(read, Path(config_file))


configfile: "config.yaml"


RUN = or_exit(resolve, config)
CONFIG = RUN.settings
STAGES = RUN.stages
ALL_STAGES = stages.all_stages(RUN.num_layers)
CHAINS = RUN.chains
GOLDEN = ALL_STAGES[: max(map(ALL_STAGES.index, STAGES)) + 1]
IMPORTS_GOLDEN = CONFIG.golden.mode == "stored"
EXPORTS_GOLDEN = CONFIG.golden.storage and not IMPORTS_GOLDEN
CONTAINERS = {"golden": CONFIG.containers.golden, "port": CONFIG.containers.port, "cpu": CONFIG.containers.cpu}


def sides_run_on():
    """What each side runs on, as far as it is known before its jobs."""
    executor = workflow.executor_plugin.name
    elsewhere = None if executor in ("local", "dryrun", "touch") else executor
    return {
        "golden": elsewhere or devices.golden_text(CONFIG.golden.device),
        "port": elsewhere or devices.port_text(CONFIG.port.device),
    }


if workflow.is_main_process:
    running.note_this_process()
    # The logger plugin answers what this call asks for; Snakemake knows the targets once it has read the rules.
    plan = Plan(lambda: [str(target) for target in workflow.dag_settings.targets], tuple(STAGES), sides_run_on)
    snakemake_logger.info("Layerproof reads config.yaml.", extra={"layerproof_plan": plan})


def own_file(path):
    """A file of Layerproof's own, by its relative path if it lies here: records then say the same in every clone."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


EVERYTHING = [*as_json(CONFIG)]
"""Every section of config.yaml."""


def caption(name):
    """A text of Snakemake's own report (snakemake --report)."""
    return str(WORKFLOW / f"workflow/resources/captions/{name}.rst")


wildcard_constraints:
    stage="|".join(ALL_STAGES),
    chain="|".join(CHAINS) or "none",
    run=r"[A-Za-z0-9._-]+",


def layerproof(verb, outputs, inputs="", more=""):
    """The command of a rule: what it writes, and what it reads, by their names in the rule, and further flags."""
    files = [f"{{output.{name}:q}}" for name in outputs.split()]
    flags = [f"--{name} {{input.{name}:q}}" for name in inputs.split()]
    return " ".join(["python -m layerproof", verb, *files, *flags, *more.split(), "--job {input.job:q} --log {log:q}"])


PLANNER = Planner(
    RECORDS,
    Path(".layerproof/jobs"),
    lambda name: needs_taps(Path(name).name),
)
DESCRIBED = {}
"""By the name of a job, with {stage} or {chain} in it, how its rule describes it."""


def versions(side, packages):
    """What the numbers of a job depend on besides our code: packages, or in containers the image with the packages in it."""
    if IN_CONTAINERS:
        return {"container": image_digest(CONTAINERS[side])}
    installed = package_versions()
    return {name: installed[name] for name in packages if name in installed}


def job(name, side, settings=(), packages=(), **arguments):
    """The job file among the inputs of a rule. It names settings, as keys of config.yaml, and packages that the output depends on.

    An argument that is a function is called with the job's wildcards.
    """

    def described(wildcards):
        given = {key: value(wildcards) if callable(value) else value for key, value in arguments.items()}
        return Job(
            name.format(**vars(wildcards)), selected(CONFIG, settings), given, versions(side, packages), "", "", ""
        )

    def file(wildcards):
        return job_file(name, described(SimpleNamespace(**dict(wildcards.items()))))

    DESCRIBED[name] = described
    file.job = name
    return file


def jobs(name, stages, side, settings=(), packages=(), **arguments):
    """The job files, one for each stage, of a rule that runs several stages."""
    one = job(name, side, settings, packages, **arguments)

    def files(wildcards):
        return [
            job_file(name, DESCRIBED[name](SimpleNamespace(**dict(wildcards.items()), stage=stage))) for stage in stages
        ]

    files.job = name
    return files


def job_file(name, described):
    if not workflow.is_main_process:  # in a job, which Snakemake has read the Snakefile again
        return str(PLANNER.path(described.name))
    arguments = described.settings, described.arguments, described.versions
    return PLANNER.job_file(described.name, *arguments, rerun_requested(name, described.name) or shows_old_lines(name))


def shows_old_lines(name):
    """Whether the report shows lines of a port that a comment has moved since: no record knows of them."""
    return name == "report" and not CONFIG.report.share and gate.shows_old_lines(summary.REPORT, summary.VERDICTS)


def previous_golden(wildcards, folder="golden"):
    """The golden files that feed a stage; nothing feeds embed."""
    return [f"results/{folder}/{stage}.h5" for stage in fed_by(wildcards)]


def fed_by(wildcards):
    """The stages whose golden outputs feed a stage."""
    return feeding([wildcards.stage])


def feeding(names):
    """The stages whose golden outputs feed these; nothing feeds embed."""
    before = (stages.previous_stage(name, RUN.num_layers) for name in names)
    return [stage for stage in before if stage]


def of_chain(pattern):
    """The files of a chain's stages."""
    return lambda wildcards: expand(pattern, chain=wildcards.chain, stage=CHAINS[wildcards.chain])


def from_own_input(folder):
    """The golden's files of those captured stages whose input was captured, too; what feeds embed is known anyway."""
    chain = CHAINS[captured.CHAIN]
    found = [f"results/{folder}/{stages.EMBED}.h5" for stage in chain if stage == stages.EMBED]
    if IMPORTS_GOLDEN:  # its host does not have what was captured
        return found
    before = {stage: stages.previous_stage(stage, RUN.num_layers) for stage in chain}
    return found + [f"results/captured/{folder}/{stage}.h5" for stage in chain if before[stage] in chain]


def asked_for(target):
    """A target that no other needs, in a list if it exists or is asked for in this call: from then on it is kept up to date."""
    return [target] if exists(target) or target in map(str, workflow.dag_settings.targets) else []


def sizes_and_times(files):
    """By these a job that reads hundreds of gigabytes knows whether to read them again."""
    return [[Path(name).name, os.path.getsize(name), os.stat(name).st_mtime_ns] for name in files]


def with_taps(wildcards):
    """Whether the golden of a stage has taps and noise: if it is compared, or has them from a run with more `layers`."""
    return wildcards.stage in STAGES or PLANNER.has_run_with(golden_job(wildcards.stage, with_taps=True))


def golden_job(stage, with_taps):
    """The job of a stage's golden, with taps or without."""
    side, settings, packages = (
        ("cpu", IMPORTED_SETTINGS, ()) if IMPORTS_GOLDEN else ("golden", GOLDEN_SETTINGS, GOLDEN_PACKAGES)
    )
    given = {"with_taps": with_taps}
    return Job(f"golden/{stage}", selected(CONFIG, settings), given, versions(side, packages), "", "", "")


def in_storage(name):
    return storage(f"{CONFIG.golden.storage}/{name}.zip")


def all_that_is_exported(wildcards):
    if IMPORTS_GOLDEN:
        sys.exit(
            "error: config.yaml: golden.mode: stored imports the golden. Run snakemake export_golden on the host that computes it."
        )
    if not EXPORTS_GOLDEN:
        sys.exit(
            "error: config.yaml: golden.storage: is missing, but export_golden writes the golden there. Write s3://BUCKET/FOLDER."
        )
    return [in_storage(name) for name in ("preflight", *GOLDEN)]


def related_stages(wildcards):
    """The stages whose weights a port may have loaded in this one's place."""
    return stages.related_stages(wildcards.stage, RUN.num_layers)


def sibling(wildcards):
    """The layer of the same kind, in a list, into which a mistake in this one's code is put, too."""
    found = stages.sibling(wildcards.stage, STAGES, KINDS)
    return [found] if found else []


def own_and_sibling(pattern):
    """The files of a stage and of its sibling."""
    return lambda wildcards: expand(pattern, stage=[wildcards.stage, *sibling(wildcards)])


def sibling_fed_by(wildcards):
    """The stages whose golden outputs feed the sibling."""
    return feeding(sibling(wildcards))


def needs_taps(stage):
    """Whether the taps of a stage are needed where they were dropped: all are kept now, or its comparison has to run."""
    if stage not in STAGES or CONFIG.compare.taps == "all":
        return stage in STAGES
    before = GOLDEN[: GOLDEN.index(stage) + 1]
    return any(will_run("golden", name) for name in before) or will_run("port", stage) or will_run("compare", stage)


@functools.cache
def will_run(folder, stage):
    """Whether the golden, port or comparison of a stage has to run, for all that is known before any job ran."""
    name = f"{folder}/{{stage}}"
    described = DESCRIBED[name](SimpleNamespace(stage=stage))
    return rerun_requested(name, described.name) or PLANNER.is_stale(described)
