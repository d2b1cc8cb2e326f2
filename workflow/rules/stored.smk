# For hosts that share no file system, by golden.storage, which a storage plugin of Snakemake reads and writes:
# results/golden/STAGE.h5, results/noise/STAGE.h5 -> STORAGE/STAGE.zip                     snakemake store_golden, where it is made
# STORAGE/STAGE.zip -> results/golden/STAGE.h5, results/noise/STAGE.h5                     golden.mode stored, where the port is

if STORES_GOLDEN:

    rule store_stage:
        """The golden of a stage with its record, for hosts of the port."""
        input:
            tensors=rules.golden_stage.output.tensors,
            noise=rules.golden_stage.output.noise,
            record=rules.golden_stage.output.record,
            weights="results/weights/{stage}.json",
        output:
            zip=in_storage("{stage}"),
        log:
            "results/logs/store/{stage}.log",
        container:
            CONTAINERS["cpu"]
        shell:
            "python -m layerproof store {output.zip:q} --record {input.record:q} --weights {input.weights:q} > {log:q} 2>&1"

    rule store_preflight:
        """What was found of the golden's host, for the report."""
        input:
            preflight="results/preflight/golden.json",
            record="results/records/preflight/golden.json",
        output:
            zip=in_storage("preflight"),
        log:
            "results/logs/store/preflight.log",
        container:
            CONTAINERS["cpu"]
        shell:
            "python -m layerproof store {output.zip:q} --record {input.record:q} > {log:q} 2>&1"


if TAKES_GOLDEN:

    rule take_golden:
        """The golden of a stage that another host stored, if it was made from what this one has."""
        input:
            stored=in_storage("{stage}"),
            weights="results/weights/{stage}.json",
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            previous=lambda wildcards: previous_golden(wildcards.stage),
            noise=lambda wildcards: previous_golden(wildcards.stage, "noise"),
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
            CONTAINERS["cpu"]
        params:
            spec=golden_stage_spec,
            stamp=lambda wildcards: stamp("take_golden", f"results/golden/{wildcards.stage}.h5"),
        shell:
            "python -m layerproof take-golden {output.tensors:q} {output.noise:q} --stored {input.stored:q}"
            " --weights {input.weights:q} --tokens {input.tokens:q} --config {input.config:q} --previous {input.previous:q}"
            " --noise {input.noise:q}"
            " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"

    rule take_preflight:
        """What was found of the golden's host before it began."""
        input:
            stored=in_storage("preflight"),
            stamp=lambda wildcards: stamp_file("results/preflight/golden.json", preflight_spec("golden")),
        output:
            preflight=update("results/preflight/golden.json"),
            record=update("results/records/preflight/golden.json"),
        log:
            "results/logs/preflight/golden.log",
        benchmark:
            "results/benchmarks/preflight/golden.tsv"
        container:
            CONTAINERS["cpu"]
        params:
            spec=lambda wildcards: preflight_spec("golden"),
            stamp=lambda wildcards: stamp("take_preflight", "results/preflight/golden.json"),
        shell:
            "python -m layerproof take-preflight {output.preflight:q} --stored {input.stored:q}"
            " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


# What the rules that follow read of the golden, wherever it was made.
GOLDEN_FILES = (rules.take_golden if TAKES_GOLDEN else rules.golden_stage).output


rule store_golden:
    """All that a host of the port needs of the golden."""
    input:
        all_that_is_stored,
