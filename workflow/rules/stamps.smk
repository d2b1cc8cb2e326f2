# Which jobs have to run for a reason that Snakemake does not see (records.py): their parameter `stamp` changes, and a stamp
# file that is their input is renewed.

import json
import secrets
from types import SimpleNamespace

from layerproof.rerun.planner import Stamps

STAMPS = Stamps(
    Path("results/records"),
    Path(".layerproof/stamps"),
    Path(".layerproof/seen"),
    lambda job: reads_taps(Path(job).name),
)
FORCED = secrets.token_hex(8)


def is_forced(rule_name, output):
    """Whether this call of snakemake was told to run a job whatever its state (-F, -R, -f)."""
    asked = workflow.dag_settings
    named = {rule_name, output, block_rule(rule_name, Path(output).stem)}
    return workflow.is_main_process and (
        asked.forceall
        or bool(named & {str(name) for name in asked.forcerun})
        or (asked.forcetargets and bool(named & {str(name) for name in asked.targets}))
    )


def job_name(output):
    """What a job is called by its record: results/port/layer_003.h5 is made by port/layer_003."""
    return str(Path(output).relative_to("results").with_suffix(""))


def stamp(rule_name, output):
    """Changes when a job has to run for a reason that Snakemake does not see (records.py)."""
    return FORCED if is_forced(rule_name, output) else STAMPS.value(job_name(output))


def stamp_file(output, spec):
    """An input that is newer than the output when the job has to run with these settings."""
    job = job_name(output)
    return STAMPS.file(job, json.loads(spec)) if workflow.is_main_process else str(STAMPS.files / job)


def chain_stamp_files(chain):
    outputs = chain_files("results/chain/{chain}/{stage}.h5", chain)
    return [stamp_file(output, chain_spec(chain)) for output in outputs]


def chain_stamps(chain):
    """One stamp for each stage: of a chain only the stages that changed, and those that they reach, run again."""
    return [stamp(f"chain_{chain}", f"results/chain/{chain}/{stage}.h5") for stage in CHAINS[chain]]


def golden_stamp_files(wildcards):
    specs = {stage: golden_stage_spec(SimpleNamespace(stage=stage)) for stage in GOLDEN}
    return [stamp_file(f"results/golden/{stage}.h5", settings) for stage, settings in specs.items()]


def golden_stamps(wildcards):
    """One stamp for each stage: in one process too, only those that changed and those that they reach run again."""
    return [stamp("golden_whole", f"results/golden/{stage}.h5") for stage in GOLDEN]
