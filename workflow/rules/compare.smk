# results/golden/STAGE.h5, results/noise/STAGE.h5, results/port/STAGE.h5 -> results/compare/STAGE.json
# results/golden/, results/chain/A-B/ -> results/compare/chain/A-B.json

from layerproof.model import captured


rule compare_stage:
    """Every tap of a stage: metrics and status."""
    input:
        golden=GOLDEN_FILES.tensors,
        noise=GOLDEN_FILES.noise,
        port=rules.port_stage.output.tensors,
        tokens=rules.tokens.output.tokens,
        stamp=lambda wildcards: stamp_file(f"results/compare/{wildcards.stage}.json", compare_stage_spec(wildcards)),
    output:
        comparison=update("results/compare/{stage}.json"),
        record=update("results/records/compare/{stage}.json"),
    log:
        "results/logs/compare/{stage}.log",
    benchmark:
        "results/benchmarks/compare/{stage}.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=compare_stage_spec,
        stamp=lambda wildcards: stamp("compare_stage", f"results/compare/{wildcards.stage}.json"),
    shell:
        "python -m layerproof compare {output.comparison:q} --golden {input.golden:q}"
        " --noise {input.noise:q} --port {input.port:q} --tokens {input.tokens:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule compare_chain:
    """A chain against the golden's trajectory: propagated error and gain of each stage."""
    input:
        golden=lambda wildcards: expand(GOLDEN_FILES.tensors, stage=CHAINS[wildcards.chain]),
        port=lambda wildcards: chain_files("results/chain/{chain}/{stage}.h5", wildcards.chain),
        comparisons=lambda wildcards: expand(rules.compare_stage.output.comparison, stage=CHAINS[wildcards.chain]),
        noise=lambda wildcards: expand(
            GOLDEN_FILES.noise, stage=CHAINS[wildcards.chain] if wildcards.chain == captured.CHAIN else []
        ),
        tokens=rules.tokens.output.tokens,
        stamp=lambda wildcards: stamp_file(
            f"results/compare/chain/{wildcards.chain}.json", compare_chain_spec(wildcards)
        ),
    output:
        comparison=update("results/compare/chain/{chain}.json"),
        record=update("results/records/compare/chain/{chain}.json"),
    log:
        "results/logs/compare/chain/{chain}.log",
    benchmark:
        "results/benchmarks/compare/chain/{chain}.tsv"
    wildcard_constraints:
        chain="|".join(CHAINS) or "none",
    container:
        CONTAINERS["cpu"]
    params:
        spec=compare_chain_spec,
        stamp=lambda wildcards: stamp("compare_chain", f"results/compare/chain/{wildcards.chain}.json"),
    shell:
        "python -m layerproof compare-chain {output.comparison:q} --golden {input.golden:q}"
        " --port {input.port:q} --comparisons {input.comparisons:q} --noise {input.noise:q} --tokens {input.tokens:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"
