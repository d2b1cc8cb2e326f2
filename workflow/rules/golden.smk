# results/weights/STAGE.json, results/tokens.json, results/{golden,noise}/PREVIOUS.h5 -> results/{golden,noise}/STAGE.h5


if not TAKES_GOLDEN:

    rule golden_stage:
        """One stage of the trusted model on its own trajectory, its fp32 truth from the same input, and its noise."""
        input:
            weights="results/weights/{stage}.json",
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            previous=lambda wildcards: previous_golden(wildcards.stage),
            noise=lambda wildcards: previous_golden(wildcards.stage, "noise"),
            preflight="results/preflight/golden.json",
            stamp=lambda wildcards: stamp_file(f"results/golden/{wildcards.stage}.h5", golden_stage_spec(wildcards)),
        output:
            tensors=update("results/golden/{stage}.h5"),
            noise=update("results/noise/{stage}.h5"),
            record=update("results/records/golden/{stage}.json"),
        log:
            "results/logs/golden/{stage}.log",
        benchmark:
            "results/benchmarks/golden/{stage}.tsv"
        container:
            CONTAINERS["golden"]
        resources:
            gpu=1,
            mem_mb=memory_of("golden", own_stage),
            runtime=time_of("golden", own_stage, start=2),
        params:
            spec=golden_stage_spec,
            stamp=lambda wildcards: stamp("golden_stage", f"results/golden/{wildcards.stage}.h5"),
        shell:
            "python -m layerproof golden {output.tensors:q} {output.noise:q} --weights {input.weights:q}"
            " --tokens {input.tokens:q} --config {input.config:q} --previous {input.previous:q}"
            " --noise {input.noise:q}"
            " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


if SETTINGS["golden"]["mode"] == "whole":

    ruleorder: golden_whole > golden_stage

    rule golden_whole:
        """All stages of the trusted model in one process, which holds it whole."""
        input:
            weights=expand("results/weights/{stage}.json", stage=GOLDEN),
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            preflight="results/preflight/golden.json",
            stamps=golden_stamp_files,
        output:
            tensors=update(expand("results/golden/{stage}.h5", stage=GOLDEN)),
            noise=update(expand("results/noise/{stage}.h5", stage=GOLDEN)),
            records=update(expand("results/records/golden/{stage}.json", stage=GOLDEN)),
        log:
            "results/logs/golden/whole.log",
        benchmark:
            "results/benchmarks/golden/whole.tsv"
        container:
            CONTAINERS["golden"]
        resources:
            gpu=1,
            mem_mb=memory_of("golden", lambda wildcards: ALL_STAGES, at_once=True),
            runtime=time_of("golden", lambda wildcards: GOLDEN, start=30),
        params:
            spec=lambda wildcards: golden_spec(compared=list(filter(has_taps, GOLDEN))),
            stamps=golden_stamps,
        shell:
            "python -m layerproof golden {output.tensors:q} {output.noise:q} --weights {input.weights:q}"
            " --tokens {input.tokens:q} --config {input.config:q}"
            " --spec {params.spec:q} --stamp {params.stamps} --record {output.records:q} > {log:q} 2>&1"
