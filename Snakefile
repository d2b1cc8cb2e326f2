# Layerproof. Golden and port, one stage at a time:
#
#   checkpoint, prompts -> results/weights/STAGE.json, results/tokens.json
#     -> results/prediction.json, results/preflight/SIDE.json   what jobs will take, and whether this host has it
#     -> results/golden/STAGE.h5, results/noise/STAGE.h5    the trusted model, with fp32 truth; its noise
#     -> results/port/STAGE.h5, results/chain/A-B/STAGE.h5  the port on the golden's input, and on its own
#     -> results/compare/STAGE.json, results/compare/chain/A-B.json                     how far apart they are
#     -> results/forced/STAGE.h5 -> results/diagnosis/STAGE.json    where a stage goes wrong, and why
#     -> results/audit.json, results/verdicts.json          what became of the weights, and all in one verdict
#     -> results/trimmed/STAGE.json                         the taps of stages that pass are dropped, if that is asked for
#     -> results/plots/ -> results/report.html -> results/manifest.json -> results/archive/RUN.zip
#
# Any of these files is a target. results/records/ mirrors them with what each was made from.

from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/common.smk"  # config, stages, and what rules are made of
include: "workflow/rules/resources.smk"  # memory and time that a cluster is asked for
include: "workflow/rules/internals.smk"  # what is off Snakemake's documented interface
include: "workflow/rules/model.smk"  # weights, tokens
include: "workflow/rules/host.smk"  # prediction, preflight
include: "workflow/rules/golden.smk"
include: "workflow/rules/port.smk"
include: "workflow/rules/compare.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/blocks.smk"  # several stages in one job


onstart:
    if workflow.executor_plugin.name == "slurm":
        from layerproof.host import preflight

        or_exit(preflight.require_slurm)
    limit_no_starts()
    snakemake_logger.addHandler(KeepDigests())


onerror:
    set_aside_earlier_verdict()


onsuccess:
    shutil.rmtree(summary.SET_ASIDE, ignore_errors=True)


rule all:
    """The report and the audit trail behind it."""
    default_target: True
    input:
        rules.report.output.html,
        rules.manifest.output.manifest,
