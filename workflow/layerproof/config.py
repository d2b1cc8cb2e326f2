"""config.yaml: every key with its type, default and meaning, and how the file is read and checked.

The sections are plain frozen dataclasses, so a job reads its settings without pydantic. Only `validate` and `schema`, which
run where Snakemake does, import it.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from layerproof.errors import UserError
from layerproof.files import canonical_json

SCHEMA = "workflow/schemas/config.schema.yaml"
PYDANTIC = {"extra": "forbid", "use_attribute_docstrings": True, "strict": True}


class Limit:
    """What a value must satisfy besides its type, by the keys of pydantic's core schema (`gt`, `pattern`, `min_length`).

    pydantic asks any annotation for `__get_pydantic_core_schema__`, so this needs no import of it.
    """

    def __init__(self, **keys: Any) -> None:
        self.keys = keys

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = handler(source)
        schema.update(self.keys)
        return schema


Launcher = Literal["fork", "torchrun", "ray", "srun"]
LAUNCHERS = get_args(Launcher)
NotEmpty = Annotated[str, Limit(min_length=1)]
Image = Annotated[str, Limit(pattern=r"^([^:]+\.sif|[a-z]+://([^\s@/]+/)*[^\s@/:]+@sha256:[0-9a-f]{64})$")]
Place = Annotated[str, Limit(pattern=r"^(cpu|disk|cuda(:[0-9]+)?)$")] | Annotated[int, Limit(ge=0)]
DeviceMap = Annotated[str, Limit(pattern=r"^(auto|balanced|balanced_low_0|sequential|cpu|cuda(:[0-9]+)?)$")]


class Section:
    """A part of config.yaml. A job has only the keys that its rule names; reading another one raises AttributeError."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__}.{name} is not among this job's settings: name it in the job's rule."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Section):
    """The model that both sides run."""

    __pydantic_config__ = PYDANTIC

    checkpoint: NotEmpty = "workflow/resources/tiny_minimax_m2"
    """Directory of a transformers causal language model with safetensors: in bf16, fp16 or fp32, or quantized by fp8, mxfp4,
    mxfp8 or compressed-tensors, which transformers dequantizes as it loads. The default is a small MiniMax-M2, trained
    for half a minute on public-domain text, that comes with Layerproof."""
    trust_remote_code: bool = False
    """Whether transformers may run Python code that comes with the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Section):
    """What the model reads. Set exactly one of prompts and token_ids."""

    __pydantic_config__ = PYDANTIC

    prompts: NotEmpty | None = None
    """UTF-8 text file of prompts separated by empty lines, for the checkpoint's tokenizer."""
    token_ids: NotEmpty | None = None
    """JSON file of token ids in place of prompts: [[1, 2, 3], [4, 5]]."""
    max_tokens: Annotated[int, Limit(ge=1)] = 512
    """Longest prompt in tokens; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden(Section):
    """The trusted model."""

    __pydantic_config__ = PYDANTIC

    mode: Literal["streamed", "whole", "stored"] = "streamed"
    """streamed runs one stage at a time and needs the memory of one. whole loads the full model into one process,
    spread over devices by accelerate. stored imports it from golden.storage, where another host exported it
    (docs/clusters.md)."""
    device_map: DeviceMap | Annotated[Mapping[str, Place], Limit(min_length=1)] = "auto"
    """How the full model is spread over devices, in accelerate's terms: auto, balanced, balanced_low_0, sequential,
    one device such as cuda:0 or cpu, or a map from module names to devices (the number of a GPU, cuda:N, cpu or
    disk). A streamed golden ignores it."""
    max_memory: (
        Mapping[
            Annotated[str, Limit(pattern="^([0-9]+|cpu)$")],
            Annotated[str, Limit(pattern="^[0-9]+([.][0-9]+)?[KMG]i?B$")],
        ]
        | None
    ) = None
    """Maximum memory of the full model on each device, the number of a GPU or cpu: {0: 70GiB, cpu: 200GiB}. null means
    no limit."""
    offload_folder: NotEmpty | None = None
    """Folder for the weights of the full model that fit on no device. Required if device_map and max_memory leave no
    room for some."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where a streamed golden runs; auto means CUDA if there is a GPU, otherwise the CPU."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Dtype of the golden's weights and activations along its own trajectory. The truth is always fp32, so an fp32
    golden would have no error to measure the port's error with."""
    attn_implementation: Literal["eager", "sdpa"] | None = None
    """transformers' attention implementation; null leaves the choice to transformers."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] | None = None
    """transformers' experts implementation; null leaves the choice to transformers."""
    taps: Mapping[
        Annotated[str, Limit(pattern="^[a-z][a-z0-9_]*([.][a-z0-9_]+)*$")],
        NotEmpty,
    ] = field(default_factory=dict)
    """Taps of your own besides the canonical ones: a name to the submodule of a transformers layer whose output it is,
    such as {mlp.shared: mlp.shared_experts}. The port hands them over under the same names (docs/ports.md)."""
    storage: Annotated[str, Limit(pattern="^[a-z0-9]+://[^{}?#/][^{}?#]*[^{}?#/]$")] | None = None
    """Where the golden is stored for hosts that share no file system with the host that computes it: s3://BUCKET/FOLDER, or
    an address for another storage plugin of Snakemake."""

    @property
    def implementations(self) -> dict[str, str]:
        """The options of transformers' implementations that are set."""
        asked = {
            "attn_implementation": self.attn_implementation,
            "experts_implementation": self.experts_implementation,
        }
        return {name: value for name, value in asked.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nxdi(Section):
    """How a model of NxD Inference is run, with backend nxdi (docs/nxdi.md)."""

    __pydantic_config__ = PYDANTIC

    causal_lm: str | None = None
    """Class in port.module that names the others; null means the only NeuronXForCausalLM that the module defines."""
    neuron_config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's NeuronConfig, except batch_size, seq_len, torch_dtype and tp_degree, which the run
    sets."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the model's InferenceConfig that config.json lacks or that must differ from it."""
    taps: Mapping[str, NotEmpty | None] = field(default_factory=dict)
    """For models whose submodules do not have the library's names: canonical tap to the submodule of a layer whose
    output it is, such as self_attn.q_norm; append [1] for the second of several outputs. null omits a tap that means
    another tensor in this model, such as queries that are already scaled."""
    cpu_mode: bool = False
    """NxD's own CPU mode (NXD_CPU_MODE, gloo), without XLA; port.device is then ignored."""


SHIPPED_PORT = "workflow/ports/minimax_m2.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port(Section):
    """The implementation under test."""

    __pydantic_config__ = PYDANTIC

    backend: Literal["xla", "nxdi", "transformers"] = "xla"
    """xla runs port.module on an XLA device. nxdi runs the model of NxD Inference that port.module defines there
    (docs/nxdi.md). transformers runs the unmodified transformers stage there, which checks the compiler and the
    hardware and needs no module; or with a module, the stage as its `patch` changes it."""
    module: NotEmpty | None = SHIPPED_PORT
    """Python file, or dotted name of an installed module, that defines the port (docs/ports.md), with nxdi the model,
    or with transformers the function patch; then the default is null, the unmodified model."""
    device: Literal["auto", "CPU", "NEURON", "TPU"] = "auto"
    """PJRT device; auto means $PJRT_DEVICE, and CPU if that is not set."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the port's weights and activations."""
    compile: Literal["xla", "neuron"] | None = None
    """How stages are compiled before they run. They are traced on other values than they run on, and the audit compares
    them with the same stages uncompiled. xla: traced by torch-xla. neuron: traced by torch_neuronx and
    compiled by neuronx-cc. null: they run as they are. With parallel.tp, which neuron does not support, stages run as
    they are, and the audit says whether all ranks have one graph."""
    compiler_flags: Sequence[str] = ("--auto-cast=none",)
    """Flags of neuronx-cc, with port.compile neuron. Each is one string, with its value after an equals sign."""
    captured: NotEmpty | None = None
    """Folder of tensors that NxD Inference captured from the whole compiled model. They are compared as a chain named
    captured (docs/nxdi.md)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the port unchanged."""
    nxdi: Nxdi = field(default_factory=Nxdi)
    """How a model of NxD Inference is run, with backend nxdi (docs/nxdi.md)."""

    def __post_init__(self) -> None:
        if self.backend == "transformers" and self.module == SHIPPED_PORT:
            object.__setattr__(self, "module", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel(Section):
    """How the port is spread over ranks (docs/ports.md)."""

    __pydantic_config__ = PYDANTIC

    launcher: Launcher = "fork"
    """What starts the ranks. fork makes them from the job, on its host; torchrun starts them there, too; ray starts
    them as actors of the cluster at RAY_ADDRESS, or of one of its own; srun as tasks of the Slurm job that it runs in."""
    retries: Annotated[int, Limit(ge=0)] = 0
    """How many times a stage whose rank was killed, or ended without a word, runs again. A stage whose ranks report an
    error, or hang, does not."""
    tp: Annotated[int, Limit(ge=1)] = 1
    """Ranks that tensor parallelism splits a stage over, by the port, or by the plan of transformers with its backend. Each
    rank is one process, on Neuron with one core. On the CPU several ranks run without XLA, whose CPU client supports
    only one process."""
    cp: Annotated[int, Limit(ge=1)] = 1
    """Ranks that context parallelism splits the tokens of a stage over."""
    ep: Annotated[int, Limit(ge=1)] = 1
    """Ranks that expert parallelism spreads the experts of a stage over."""
    pp: Annotated[int, Limit(ge=1)] = 1
    """Ranks that pipeline parallelism spreads the layers over, in programs that layerproof launch starts. Stages do
    without it."""
    dp: Annotated[int, Limit(ge=1)] = 1
    """Copies of the model with data of their own, in programs that layerproof launch starts. Stages do without it."""

    @property
    def of_stage(self) -> dict[str, int]:
        """The ranks that a stage is split over, by axis."""
        return {"ep": self.ep, "cp": self.cp, "tp": self.tp}

    @property
    def of_program(self) -> dict[str, int]:
        """The ranks of a program of the user's own, by axis."""
        return {"pp": self.pp, "dp": self.dp, **self.of_stage}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(Section):
    """How verdicts are reached."""

    __pydantic_config__ = PYDANTIC

    limit: Annotated[float, Limit(gt=0)] = 1.5
    """Largest R that passes, in units of the band that legitimate variants of the golden reach; 4/3 of it for the
    worst token, channel block, head and expert. R is the port's error in units of the golden's own
    (docs/verdicts.md)."""
    taps: Literal["all", "auto"] = "all"
    """Which taps stay in results/ after a stage is compared and diagnosed. all keeps every tap. auto keeps all taps
    of stages that do not pass, and the outputs and all statistics of the others; an edit of the port then also
    reruns the golden of the stages that it affects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Section):
    """What the report and archives contain."""

    __pydantic_config__ = PYDANTIC

    share: bool = False
    """Whether the report and archives leave out the port's source, prompts and local paths, so that you can attach them
    to a public issue. Such an archive cannot be rerun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Containers(Section):
    """Images that the jobs of each side run in with --sdm apptainer (containers/README.md)."""

    __pydantic_config__ = PYDANTIC

    golden: Image = "containers/layerproof.sif"
    """Runs the trusted model. A .sif file, or NAME@sha256:DIGEST behind docker:// or another scheme of
    Apptainer's."""
    port: Image = "containers/layerproof.sif"
    """Runs the port. A .sif file, or NAME@sha256:DIGEST behind docker:// or another scheme of Apptainer's."""
    cpu: Image = "containers/layerproof.sif"
    """Compares, plots and reports. A .sif file, or NAME@sha256:DIGEST behind docker:// or another scheme of
    Apptainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """Every key of config.yaml, with its type, unit, default and meaning."""

    __pydantic_config__ = PYDANTIC

    model: Model = field(default_factory=Model)
    """The model that both sides run."""
    inputs: Inputs
    """What the model reads. Set exactly one of prompts and token_ids."""
    layers: str | int = "all"
    """Layers to port and compare: all, 3 or 0-5,30. embed belongs to the first layer, norm and lm_head to the
    last."""
    chains: Sequence[str] | None = None
    """Ranges of stages that the port runs on its own outputs, each a string in quotes: "0-5" or "3" for layers, all
    from the token ids to the logits. null means [all], or [] if layers is not all."""
    golden: Golden = field(default_factory=Golden)
    """The trusted model."""
    port: Port = field(default_factory=Port)
    """The implementation under test."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the port is spread over ranks (docs/ports.md)."""
    stages_per_job: Annotated[int, Limit(ge=1, le=64)] = 16
    """Maximum number of stages that one job runs, one after the other, in one process. Each stage keeps its own files,
    log and record, and runs only if it must. A golden job runs consecutive stages; a job of the port or of a diagnosis runs
    stages of one kind. A stage that you request alone runs alone."""
    compare: Compare = field(default_factory=Compare)
    """How verdicts are reached."""
    report: Report = field(default_factory=Report)
    """What the report and archives contain."""
    containers: Containers = field(default_factory=Containers)
    """Images that the jobs of each side run in with --sdm apptainer (containers/README.md)."""


SECTIONS: Mapping[type[Section], Mapping[str, type[Section]]] = {
    Config: {
        "model": Model,
        "inputs": Inputs,
        "golden": Golden,
        "port": Port,
        "parallel": Parallel,
        "compare": Compare,
        "report": Report,
        "containers": Containers,
    },
    Port: {"nxdi": Nxdi},
}
"""Sections of sections, by their key."""


def read(path: Path) -> dict[str, Any]:
    """The keys and values in a config file.

    Raises:
        UserError: if the file cannot be read, has no keys, or names a key twice in a section: YAML would silently take the
            last one.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        node, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Name a text file that exists.") from None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f"line {mark.line + 1}: " if mark else ""
        reason = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{path}: {where}is not YAML ({reason}). Correct that line or the one before it.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: has no keys. Start from the config.yaml that comes with Layerproof.")
    for name, line in _repeated_keys(node):
        raise UserError(f"{path}: line {line}: {name} appears twice in this section. Remove one.")
    return content


def _repeated_keys(node: Any) -> Iterator[tuple[str, int]]:
    """Each key of a YAML tree that is in its section already, and its line."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                yield key.value, key.start_mark.line + 1
            seen.add(key.value)
            yield from _repeated_keys(value)


def validate(raw: Mapping[str, Any]) -> Config:
    """The typed settings, with every default filled in, of the keys and values of a config file.

    Raises:
        UserError: one line that names the first key that is wrong, what is wrong with it, and the remedy.
    """
    from pydantic import ValidationError

    _check_plain(raw)
    try:
        return _adapter().validate_json(json.dumps(raw))
    except ValidationError as error:
        errors = [([str(key) for key in _keys(one["loc"], raw)], one) for one in error.errors(include_url=False)]
        first, _ = min(errors, key=lambda one: one[0])
        # Of a value that may be one thing or another, the error furthest inside is the one that was meant.
        _, inmost = max((one for one in errors if one[0][: len(first)] == first), key=lambda one: len(one[0]))
        raise UserError(f"config.yaml: {_explain(inmost, raw)}") from None


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def _check_plain(value: Any, key: str = "") -> None:
    """Raises UserError at the first value that JSON cannot express: NaN, infinity, a date, a set."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        _check_plain(child, f"{key}.{name}" if key else str(name))
    if not isinstance(value, dict | list):
        try:
            canonical_json(value)
        except (TypeError, ValueError):
            raise UserError(
                f"config.yaml: {key}: JSON cannot express {value!r}. Write a number, a string or a list."
            ) from None


def _keys(loc: Sequence[str | int], raw: Any) -> list[str | int]:
    """The part of a pydantic location that names keys of the file; the rest names types of a union."""
    keys: list[str | int] = []
    for name in loc:
        if isinstance(raw, Mapping):
            known = {str(key): value for key, value in raw.items()}
            if str(name) not in known:
                if _is_type_name(name):
                    continue
                return [*keys, name]
            keys, raw = [*keys, name], known[str(name)]
        elif isinstance(raw, list) and isinstance(name, int):
            keys, raw = [*keys, name], raw[name]
        else:
            return keys
    return keys


def _is_type_name(name: str | int) -> bool:
    return not str(name).isidentifier() or name in ("str", "int", "float", "dict", "list", "tuple", "literal")


def _explain(error: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """A pydantic error as a sentence with the key, the value, what it must be, and what the key means."""
    keys = _keys(error["loc"], raw)
    node, value = _node(keys), error["input"]
    name = ".".join(map(str, keys))
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = list(_node(keys[:-1])["properties"])
        guess = difflib.get_close_matches(str(keys[-1]), known, n=1)
        return f"{name}: unknown key. " + (
            f'Did you mean "{guess[0]}"?' if guess else f"The keys are {', '.join(known)}."
        )
    if error["type"] in ("missing", "missing_argument"):
        return f"{name}: is missing. {_description(node)}"
    types = [one["type"] for one in _alternatives(node) if "type" in one]
    choices = [choice for one in _alternatives(node) for choice in one.get("enum", ())]
    context = error.get("ctx", {})
    wanted = {
        "greater_than": f"must be above {context.get('gt', 0):g}",
        "greater_than_equal": f"must be at least {context.get('ge', 0):g}",
        "less_than_equal": f"must be at most {context.get('le', 0):g}",
        "string_pattern_mismatch": "does not have the expected form",
        "string_too_short": "must not be empty",
        "too_short": "must not be empty",
    }.get(error["type"])
    if wanted is None and choices:
        nothing = ["null"] if "null" in types else []
        wanted = f"must be one of {', '.join([*map(str, choices), *nothing])}"
    return (
        f"{name}: {value!r} {wanted or f'must be {_either(types)}'}. {_number_meant(value, types)}{_description(node)}"
    )


def _either(types: Iterable[str]) -> str:
    names = {"object": "a section of keys", "array": "a list", "string": "a string", "boolean": "true or false"}
    return " or ".join(names.get(one, f"{'an' if one == 'integer' else 'a'} {one}") for one in types if one != "null")


def _number_meant(value: Any, types: Sequence[str]) -> str:
    """What to write where YAML reads a text and its writer meant a number, such as 1e1."""
    if "number" not in types or not isinstance(value, str):
        return ""
    try:
        return f"Write {float(value)!r}. "
    except ValueError:
        return ""


def _description(node: Mapping[str, Any]) -> str:
    return " ".join(str(node.get("description", "")).split())


def _node(keys: Sequence[str | int]) -> Mapping[str, Any]:
    """What the schema says of a key; of one inside a free mapping or a list, what it says of that."""
    node = schema()
    for key in keys:
        inner = node.get("properties", {}).get(key)
        if inner is None:
            inner = next((part for one in _alternatives(node) for part in _members(one)), None)
        if inner is None:
            return node
        node = {"description": node.get("description", ""), **inner}
    return node


def _alternatives(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return node.get("anyOf", [node])


def _members(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas of the members of a mapping or a list."""
    yield from node.get("patternProperties", {}).values()
    yield from (part for part in (node.get("additionalProperties"), node.get("items")) if isinstance(part, dict))


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of config.yaml, with the description and default of each key."""
    made = _adapter().json_schema()
    definitions = made.pop("$defs")

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(one) for one in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            node = {**definitions[node["$ref"].rpartition("/")[2]], **node}
        left = {key: inlined(value) for key, value in node.items() if key not in ("$ref", "title")}
        return left | ({"description": " ".join(left["description"].split())} if "description" in left else {})

    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "config.yaml", **inlined(made)}
    _fill_in_defaults(whole, as_json(Config(inputs=Inputs())))
    return whole


def _fill_in_defaults(node: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Adds the defaults that pydantic leaves out of a schema, because a factory makes them."""
    for key, part in node["properties"].items():
        if "properties" in part:
            _fill_in_defaults(part, values[key])
        elif "default" not in part:
            part["default"] = values[key]


def as_json(section: Section) -> dict[str, Any]:
    """The keys of a section that are set, as JSON has them."""
    values = {}
    for one in fields(section):  # type: ignore[arg-type]
        try:
            value = object.__getattribute__(section, one.name)
        except AttributeError:
            continue
        values[one.name] = as_json(value) if isinstance(value, Section) else _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def selected(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """The part of the settings that these keys name, each a section (`golden`) or a key of one (`compare.limit`), as JSON.

    Raises:
        KeyError: if config.yaml has no such key.
    """
    everything, found = as_json(config), {}
    for key in keys:
        part, target = everything, found
        *outer, last = key.split(".")
        for name in outer:
            part, target = part[name], target.setdefault(name, {})
        target[last] = part[last]
    return found


def values_now(
    recorded: Mapping[str, Any], settings: Mapping[str, Any], section: type[Section] = Config
) -> dict[str, Any]:
    """The settings that a job had, with the values that config.yaml gives them now. Of a section only the keys that the
    job had count; any other mapping, such as `port.options`, counts whole.
    """
    inner = SECTIONS.get(section, {})
    return {
        key: values_now(value, settings[key], inner[key])
        if key in inner and isinstance(settings.get(key), Mapping)
        else settings.get(key)
        for key, value in recorded.items()
    }


def loaded(values: Mapping[str, Any]) -> Config:
    """The settings of a job, from what `selected` gave. Reading a key that is not among them raises AttributeError."""
    return _loaded(Config, values)


def _loaded[T: Section](model: type[T], values: Mapping[str, Any]) -> T:
    section, inner = object.__new__(model), SECTIONS.get(model, {})
    for name, value in values.items():
        object.__setattr__(section, name, _loaded(inner[name], value) if name in inner else value)
    return section


def changed[T: Section](section: T, **values: Any) -> T:
    """The section with other values for some keys, and all others as they are or not set."""
    made = object.__new__(type(section))
    for one in fields(section):  # type: ignore[arg-type]
        if one.name in values:
            object.__setattr__(made, one.name, values[one.name])
        else:
            try:
                object.__setattr__(made, one.name, object.__getattribute__(section, one.name))
            except AttributeError:
                continue
    return made
