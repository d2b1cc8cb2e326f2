# stages_per_job: several stages in one job, for models whose stages take less time than a job takes to start. Each stage keeps
# its own files, log, record and stamp, so that of such a job, too, only the stages run that have to.

import functools
import itertools

from snakemake.iocontainers import Wildcards
from snakemake.utils import format as filled_in

IN_BLOCKS = {
    # rule: side, stages, minutes that its jobs take whatever the size
    "golden_stage": ("golden", [] if TAKES_GOLDEN or SETTINGS["golden"]["mode"] == "whole" else GOLDEN, 2),
    "port_stage": ("port", STAGES, port_starts(10)),
    "compare_stage": ("cpu", STAGES, None),
    "force_stage": ("port", STAGES, port_starts(10)),
    "diagnose_stage": ("golden", STAGES, 30),
    "trim_stage": ("cpu", STAGES, None),
    "plot_stage": ("cpu", STAGES, None),
}


def block_files(rule_name, block, kind):
    """Outputs or logs of a rule for all stages of a block."""
    patterns = getattr(workflow.get_rule(rule_name), kind)
    return [str(pattern.apply_wildcards({"stage": stage})) for stage in block for pattern in patterns]


@functools.cache
def stage_job(rule_name, stage):
    """Inputs and command line of the job that a rule is for one stage."""
    of_one, wildcards = workflow.get_rule(rule_name), Wildcards(fromdict={"stage": stage})
    inputs, *_ = of_one.expand_input(wildcards)
    outputs, _ = of_one.expand_output(wildcards)
    params, _ = of_one.expand_params(wildcards, inputs, outputs, None)
    log = of_one.expand_log(wildcards)
    return list(inputs), filled_in(of_one.shellcmd, input=inputs, output=outputs, params=params, log=log)


def block_inputs(rule_name, block):
    own = set(block_files(rule_name, block, "output"))
    inputs = (file for stage in block for file in stage_job(rule_name, stage)[0])
    return [file for file in dict.fromkeys(inputs) if file not in own]


def block_lines(rule_name, block):
    return [stage_job(rule_name, stage)[1] for stage in block]


def block_resources(side, block, start):
    if side == "cpu":
        return {}
    of_block = lambda wildcards: block
    device = {"golden": "gpu", "port": "neuron"}[side]
    return {device: 1, "mem_mb": memory_of(side, of_block), "runtime": time_of(side, of_block, start)}


# Preferred to the rule of one stage, because they have no wildcards.
for rule_name, (side, names, start) in IN_BLOCKS.items() if SETTINGS["stages_per_job"] > 1 else ():
    for block_name, members in itertools.groupby(names, functools.partial(block_rule, rule_name)):
        block = list(members)

        rule:
            name:
                block_name
            input:
                lambda wildcards, rule_name=rule_name, block=block: block_inputs(rule_name, block),
            output:
                update(block_files(rule_name, block, "output")),
            log:
                block_files(rule_name, block, "log"),
            benchmark:
                f"results/benchmarks/blocks/{block_name}.tsv"
            priority: workflow.get_rule(rule_name).priority
            container:
                CONTAINERS[side]
            resources:
                **block_resources(side, block, start),
            params:
                lines=lambda wildcards, rule_name=rule_name, block=block: block_lines(rule_name, block),
            shell:
                "python -m layerproof in-turn {params.lines:q}"
