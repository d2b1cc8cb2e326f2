# results/weights/, results/tokens.json -> results/prediction.json -> results/preflight/SIDE.json
# results/weights/, results/golden/, results/port/, results/prediction.json -> results/audit.json


rule predict:
    """The memory that each job will take, and the disk that the run will."""
    input:
        weights=expand("results/weights/{stage}.json", stage=ALL_STAGES),
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        stamp=lambda wildcards: stamp_file("results/prediction.json", predict_spec(wildcards)),
    output:
        prediction=update("results/prediction.json"),
        record=update("results/records/prediction.json"),
    log:
        "results/logs/prediction.log",
    benchmark:
        "results/benchmarks/prediction.tsv"
    container:
        CONTAINERS["golden"]
    params:
        spec=predict_spec,
        stamp=lambda wildcards: stamp("predict", "results/prediction.json"),
    shell:
        "python -m layerproof predict {output.prediction:q} --weights {input.weights:q} --tokens {input.tokens:q}"
        " --config {input.config:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


# One rule for each side, because each runs on its own hosts. The jobs of a side wait for it and are started after it, but do not
# compare it, so they do not run again. (Not as `ancient` inputs: of a job that waits for another one by such an input alone,
# Snakemake does not ask whether it has to run for a reason of its own.)
for side in ["port"] if TAKES_GOLDEN else ["golden", "port"]:

    rule:
        name:
            f"preflight_{side}"
        input:
            prediction=rules.predict.output.prediction,
            stamp=lambda wildcards, side=side: stamp_file(f"results/preflight/{side}.json", preflight_spec(side)),
        output:
            preflight=update(f"results/preflight/{side}.json"),
            record=update(f"results/records/preflight/{side}.json"),
        log:
            f"results/logs/preflight/{side}.log",
        benchmark:
            f"results/benchmarks/preflight/{side}.tsv"
        container:
            CONTAINERS[side]
        resources:
            **{"golden": {"gpu": 1}, "port": {"neuron": 1}}[side],
        params:
            side=side,
            spec=lambda wildcards, side=side: preflight_spec(side),
            stamp=lambda wildcards, side=side: stamp(f"preflight_{side}", f"results/preflight/{side}.json"),
        shell:
            "python -m layerproof preflight {output.preflight:q} --side {params.side} --prediction {input.prediction:q}"
            " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule audit:
    """Of every stage the weights on disk, in the golden and in the port, and what became of them."""
    input:
        weights=expand("results/weights/{stage}.json", stage=STAGES),
        golden=expand("results/golden/{stage}.h5", stage=STAGES),
        port=expand("results/port/{stage}.h5", stage=STAGES),
        prediction=rules.predict.output.prediction,
        stamp=lambda wildcards: stamp_file("results/audit.json", audit_spec(wildcards)),
    output:
        audit=update("results/audit.json"),
        record=update("results/records/audit.json"),
    log:
        "results/logs/audit.log",
    benchmark:
        "results/benchmarks/audit.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=audit_spec,
        stamp=lambda wildcards: stamp("audit", "results/audit.json"),
    shell:
        "python -m layerproof audit {output.audit:q} --weights {input.weights:q} --golden {input.golden:q} --port {input.port:q}"
        " --prediction {input.prediction:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"
