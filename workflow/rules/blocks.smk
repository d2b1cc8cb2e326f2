# Several stages in one job (stages_per_job): the rules of a stage, for blocks of stages (internals.smk).


# Preferred to the rule of one stage, because they have no wildcards.
for rule_name, (side, _, _, start) in BLOCKS.items():
    for block in blocks_of(rule_name):
        if len(block) == 1:
            continue

        rule:
            name:
                block_of(rule_name, block[0])
            input:
                unpack(lambda wildcards, rule_name=rule_name, block=block: block_inputs(rule_name, block)),
            output:
                **{name: update(files) for name, files in block_files(rule_name, "output", block).items()},
            log:
                sum(block_files(rule_name, "log", block).values(), []),
            benchmark:
                f"results/benchmarks/blocks/{block_of(rule_name, block[0])}.tsv"
            priority: of_one_stage(rule_name).priority
            container:
                CONTAINERS[side]
            threads: threads_of(rule_name)
            resources:
                **block_resources(side, block, start),
            params:
                command=lambda wildcards, input, output, rule_name=rule_name: block_command(rule_name, input, output),
            shell:
                "{params.command} --log {log:q}"
