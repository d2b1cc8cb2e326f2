"""Runs a program on ranks that are actors of Ray: `python -m layerproof.launch.ray COUNT FILE ARGUMENTS`.

They belong to the cluster at RAY_ADDRESS, or to one that lasts as long as the program. What ranks make they write to files:
nothing but their end goes through the object store.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from layerproof import distributed
from layerproof.distributed.board import free_port
from layerproof.launch import rank
from layerproof.launch.variables import of_rank

OBJECTS = 80 * 2**20
"""Bytes of the object store of a cluster of our own, which holds nothing but the ends of ranks."""
GIVEN = (
    *("LAYERPROOF_", "OMP_", "HF_", "PYTHON", "TORCH_", "PJRT_", "XLA_", "NEURON_", "CUDA_"),
    *("NCCL_", "GLOO_", "CCL_", "HCCL_"),
)
"""Beginnings of the variables that ranks get from this process: a worker has none of them but those of its cluster."""


class Rank:
    """The actor of one rank."""

    def run(self, arguments: Sequence[str], folder: str) -> int:
        """Returns the program's exit code."""
        os.chdir(folder)
        try:
            rank.run(arguments)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            distributed.ended(error)
            raise
        distributed.ended()
        return 0


def run(count: int, arguments: Sequence[str]) -> int:
    """Returns 0, or 1 if a rank failed. The first to fail is said, and the others are ended."""
    own: dict[str, Any] = {"num_cpus": max(count, os.cpu_count() or 1), "object_store_memory": OBJECTS}
    ray.init(include_dashboard=False, **({} if "RAY_ADDRESS" in os.environ else own))
    bundle = {"CPU": 1.0} | ({"neuron_cores": 1.0} if os.environ.get("PJRT_DEVICE") == "NEURON" else {})
    group = placement_group([bundle] * count, strategy="PACK")
    try:
        ray.get(group.ready())
        return _run_in(group, bundle, count, arguments)
    finally:
        remove_placement_group(group)
        ray.shutdown()


def _run_in(group: Any, bundle: Mapping[str, float], count: int, arguments: Sequence[str]) -> int:
    def placed(number: int) -> dict[str, Any]:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        cores = {name: amount for name, amount in bundle.items() if name != "CPU"}
        return {"num_cpus": 1, "resources": cores, "scheduling_strategy": where}

    host, port = ray.get(ray.remote(_meeting_place).options(**placed(0)).remote())
    given = {name: value for name, value in os.environ.items() if name.startswith(GIVEN)}
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    on_nodes = [nodes[number] for number in range(count)]
    actors = []
    for number, node in enumerate(on_nodes):
        own = {"LOCAL_RANK": on_nodes[:number].count(node), "LOCAL_WORLD_SIZE": on_nodes.count(node)}
        variables = given | of_rank(number, count, host, port) | {name: str(value) for name, value in own.items()}
        environment = {"env_vars": variables}
        actors.append(ray.remote(Rank).options(**placed(number), max_restarts=0, runtime_env=environment).remote())
    running = {actor.run.remote(list(arguments), os.getcwd()): number for number, actor in enumerate(actors)}
    code, deadline = 0, None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended, _ = ray.wait(list(running), num_returns=1, timeout=left)
        if not ended:
            break
        number = running.pop(ended[0])
        try:
            code = code or ray.get(ended[0])
        except (RayActorError, RayTaskError) as error:
            if not code:
                print(f"rank {number} of {count}: {error}", file=sys.stderr, flush=True)
            code = 1
        if code and deadline is None:
            deadline = time.monotonic() + rank.GRACE
    for actor in actors:
        ray.kill(actor)
    return code


def _meeting_place() -> tuple[str, int]:
    """The address of this host, and a port that is free there."""
    return ray.util.get_node_ip_address(), free_port()


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
