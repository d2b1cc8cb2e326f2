"""Bad and odd inputs as people bring them: what each is, and what a user reads, or that it works.

A row is `(what, change, says)`: `change` makes the input out of a `Case`, `says` is a part of the one line that a user
reads, None if the input works: every stage passes, and the golden's logits are the whole model's, bit for bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from inputs import quantized
from inputs.case import Case
from layerproof.model.checkpoint import INDEX, SINGLE

Row = tuple[str, Callable[[Case], object], str | None]

LAYER = "model.layers.0."
NORM = "model.norm.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Case], None]:
    return lambda case: case.change(change)


def _config(*without: str, **values: Any) -> Callable[[Case], None]:
    return lambda case: case.config(*without, **values)


def _raw_config(text: str) -> Callable[[Case], object]:
    return lambda case: case.write("checkpoint/config.json", text)


def _prompts(text: str | bytes) -> Callable[[Case], object]:
    return lambda case: case.write("prompts.txt", text)


def _ids(text: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.write("ids.json", text)
        case.set(inputs={"prompts": None, "token_ids": str(case.folder / "ids.json")})

    return change


# Files of a checkpoint


def _without_index(case: Case) -> None:
    case.split()
    (case.checkpoint / INDEX).unlink()


def _index(change: Callable[[dict[str, str]], Any]) -> Callable[[Case], None]:
    return lambda case: case.index(change(case.split()))


def _shard(content: Callable[[bytes], bytes | str]) -> Callable[[Case], None]:
    """Replaces the content of a shard of several."""

    def change(case: Case) -> None:
        shard = sorted(set(case.split().values()))[1]
        case.write(f"checkpoint/{shard}", content((case.checkpoint / shard).read_bytes()))

    return change


def _single(content: Callable[[bytes], bytes | str]) -> Callable[[Case], None]:
    return lambda case: case.write(f"checkpoint/{SINGLE}", content((case.checkpoint / SINGLE).read_bytes()))


def _only(*names: str) -> Callable[[Case], None]:
    """Leaves a folder with config.json, and with files of these names in place of safetensors."""

    def change(case: Case) -> None:
        (case.checkpoint / SINGLE).unlink()
        for name in names:
            case.write(f"checkpoint/{name}", b"PK")

    return change


def _index_of_what_is_missing(case: Case) -> None:
    case.change(lambda all: all.pop(NORM))
    weight_map = case.split()
    case.index(weight_map | {NORM: next(iter(weight_map.values()))})


def _shard_gone(case: Case) -> None:
    (case.checkpoint / sorted(set(case.split().values()))[0]).unlink()


def _swap_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _untied(case: Case) -> None:
    case.config(tie_word_embeddings=False)
    case.change(lambda all: all.update({"lm_head.weight": torch.randn_like(all["model.embed_tokens.weight"])}))


def _without_head(case: Case) -> None:
    case.config(tie_word_embeddings=False)
    case.change(lambda all: all.pop("lm_head.weight", None))


def _tied(case: Case) -> None:
    case.config(tie_word_embeddings=True)
    case.change(lambda all: all.pop("lm_head.weight", None))


def _tied_with_head(case: Case) -> None:
    case.config(tie_word_embeddings=True)
    case.change(_swap_head)


def _tied_with_another_head(case: Case) -> None:
    case.config(tie_word_embeddings=True)
    case.change(lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"] * 2}))


def _cast(dtype: torch.dtype, only: str = "") -> Callable[[Case], None]:
    return _tensors(lambda all: all.update({name: one.to(dtype) for name, one in all.items() if only in name}))


FILES: list[Row] = [
    ("one file", lambda case: None, None),
    ("three shards and an index", lambda case: case.split(), None),
    ("an index for one file", lambda case: case.index(dict.fromkeys(case.tensors(), SINGLE)), None),
    ("shards without an index", _without_index, "without the index"),
    ("pytorch_model.bin", _only("pytorch_model.bin"), "pytorch_model.bin"),
    ("pytorch_model.bin and an optimizer", _only("pytorch_model.bin", "optimizer.pt"), "pytorch_model.bin"),
    ("several pytorch files", _only("pytorch_model-00001-of-00002.bin"), "pytorch_model-00001-of-00002.bin"),
    ("a GGUF file", _only("llama-q4_k_m.gguf"), "llama-q4_k_m.gguf"),
    ("an original checkpoint of Meta's", _only("consolidated.00.pth", "params.json"), "consolidated.00.pth"),
    ("a safetensors file of Mistral's", _only("consolidated.safetensors"), "consolidated.safetensors"),
    ("no weights", _only(), "contains neither"),
    ("a shard that is missing", _shard_gone, "does not exist, but the index names it"),
    ("a shard that is a pointer of Git LFS", _shard(lambda data: POINTER), "Git LFS"),
    ("one file that is a pointer of Git LFS", _single(lambda data: POINTER), "Git LFS"),
    ("a shard that is a page of an error", _shard(lambda data: "<html>404</html>"), "has no readable header"),
    ("a shard of no bytes", _shard(lambda data: b""), "has no readable header"),
    ("a shard cut in its header", _shard(lambda data: data[:40]), "has no readable header"),
    ("a shard cut in its last tensor", _shard(lambda data: data[:-30]), "Copy the shard again"),
    ("one file cut in its header", _single(lambda data: data[:100]), "has no readable header"),
    ("one file cut in its last tensor", _single(lambda data: data[:-2]), "Copy the shard again"),
    ("one file of no bytes", _single(lambda data: b""), "has no readable header"),
    (
        "an index that is not JSON",
        lambda case: case.split() and case.write(f"checkpoint/{INDEX}", "{"),
        "cannot be read",
    ),
    ("an index without a map", lambda case: case.split() and case.write(f"checkpoint/{INDEX}", "{}"), "cannot be read"),
    ("an index of no tensors", _index(lambda names: {}), "lists no tensors"),
    ("an index that is a list", lambda case: case.write(f"checkpoint/{INDEX}", "[]"), "cannot be read"),
    (
        "an index that names a file elsewhere",
        _index(lambda names: {key: f"../{name}" for key, name in names.items()}),
        "in another directory",
    ),
    (
        "an index that names a tensor that no shard has",
        _index_of_what_is_missing,
        "tensor model.norm.weight is missing",
    ),
    (
        "an index that leaves a tensor out",
        _index(lambda names: {key: name for key, name in names.items() if key != NORM}),
        None,
    ),
    ("a tensor that is missing", _tensors(lambda all: all.pop(LAYER + "mlp.up_proj.weight")), "has no tensor for"),
    ("a norm that is missing", _tensors(lambda all: all.pop(NORM)), "has no tensor for model.norm.weight"),
    ("the embedding missing", _tensors(lambda all: all.pop("model.embed_tokens.weight")), "has no tensor for"),
    ("a tensor of another shape", _tensors(lambda all: all.update({NORM: torch.ones(31)})), "has shape [31]"),
    ("a tensor of more dims", _tensors(lambda all: all.update({NORM: torch.ones(32, 1)})), "has shape [32, 1]"),
    ("tensors that nobody needs", _tensors(lambda all: all.update({"model.rotary.inv_freq": torch.ones(4)})), None),
    (
        "a layer more than the config says",
        _tensors(lambda all: all.update({"model.layers.1.mlp.up_proj.weight": torch.ones(96, 32)})),
        None,
    ),
    ("a layer less than the config says", _config(num_hidden_layers=2), "has no tensor for model.layers.1"),
    ("a head of its own", _untied, None),
    ("no head, and not tied", _without_head, "has no tensor for lm_head.weight"),
    ("a tied head", _tied, None),
    ("a tied head that is in the file, too", _tied_with_head, None),
    (
        "a tied head, and another one in the file",
        _tied_with_another_head,
        "config.json: the model ties lm_head.weight and",
    ),
    ("weights in fp32", _cast(torch.float32), None),
    ("weights in fp16", _cast(torch.float16), None),
    ("weights in fp64", _cast(torch.float64), None),
    ("norms in fp32", _cast(torch.float32, only="norm"), None),
    ("a weight of integers", _cast(torch.int8, only="up_proj"), None),
    ("names without the prefix", _tensors(lambda all: _renamed(all, lambda name: name.removeprefix("model."))), None),
    (
        "names of a wrapped model",
        _tensors(lambda all: _renamed(all, lambda name: f"module.{name}")),
        "has no tensor for",
    ),
]


def _renamed(tensors: dict[str, torch.Tensor], rename: Callable[[str], str]) -> None:
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


# config.json

ROPE = {"rope_theta": 10000.0}


def _rope4(**scaling: Any) -> Callable[[Case], None]:
    """The form of transformers 4: rope_theta and rope_scaling beside each other."""
    return _config("rope_parameters", rope_theta=10000.0, rope_scaling=scaling or None, max_position_embeddings=64)


def _long(change: Callable[[Case], None], length: int = 40) -> Callable[[Case], None]:
    def both(case: Case) -> None:
        change(case)
        _ids(json.dumps([[number % 90 + 3 for number in range(length)], [4, 5]]))(case)

    return both


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}


def _patched(model_type: str) -> Callable[[Case], None]:
    """Passes the refusal of the unmodified model; what is left is that its weights are a Llama's."""

    def change(case: Case) -> None:
        case.config(model_type=model_type)
        case.write("patch.py", "def patch(model, part, stage):\n    pass\n")
        case.set(port={"module": str(case.folder / "patch.py")})

    return change


CONFIG: list[Row] = [
    ("no config.json", lambda case: (case.checkpoint / "config.json").unlink(), "config.json: does not exist"),
    ("a config that is not JSON", _raw_config("{'a': 1}"), "is not JSON"),
    ("a config of no bytes", _raw_config(""), "is not JSON"),
    ("a config that is a list", _raw_config("[]"), "is not a JSON object"),
    ("an empty config", _raw_config("{}"), "num_hidden_layers is missing"),
    ("a model that transformers does not know", _config(model_type="llama9"), "cannot build this model"),
    ("a model that XLA does not survive", _config(model_type="jetmoe"), "port.backend"),
    ("a model that XLA does not survive, patched", _patched("jetmoe"), "has no tensor for"),
    ("no model type", _config("model_type"), "cannot build this model"),
    ("an encoder", _config(model_type="bert", architectures=["BertModel"]), "has no tensor for"),
    ("an encoder and decoder", _config(model_type="t5", num_layers=1, architectures=["T5Model"]), "T5Model"),
    ("a model of pictures", _config(model_type="vit", architectures=["ViTModel"]), "ViTModel"),
    ("no number of layers", _config("num_hidden_layers"), "num_hidden_layers is missing"),
    ("no layers", _config(num_hidden_layers=0), "num_hidden_layers"),
    ("a negative number of layers", _config(num_hidden_layers=-1), "num_hidden_layers"),
    ("a number of layers as a text", _config(num_hidden_layers="1"), "num_hidden_layers"),
    ("a number of layers as a float", _config(num_hidden_layers=1.0), "num_hidden_layers"),
    ("no architectures", _config("architectures"), None),
    ("an architecture of another name", _config(architectures=["MyLlamaForCausalLM"]), None),
    ("a base model as the architecture", _config(architectures=["LlamaModel"]), None),
    ("torch_dtype, of transformers 4", _config("dtype", torch_dtype="bfloat16"), None),
    ("dtype, of transformers 5", _config("torch_dtype", dtype="bfloat16"), None),
    ("no dtype", _config("dtype", "torch_dtype"), None),
    ("a dtype of fp32 over bf16 weights", _config(dtype="float32"), None),
    ("a dtype that torch does not know", _config(dtype="float12"), "float12"),
    ("a theta beside the config, of transformers 4", _rope4(), None),
    ("linear scaling, of transformers 4", _rope4(type="linear", factor=2.0), None),
    ("linear scaling by rope_type", _rope4(rope_type="linear", factor=2.0), None),
    ("dynamic scaling, of transformers 4", _rope4(type="dynamic", factor=2.0), None),
    ("YaRN, of transformers 4", _rope4(rope_type="yarn", factor=2.0, original_max_position_embeddings=32), None),
    ("Llama 3's scaling, of transformers 4", _rope4(rope_type="llama3", **LLAMA3), None),
    ("longrope, of transformers 4", _rope4(rope_type="longrope", factor=2.0, **LONGROPE), None),
    ("longrope beyond the first length", _long(_rope4(rope_type="longrope", factor=2.0, **LONGROPE)), None),
    ("dynamic scaling beyond the table", _long(_rope4(rope_type="dynamic", factor=2.0), 80), None),
    ("a scaling that nobody knows", _rope4(rope_type="spiral", factor=2.0), "spiral"),
    ("Llama 3's scaling without its factors", _rope4(rope_type="llama3", factor=8.0), "rope"),
    ("scaling, of transformers 5", _config(rope_parameters=ROPE | {"rope_type": "linear", "factor": 4.0}), None),
    ("heads that do not divide", _config("head_dim", num_attention_heads=5), "config.json"),
    ("more heads than the weights", _config(num_attention_heads=8), "has shape"),
    ("no head_dim", _config("head_dim"), None),
    ("another width than the weights", _config(hidden_size=64), "has shape"),
    ("another vocabulary than the weights", _config(vocab_size=5000), "has shape"),
    ("a vocabulary of none", _config(vocab_size=0), "vocab_size"),
    ("no vocabulary", _config("vocab_size"), "vocab_size"),
    ("an epsilon as a text", _config(rms_norm_eps="1e-6"), "rms_norm_eps"),
    ("an activation that nobody knows", _config(hidden_act="swoosh"), "swoosh"),
    ("a pad token of -1", _config(pad_token_id=-1), None),
    ("no pad token", _config(pad_token_id=None), None),
    ("a pad token beyond the vocabulary", _config(pad_token_id=99999), "Padding_idx"),
    ("several ends of a text", _config(eos_token_id=[2, 3]), None),
    ("a table of four positions", _config(max_position_embeddings=4), None),
    ("biases in the config alone", _config(attention_bias=True), "has no tensor for"),
    ("an attention that is not installed", _config(_attn_implementation="flash_attention_2"), "FlashAttention2"),
    ("a version of the future", _config(transformers_version="99.0.0"), None),
    ("keys that nobody knows", _config(my_own={"a": [1, 2]}, rope_thetas=3), None),
    ("a quantization of null", _config(quantization_config=None), None),
]


# Paths


def _linked(case: Case) -> None:
    case.moved("elsewhere")
    (case.folder / "link").symlink_to(case.folder / "elsewhere", target_is_directory=True)
    case.set(model={"checkpoint": str(case.folder / "link")})


def _cache(case: Case, broken: bool = False) -> None:
    """The cache of the Hub: files are links to blobs."""
    case.split()
    repository = case.folder / "hub/models--meta-llama--Llama-3.2-1B"
    snapshot = repository / "snapshots/4e20de362430cd3b72f300e6b0f18e50e7166e08"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(case.checkpoint.iterdir())):
        blob = repository / f"blobs/{number:064x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
        if broken and path.name.endswith("2-of-00003.safetensors"):
            blob.unlink()
    case.set(model={"checkpoint": str(snapshot)})


def _read_only(case: Case) -> None:
    for path in (*case.checkpoint.iterdir(), case.checkpoint):
        path.chmod(0o555 if path.is_dir() else 0o444)


def _named(name: str) -> Callable[[Case], object]:
    return lambda case: case.set(model={"checkpoint": name})


def _root_of_cache(case: Case) -> None:
    _cache(case)
    case.set(model={"checkpoint": str(case.folder / "hub/models--meta-llama--Llama-3.2-1B")})


def _relative(case: Case) -> None:
    os.chdir(case.folder)
    case.set(model={"checkpoint": "./checkpoint/"}, inputs={"prompts": "prompts.txt"})


def _adapter_alone(case: Case) -> None:
    for path in case.checkpoint.iterdir():
        path.unlink()
    _with_adapter(case)


def _with_adapter(case: Case) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B", "r": 8}
    case.write("checkpoint/adapter_config.json", json.dumps(adapter))
    case.write("checkpoint/adapter_model.safetensors", b"")


def _captured(name: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        (case.folder / "captured").mkdir()
        (case.folder / "captured" / name).touch()
        case.set(port={"captured": str(case.folder / "captured")})

    return change


PATHS: list[Row] = [
    (
        "a capture of a deeper model",
        _captured("captured_tensors_cte_step_1_module_layers.22_output.pt"),
        "contains layer_022, but the model has",
    ),
    ("a folder that holds no capture", _captured("layers.0.pt"), "contains no file such as captured_tensors"),
    ("a path with spaces", lambda case: case.moved("my models/llama 1b"), None),
    ("a path with quotes", lambda case: case.moved('it\'s "mine"'), None),
    ("a path with brackets", lambda case: case.moved("llama[1]{b}"), None),
    ("a path that is not ASCII", lambda case: case.moved("modèles/лама"), None),
    ("a relative path with a slash at its end", _relative, None),
    ("a link to a folder", _linked, None),
    ("the cache of the Hub", _cache, None),
    ("the cache of the Hub with a blob gone", lambda case: _cache(case, broken=True), "does not exist"),
    (
        "the cache of the Hub, not a snapshot of it",
        _root_of_cache,
        "snapshots/4e20de362430cd3b72f300e6b0f18e50e7166e08",
    ),
    ("a folder that cannot be written", _read_only, None),
    ("a name on the Hub", _named("meta-llama/Llama-3.2-1B"), "does not exist"),
    ("a folder that does not exist", _named("/nowhere/at/all"), "does not exist"),
    ("a path of the home folder", _named("~/no such checkpoint"), "does not exist"),
    ("a file in place of a folder", lambda case: _named(str(case.checkpoint / SINGLE))(case), "is a file"),
    ("an empty folder", lambda case: [path.unlink() for path in case.checkpoint.iterdir()], "does not exist"),
    ("an adapter beside the model", _with_adapter, "adapter beside the model"),
    ("an adapter alone", _adapter_alone, "adapter"),
]


# Quantised checkpoints


def _method(method: str, **settings: Any) -> Callable[[Case], None]:
    return _config(quantization_config={"quant_method": method, **settings})


QUANTIZED: list[Row] = [
    ("FP8 with scales of blocks", quantized.fp8_blocks, None),
    ("FP8 with one scale for a tensor, by compressed-tensors", quantized.fp8_tensors, None),
    ("FP8 with one scale for a row, by compressed-tensors", quantized.fp8_rows, None),
    ("INT8, by compressed-tensors", quantized.int8, None),
    ("INT4 in groups, by compressed-tensors", quantized.int4, None),
    ("NVFP4, by compressed-tensors", quantized.nvfp4, None),
    ("NVFP4 experts, by compressed-tensors", quantized.nvfp4_experts, None),
    ("INT4 experts in groups, by compressed-tensors", quantized.int4_experts, None),
    ("FP8 experts with one scale for a row, by compressed-tensors", quantized.fp8_experts, None),
    ("MXFP4, as gpt-oss is released", quantized.mxfp4, None),
    ("FP8 with a scale missing", quantized.fp8_without_a_scale, "has no scales for"),
    ("GPTQ", _method("gptq", bits=4, group_size=128), "gptq"),
    ("AWQ", _method("awq", bits=4, group_size=128, version="gemm"), "awq"),
    ("bitsandbytes in 4 bits", _method("bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    ("bitsandbytes in 8 bits", _method("bitsandbytes", load_in_8bit=True), "bitsandbytes"),
    ("HQQ", _method("hqq"), "hqq"),
    ("torchao", _method("torchao", quant_type="int4_weight_only"), "torchao"),
    ("fbgemm", _method("fbgemm_fp8"), "fbgemm_fp8"),
    ("a method that nobody knows", _method("quarter_bits"), "quarter_bits"),
    ("no method", _config(quantization_config={"bits": 4}), "quant_method"),
    ("settings that are not an object", _config(quantization_config="fp8"), "quantization_config"),
    ("a format that compressed-tensors does not know", quantized.unknown_format, "quantization_config"),
]


# Code that comes with a checkpoint

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def _own_code(code: str = CODE, trust: bool = True, without: str | None = None) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        case.config(model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map)
        case.write("checkpoint/own.py", code)
        if without:
            (case.checkpoint / without).unlink()
        case.set(model={"trust_remote_code": trust})

    return change


FOREIGN: list[Row] = [
    ("code of its own", _own_code(), None),
    ("code of its own, not trusted", _own_code(trust=False), "trust_remote_code"),
    ("code of its own with an error of syntax", _own_code("class OwnConfig(:\n"), "SyntaxError"),
    ("code of its own that raises", _own_code(CODE + "raise RuntimeError('no')\n"), "RuntimeError"),
    ("code of its own that needs a package", _own_code("import flash_attn_9\n" + CODE), "flash_attn_9"),
    ("code of its own that is missing", _own_code(without="own.py"), "own.py"),
    ("code of its own without the class", _own_code(CODE.replace("OwnForCausalLM", "Another")), "OwnForCausalLM"),
    ("no port for another model", lambda case: case.set(port={"backend": "xla"}), "is a port of minimax_m2"),
    ("code trusted where there is none", lambda case: case.set(model={"trust_remote_code": True}), None),
]


# Prompts


def _tokenizer(content: str | None, name: str = "tokenizer.json") -> Callable[[Case], object]:
    return lambda case: (
        (case.checkpoint / name).unlink() if content is None else case.write(f"checkpoint/{name}", content)
    )


def _vocabulary_too_small(case: Case) -> None:
    case.config(vocab_size=50)
    case.change(lambda all: all.update({"model.embed_tokens.weight": all["model.embed_tokens.weight"][:50]}))
    case.change(lambda all: all.update({k: v[:50] for k, v in all.items() if k == "lm_head.weight"}))


def _prompts_at(name: str) -> Callable[[Case], object]:
    return lambda case: case.set(inputs={"prompts": str(case.folder / name) if name else None})


def _both(case: Case) -> None:
    case.write("ids.json", "[[1]]")
    case.set(inputs={"token_ids": str(case.folder / "ids.json")})


def _unreadable(case: Case) -> None:
    (case.folder / "prompts.txt").unlink()
    (case.folder / "prompts.txt").mkdir()


def _limited(tokens: int) -> Callable[[Case], object]:
    return lambda case: case.set(inputs={"max_tokens": tokens})


def _learned_positions(length: int) -> Callable[[Case], None]:
    """A GPT-2 with a table of 16 positions."""

    def change(case: Case) -> None:
        quantized.replace(case, "gpt2", {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 16})
        _ids(json.dumps([[3] * length, [4, 5]]))(case)

    return change


CHAT = "<|bos|><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"

PROMPTS: list[Row] = [
    ("a prompt of one word", _prompts("Hello"), None),
    ("a prompt of one letter", _prompts("a"), None),
    ("several empty lines between prompts", _prompts("\n\n\nOne.\n\n\n\nTwo.\n\n\n"), None),
    ("spaces in the empty line", _prompts("One.\n   \nTwo."), None),
    ("lines that end as on Windows", _prompts("One.\r\n\r\nTwo.\r\n"), None),
    ("a mark of the byte order", _prompts(b"\xef\xbb\xbfOne."), None),
    ("a line with only a tab between prompts", _prompts(b"One.\n\t\nTwo."), None),
    ("Chinese, and pictures", _prompts("你好,世界 🚀🚀\n\nпривет"), None),
    ("the output of a chat template", _prompts(CHAT), None),
    ("tabs, and code", _prompts("def f(x):\n\treturn x\n"), None),
    ("a zero byte", _prompts(b"One\x00two"), None),
    ("a prompt longer than inputs.max_tokens", _prompts("word " * 900), None),
    ("one word a hundred times", _prompts("a " * 100), None),
    ("thirty prompts", _prompts("\n\n".join(f"Prompt {number}." for number in range(30))), None),
    ("an empty file", _prompts(""), "contains no prompt"),
    ("empty lines alone", _prompts("\n\n \n\t\n"), "contains no prompt"),
    ("Latin-1", _prompts("déjà vu".encode("latin-1")), "cannot be read as text"),
    ("UTF-16", _prompts("hello".encode("utf-16")), "cannot be read as text"),
    ("a picture", _prompts(b"\x89PNG\r\n\x1a\n\x00\xff"), "cannot be read as text"),
    ("a file that does not exist", _prompts_at("no.txt"), "does not exist"),
    ("a folder in place of a file", _unreadable, "prompts.txt"),
    ("neither prompts nor ids", _prompts_at(""), "set exactly one"),
    ("prompts and ids", _both, "set exactly one"),
    ("no tokenizer", _tokenizer(None), "has no usable tokenizer"),
    ("a tokenizer that is not JSON", _tokenizer("{"), "has no usable tokenizer"),
    ("a tokenizer of nothing", _tokenizer("{}"), "has no usable tokenizer"),
    ("a tokenizer that is a pointer of Git LFS", _tokenizer(POINTER), "has no usable tokenizer"),
    ("settings of a tokenizer missing", _tokenizer(None, "tokenizer_config.json"), None),
    ("a tokenizer with more words than the model", _vocabulary_too_small, "49"),
    ("a limit of one token", _limited(1), None),
    ("a limit of no token", _limited(0), "max_tokens"),
    ("a limit below zero", _limited(-5), "max_tokens"),
    ("a limit beyond everything", _limited(10**9), None),
    ("ids", _ids("[[1, 5, 7], [8]]"), None),
    ("one id", _ids("[[5]]"), None),
    ("the same id throughout", _ids(json.dumps([[7] * 20])), None),
    ("ids of one prompt, not in a list of lists", _ids("[1, 2, 3]"), "is not a list of lists"),
    ("no ids", _ids("[]"), "is not a list of lists"),
    ("a row of no ids", _ids("[[1], []]"), "row 1 is empty"),
    ("ids of a dict", _ids('{"input_ids": [[1, 2]]}'), "is not a list of lists"),
    ("a negative id", _ids("[[1, -1]]"), "row 0 contains -1"),
    ("an id beyond the vocabulary", _ids("[[1], [100000]]"), "row 1 contains 100000"),
    ("an id as a float", _ids("[[1.0]]"), "row 0 contains 1.0"),
    ("an id as a text", _ids('[["1"]]'), "row 0 contains '1'"),
    ("true as an id", _ids("[[true]]"), "row 0 contains True"),
    ("null as an id", _ids("[[null]]"), "row 0 contains None"),
    ("NaN as an id", _ids("[[NaN]]"), "row 0 contains nan"),
    ("a comma too many", _ids("[[1, 2,]]"), "cannot be read as JSON"),
    ("ids that are not JSON", _ids("1 2 3"), "cannot be read as JSON"),
    ("as many tokens as there are positions", _learned_positions(16), None),
    ("more tokens than there are positions", _learned_positions(17), "a table of 16 positions"),
]

TABLE: dict[str, list[Row]] = {
    "files": FILES,
    "config.json": CONFIG,
    "paths": PATHS,
    "quantised": QUANTIZED,
    "code": FOREIGN,
    "prompts": PROMPTS,
}
