# results/weights/, results/golden/, results/port/, results/prediction.json -> results/audit.json
# all comparisons and diagnoses -> results/verdicts.json
# results/compare/ -> results/plots/ -> results/report.html -> results/manifest.json -> results/archive/RUN.zip
# with compare.taps auto: results/diagnosis/STAGE.json -> results/trimmed/STAGE.json; the files of a stage that passes shrink

PRUNED = expand("results/trimmed/{stage}.json", stage=STAGES if CONFIG.compare.taps == "auto" else [])


rule audit:
    """The weights of every stage on disk, in the golden and in the port, and what became of them."""
    input:
        weights=expand("results/weights/{stage}.json", stage=STAGES),
        golden=expand("results/golden/{stage}.h5", stage=STAGES),
        port=expand("results/port/{stage}.h5", stage=STAGES),
        prediction=rules.predict.output.prediction,
        job=job("audit", "cpu", settings=["port.dtype"], packages=["h5py"]),
    output:
        audit=update("results/audit.json"),
        record=update("results/records/audit.json"),
    log:
        "results/logs/audit.log",
    benchmark:
        "results/benchmarks/audit.tsv"
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof("audit", "audit", "weights golden port prediction")


rule verdicts:
    """All comparisons and diagnoses as one verdict, for programs."""
    input:
        comparisons=expand(rules.compare_stage.output.comparison, stage=STAGES),
        chains=expand(rules.compare_chain.output.comparison, chain=CHAINS),
        diagnoses=expand(rules.diagnose_stage.output.diagnosis, stage=STAGES),
        job=job("verdicts", "cpu", settings=["compare.limit"]),
    output:
        verdicts=report(update("results/verdicts.json"), caption=caption("verdicts"), category="Verdict"),
        record=update("results/records/verdicts.json"),
    log:
        "results/logs/verdicts.log",
    benchmark:
        "results/benchmarks/verdicts.tsv"
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof("verdicts", "verdicts", "comparisons chains diagnoses")


rule prune_stage:
    """Only the outputs and the statistics of all taps stay in the files of a stage that passes."""
    input:
        comparison=rules.compare_stage.output.comparison,
        diagnosis=rules.diagnose_stage.output.diagnosis,
        golden=GOLDEN_FILES.tensors,
        port=rules.port_stage.output.tensors,
        job=job("trimmed/{stage}", "cpu", packages=["h5py"]),
    output:
        pruned=update("results/trimmed/{stage}.json"),
        record=update("results/records/trimmed/{stage}.json"),
    log:
        "results/logs/trimmed/{stage}.log",
    benchmark:
        "results/benchmarks/trimmed/{stage}.tsv"
    priority: 1
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof("prune", "pruned", "comparison diagnosis golden port")


rule plot_stage:
    """Errors of one stage: histogram, quantiles, tokens."""
    input:
        comparison=rules.compare_stage.output.comparison,
        job=job("plots/{stage}", "cpu", packages=["matplotlib"]),
    output:
        plot=report(
            update("results/plots/{stage}.svg"),
            caption=caption("stage"),
            category="Stages",
            labels={"stage": "{stage}", "plot": "errors of out"},
        ),
        record=update("results/records/plots/{stage}.json"),
    log:
        "results/logs/plots/{stage}.log",
    benchmark:
        "results/benchmarks/plots/{stage}.tsv"
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof("plot-stage", "plot", "comparison")


rule plot_model:
    """The map of R by stage and tap, and the errors along depth."""
    input:
        comparisons=rules.verdicts.input.comparisons,
        chains=rules.verdicts.input.chains,
        job=job("plots/map", "cpu", packages=["matplotlib"]),
    output:
        map=report(update("results/plots/map.svg"), caption=caption("map"), category="Model", labels={"plot": "map"}),
        depth=report(
            update("results/plots/depth.svg"),
            caption=caption("depth"),
            category="Model",
            labels={"plot": "along depth"},
        ),
        record=update("results/records/plots/map.json"),
    log:
        "results/logs/plots/map.log",
    benchmark:
        "results/benchmarks/plots/map.tsv"
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof("plot-model", "map depth", "comparisons chains")


rule report:
    """One self-contained page: the verdict, the map, and for each stage what to do about it."""
    input:
        templates=[own_file(template) for template in TEMPLATES],
        glossary=own_file(GLOSSARY),
        causes=own_file(CAUSES),
        verdicts=rules.verdicts.output.verdicts,
        unused=rules.weights.output.unused,
        audit=rules.audit.output.audit,
        pruned=PRUNED,
        preflights=expand("results/preflight/{side}.json", side=["golden", "port"]),
        comparisons=rules.verdicts.input.comparisons,
        chains=rules.verdicts.input.chains,
        diagnoses=rules.verdicts.input.diagnoses,
        records=expand(rules.port_stage.output.record, stage=STAGES),
        plots=[
            *expand(rules.plot_stage.output.plot, stage=STAGES),
            rules.plot_model.output.map,
            rules.plot_model.output.depth,
        ],
        job=job("report", "cpu", settings=EVERYTHING, packages=["transformers", "torch", "torch-xla"]),
    output:
        html=report(update("results/report.html"), caption=caption("report"), category="Verdict"),
        record=update("results/records/report.json"),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    container:
        CONTAINERS["cpu"]
    shell:
        layerproof(
            "report",
            "html",
            "templates glossary causes verdicts unused audit pruned preflights comparisons chains diagnoses plots records",
        )


rule manifest:
    """Digest of every file of the run and of what went into it; `layerproof verify` checks them."""
    input:
        html=rules.report.output.html,
        bisection=lambda wildcards: asked_for(rules.bisect.output.bisection),
    output:
        manifest="results/manifest.json",
        checksums="results/MANIFEST.sha256",
    log:
        "results/logs/manifest.log",
    container:
        CONTAINERS["cpu"]
    shell:
        "python -m layerproof manifest {output.manifest:q} > {log:q} 2>&1"


rule archive:
    """The whole run in one file, as an RO-Crate; `layerproof rerun` makes its verdict again."""
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
