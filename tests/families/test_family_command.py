"""A family through the command that people type: one that keeps its residuals in fp32."""

import pytest

from environments import hurried
from families import command

pytestmark = pytest.mark.workflow


def test_a_family_passes_by_the_command(tmp_path):
    row = command.judge(("falcon_mamba", 611128), tmp_path, **hurried())
    assert row["code"] == 0, row["headline"]
    assert row["headline"].startswith("All 7 stages")
