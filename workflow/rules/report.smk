# results/compare/ -> results/plots/ -> results/report.html -> results/manifest.json -> results/archive/RUN.zip


rule plot_stage:
    """Errors of one stage: histogram, quantiles, tokens."""
    input:
        comparison=rules.compare_stage.output.comparison,
        stamp=lambda wildcards: stamp_file(f"results/plots/{wildcards.stage}.svg", plot_stage_spec(wildcards)),
    output:
        plot=update("results/plots/{stage}.svg"),
        record=update("results/records/plots/{stage}.json"),
    log:
        "results/logs/plots/{stage}.log",
    benchmark:
        "results/benchmarks/plots/{stage}.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=plot_stage_spec,
        stamp=lambda wildcards: stamp("plot_stage", f"results/plots/{wildcards.stage}.svg"),
    shell:
        "python -m layerproof plot-stage {output.plot:q} --comparisons {input.comparison:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule plot_model:
    """The map of R by stage and tap, and the errors along depth."""
    input:
        comparisons=rules.verdicts.input.comparisons,
        chains=rules.verdicts.input.chains,
        stamp=lambda wildcards: stamp_file("results/plots/map.svg", plot_model_spec(wildcards)),
    output:
        plots=update(["results/plots/map.svg", "results/plots/depth.svg"]),
        record=update("results/records/plots/map.json"),
    log:
        "results/logs/plots/map.log",
    benchmark:
        "results/benchmarks/plots/map.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=plot_model_spec,
        stamp=lambda wildcards: stamp("plot_model", "results/plots/map.svg"),
    shell:
        "python -m layerproof plot-model {output.plots:q} --comparisons {input.comparisons:q}"
        " --chains {input.chains:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule report:
    """One self-contained page: the verdict, the map, and for each stage what to do about it."""
    input:
        template="workflow/layerproof/report/templates/report.html.j2",
        verdicts=rules.verdicts.output.verdicts,
        unused=rules.weights.output.unused,
        audit=rules.audit.output.audit,
        trimmed=TRIMMED,
        preflights=expand("results/preflight/{side}.json", side=["golden", "port"]),
        comparisons=rules.verdicts.input.comparisons,
        chains=rules.verdicts.input.chains,
        diagnoses=rules.verdicts.input.diagnoses,
        records=expand(rules.port_stage.output.record, stage=STAGES),
        plots=[*expand(rules.plot_stage.output.plot, stage=STAGES), *rules.plot_model.output.plots],
        stamp=lambda wildcards: stamp_file("results/report.html", report_spec(wildcards)),
    output:
        html=update("results/report.html"),
        record=update("results/records/report.json"),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=report_spec,
        stamp=lambda wildcards: stamp("report", "results/report.html"),
    shell:
        "python -m layerproof report {output.html:q} --template {input.template:q}"
        " --verdicts {input.verdicts:q} --unused {input.unused:q} --audit {input.audit:q}"
        " --trimmed {input.trimmed:q} --preflights {input.preflights:q} --comparisons {input.comparisons:q}"
        " --chains {input.chains:q} --diagnoses {input.diagnoses:q} --plots {input.plots:q} --records {input.records:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule manifest:
    """Digest of every file of the run and of what went into it; `layerproof verify` checks them."""
    input:
        html=rules.report.output.html,
        bisection=lambda wildcards: asked_for(rules.bisect.output.bisection),
    output:
        manifest="results/manifest.json",
    log:
        "results/logs/manifest.log",
    container:
        CONTAINERS["cpu"]
    params:
        spec=lambda wildcards: spec("cpu", config=SETTINGS),
    shell:
        "python -m layerproof manifest {output.manifest:q} --spec {params.spec:q} > {log:q} 2>&1"


rule archive:
    """The whole run in one file."""
    input:
        manifest=rules.manifest.output.manifest,
    output:
        zip="results/archive/{run}.zip",
    log:
        "results/logs/archive/{run}.log",
    container:
        CONTAINERS["cpu"]
    shell:
        "python -m layerproof archive {output.zip:q} --manifest {input.manifest:q} > {log:q} 2>&1"
