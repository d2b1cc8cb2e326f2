# results/prediction.json -> the memory and time that a cluster is asked for. A job that was killed for one of them asks for more.

import errno
import math

from layerproof.files import read_json

# Bytes that are asked for besides what is predicted: a process's libraries, with room (docs/performance.md).
IMPORTS_WITH_ROOM = 2_000_000_000
# Of what is predicted, which was measured to be between half and 1.15 times what a job takes.
ROOM = 1.5
# Bytes a second, of weights and of tensors in results/: a tenth of what was measured.
READ = 100_000_000
WORK = 10_000_000
# Minutes that Neuron's compiler is given for a stage.
NEURON_COMPILES = 90


def predicted(input):
    """The prediction. Until it is made Snakemake is told that an input is missing, and asks again when the job is due."""
    prediction = Path("results/prediction.json")
    if not prediction.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), input[0])
    return read_json(prediction)


def more(attempt):
    """By how much more memory and time is asked for: 1, 1.5, 2 times. Not every second attempt is for want of them."""
    return (attempt + 1) / 2


def port_starts(minutes):
    """Minutes of a port's job that do not depend on its size: starts, and compilers."""
    on_neuron = CONFIG.port.device == "NEURON" or CONFIG.port.compile == "neuron"
    return minutes + NEURON_COMPILES * on_neuron


def memory_of(side, stages_of, at_once=False):
    """MB for a job that has these stages in memory, one at a time or all at once."""

    def mem_mb(wildcards, input, attempt):
        known = predicted(input)["stages"]
        parts = [known[stage] for stage in stages_of(wildcards) if stage in known]
        needed = max((part[side] for part in parts), default=0)
        if at_once:
            needed = sum(part["weights"][side] for part in parts) + max(
                (part[side] - part["weights"][side] for part in parts), default=0
            )
        processes = CONFIG.parallel.tp if side == "port" else 1
        asked = processes * (IMPORTS_WITH_ROOM + ROOM * needed)  # each rank may convert the whole stage
        return math.ceil(more(attempt) * asked / 1e6)

    return mem_mb


def time_of(side, stages_of, start):
    """Minutes for a job that runs these stages; `start` of them for what takes as long whatever the size: starts, compilers."""

    def runtime(wildcards, input, attempt):
        known = predicted(input)["stages"]
        parts = [known[stage] for stage in stages_of(wildcards) if stage in known]
        seconds = sum(part["weights"][side] / READ + part["files"] / WORK for part in parts)
        return math.ceil(more(attempt) * (start + seconds / 60))

    return runtime


def time_of_reading(files):
    """Minutes for a job that reads files."""

    def runtime(wildcards, input, attempt):
        size = sum(map(os.path.getsize, files))
        return math.ceil(more(attempt) * (30 + size / READ / 60))

    return runtime


def own_stage(wildcards):
    return [wildcards.stage]
