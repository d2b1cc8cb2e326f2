"""Settings for tests, as jobs get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerproof.config import Config, validate

REPOSITORY = Path(__file__).resolve().parents[1]
QUICK = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
}
"""A port then compiles in a tenth of the time, and few tests ask how well."""


def config_with(**sections: Any) -> Config:
    """The defaults of config.yaml with other values by section: `config_with(port={"backend": "nxdi"}, parallel={"tp":
    2})`.
    """
    return validate({"inputs": {"prompts": "prompts.txt"}, **sections})
