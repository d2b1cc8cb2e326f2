"""The fault dictionary: known porting mistakes, each as a small change to a golden stage that imitates it.

`DICTIONARY` contains all of them. A fault has a name, one tap where it shows first, and a function that makes the
change:

    @fault("router_softmax", "a softmax over the experts in place of the sigmoid", "router.scores")
    def router_softmax(stage: GoldenStage) -> None:
        stage.edit("router.scores", lambda scores, seen: seen["router.logits"].float().softmax(-1))

To add a fault, add such a function to the module that it belongs to. A fault that does not apply to a model raises
NotApplicable, most often because it asks for a module that does not exist. A fault that changes nothing at its tap
explains nothing.
"""

from layerproof.diagnose.faults import attention, ends, experts, fp8, linear, norms, rotary, router, stream
from layerproof.diagnose.faults.golden_stage import Fault, GoldenStage, NotApplicable

DICTIONARY: tuple[Fault, ...] = tuple(
    fault
    for module in (norms, linear, rotary, attention, stream, router, experts, fp8, ends)
    for fault in module.FAULTS.found
)

__all__ = ["DICTIONARY", "Fault", "GoldenStage", "NotApplicable"]
