# What Layerproof needs of Snakemake beyond its documented interface. Tried with Snakemake 9.27.1.

import logging
import shlex

from snakemake.iocontainers import Wildcards
from snakemake.settings.types import DeploymentMethod
from snakemake.utils import format as filled_in
from snakemake_interface_logger_plugins.common import LogEvent

from layerproof import digests, warm

if workflow.storage_settings.default_storage_provider:
    # Of an output that a job may leave as it is, Snakemake 9.27 makes a copy first, on the local disk alone.
    sys.exit(
        "error: --default-storage-provider: results/ must be local. Omit the option; for hosts that share no file system, set "
        "golden.storage (docs/clusters.md)."
    )

# Containers: what is bound into them, and the digest of each image.

IN_CONTAINERS = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method

if IN_CONTAINERS:
    USED = [
        str(WORKFLOW),
        LIBRARY,
        CONFIG.model.checkpoint,
        CONFIG.inputs.prompts,
        CONFIG.inputs.token_ids,
        CONFIG.port.module,
        CONFIG.port.captured,
    ]
    for argument in containers.arguments(
        [Path(path) for path in [*USED, *os.environ.get("PYTHONPATH", "").split(":")] if path]
    ):
        # It is there already in jobs that a cluster runs.
        if f" {argument} " not in f" {workflow.deployment_settings.apptainer_args} ":
            workflow.deployment_settings.apptainer_args += f" {argument}"


@functools.cache
def image_digest(image):
    return or_exit(containers.digest, image, Path(".layerproof/images"))


# How jobs start: with the library, and on this host from a process that has imported the large packages (layerproof.warm).

FIND_LIBRARY = f"export PYTHONPATH={shlex.quote(LIBRARY)}${{PYTHONPATH:+:$PYTHONPATH}}"
NO_XLA = "export USE_TORCH_XLA=0"  # accelerate would start the XLA runtime in golden jobs, which have no use for it
START_WARM = "" if IN_CONTAINERS else warm.shell_prefix(own_server=workflow.is_main_process)

shell.executable("bash")
shell.prefix(f"set -euo pipefail; {FIND_LIBRARY}; {NO_XLA}; {START_WARM}".replace("{", "{{").replace("}", "}}"))


# Which jobs this call of snakemake was told to run whatever their state (-F, -R, -f).


@functools.cache
def rules_of(job_name):
    """The rules that have a job file of this name, with {stage} in it, among their inputs."""
    return [rule for rule in workflow.rules if any(getattr(item, "job", None) == job_name for item in rule.input)]


def rerun_requested(job_name, name):
    """Whether this call of snakemake was told to run a job, by its rule, its block or one of its outputs."""
    asked = workflow.dag_settings
    if not workflow.is_main_process or not (asked.forceall or asked.forcerun or asked.forcetargets):
        return False
    stage = name.rpartition("/")[2]
    named = set()
    for made_by in rules_of(job_name):
        outputs = [re.sub(r"\{.*?\}", stage, str(output)) for output in made_by.output]
        own = [output for output in outputs if Path(output).stem == stage] or outputs
        # With the prefix that another workflow gave, which uses this one as a module.
        blocks = {
            made_by.name.removesuffix(name) + block
            for name in BLOCKS
            if blocks_of(name) and of_one_stage(name) is made_by and (block := block_of(name, stage))
        }
        named |= {made_by.name, *blocks, *own}
    return bool(
        asked.forceall
        or named & {str(target) for target in asked.forcerun}
        or (asked.forcetargets and named & {str(target) for target in asked.targets})
    )


# Blocks: several stages in one job (stages_per_job). Such a job has the command of the rule for one stage, with the files of all
# its stages. Each stage keeps its own files, log, record and job file, so it runs only if it must.

SIGNATURES = checkpoint.stage_signatures(Path(CONFIG.model.checkpoint), ALL_STAGES)
LAYER_TYPES = dict(enumerate(checkpoint.layer_types(checkpoint.read_config(Path(CONFIG.model.checkpoint)))))
KINDS = {name: (SIGNATURES[name], str(LAYER_TYPES.get(stages.layer_of(name)))) for name in ALL_STAGES}
BLOCKS = {
    # rule: side, its stages, what only stages of one block may share, minutes that its jobs take whatever the size
    "golden_stage": ("golden", [] if IMPORTS_GOLDEN or CONFIG.golden.mode == "whole" else GOLDEN, None, 2),
    "port_stage": ("port", STAGES, SIGNATURES, port_starts(10)),
    "compare_stage": ("cpu", STAGES, None, None),
    "teacher_force_stage": ("port", STAGES, SIGNATURES, port_starts(10)),
    "diagnose_stage": ("golden", STAGES, SIGNATURES, 30),
    "prune_stage": ("cpu", STAGES, None, None),
    "plot_stage": ("cpu", STAGES, None, None),
}


@functools.cache
def stages_asked_for():
    """The stages whose files alone this call was asked for; all, if it was asked for anything else."""
    found = {Path(str(target)).stem for target in workflow.dag_settings.targets}
    return [stage for stage in ALL_STAGES if stage in found] if found and found <= set(ALL_STAGES) else ALL_STAGES


def is_used(rule_name, block):
    """Whether this call needs all stages of a block. A stage that is asked for alone runs alone, by the rule of one stage."""
    if not workflow.is_main_process:
        return True
    asked = stages_asked_for()
    return (
        block[-1] in ALL_STAGES[: ALL_STAGES.index(asked[-1]) + 1]
        if rule_name == "golden_stage"
        else set(block) <= set(asked)
    )


@functools.cache
def blocks_of(rule_name):
    """The blocks of a rule, each a list of stages in the order of the model: of one kind where the rule asks for it."""
    _, members, signatures, _ = BLOCKS[rule_name]
    by_signature = {}
    for stage in members:
        by_signature.setdefault(signatures[stage] if signatures else None, []).append(stage)
    size = CONFIG.stages_per_job
    return [list(block) for same in by_signature.values() for block in itertools.batched(same, size)]


@functools.cache
def block_of(rule_name, stage):
    """The name of the rule that runs a stage together with others; None if it has a job of its own."""
    for block in blocks_of(rule_name) if rule_name in BLOCKS else ():
        if stage in block and len(block) > 1:
            return f"{rule_name}s_{block[0]}"
    return None


def of_one_stage(rule_name):
    """The rule of one stage, by its name here; in a workflow that uses this one as a module it may have another."""
    return getattr(rules, rule_name).rule


def threads_of(rule_name):
    """The threads of the rule of one stage, also where a profile or the command line says how many."""
    return of_one_stage(rule_name).resources["_cores"].value


def block_files(rule_name, section, block):
    """Outputs or logs of a rule for all stages of a block, by their names in the rule."""
    of_rule = getattr(of_one_stage(rule_name), section)
    return {
        name: [str(item.apply_wildcards({"stage": stage})) for stage in block for item in flat(files)]
        for name, files in of_rule._allitems()
    }


def flat(files):
    return [files] if isinstance(files, str) else list(files)


def block_inputs(rule_name, block):
    """Inputs of a rule for all stages of a block, by their names in the rule, but what the block itself makes.

    A block that is not used asks for a file that no rule makes, so Snakemake takes the rule of one stage.
    """
    if not is_used(rule_name, block):
        return {"unused": f".layerproof/unused/{block_of(rule_name, block[0])}"}
    own = {file for files in block_files(rule_name, "output", block).values() for file in files}
    merged = {}
    for stage in block:
        inputs, *_ = of_one_stage(rule_name).expand_input(Wildcards(fromdict={"stage": stage}))
        for name, files in inputs._allitems():
            merged.setdefault(name, {}).update(dict.fromkeys(map(str, flat(files))))
    return {name: [file for file in files if file not in own] for name, files in merged.items()}


def block_command(rule_name, input, output):
    """The command of the rule of one stage for the files of a block, up to its logs. (A parameter, because Snakemake looks at the
    text of `shell` again when the job runs.)
    """
    command, _, _ = of_one_stage(rule_name).shellcmd.partition(" --log ")
    return filled_in(command, input=input, output=output)


def block_resources(side, block, start):
    if side == "cpu":
        return {}
    of_block = lambda wildcards: block
    device = {"golden": "gpu", "port": "neuron"}[side]
    return {device: 1, "mem_mb": memory_of(side, of_block), "runtime": time_of(side, of_block, start)}


# Each chain, and each block of stages, has a rule of its own; a profile speaks of them as `chain`, and as the rule of one stage.
for of_rules in (workflow.resource_settings.overwrite_resources, workflow.group_settings.overwrite_groups):
    for rule_name in list(of_rules):
        chains = {f"chain_{name}" for name in CHAINS if rule_name == "chain" and name != captured.CHAIN}
        blocks = {block_of(rule_name, stage) for stage in ALL_STAGES} - {None}
        of_rules.update({name: of_rules.get(name, of_rules[rule_name]) for name in chains | blocks})


class KeepDigests(logging.Handler):
    """Tells of every output when its job has ended and Snakemake has given it a new time, so that it need not be read again."""

    def emit(self, record):
        if getattr(record, "event", None) == LogEvent.JOB_FINISHED:
            for output in self.outputs.get(record.job_id, ()):
                digests.keep_after_touch(Path(output))

    @functools.cached_property
    def outputs(self):
        return {workflow.dag.jobid(job): list(job.output) for job in workflow.dag.jobs}


def limit_no_starts():
    """Snakemake 9.27 limits how many jobs start in a second. For that it wakes its scheduler every second once more for each job
    that ended, which after some hundred jobs takes a core. Its default, 100 a second, is out of reach; others are kept.
    """
    limit = workflow.scheduling_settings.max_jobs_per_timespan
    if limit and (limit.max_jobs, limit.timespan) == (100, 1):
        workflow.scheduler.job_rate_limiter = None


# A run that fails before it has made its own verdict leaves none of an earlier run standing as if it were new.


def set_aside_earlier_verdict():
    """Moves what this call was to make anew and did not, of verdict, report and manifest, to results/previous/."""
    answers = {rules.verdicts.rule, rules.report.rule, rules.manifest.rule}
    for job in workflow.dag.jobs:
        is_unmade = workflow.dag.needrun(job) and not workflow.dag.finished(job)
        if is_unmade and {job.rule} & answers:
            for name in map(str, job.output):
                if Path(name).exists() and not Path(name).is_relative_to(RECORDS):
                    summary.SET_ASIDE.mkdir(parents=True, exist_ok=True)
                    os.replace(name, summary.SET_ASIDE / Path(name).name)
