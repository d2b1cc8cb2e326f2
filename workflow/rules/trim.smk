# results/diagnosis/STAGE.json -> results/trimmed/STAGE.json; results/golden/STAGE.h5 and results/port/STAGE.h5 become smaller

TRIMMED = expand("results/trimmed/{stage}.json", stage=STAGES if SETTINGS["compare"]["taps"] == "auto" else [])


rule trim_stage:
    """Of a stage that passes only the outputs and the statistics of all taps stay in its files."""
    input:
        comparison=rules.compare_stage.output.comparison,
        diagnosis=rules.diagnose_stage.output.diagnosis,
        golden=GOLDEN_FILES.tensors,
        port=rules.port_stage.output.tensors,
        stamp=lambda wildcards: stamp_file(f"results/trimmed/{wildcards.stage}.json", trim_stage_spec(wildcards)),
    output:
        trimmed=update("results/trimmed/{stage}.json"),
        record=update("results/records/trimmed/{stage}.json"),
    log:
        "results/logs/trimmed/{stage}.log",
    benchmark:
        "results/benchmarks/trimmed/{stage}.tsv"
    priority: 1
    container:
        CONTAINERS["cpu"]
    params:
        spec=trim_stage_spec,
        stamp=lambda wildcards: stamp("trim_stage", f"results/trimmed/{wildcards.stage}.json"),
    shell:
        "python -m layerproof trim {output.trimmed:q} --comparison {input.comparison:q} --diagnoses {input.diagnosis:q}"
        " --golden {input.golden:q} --port {input.port:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"
