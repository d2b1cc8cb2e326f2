# results/compare/STAGE.json of a stage that fails -> results/forced/STAGE.h5 -> results/diagnosis/STAGE.json
# all comparisons and diagnoses -> results/verdicts.json


rule force_stage:
    """A port stage that fails, with the golden's tap in place of each of its own: what is wrong of itself."""
    input:
        comparison=rules.compare_stage.output.comparison,
        golden=GOLDEN_FILES.tensors,
        weights="results/weights/{stage}.json",
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=lambda wildcards: previous_golden(wildcards.stage),
        stamp=lambda wildcards: stamp_file(f"results/forced/{wildcards.stage}.h5", force_stage_spec(wildcards)),
    output:
        tensors=update("results/forced/{stage}.h5"),
        record=update("results/records/forced/{stage}.json"),
    log:
        "results/logs/forced/{stage}.log",
    benchmark:
        "results/benchmarks/forced/{stage}.tsv"
    container:
        CONTAINERS["port"]
    resources:
        neuron=1,
        mem_mb=memory_of("port", own_stage),
        runtime=time_of("port", own_stage, start=port_starts(10)),
    params:
        spec=force_stage_spec,
        stamp=lambda wildcards: stamp("force_stage", f"results/forced/{wildcards.stage}.h5"),
    shell:
        "python -m layerproof force {output.tensors:q} --comparison {input.comparison:q} --golden {input.golden:q}"
        " --weights {input.weights:q} --tokens {input.tokens:q} --config {input.config:q} --previous {input.previous:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule diagnose_stage:
    """Which known mistake a stage that fails behaves like."""
    input:
        comparison=rules.compare_stage.output.comparison,
        golden=GOLDEN_FILES.tensors,
        noise=GOLDEN_FILES.noise,
        port=rules.port_stage.output.tensors,
        forced=rules.force_stage.output.tensors,
        weights=lambda wildcards: expand(
            "results/weights/{stage}.json",
            stage=[wildcards.stage, *stages.related_stages(wildcards.stage, CONFIG.num_layers)],
        ),
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=lambda wildcards: previous_golden(wildcards.stage),
        stamp=lambda wildcards: stamp_file(f"results/diagnosis/{wildcards.stage}.json", diagnose_stage_spec(wildcards)),
    output:
        diagnosis=update("results/diagnosis/{stage}.json"),
        record=update("results/records/diagnosis/{stage}.json"),
    log:
        "results/logs/diagnosis/{stage}.log",
    benchmark:
        "results/benchmarks/diagnosis/{stage}.tsv"
    container:
        CONTAINERS["golden"]
    resources:
        gpu=1,
        mem_mb=memory_of("golden", own_stage),
        runtime=time_of("golden", own_stage, start=30),
    params:
        spec=diagnose_stage_spec,
        stamp=lambda wildcards: stamp("diagnose_stage", f"results/diagnosis/{wildcards.stage}.json"),
    shell:
        "python -m layerproof diagnose {output.diagnosis:q} --comparison {input.comparison:q} --golden {input.golden:q}"
        " --noise {input.noise:q} --port {input.port:q} --forced {input.forced:q} --weights {input.weights:q}"
        " --tokens {input.tokens:q} --config {input.config:q} --previous {input.previous:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule bisect:
    """The first stage at which the port goes wrong on its own outputs, by chains alone; not part of the report."""
    input:
        golden=expand(GOLDEN_FILES.tensors, stage=BISECTED),
        noise=expand(GOLDEN_FILES.noise, stage=BISECTED),
        weights=expand("results/weights/{stage}.json", stage=BISECTED),
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=previous_golden(BISECTED[0]),
        stamp=lambda wildcards: stamp_file("results/bisect.json", bisect_spec(wildcards)),
    output:
        bisection=update("results/bisect.json"),
        record=update("results/records/bisect.json"),
    log:
        "results/logs/bisect.log",
    benchmark:
        "results/benchmarks/bisect.tsv"
    container:
        CONTAINERS["port"]
    resources:
        neuron=1,
        mem_mb=memory_of("port", lambda wildcards: BISECTED, at_once=True),
        runtime=time_of("port", lambda wildcards: BISECTED * (1 + len(BISECTED).bit_length()), start=port_starts(60)),
    params:
        spec=bisect_spec,
        stamp=lambda wildcards: stamp("bisect", "results/bisect.json"),
    shell:
        "python -m layerproof bisect {output.bisection:q} --golden {input.golden:q} --noise {input.noise:q}"
        " --weights {input.weights:q} --tokens {input.tokens:q} --config {input.config:q}"
        " --previous {input.previous:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule verdicts:
    """All comparisons and diagnoses as one verdict, for programs."""
    input:
        comparisons=expand(rules.compare_stage.output.comparison, stage=STAGES),
        chains=expand(rules.compare_chain.output.comparison, chain=CHAINS),
        diagnoses=expand(rules.diagnose_stage.output.diagnosis, stage=STAGES),
        stamp=lambda wildcards: stamp_file("results/verdicts.json", verdicts_spec(wildcards)),
    output:
        verdicts=update("results/verdicts.json"),
        record=update("results/records/verdicts.json"),
    log:
        "results/logs/verdicts.log",
    benchmark:
        "results/benchmarks/verdicts.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=verdicts_spec,
        stamp=lambda wildcards: stamp("verdicts", "results/verdicts.json"),
    shell:
        "python -m layerproof verdicts {output.verdicts:q} --comparisons {input.comparisons:q}"
        " --chains {input.chains:q} --diagnoses {input.diagnoses:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"
