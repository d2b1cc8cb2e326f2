"""The run of a port that changes the process it runs in."""

import json

import pytest
from runs import Workflow

from models import save

pytestmark = pytest.mark.workflow

HOSTILE = """
import os, random, sys
import numpy as np
import torch

class Hostile(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        HARM
        return self.norm(x)

def patch(model, part, stage):
    stage.options["harm"] = stage.config["vocab_size"] = object()
    if stage.layer is not None:
        part.input_layernorm = Hostile(part.input_layernorm)
    print("harm is done")
"""


HARM = (
    "torch.set_num_threads(7); os.chdir('/'); random.seed(1); np.random.seed(1); torch.manual_seed(1); "
    "np.seterr(all='raise'); os.fork() == 0 and os._exit(0)"
)


def test_a_hostile_port_is_judged_as_a_friendly_one(tmp_path):
    """All harm at once, in jobs that run several stages in one process; the verdict is that of the port without it."""
    (tmp_path / "hostile.py").write_text(HOSTILE.replace("HARM", HARM))
    settings = {"backend": "transformers", "module": "hostile.py", "options": {"harm": 1}}
    workflow = Workflow(tmp_path, model={"checkpoint": "model"}, inputs={"prompts": None, "token_ids": "ids.json"})
    save("qwen3", tmp_path / "model")
    (tmp_path / "ids.json").write_text("[[5, 6, 7, 8, 9, 10, 11], [10, 11, 12, 13]]")
    workflow.configure(port=settings, stages_per_job=8)
    workflow.run()
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["overall"] == "pass", verdicts["headline"]
    assert "harm is done" in workflow.log("port/layer_001")
