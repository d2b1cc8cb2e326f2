# Layerproof. Golden and port, one stage at a time:
#
#   checkpoint, prompts -> results/weights/STAGE.json, results/tokens.json
#     -> results/prediction.json, results/preflight/SIDE.json   what jobs will take, and whether this host has it
#     -> results/golden/STAGE.h5, results/noise/STAGE.h5    the trusted model, with fp32 truth; its noise
#     -> results/port/STAGE.h5, results/chain/A-B/STAGE.h5  the port on the golden's input, and on its own
#     -> results/audit.json                                 what became of the weights
#     -> results/compare/STAGE.json, results/compare/chain/A-B.json                     how far apart they are
#     -> results/forced/STAGE.h5 -> results/diagnosis/STAGE.json    where a stage goes wrong, and why -> results/verdicts.json
#     -> results/trimmed/STAGE.json                         of stages that pass the taps are dropped, if that is asked for
#     -> results/plots/ -> results/report.html -> results/manifest.json -> results/archive/RUN.zip
#
# Any of these files is a target. results/records/ mirrors them with what each was made from.

from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/common.smk"
include: "workflow/rules/containers.smk"
include: "workflow/rules/workers.smk"
include: "workflow/rules/stamps.smk"
include: "workflow/rules/settings.smk"
include: "workflow/rules/resources.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/golden.smk"
include: "workflow/rules/stored.smk"
include: "workflow/rules/port.smk"
include: "workflow/rules/audit.smk"
include: "workflow/rules/compare.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/trim.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/blocks.smk"


onstart:
    if workflow.executor_plugin.name == "slurm":
        from layerproof.host import preflight

        or_exit(preflight.require_slurm)
    # Snakemake 9.27 limits how many jobs start in a second. For that it wakes its scheduler every second once more for each job
    # that ended, which after some hundred jobs takes a core. Its default, 100 a second, is out of reach; others are kept.
    limit = workflow.scheduling_settings.max_jobs_per_timespan
    if limit and (limit.max_jobs, limit.timespan) == (100, 1):
        workflow.scheduler.job_rate_limiter = None
    prepare_port()


rule all:
    """The report and the audit trail behind it."""
    default_target: True
    input:
        rules.report.output.html,
        rules.manifest.output.manifest,
