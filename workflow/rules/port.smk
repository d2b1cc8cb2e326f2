# results/weights/STAGE.json, results/tokens.json, results/golden/PREVIOUS.h5 -> results/port/STAGE.h5
# the same for the first stage of a chain -> results/chain/A-B/STAGE.h5
# tensors captured from a whole compiled model -> results/chain/captured/STAGE.h5

PORT_SETTINGS = [
    "model",
    "golden.taps",  # names that the port may hand over, too
    # A model of transformers may keep its residuals in fp32, whatever the golden's dtype is.
    *(["golden.dtype"] if CONFIG.port.backend == "transformers" else []),
    *(f"port.{key}" for key in ("backend", "module", "device", "dtype", "options", "nxdi")),
    *PARALLEL,
]
"""Of a job that runs the port as it is."""
SHIPPED_SETTINGS = [
    *PORT_SETTINGS,
    "port.compile",
    *(["port.compiler_flags"] if CONFIG.port.compile == "neuron" else []),
]
"""Of a job that runs the port as it is shipped: compiled, if that is asked for."""
RETRIES = f"--retries {CONFIG.parallel.retries}" if CONFIG.parallel.retries else ""
PORT_PACKAGES = [
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    *(["transformers"] if CONFIG.port.backend in ("transformers", "nxdi") else []),  # NxDI takes functions from it
    *(["neuronx-distributed", "neuronx-distributed-inference"] if CONFIG.port.backend == "nxdi" else []),
]


rule port_stage:
    """One stage of the port, fed with the golden input of that stage."""
    input:
        weights="results/weights/{stage}.json",
        tokens=rules.tokens.output.tokens,
        config=CONFIG_JSON,
        previous=previous_golden,
        preflight="results/preflight/port.json",
        job=job("port/{stage}", "port", SHIPPED_SETTINGS, PORT_PACKAGES, fed_by=fed_by),
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
    shell:
        layerproof("port", "tensors", "weights tokens config previous", RETRIES)


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
            previous=previous_golden(SimpleNamespace(stage=CHAINS[chain_name][0])),
            preflight="results/preflight/port.json",
            job=jobs(f"chain/{chain_name}/{{stage}}", CHAINS[chain_name], "port", SHIPPED_SETTINGS, PORT_PACKAGES),
        output:
            tensors=update(expand("results/chain/{chain}/{stage}.h5", chain=chain_name, stage=CHAINS[chain_name])),
            records=update(
                expand("results/records/chain/{chain}/{stage}.json", chain=chain_name, stage=CHAINS[chain_name])
            ),
        log:
            expand("results/logs/chain/{chain}/{stage}.log", chain=chain_name, stage=CHAINS[chain_name]),
        benchmark:
            f"results/benchmarks/chain/{chain_name}.tsv"
        container:
            CONTAINERS["port"]
        resources:
            neuron=1,
            mem_mb=memory_of("port", lambda wildcards, chain_name=chain_name: CHAINS[chain_name]),
            runtime=time_of("port", lambda wildcards, chain_name=chain_name: CHAINS[chain_name], start=port_starts(30)),
        shell:
            layerproof("chain", "tensors", "weights tokens config previous", RETRIES)


if captured.CHAIN in CHAINS:

    rule chain_captured:
        """What NxD Inference captured of the whole compiled model, as the outputs of stages."""
        input:
            captured=[str(path) for path in RUN.captured.values()],
            tokens=rules.tokens.output.tokens,
            job=jobs("chain/captured/{stage}", CHAINS[captured.CHAIN], "port", packages=["torch", "h5py"]),
        output:
            tensors=update(expand("results/chain/captured/{stage}.h5", stage=CHAINS[captured.CHAIN])),
            records=update(expand("results/records/chain/captured/{stage}.json", stage=CHAINS[captured.CHAIN])),
        log:
            expand("results/logs/chain/captured/{stage}.log", stage=CHAINS[captured.CHAIN]),
        benchmark:
            "results/benchmarks/chain/captured.tsv"
        container:
            CONTAINERS["port"]
        shell:
            layerproof("captured", "tensors", "captured tokens")
