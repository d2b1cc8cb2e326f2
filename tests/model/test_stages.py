"""Names and selections of stages: what a user writes is what runs, and what cannot run is told in one line."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerproof.errors import UserError
from layerproof.model.stages import (
    all_stages,
    chain_stages,
    layer_of,
    layer_stage,
    parse_ranges,
    previous_stage,
    selected_stages,
)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("3", [3]),
        ("0-5", [0, 1, 2, 3, 4, 5]),
        ("4, 0 - 1", [0, 1, 4]),
        ("2-4,3,4-5", [2, 3, 4, 5]),
        ("5-5", [5]),
    ],
)
def test_ranges_are_read(text, layers):
    assert parse_ranges(text, 6, "layers") == layers


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("6", ["6 layers", '"0-5"']),
        ("0-70", ["(0 to 5)", '"all"']),
        ("1,4-2", ['"4-2" counts backwards', '"2-4"']),
        ("", ["not a list of layers", '"0-5,30"']),
        ("1,", ["not a list of layers"]),
        ("-1", ["not a list of layers"]),
        ("1-2-3", ["not a list of layers"]),
        ("1.5", ["not a list of layers"]),
        ("ALL", ["not a list of layers"]),
        ("1\n2", ["not a list of layers"]),
    ],
)
def test_unreadable_ranges_are_refused_in_one_line_that_names_the_key(text, told):
    with pytest.raises(UserError) as error:
        parse_ranges(text, 6, "some.key")
    message = str(error.value)
    assert message.startswith("config.yaml: some.key: ")
    assert all(part in message for part in told), message


@given(st.sets(st.integers(0, 199), min_size=1), st.randoms())
def test_ranges_written_in_any_order_are_read_back(layers, random):
    runs = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1 and random.random() < 0.8:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    random.shuffle(runs)
    text = ",".join(f"{a}-{b}" if b > a or random.random() < 0.5 else str(a) for a, b in runs)
    assert parse_ranges(text, 200, "layers") == sorted(layers)


@given(st.integers(0, 5000))
def test_the_name_of_a_layer_leads_back_to_the_layer(layer):
    assert layer_of(layer_stage(layer)) == layer


def test_stages_without_a_layer():
    assert [layer_of(stage) for stage in ("embed", "norm", "lm_head")] == [None] * 3


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        ([1], ["layer_001"]),
        ([0], ["embed", "layer_000"]),
        ([2], ["layer_002", "norm", "lm_head"]),
        ([2, 0], ["embed", "layer_000", "layer_002", "norm", "lm_head"]),
    ],
)
def test_the_ends_come_with_the_first_and_the_last_layer(layers, stages):
    assert selected_stages(layers, 3) == stages


def test_all_layers_select_every_stage_in_the_order_of_data():
    assert selected_stages(range(12), 12) == all_stages(12)
    assert all_stages(2) == ["embed", "layer_000", "layer_001", "norm", "lm_head"]


def test_chains():
    assert chain_stages("all", 2) == all_stages(2)
    assert chain_stages("1-3", 6) == ["layer_001", "layer_002", "layer_003"]
    assert chain_stages("0-5", 6) == all_stages(6)[1:-2], "only `all` runs from the token ids to the logits"


@pytest.mark.parametrize("chain", ["1,3", "0-1,2-3", " 1-2", "3-1", "0-6", "each"])
def test_a_chain_is_one_unbroken_range_inside_the_model(chain):
    with pytest.raises(UserError, match=r"^config\.yaml: chains: "):
        chain_stages(chain, 6)


@given(st.integers(1, 300))
def test_previous_stages_lead_from_the_end_to_the_start(num_layers):
    stage, seen = "lm_head", []
    while stage is not None:
        seen.append(stage)
        stage = previous_stage(stage, num_layers)
    assert seen[::-1] == all_stages(num_layers)


def test_the_map_of_the_library_names_every_module():
    import layerproof

    folder = Path(layerproof.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    listed = set(re.findall(r"\w+", layerproof.__doc__))
    assert names - {"__init__", "__main__"} <= listed
