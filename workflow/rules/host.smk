# results/weights/, results/tokens.json -> results/prediction.json -> results/preflight/SIDE.json


rule predict:
    """The memory that each job will take, and the disk that the run will."""
    input:
        weights=expand("results/weights/{stage}.json", stage=ALL_STAGES),
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        job=job(
            "prediction",
            "golden",
            settings=["model", "golden.dtype", "golden.taps", "port.dtype", "port.backend"],
            packages=["torch", "transformers"],
            compared=STAGES,
            before=[stage for stage in GOLDEN if stage not in STAGES],
            chains={stage: sum(stage in members for members in CHAINS.values()) for stage in STAGES},
        ),
    output:
        prediction=update("results/prediction.json"),
        record=update("results/records/prediction.json"),
    log:
        "results/logs/prediction.log",
    benchmark:
        "results/benchmarks/prediction.tsv"
    container:
        CONTAINERS["golden"]
    shell:
        layerproof("predict", "prediction", "weights tokens config")


PARALLEL = [f"parallel.{key}" for key in ("launcher", "tp", "cp", "ep")]
"""What a stage is split over, and by what. (`parallel.retries` changes nothing that a job makes.)"""
# One rule for each side, because each runs on its own hosts. The jobs of a side wait for it and start after it, but do not
# compare it, so they do not run again. (Not as `ancient` inputs: Snakemake does not ask whether a job that waits for another
# one by such an input alone has to run for a reason of its own.)
PREFLIGHT_SETTINGS = {
    "golden": ["model", "golden"],
    "port": ["model", "port.device", "port.backend", "port.compile", "port.dtype", *PARALLEL],
}

for side in ["port"] if IMPORTS_GOLDEN else ["golden", "port"]:

    rule:
        name:
            f"preflight_{side}"
        input:
            prediction=rules.predict.output.prediction,
            job=job(f"preflight/{side}", side, settings=PREFLIGHT_SETTINGS[side], packages=package_versions()),
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
        shell:
            layerproof("preflight --side {params.side}", "preflight", "prediction")
