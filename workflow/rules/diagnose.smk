# results/compare/STAGE.json of a stage that fails -> results/forced/STAGE.h5 -> results/diagnosis/STAGE.json


rule teacher_force_stage:
    """A port stage that fails, with the golden's tap in place of each of its own: what is wrong with each step by itself."""
    input:
        comparison=rules.compare_stage.output.comparison,
        golden=GOLDEN_FILES.tensors,
        weights="results/weights/{stage}.json",
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=previous_golden,
        job=job("forced/{stage}", "port", PORT_SETTINGS, PORT_PACKAGES, fed_by=fed_by),
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
    shell:
        layerproof("teacher-force", "tensors", "comparison golden weights tokens config previous", RETRIES)


rule diagnose_stage:
    """Which known mistake a stage that fails behaves like."""
    input:
        comparison=rules.compare_stage.output.comparison,
        golden=own_and_sibling(GOLDEN_FILES.tensors),
        noise=own_and_sibling(GOLDEN_FILES.noise),
        port=rules.port_stage.output.tensors,
        forced=rules.teacher_force_stage.output.tensors,
        weights=lambda wildcards: expand(
            "results/weights/{stage}.json",
            stage=dict.fromkeys([wildcards.stage, *related_stages(wildcards), *sibling(wildcards)]),
        ),
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=lambda wildcards: expand(
            GOLDEN_FILES.tensors, stage=dict.fromkeys([*fed_by(wildcards), *sibling_fed_by(wildcards)])
        ),
        job=job(
            "diagnosis/{stage}",
            "golden",
            settings=[*GOLDEN_SETTINGS, "compare.limit"],
            packages=["torch", "transformers", "numpy", "numba"],
            fed_by=fed_by,
            related=related_stages,
            sibling=sibling,
            sibling_fed_by=sibling_fed_by,
        ),
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
    shell:
        layerproof("diagnose", "diagnosis", "comparison golden noise port forced weights tokens config previous")
