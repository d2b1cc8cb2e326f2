"""Taps: what is collected, what goes on in a forced run, and where a mistake may be that shows at a tap."""

import pytest
import torch

from layerproof.errors import StageError
from layerproof.taps import FEEDS, OUT, SHAPES, Fed, TapsDone, check_known, collecting, merged, tap, unseen_before


def stage(x):
    q = tap("attn.q", x + 1)
    return tap(OUT, 2 * tap("attn.q_norm", q * 3))


def test_outside_of_a_run_a_tap_is_the_tensor_itself():
    x = torch.ones(1, 2, 3)
    assert tap("attn.q", x) is x


def test_a_forced_tap_is_collected_as_it_was_and_goes_on_as_the_golden():
    golden = {"attn.q": torch.full((1, 2, 3), 5.0, dtype=torch.float64)}
    with collecting(golden) as taps:
        out = stage(torch.ones(1, 2, 3))
    assert (taps["attn.q"] == 2).all()
    assert (out == 30).all() and out.dtype == torch.float32


def test_a_golden_of_another_shape_is_not_forced():
    with collecting({"attn.q": torch.full((1, 2, 4), 5.0)}):
        assert (stage(torch.ones(1, 2, 3)) == 12).all()


def test_an_edit_sees_what_was_forced_before_it():
    def edit(tensor, seen):
        return tensor + seen["attn.q"]

    with collecting({"attn.q": torch.full((1, 2, 3), 5.0)}, {"attn.q_norm": edit}) as taps:
        out = stage(torch.ones(1, 2, 3))
    assert (taps["attn.q_norm"] == 20).all() and (out == 40).all()


def test_a_run_ends_at_the_tap_that_is_asked_for():
    with pytest.raises(TapsDone), collecting(until="attn.q") as taps:
        stage(torch.ones(1, 2, 3))
    assert set(taps) == {"attn.q"}


def test_a_tap_that_a_layer_hands_over_again_may_be_named():
    check_known(["attn.q.2", "post_attn_norm.2", "router.scores.3", "mlp.otu.2", "mlp.q_norm"], "my_port.py: TAPS")
    for name in ("atn.q", "router.scoress", "attn.qk"):
        with pytest.raises(StageError):
            check_known([name], "my_port.py: TAPS")
    with pytest.raises(StageError, match=r'"post_att_norm\.2" is not a tap. Did you mean "post_attn_norm\.2"'):
        check_known(["post_att_norm.2"], "my_port.py: TAPS")


def test_a_name_that_no_tap_has_is_refused_in_a_run():
    assert tap("attention.q", torch.ones(1)) == 1
    with collecting(), pytest.raises(StageError, match=r'"attn\.qrot" is not a tap\. Did you mean "attn\.q_rot"\?'):
        tap("attn.qrot", torch.ones(1))
    with collecting(own={"mlp.shared": ""}) as taps:
        tap("mlp.shared", torch.ones(1))
    assert set(taps) == {"mlp.shared"}


@pytest.mark.parametrize(
    "name",
    [
        *("self_attn.qkv_proj", "self_attn.q_a_proj", "self_attn.v_norm", "linear_attn.norm"),
        *("mlp.gate_up_proj", "mlp.router", "mlp.fc1", "attn.c_attn"),
    ],
)
def test_a_tap_may_have_the_name_of_any_module(name):
    with collecting() as taps:
        tap(name, torch.ones(1))
    assert set(taps) == {name}


def test_orders_are_merged_with_own_taps_behind_what_they_follow():
    assert merged([["out"], ["attn.k", "attn.q", "mine", "mlp.out", "other", "out"]]) == [
        *("attn.q", "mine", "attn.k", "mlp.out", "other", "out"),
    ]
    assert merged([["first", "attn.q"], ["attn.q", "last"]]) == ["first", "attn.q", "last"]


def test_what_was_measured_tells_where_a_mistake_may_be():
    measured = [Fed("mine", ("attn.out",)), Fed("mlp.out", ("mine",)), Fed("attn.out", ("mlp.out",))]
    assert "mine" in unseen_before("mlp.out", {"attn.out", "mlp.gate"}, measured)
    assert "attn.out" in unseen_before("mlp.out", {"mlp.gate"}, measured), "and a circle comes to its end"
    assert unseen_before("mine", {"attn.out"}, measured) == {"mine"}


def test_every_tap_is_fed_by_earlier_ones():
    order = list(SHAPES)
    assert list(FEEDS) == order
    for name, feeds in FEEDS.items():
        assert all(order.index(feed) < order.index(name) for feed in feeds)


def test_a_mistake_that_shows_at_a_tap_was_made_there_or_before_it_unseen():
    assert unseen_before("attn.q_rot", {"attn.q", "attn.q_norm"}) == {"attn.q_rot"}
    assert unseen_before("attn.q_rot", {"attn.q"}) == {"attn.q_rot", "attn.q_norm"}
    assert unseen_before("attn.context", {"attn.v"}) >= {"attn.q_rot", "attn.k", "input_norm"}
    assert "attn.v" not in unseen_before("attn.context", {"attn.v", "input_norm"})
    assert unseen_before(OUT, ()) == {*SHAPES}


def test_a_tap_is_what_was_handed_over_whatever_is_written_into_it_later():
    with collecting() as taps:
        out = tap("mlp.out", torch.ones(1, 2, 3))
        out.add_(1)
    assert torch.equal(taps["mlp.out"], torch.ones(1, 2, 3)) and torch.equal(out, 2 * torch.ones(1, 2, 3))


def test_what_is_handed_over_again_is_another_tap_and_edited_as_the_first():
    """As the attention of a layer that has two: a forced run must not put the second one's tensor into the first."""
    first, second = (torch.full((1, 2, 3), value) for value in (5.0, 7.0))

    def twice(x):
        return tap("attn.q_rot", x), tap("attn.q_rot", x + 1)

    with collecting({"attn.q_rot": first, "attn.q_rot.2": second}) as taps:
        assert twice(torch.ones(1, 2, 3)) == (first, second)
    assert (taps["attn.q_rot"] == 1).all() and (taps["attn.q_rot.2"] == 2).all()
    with collecting(edits={"attn.q_rot": lambda tensor, seen: tensor * 10}):
        assert [int(tensor.max()) for tensor in twice(torch.ones(1, 2, 3))] == [10, 20]
    with collecting(edits={"attn.q_rot.2": lambda tensor, seen: tensor * 10}):
        assert [int(tensor.max()) for tensor in twice(torch.ones(1, 2, 3))] == [1, 20]
