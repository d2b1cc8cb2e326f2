"""The lines of a port's source that hand a tap over."""

import pytest
import torch
from torch import nn

from layerproof.report.source import code_frame
from layerproof.taps import Place, collecting, forward_place, locating, tap

PORT = """TAPS = {"attn.q": "attention.q_proj"}


class Attention:
    def forward(self, x):
        q = self.q_proj(x)
        # rotate
        q = tap("attn.q_rot", q)
        return q


def build(stage):
    class Layer:
        def forward(self, x):
            if x is None:
                return x
            return self.attention(x)
"""


@pytest.fixture
def port(tmp_path):
    path = tmp_path / "port.py"
    path.write_text(PORT)
    return path


@pytest.mark.parametrize(
    ("function", "name", "line"),
    [
        ("Attention.forward", "attn.q_rot", 8),
        ("Attention.forward", "attn.q", 6),
        ("build.<locals>.Layer.forward", "out", 17),
        ("Attention.forward", "attn.k", 9),
    ],
    ids=["call of tap", "module in the table", "output", "unknown: what it returns"],
)
def test_the_line_is_that_which_hands_the_tap_over(port, function, name, line):
    frame = code_frame({"file": str(port), "function": function}, name)
    assert frame is not None and frame.line == line
    assert f"> {line:>{len(str(frame.lines[-1][0]))}} " in frame.text()


def test_a_comment_moves_the_line(port):
    place = {"file": str(port), "function": "Attention.forward"}
    port.write_text("# why\n" + PORT)
    frame = code_frame(place, "attn.q_rot")
    assert frame is not None and frame.line == 9


@pytest.mark.parametrize("change", [None, "def broken(:", "", "\x00"], ids=["gone", "syntax", "empty", "binary"])
def test_a_file_that_has_changed_has_no_lines(port, change):
    if change is None:
        port.unlink()
    else:
        port.write_text(change)
    assert code_frame({"file": str(port), "function": "Attention.forward"}, "attn.q_rot") is None


class Inner(nn.Module):
    def forward(self, x):
        return tap("attn.q", x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(self.inner(x))


def test_places_are_the_functions_of_the_port_not_those_of_torch():
    module = Outer()
    module.linear.register_forward_hook(lambda *args: tap("attn.out", args[2]))
    with collecting(), locating() as places:
        module(torch.ones(1, 2))
    assert places["attn.q"].function == "Inner.forward"
    assert places["attn.out"].function.endswith("<lambda>"), "the hook is the user's own"
    assert places["attn.q"].file.endswith("test_code_frame.py")


def test_the_output_is_handed_over_by_the_forward_of_the_port():
    place = forward_place(Outer())
    assert isinstance(place, Place) and place.function == "Outer.forward"
    assert forward_place(nn.Linear(2, 2)) is None


def test_a_patch_returns_nothing_and_its_early_return_is_no_place(tmp_path):
    port = tmp_path / "port.py"
    port.write_text(
        "def patch(model, part, stage):\n    if stage.layer is None:\n        return\n    part.norm = None\n"
    )
    frame = code_frame({"file": str(port), "function": "patch"}, "input_norm")
    assert frame is not None and frame.line == 1
