# results/weights/STAGE.json, results/tokens.json, results/{golden,noise}/PREVIOUS.h5 -> results/{golden,noise}/STAGE.h5
#
# results/weights/STAGE.json, results/tokens.json, results/chain/captured/PREVIOUS.h5 -> results/captured/{golden,noise}/STAGE.h5
#
# For hosts that share no file system, by golden.storage, which a storage plugin of Snakemake reads and writes:
# results/golden/STAGE.h5, results/noise/STAGE.h5 -> STORAGE/STAGE.zip            snakemake export_golden, where it is made
# STORAGE/STAGE.zip -> results/golden/STAGE.h5, results/noise/STAGE.h5            golden.mode stored, where the port is

from layerproof.golden import transfer

GOLDEN_SETTINGS = ["model", *(f"golden.{key}" for key in as_json(CONFIG.golden) if key != "storage")]
"""What the golden is made with; where it is exported to does not count."""


GOLDEN_PACKAGES = ["torch", "transformers", "numba", *(["accelerate"] if CONFIG.golden.mode == "whole" else [])]
IMPORTED_SETTINGS = ["golden.storage", *transfer.MUST_MATCH]

if not IMPORTS_GOLDEN:

    rule golden_stage:
        """One stage of the trusted model on its own trajectory, its fp32 truth from the same input, and its noise."""
        input:
            weights="results/weights/{stage}.json",
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            previous=previous_golden,
            noise=lambda wildcards: previous_golden(wildcards, "noise"),
            preflight="results/preflight/golden.json",
            job=job("golden/{stage}", "golden", GOLDEN_SETTINGS, GOLDEN_PACKAGES, with_taps=with_taps),
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
        shell:
            layerproof("golden", "tensors noise", "weights tokens config previous noise")


if CONFIG.golden.mode == "whole":

    ruleorder: golden_whole > golden_stage

    rule golden_whole:
        """All stages of the trusted model in one process, which holds the full model."""
        input:
            weights=expand("results/weights/{stage}.json", stage=GOLDEN),
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            preflight="results/preflight/golden.json",
            job=jobs("golden/{stage}", GOLDEN, "golden", GOLDEN_SETTINGS, GOLDEN_PACKAGES, with_taps=with_taps),
        output:
            tensors=update(expand("results/golden/{stage}.h5", stage=GOLDEN)),
            noise=update(expand("results/noise/{stage}.h5", stage=GOLDEN)),
            records=update(expand("results/records/golden/{stage}.json", stage=GOLDEN)),
        log:
            expand("results/logs/golden/{stage}.log", stage=GOLDEN),
        benchmark:
            "results/benchmarks/golden/whole.tsv"
        container:
            CONTAINERS["golden"]
        resources:
            gpu=1,
            mem_mb=memory_of("golden", lambda wildcards: ALL_STAGES, at_once=True),
            runtime=time_of("golden", lambda wildcards: GOLDEN, start=30),
        shell:
            layerproof("golden", "tensors noise", "weights tokens config")


if captured.CHAIN in CHAINS and not IMPORTS_GOLDEN:

    rule golden_from_captured:
        """One stage of the trusted model from what was captured as its input, its fp32 truth and its noise."""
        input:
            weights="results/weights/{stage}.json",
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            previous=lambda wildcards: expand("results/chain/captured/{stage}.h5", stage=fed_by(wildcards)),
            preflight="results/preflight/golden.json",
            job=job("captured/golden/{stage}", "golden", GOLDEN_SETTINGS, GOLDEN_PACKAGES, reads="port/out"),
        output:
            tensors=update("results/captured/golden/{stage}.h5"),
            noise=update("results/captured/noise/{stage}.h5"),
            record=update("results/records/captured/golden/{stage}.json"),
        log:
            "results/logs/captured/golden/{stage}.log",
        benchmark:
            "results/benchmarks/captured/golden/{stage}.tsv"
        container:
            CONTAINERS["golden"]
        resources:
            gpu=1,
            mem_mb=memory_of("golden", own_stage),
            runtime=time_of("golden", own_stage, start=2),
        shell:
            layerproof("golden", "tensors noise", "weights tokens config previous")


if EXPORTS_GOLDEN:

    rule export_stage:
        """The golden of a stage with its record, for hosts of the port."""
        input:
            tensors=rules.golden_stage.output.tensors,
            noise=rules.golden_stage.output.noise,
            record=rules.golden_stage.output.record,
            weights="results/weights/{stage}.json",
        output:
            zip=in_storage("{stage}"),
        log:
            "results/logs/export/{stage}.log",
        container:
            CONTAINERS["cpu"]
        shell:
            "python -m layerproof export {output.zip:q} --record {input.record:q} --weights {input.weights:q} > {log:q} 2>&1"

    rule export_preflight:
        """What was found of the golden's host, for the report."""
        input:
            preflight="results/preflight/golden.json",
            record="results/records/preflight/golden.json",
        output:
            zip=in_storage("preflight"),
        log:
            "results/logs/export/preflight.log",
        container:
            CONTAINERS["cpu"]
        shell:
            "python -m layerproof export {output.zip:q} --record {input.record:q} > {log:q} 2>&1"


if IMPORTS_GOLDEN:

    rule import_golden:
        """The golden of a stage that another host exported, if it was made from the same inputs as this host has."""
        input:
            exported=in_storage("{stage}"),
            weights="results/weights/{stage}.json",
            tokens=rules.tokens.output.tokens,
            config=CONFIG_JSON,
            previous=previous_golden,
            noise=lambda wildcards: previous_golden(wildcards, "noise"),
            job=job("golden/{stage}", "cpu", IMPORTED_SETTINGS, with_taps=with_taps),
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
        shell:
            layerproof("import-golden", "tensors noise", "exported weights tokens config previous noise")

    rule import_preflight:
        """What the golden's host found before its first job."""
        input:
            exported=in_storage("preflight"),
            job=job("preflight/golden", "cpu", settings=["golden.storage"]),
        output:
            preflight=update("results/preflight/golden.json"),
            record=update("results/records/preflight/golden.json"),
        log:
            "results/logs/preflight/golden.log",
        benchmark:
            "results/benchmarks/preflight/golden.tsv"
        container:
            CONTAINERS["cpu"]
        shell:
            layerproof("import-preflight", "preflight", "exported")


# What the rules that follow read of the golden, wherever it was made.
GOLDEN_FILES = (rules.import_golden if IMPORTS_GOLDEN else rules.golden_stage).output


rule export_golden:
    """All that a host of the port needs of the golden."""
    input:
        all_that_is_exported,
