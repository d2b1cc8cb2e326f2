# What the output of each job depends on besides its files, as canonical JSON: the settings and package versions that it
# uses and no others, so that a change of config.yaml runs only the jobs it concerns.

import functools
import json
from types import SimpleNamespace

from layerproof.golden import transfer
from layerproof.model import captured


def checkpoint_spec(wildcards):
    return spec(
        "cpu", "torch", "transformers", "tokenizers", seed=SETTINGS["model"]["seed"], form=SETTINGS["model"]["form"]
    )


def weights_spec(wildcards):
    return spec(
        "golden",
        "transformers",
        checkpoint_dir=CHECKPOINT,
        trust_remote_code=SETTINGS["model"]["trust_remote_code"],
    )


def tokens_spec(wildcards):
    return spec(
        "golden",
        "transformers",
        "tokenizers",
        checkpoint_dir=CHECKPOINT,
        inputs=SETTINGS["inputs"],
        trust_remote_code=SETTINGS["model"]["trust_remote_code"],
    )


# What the golden is made with; where it is stored then is no part of it.
GOLDEN_SETTINGS = {key: value for key, value in SETTINGS["golden"].items() if key != "storage"}


def golden_spec(**settings):
    if TAKES_GOLDEN:
        alike = {key: SETTINGS[name.split(".")[0]][key] for key, name in transfer.ALIKE.items()}
        return spec("cpu", storage=SETTINGS["golden"]["storage"], **alike, **settings)
    return spec(
        "golden",
        "torch",
        "transformers",
        "numba",
        *(["accelerate"] if SETTINGS["golden"]["mode"] == "whole" else []),
        checkpoint_dir=CHECKPOINT,
        trust_remote_code=SETTINGS["model"]["trust_remote_code"],
        **GOLDEN_SETTINGS,
        **settings,
    )


def has_taps(stage):
    """Whether the golden of a stage has taps and noise: if it is compared, or has them from a run with more `layers`."""
    return stage in STAGES or STAMPS.settings(f"golden/{stage}") == json.loads(
        golden_spec(stage=stage, compared=[stage])
    )


def golden_stage_spec(wildcards):
    return golden_spec(stage=wildcards.stage, compared=list(filter(has_taps, [wildcards.stage])))


def port_spec(**settings):
    """Of a job that runs the port as it is."""
    return spec(
        "port",
        "torch",
        "torch-xla",
        "torch-neuronx",
        "neuronx-cc",
        "libneuronxla",
        *(["transformers"] if SETTINGS["port"]["backend"] == "transformers" else []),
        *(["neuronx-distributed", "neuronx-distributed-inference"] if SETTINGS["port"]["backend"] == "nxdi" else []),
        checkpoint_dir=CHECKPOINT,
        trust_remote_code=SETTINGS["model"]["trust_remote_code"],
        **{
            key: value
            for key, value in SETTINGS["port"].items()
            if key not in ("compile", "compiler_flags", "captured")
        },
        tp=SETTINGS["parallel"]["tp"],
        **settings,
    )


def shipped_spec(**settings):
    """Of a job that runs the port as it is shipped: compiled, if that is asked for."""
    how = SETTINGS["port"]["compile"]
    flags = {"compiler_flags": SETTINGS["port"]["compiler_flags"]} if how == "neuron" else {}
    return port_spec(compile=how, **flags, **settings)


def chain_spec(chain):
    return spec("port", "torch", "h5py") if chain == captured.CHAIN else shipped_spec(chain=chain)


def port_stage_spec(wildcards):
    return shipped_spec()


def force_stage_spec(wildcards):
    return port_spec()


def bisect_spec(wildcards):
    return port_spec(stages=BISECTED, left_out=[stage for stage in STAGES if stage not in BISECTED])


def compare_stage_spec(wildcards):
    return spec("cpu", "numpy", "numba", "h5py", stage=wildcards.stage, limit=SETTINGS["compare"]["limit"])


def diagnose_stage_spec(wildcards):
    return spec(
        "golden",
        "torch",
        "transformers",
        "numpy",
        "numba",
        stage=wildcards.stage,
        checkpoint_dir=CHECKPOINT,
        trust_remote_code=SETTINGS["model"]["trust_remote_code"],
        limit=SETTINGS["compare"]["limit"],
        **GOLDEN_SETTINGS,
    )


def compare_chain_spec(wildcards):
    return spec(
        "cpu",
        "numpy",
        "numba",
        "h5py",
        chain=wildcards.chain,
        stages=CHAINS[wildcards.chain],
    )


def predict_spec(wildcards):
    return spec(
        "golden",
        "torch",
        "transformers",
        checkpoint_dir=CHECKPOINT,
        trust_remote_code=SETTINGS["model"]["trust_remote_code"],
        golden={"dtype": SETTINGS["golden"]["dtype"]},
        port={key: SETTINGS["port"][key] for key in ("dtype", "backend")},
        compared=STAGES,
        before=[stage for stage in GOLDEN if stage not in STAGES],
        chains={stage: sum(stage in members for members in CHAINS.values()) for stage in STAGES},
    )


def preflight_spec(side):
    if side == "golden" and TAKES_GOLDEN:
        return spec("cpu", storage=SETTINGS["golden"]["storage"])
    asked = {"golden": ("device", "mode"), "port": ("device", "backend", "compile", "dtype")}[side]
    if side == "golden" and SETTINGS["golden"]["mode"] == "whole":
        asked += ("device_map", "max_memory", "offload_folder")
    ranks = {"parallel": SETTINGS["parallel"]} if side == "port" else {}
    return spec(
        side, *PACKAGES, checkpoint_dir=CHECKPOINT, **{side: {key: SETTINGS[side][key] for key in asked}}, **ranks
    )


def audit_spec(wildcards):
    return spec("cpu", "h5py", port_dtype=SETTINGS["port"]["dtype"])


def trim_stage_spec(wildcards):
    return spec("cpu", "h5py")


@functools.cache
def reads_taps(stage):
    """Whether the taps of a stage are wanted where they were dropped: all are kept now, or its comparison has to run."""
    if stage not in STAGES or SETTINGS["compare"]["taps"] == "all":
        return stage in STAGES
    before = GOLDEN[: GOLDEN.index(stage) + 1]
    return any(will_run("golden", name) for name in before) or will_run("port", stage) or will_run("compare", stage)


@functools.cache
def will_run(folder, stage):
    """Whether the golden, port or comparison of a stage has to run, for all that is known before any job ran."""
    wildcards = SimpleNamespace(stage=stage)
    rule_name, settings, ending = {
        "golden": (GOLDEN_RULE, golden_stage_spec, "h5"),
        "port": ("port_stage", port_stage_spec, "h5"),
        "compare": ("compare_stage", compare_stage_spec, "json"),
    }[folder]
    output = f"results/{folder}/{stage}.{ending}"
    return is_forced(rule_name, output) or STAMPS.is_stale(job_name(output), json.loads(settings(wildcards)))


def verdicts_spec(wildcards):
    return spec("cpu")


def plot_stage_spec(wildcards):
    return spec("cpu", "matplotlib")


def plot_model_spec(wildcards):
    return spec("cpu", "matplotlib")


def report_spec(wildcards):
    return spec("cpu", "transformers", "torch", "torch-xla", config=SETTINGS)
