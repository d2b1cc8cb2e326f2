# nothing, or the user's directory -> checkpoint -> results/weights/STAGE.json, results/weights/unused.json
# prompts or token ids -> results/tokens.json

from layerproof.model import tiny
from layerproof.model.checkpoint import DEFAULT as DEFAULT_CHECKPOINT

CONFIG_JSON = os.path.join(CHECKPOINT, "config.json")
if CHECKPOINT == DEFAULT_CHECKPOINT:
    CHECKPOINT_FILES = [f"{CHECKPOINT}/{name}" for name in tiny.FILES]
else:
    CHECKPOINT_FILES = [str(path) for path in sorted(Path(CHECKPOINT).iterdir()) if path.is_file()]
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


rule checkpoint:
    """A small MiniMax-M2 in the layout of the release, trained for half a minute on public-domain text."""
    input:
        text="workflow/resources/text.txt",
        stamp=lambda wildcards: stamp_file("results/checkpoint", checkpoint_spec(wildcards)),
    output:
        files=update(expand(f"{DEFAULT_CHECKPOINT}/{{file}}", file=tiny.FILES)),
        record=update("results/records/checkpoint.json"),
    log:
        "results/logs/checkpoint.log",
    benchmark:
        "results/benchmarks/checkpoint.tsv"
    container:
        CONTAINERS["cpu"]
    params:
        spec=checkpoint_spec,
        stamp=lambda wildcards: stamp("checkpoint", "results/checkpoint"),
    shell:
        "python -m layerproof checkpoint {output.files:q} --inputs {input.text:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule weights:
    """Which tensors each stage loads, with a digest of their content."""
    input:
        files=WEIGHT_FILES,
        stamp=lambda wildcards: stamp_file("results/weights", weights_spec(wildcards)),
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
    resources:
        runtime=time_of_reading(WEIGHT_FILES),
    params:
        spec=weights_spec,
        stamp=lambda wildcards: stamp("weights", "results/weights"),
    shell:
        "python -m layerproof weights {output.stages:q} {output.unused:q} --inputs {input.files:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"


rule tokens:
    """Prompts through the checkpoint's tokenizer, or token ids as they are, padded on the right."""
    input:
        files=[
            *(name for name in (SETTINGS["inputs"]["prompts"], SETTINGS["inputs"]["token_ids"]) if name),
            CONFIG_JSON,
            *TOKENIZER_FILES,
        ],
        stamp=lambda wildcards: stamp_file("results/tokens.json", tokens_spec(wildcards)),
    output:
        tokens=update("results/tokens.json"),
        record=update("results/records/tokens.json"),
    log:
        "results/logs/tokens.log",
    benchmark:
        "results/benchmarks/tokens.tsv"
    container:
        CONTAINERS["golden"]
    params:
        spec=tokens_spec,
        stamp=lambda wildcards: stamp("tokens", "results/tokens.json"),
    shell:
        "python -m layerproof tokens {output.tokens:q} --inputs {input.files:q}"
        " --spec {params.spec:q} --stamp {params.stamp} --record {output.record:q} > {log:q} 2>&1"
