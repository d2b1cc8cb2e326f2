# results/golden/STAGE.h5, results/noise/STAGE.h5, results/port/STAGE.h5 -> results/compare/STAGE.json
# results/golden/, results/chain/A-B/ -> results/compare/chain/A-B.json, and of chain captured also results/captured/
# results/golden/, results/noise/, chains -> results/bisect.json


rule compare_stage:
    """Compare every tap of one stage with the golden."""
    input:
        golden=GOLDEN_FILES.tensors,
        noise=GOLDEN_FILES.noise,
        port=rules.port_stage.output.tensors,
        tokens=rules.tokens.output.tokens,
        job=job("compare/{stage}", "cpu", settings=["compare.limit"], packages=["numpy", "numba", "h5py"]),
    output:
        comparison=update("results/compare/{stage}.json"),
        record=update("results/records/compare/{stage}.json"),
    log:
        "results/logs/compare/{stage}.log",
    benchmark:
        "results/benchmarks/compare/{stage}.tsv"
    container:
        CONTAINERS["cpu"]
    threads: 4  # a tap each
    shell:
        layerproof("compare", "comparison", "golden noise port tokens")


rule compare_chain:
    """A chain against the golden's trajectory: propagated error and gain of each stage."""
    input:
        golden=of_chain(GOLDEN_FILES.tensors),
        port=of_chain("results/chain/{chain}/{stage}.h5"),
        comparisons=of_chain(rules.compare_stage.output.comparison),
        noise=lambda wildcards: of_chain(GOLDEN_FILES.noise)(wildcards) if wildcards.chain == captured.CHAIN else [],
        own_golden=lambda wildcards: from_own_input("golden") if wildcards.chain == captured.CHAIN else [],
        own_noise=lambda wildcards: from_own_input("noise") if wildcards.chain == captured.CHAIN else [],
        tokens=rules.tokens.output.tokens,
        job=job(
            "compare/chain/{chain}",
            "cpu",
            packages=["numpy", "numba", "h5py"],
            chain=lambda wildcards: wildcards.chain,
            stages=lambda wildcards: list(CHAINS[wildcards.chain]),
            limit=lambda wildcards: CONFIG.compare.limit if wildcards.chain == captured.CHAIN else None,
        ),
    output:
        comparison=update("results/compare/chain/{chain}.json"),
        record=update("results/records/compare/chain/{chain}.json"),
    log:
        "results/logs/compare/chain/{chain}.log",
    benchmark:
        "results/benchmarks/compare/chain/{chain}.tsv"
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof("compare-chain", "comparison", "golden port comparisons noise own_golden own_noise tokens")


BISECTED = stages.first_run(STAGES, RUN.num_layers)


rule bisect:
    """The first stage at which the port goes wrong on its own outputs, by chains alone; not part of the report."""
    input:
        golden=expand(GOLDEN_FILES.tensors, stage=BISECTED),
        noise=expand(GOLDEN_FILES.noise, stage=BISECTED),
        weights=expand("results/weights/{stage}.json", stage=BISECTED),
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=previous_golden(SimpleNamespace(stage=BISECTED[0])),
        job=job(
            "bisect",
            "port",
            PORT_SETTINGS,
            PORT_PACKAGES,
            stages=list(BISECTED),
            left_out=[stage for stage in STAGES if stage not in BISECTED],
        ),
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
    shell:
        layerproof("bisect", "bisection", "golden noise weights tokens config previous", RETRIES)
