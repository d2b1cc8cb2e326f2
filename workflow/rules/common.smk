# config.yaml -> CONFIG (checked), the stages, and what every job's parameters are made of.

import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.join(workflow.basedir, "workflow"))

from layerproof.config import read
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.files import canonical_json
from layerproof.model import captured, stages
from layerproof.model.resolve import resolve

if workflow.storage_settings.default_storage_provider:
    # Of an output that a job may leave as it is, Snakemake 9.27 makes a copy first, on the local disk alone.
    sys.exit(
        "error: --default-storage-provider: results/ has to be local. Leave it out; for hosts that share no file system there is "
        "golden.storage (docs/clusters.md)."
    )


def or_exit(function, *arguments):
    """What a function of the library returns. If it is a user's error, its line is all that is printed."""
    try:
        return function(*arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


for config_file in [*workflow.configfiles, "config.yaml"]:
    if os.path.exists(config_file):  # Snakemake says it if none is there, but not what is wrong in one
        or_exit(read, Path(config_file))


configfile: "config.yaml"


CONFIG = or_exit(resolve, config)
SETTINGS = CONFIG.resolved
CHECKPOINT = CONFIG.checkpoint
STAGES = CONFIG.stages
ALL_STAGES = stages.all_stages(CONFIG.num_layers)
CHAINS = CONFIG.chains
GOLDEN = ALL_STAGES[: max(map(ALL_STAGES.index, STAGES)) + 1]
BISECTED = stages.first_run(STAGES, CONFIG.num_layers)
PACKAGES = package_versions()
TAKES_GOLDEN = SETTINGS["golden"]["mode"] == "stored"
GOLDEN_RULE = {"stored": "take_golden", "whole": "golden_whole"}.get(SETTINGS["golden"]["mode"], "golden_stage")
STORES_GOLDEN = SETTINGS["golden"]["storage"] and not TAKES_GOLDEN


def block_rule(rule_name, stage):
    """What runs a stage together with others (blocks.smk); None if it has a job of its own."""
    size = SETTINGS["stages_per_job"]
    names = GOLDEN if rule_name == "golden_stage" else STAGES
    if size == 1 or not rule_name.endswith("_stage") or stage not in names:
        return None
    return f"{rule_name}s_{names[names.index(stage) // size * size]}"


# Each chain, and each block of stages, has a rule of its own; a profile speaks of them as `chain`, and as the rule of one stage.
for of_rules in (workflow.resource_settings.overwrite_resources, workflow.group_settings.overwrite_groups):
    for rule_name in list(of_rules):
        chains = {f"chain_{name}" for name in CHAINS if rule_name == "chain" and name != captured.CHAIN}
        blocks = {block_rule(rule_name, stage) for stage in ALL_STAGES} - {None}
        of_rules.update({name: of_rules.get(name, of_rules[rule_name]) for name in chains | blocks})


wildcard_constraints:
    stage="|".join(ALL_STAGES),
    run=r"[A-Za-z0-9._-]+",


def spec(side, /, *packages, **settings):
    """Canonical JSON of what a job's output depends on besides its files: Snakemake reruns the job when it changes.

    In containers that is the image of the job's side, and the packages in it with it.
    """
    if IN_CONTAINERS:
        return canonical_json({**settings, "container": image_digest(CONTAINERS[side])})
    versions = {name: PACKAGES[name] for name in packages if name in PACKAGES}
    return canonical_json({**settings, "packages": versions})


def previous_golden(stage, folder="golden"):
    """The golden file that feeds a stage, in a list; nothing feeds embed."""
    previous = stages.previous_stage(stage, CONFIG.num_layers)
    return [f"results/{folder}/{previous}.h5"] if previous else []


def chain_files(pattern, chain):
    return expand(pattern, chain=chain, stage=CHAINS[chain])


def in_storage(name):
    return storage(f"{SETTINGS['golden']['storage']}/{name}.zip")


def all_that_is_stored(wildcards):
    if TAKES_GOLDEN:
        sys.exit(
            "error: config.yaml: golden.mode: stored takes the golden. Run snakemake store_golden where it is made."
        )
    if not STORES_GOLDEN:
        sys.exit("error: config.yaml: golden.storage: store_golden puts the golden there. Name s3://BUCKET/FOLDER.")
    return [in_storage(name) for name in ("preflight", *GOLDEN)]


def asked_for(target):
    """A target that no other needs, in a list if it is there or asked for in this call: from then on it is kept up to date."""
    return [target] if exists(target) or target in map(str, workflow.dag_settings.targets) else []
