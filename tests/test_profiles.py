"""The profiles that ship."""

import yaml

from configs import REPOSITORY


def test_a_cluster_runs_by_the_rules_of_the_default_profile():
    """Snakemake does not read the default one when another is named."""
    default, slurm = (
        yaml.safe_load((REPOSITORY / f"profiles/{name}/config.yaml").read_text()) for name in ("default", "slurm")
    )
    assert default and default.items() <= slurm.items()
