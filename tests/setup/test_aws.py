"""The cluster that docs/aws has a user make is one that the profile of Slurm can use."""

from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


def test_its_queues_are_the_partitions_of_the_profile():
    cluster = yaml.safe_load((REPOSITORY / "docs/aws/cluster.yaml").read_text())
    profile = yaml.safe_load((REPOSITORY / "profiles/slurm/config.yaml").read_text())
    asked = [profile["default-resources"], *profile["set-resources"].values()]
    assert {queue["Name"] for queue in cluster["Scheduling"]["SlurmQueues"]} == {
        one["slurm_partition"] for one in asked
    }
