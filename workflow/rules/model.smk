# checkpoint -> results/weights/STAGE.json, results/weights/unused.json
# prompts or token ids -> results/tokens.json

CONFIG_JSON = os.path.join(CONFIG.model.checkpoint, "config.json")
CHECKPOINT_FILES = [str(path) for path in sorted(Path(CONFIG.model.checkpoint).iterdir()) if path.is_file()]
WEIGHT_FILES = [
    name
    for name in CHECKPOINT_FILES
    if name.endswith((".safetensors", ".safetensors.index.json")) or name == CONFIG_JSON
]
TOKENIZER_FILES = [
    name
    for name in CHECKPOINT_FILES
    if name not in WEIGHT_FILES and name.endswith((".json", ".model", ".txt", ".jinja", ".tiktoken", ".py"))
]


rule weights:
    """Which tensors each stage loads, with a digest of their content."""
    input:
        files=WEIGHT_FILES,
        job=job(
            "weights",
            "golden",
            settings=["model"],
            packages=["transformers"],
            files=lambda wildcards: sizes_and_times(WEIGHT_FILES),
        ),
    output:
        stages=update(expand("results/weights/{stage}.json", stage=ALL_STAGES)),
        unused=update("results/weights/unused.json"),
        record=update("results/records/weights.json"),
    log:
        "results/logs/weights.log",
    benchmark:
        "results/benchmarks/weights.tsv"
    container:
        CONTAINERS["golden"]
    threads: 4  # digests
    resources:
        runtime=time_of_reading(WEIGHT_FILES),
    shell:
        layerproof("weights", "stages unused", "files")


rule tokens:
    """Prompts through the checkpoint's tokenizer, or token ids as they are, padded on the right."""
    input:
        files=[
            *(name for name in (CONFIG.inputs.prompts, CONFIG.inputs.token_ids) if name),
            CONFIG_JSON,
            *TOKENIZER_FILES,
        ],
        job=job("tokens", "golden", settings=["model", "inputs"], packages=["transformers", "tokenizers"]),
    output:
        tokens=update("results/tokens.json"),
        record=update("results/records/tokens.json"),
    log:
        "results/logs/tokens.log",
    benchmark:
        "results/benchmarks/tokens.tsv"
    container:
        CONTAINERS["golden"]
    shell:
        layerproof("tokens", "tokens", "files")
