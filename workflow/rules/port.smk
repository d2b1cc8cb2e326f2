# results/weights/STAGE.json, results/tokens.json, results/golden/PREVIOUS.h5 -> results/port/STAGE.h5
# the same for the first stage of a chain -> results/chain/A-B/STAGE.h5
# tensors captured of a whole compiled model -> results/chain/captured/STAGE.h5

from layerproof.model import captured


rule port_stage:
    """One stage of the port, fed with the golden input of that stage."""
    input:
        weights="results/weights/{stage}.json",
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=lambda wildcards: previous_golden(wildcards.stage),
        preflight="results/preflight/port.json",
        stamp=lambda wildcards: stamp_file(f"results/port/{wildcards.stage}.h5", port_stage_spec(wildcards)),
    output:
        tensors=update("results/port/{stage}.h5"),
        record=update("results/records/port/{stage}.json"),
    log:
        "results/logs/port/{stage}.log",
    benchmark:
        "results/benchmarks/port/{stage}.tsv"
    container:
        CONTAINERS["port"]
    resources:
        neuron=1,
        mem_mb=memory_of("port", own_stage),
        runtime=time_of("port", own_stage, start=port_starts(10)),
    params:
        spec=port_stage_spec,
        stamp=lambda wildcards: stamp("port_stage", f"results/port/{wildcards.stage}.h5"),
    shell:
        "python -m layerproof port {output.tensors:q} --weights {input.weights:q}"
        " --tokens {input.tokens:q} --config {input.config:q} --previous {input.previous:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


# One rule for each chain, because Snakemake cannot tell a rule's set of outputs from a wildcard. (A variable named chain
# would hide the one of Snakemake's own, whose globals these are.)
for chain_name in filter(lambda name: name != captured.CHAIN, CHAINS):

    rule:
        name:
            f"chain_{chain_name}"
        input:
            weights=expand("results/weights/{stage}.json", stage=CHAINS[chain_name]),
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            previous=previous_golden(CHAINS[chain_name][0]),
            preflight="results/preflight/port.json",
            stamps=lambda wildcards, chain_name=chain_name: chain_stamp_files(chain_name),
        output:
            tensors=update(chain_files("results/chain/{chain}/{stage}.h5", chain_name)),
            records=update(chain_files("results/records/chain/{chain}/{stage}.json", chain_name)),
        log:
            f"results/logs/chain/{chain_name}.log",
        benchmark:
            f"results/benchmarks/chain/{chain_name}.tsv"
        container:
            CONTAINERS["port"]
        resources:
            neuron=1,
            mem_mb=memory_of("port", lambda wildcards, chain_name=chain_name: CHAINS[chain_name]),
            runtime=time_of("port", lambda wildcards, chain_name=chain_name: CHAINS[chain_name], start=port_starts(30)),
        params:
            spec=lambda wildcards, chain_name=chain_name: chain_spec(chain_name),
            stamps=lambda wildcards, chain_name=chain_name: chain_stamps(chain_name),
        shell:
            "python -m layerproof port {output.tensors:q} --weights {input.weights:q}"
            " --tokens {input.tokens:q} --config {input.config:q} --previous {input.previous:q}"
            " --spec {params.spec:q} --stamp {params.stamps} --record {output.records:q} > {log:q} 2>&1"


if captured.CHAIN in CHAINS:

    rule chain_captured:
        """What NxD Inference captured of the whole compiled model, as the outputs of stages."""
        input:
            captured=[str(path) for path in CONFIG.captured.values()],
            tokens=rules.tokens.output.tokens,
            stamps=lambda wildcards: chain_stamp_files(captured.CHAIN),
        output:
            tensors=update(chain_files("results/chain/{chain}/{stage}.h5", captured.CHAIN)),
            records=update(chain_files("results/records/chain/{chain}/{stage}.json", captured.CHAIN)),
        log:
            f"results/logs/chain/{captured.CHAIN}.log",
        benchmark:
            f"results/benchmarks/chain/{captured.CHAIN}.tsv"
        container:
            CONTAINERS["port"]
        params:
            spec=lambda wildcards: chain_spec(captured.CHAIN),
            stamps=lambda wildcards: chain_stamps(captured.CHAIN),
        shell:
            "python -m layerproof captured {output.tensors:q} --captured {input.captured:q} --tokens {input.tokens:q}"
            " --spec {params.spec:q} --stamp {params.stamps} --record {output.records:q} > {log:q} 2>&1"
