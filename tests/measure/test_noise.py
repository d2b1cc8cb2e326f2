"""The noise of the golden: one more draw of it passes, and what stands out of it in any kind of group does not."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerproof.errors import StageError
from layerproof.golden.variants import last_bits_changed, rounded_once_more
from layerproof.measure.groups import relative, rounding_squares
from layerproof.measure.metrics import judge
from layerproof.measure.noise import BALANCING, Noise, measure, noise_of_taps
from layerproof.measure.noise_file import NOISE_ARRAYS, read_noise, write_noise
from layerproof.measure.rule import GROUP_LIMIT, LIMIT
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

DRAWS = 5
SHAPES = [(2, 24, 64), (2, 24, 4, 16), (3, 40, 8)]


def fp32(values):
    return Tensor(np.asarray(values, np.float32), "float32")


def bfloat16(values):
    return Tensor(np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16), "bfloat16")


class Tap:
    """A tap whose golden, variants and port are equally noisy draws; channels and tokens have sizes of their own."""

    def __init__(self, shape=SHAPES[0], seed=0, draws=DRAWS):
        self.random = np.random.default_rng(seed)
        self.truth = self.random.standard_normal(shape) * np.exp(self.random.standard_normal(shape[2:]))
        self.truth[:, 0] *= 100  # a massive token
        self.truth[..., 0] *= 50  # a massive channel
        self.valid = np.ones(shape[:2], bool)
        self.valid[1, shape[1] // 2 :] = False
        self.experts = self.random.permuted(np.arange(8) < 2 + np.zeros((*shape[:2], 1)), axis=-1)
        self.draws = [self.draw() for _ in range(draws)]

    def draw(self):
        return self.truth * (1 + 2.0**-9 * self.random.standard_normal(self.truth.shape))

    def noise(self):
        return measure([fp32(draw) for draw in self.draws], fp32(self.truth), self.valid, self.experts)

    def judge(self, port):
        noise = self.noise()
        golden, truth = fp32(self.draws[0]), fp32(self.truth)
        return judge(fp32(port), golden, truth, self.valid, LIMIT, None, noise, self.experts)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_one_more_draw_of_the_noise_passes(shape, seed):
    tap = Tap(shape, seed)
    result = tap.judge(tap.draw())
    assert result["status"] == "pass", result["reason"]


def fitted(draws, truth, compared):
    """Factors of tokens and channels, and R of each row in units of the noise of the others, as their definition says."""
    features = truth.reshape(truth.shape[0] * truth.shape[1], -1)
    values = np.stack([draw.reshape(features.shape) for draw in draws])
    keep = np.isfinite(features) & np.isfinite(values).all(axis=0) & compared.reshape(-1, 1)
    exact, values = np.where(keep, features, 0), np.where(keep, values, 0)
    rounded, expected = rounding_squares(exact)
    squares = np.stack([*np.square(values - exact), rounded])
    rounding = squares.mean() and squares.sum(axis=(1, 2)).mean() / expected[squares.any(axis=0)].sum()
    known = squares if rounding else np.broadcast_to(expected, squares.shape)
    token, counts = np.ones((1, len(exact))), (keep.sum(axis=1), keep.sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        for _ in range(BALANCING):
            channel = relative(known, token.mean(axis=0)[:, None]).sum(axis=1) / counts[1]
            token = relative(known, channel.mean(axis=0)).sum(axis=2) / counts[0]
    ratios = []
    for row in range(len(squares)):
        others = np.arange(len(squares)) != row
        model = token[others].mean(axis=0)[:, None] * channel[others].mean(axis=0) + (rounding or 1) * expected
        ratios.append(np.sqrt(relative(squares[row], model / 2).sum() / max(keep.sum(), 1)))
    return token.mean(axis=0).reshape(compared.shape), channel.mean(axis=0), max(1.0, *ratios)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 2**32 - 1),
    st.integers(-25, 25),
    st.sampled_from([np.nan, np.inf, 0.0, 1e30]),
    st.booleans(),
)
def test_the_fit_is_what_its_definition_says(shape, seed, exponent, odd, is_exact):
    tap = Tap(shape, seed)
    truth = (tap.truth * 10.0**exponent).astype(np.float32)
    truth[tap.random.random(shape) < 0.1] = 0
    draws = [truth if is_exact else (truth * (draw / tap.truth)).astype(np.float32) for draw in tap.draws]
    draws[1] = np.where(tap.random.random(shape) < 0.05, np.float32(odd), draws[1])
    noise = measure([fp32(draw) for draw in draws], fp32(truth), tap.valid)
    token, channel, worst = fitted(np.float64(draws), np.float64(truth), tap.valid)
    np.testing.assert_allclose(noise.token, token, rtol=1e-9)
    np.testing.assert_allclose(noise.channel, channel, rtol=1e-9)
    assert noise.band["weighted"] == pytest.approx(worst, rel=1e-9)


def off(tap, where, factor=8):
    """A port with more noise in one place."""
    port = tap.draw()
    port[where] = (tap.truth + factor * (port - tap.truth))[where]
    return port


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "where", "index"),
    [
        ("token", (0, 5), [0, 5]),
        ("block", (slice(None), slice(None), 7), 7),
    ],
)
def test_more_noise_in_one_group_is_found_there(kind, where, index, seed):
    tap = Tap(seed=seed)
    result = tap.judge(off(tap, where))
    assert result["status"] == "fail"
    assert result[f"worst_{kind}"]["index"] == index
    assert result[f"worst_{kind}"]["R"] > LIMIT * GROUP_LIMIT * result["band"][kind]


def test_more_noise_in_one_head_is_found_there():
    tap = Tap((2, 24, 4, 16))
    result = tap.judge(off(tap, (slice(None), slice(None), 2), factor=3))
    assert result["worst_head"]["index"] == 2 and result["band"]["head"] < 1.5
    assert result["worst_head"]["R"] > LIMIT * GROUP_LIMIT * result["band"]["head"] and result["status"] == "fail"


def test_more_noise_in_one_expert_is_found_there():
    tap = Tap((2, 200, 64))
    where = tap.experts[..., 3]
    result = tap.judge(off(tap, where, factor=3))
    assert result["status"] == "fail" and result["worst_expert"]["index"] == 3
    assert result["worst_expert"]["R"] > LIMIT * GROUP_LIMIT * result["band"]["expert"]


def test_garbage_beside_massive_channels_is_found():
    """What a cosine does not see: the error of the massive ones is larger than that of all others together."""
    tap = Tap((2, 100, 64))
    port = tap.draw()
    ordinary = np.arange(64) != 0
    port[:, 1:, ordinary] += 2 * (port - tap.truth)[:, 1:, ordinary]
    result = tap.judge(port)
    assert result["R"] < result["weighted_R"] / 1.4, "R sees little but the massive ones"
    assert result["weighted_R"] > LIMIT * result["band"]["weighted"] and "times what is allowed" in result["reason"]


def test_a_group_that_fails_alone_is_named_with_its_limit():
    tap = Tap((2, 100, 64))
    result = tap.judge(off(tap, (0, 5), factor=6))
    excess = result["worst_token"]["R"] / (LIMIT * GROUP_LIMIT * result["band"]["token"])
    assert result["weighted_R"] < LIMIT * result["band"]["weighted"]
    assert result["reason"] == f"the error is {excess:.3g} times what is allowed at token [0,5]"
    assert result["excess"] == pytest.approx(excess)


def test_bands_are_never_below_one_and_equal_draws_reach_it():
    tap = Tap()
    tap.draws = [tap.draws[0]] * DRAWS
    assert all(band >= 1 for band in tap.noise().band.values())
    tap.draws = [tap.truth] * DRAWS  # an exact golden: the rounding of the truth is the floor
    assert all(band >= 1 for band in tap.noise().band.values())
    assert tap.judge(tap.truth)["status"] == "pass"
    rounded = tap.truth.astype(np.float32).view(np.uint32) + 0x7FFF & 0xFFFF0000
    assert tap.judge(rounded.astype(np.uint32).view(np.float32))["status"] == "pass", "rounded to bf16 and no worse"


def test_a_noisier_variant_widens_the_band():
    tap = Tap()
    before = tap.noise().band
    tap.draws[2] = off(tap, ..., factor=2)
    assert 1.5 < tap.noise().band["weighted"] / before["weighted"] < 2.5


def test_what_is_not_compared_does_not_count():
    tap = Tap()
    noise = tap.noise()
    for values in (tap.truth, *tap.draws):
        values[~tap.valid] = 1e6 * tap.random.standard_normal(values[~tap.valid].shape)
    again = tap.noise()
    assert again.band == noise.band
    np.testing.assert_array_equal(again.channel, noise.channel)
    assert np.isnan(again.token[~tap.valid]).all() and np.isfinite(again.token[tap.valid]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_left_out_and_rescues_nothing(value):
    tap = Tap()
    tap.draws[1][0, 3] = value
    noise = tap.noise()
    assert np.isnan(noise.token[0, 3]) and all(np.isfinite(band) for band in noise.band.values())
    port = tap.draw()
    port[0, 3, 2] = value
    assert "NaN" in tap.judge(port)["reason"] or "Inf" in tap.judge(port)["reason"]
    tap.truth[:] = value
    assert set(tap.noise().band.values()) == {1.0}


def test_without_variants_the_band_is_one():
    tap = Tap(draws=1)
    assert set(tap.noise().band.values()) == {1.0}
    assert tap.judge(tap.draw())["status"] == "pass"


def test_a_variant_that_overflows_is_none():
    tap = Tap()
    tap.draws[3][0, 5] = np.nan
    names = [{"out": fp32(draw)} for draw in tap.draws]
    noise = noise_of_taps(names[0], names[1:], {"out": fp32(tap.truth)}, tap.valid)["out"]
    assert np.isfinite(noise.token[tap.valid]).all()
    port = off(tap, (0, 5), factor=100)
    result = judge(fp32(port), fp32(tap.draws[0]), fp32(tap.truth), tap.valid, LIMIT, None, noise)
    assert result["status"] == "fail" and result["worst_token"]["index"] == [0, 5]


def test_a_wrong_token_of_a_lookup_is_found():
    tap = Tap(draws=1)
    tap.draws = [tap.truth.astype(np.float32)]
    tap.truth = tap.draws[0].astype(np.float64)
    assert tap.judge(tap.truth)["status"] == "pass"
    port = tap.truth.copy()
    port[0, 5] *= 1.05
    assert tap.judge(port)["reason"].endswith("times what is allowed at token [0,5]")


def test_copies_of_a_draw_do_not_narrow_the_band():
    tap = Tap()
    copies = [tap.draws[0], tap.draws[0], tap.draws[0], tap.draws[1]]
    found = [
        noise_of_taps(*_taps(of), {"out": fp32(tap.truth)}, tap.valid)["out"].band for of in (copies, tap.draws[:2])
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_channel_that_is_zero_in_all_draws_by_chance_may_be_a_little_off(leaves):
    """Behind a ReLU, a channel just below zero is zero in the golden and its variants, and in some ports is not."""
    tap = Tap()
    tap.truth[..., 9] = 0
    tap.draws = [tap.draw() for _ in range(DRAWS)]
    if leaves == 2:
        tap.draws[3][0, 7, 9] = 1e-3
    typical = float(np.median(np.abs(tap.draws[0] - tap.truth)))
    port = tap.draw()
    port[0, 5, 9] = typical
    assert tap.noise().band["block"] < 4, "one draw alone above zero does not widen the band without limit"
    assert tap.judge(port)["status"] == "pass"
    port[..., 9] = 10 * typical
    result = tap.judge(port)
    assert result["status"] == "fail" and result["worst_block"]["channels"][0] <= 9


def _taps(draws):
    golden, *variants = ({"out": fp32(draw)} for draw in draws)
    return golden, variants


def test_flips_of_golden_and_variants_are_left_out_after_the_router():
    tap = Tap()
    choice = np.tile([1, 4], (2, 24, 1))
    flipped = choice.copy()
    flipped[0, 7] = [1, 5]
    tap.draws[2][0, 7] += 1000
    weights = np.zeros((2, 24, 8))

    def taps(values, choice):
        return {
            "attn.out": fp32(tap.truth if values is tap.truth else tap.draws[0]),
            "router.choice": Tensor(choice.astype(np.int32), "int32"),
            "router.weights": fp32(weights),
            "out": fp32(values),
        }

    golden, *others = (taps(draw, flipped if i == 2 else choice) for i, draw in enumerate(tap.draws))
    noise = noise_of_taps(golden, others, taps(tap.truth, choice), tap.valid)
    assert set(noise) == {"attn.out", "router.weights", "out"}, "integers have none"
    assert noise["attn.out"].compared[0, 7] and not noise["out"].compared[0, 7]
    assert noise["out"].band["token"] < 5 and set(noise["out"].band) >= {"expert"}
    assert "expert" not in noise["attn.out"].band


def test_noise_is_stored_as_it_is(tmp_path):
    noise = {"attn.q": Tap((2, 24, 4, 16)).noise(), "out": Tap().noise()}
    write_noise(tmp_path / "noise.h5", noise, ["split", "input"], fp32(Tap().truth))
    found = read_noise(tmp_path / "noise.h5")
    assert list(found) == list(noise)
    np.testing.assert_array_equal(hdf5.read(tmp_path / "noise.h5", "chained/out").data, fp32(Tap().truth).data)
    for name, one in noise.items():
        assert isinstance(found[name], Noise) and found[name].band == one.band
        for array in NOISE_ARRAYS:
            np.testing.assert_array_equal(getattr(found[name], array), getattr(one, array))
    content = bytearray((tmp_path / "noise.h5").read_bytes())
    position = content.index(noise["out"].channel.tobytes()[:32])
    content[position + 3] ^= 1
    (tmp_path / "noise.h5").write_bytes(content)
    with pytest.raises(StageError, match=r"noise\.h5: cannot be read, the file is damaged"):
        read_noise(tmp_path / "noise.h5")


def test_changed_last_bits_are_as_much_as_one_rounding():
    import torch

    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    changed = last_bits_changed(x)
    assert torch.equal(changed, last_bits_changed(x)), "the same in every run"
    moved = changed != x
    assert moved.float().mean().item() == pytest.approx(1 / 12, rel=0.05)
    wide = x.float() * (1 + torch.rand(x.shape, generator=torch.Generator().manual_seed(2)))
    rounding = (wide.bfloat16().float() - wide) / wide
    change = (changed.float() - x.float()) / x.float()
    assert change.square().mean().sqrt() == pytest.approx(rounding.square().mean().sqrt().item(), rel=0.1)


def test_an_input_wider_than_the_model_is_rounded_as_ports_get_it():
    """Models like Mamba keep their residuals in fp32, and a port gets them in its own dtype."""
    import torch

    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded_once_more(x, torch.bfloat16), x.bfloat16().float())
    assert torch.equal(rounded_once_more(x.bfloat16(), torch.bfloat16), last_bits_changed(x.bfloat16()))


def one_number(seed):
    """A tap of one number a token, of draws equally noisy at each, and one more draw."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal((3, 30, 1))
    draws = [truth + 2.0**-9 * random.standard_normal(truth.shape) for _ in range(3)]
    return draws, truth, np.ones(truth.shape[:2], bool)


def test_one_more_draw_of_one_number_a_token_passes_whatever_the_others_are_by_chance():
    failing = 0
    for seed in range(300):
        (*draws, port), truth, valid = one_number(seed)
        noise = measure([fp32(draw) for draw in draws], fp32(truth), valid)
        failing += judge(fp32(port), fp32(draws[0]), fp32(truth), valid, LIMIT, None, noise)["status"] == "fail"
    assert failing == 0


def test_one_number_of_one_token_that_is_off_is_found():
    (*draws, port), truth, valid = one_number(0)
    port[1, 7] += 2.0**-9 * 60
    noise = measure([fp32(draw) for draw in draws], fp32(truth), valid)
    result = judge(fp32(port), fp32(draws[0]), fp32(truth), valid, LIMIT, None, noise)
    assert result["worst_token"]["index"] == [1, 7] and result["status"] == "fail"


def scores_behind_a_threshold(seed):
    """Scores of experts as Phi-3.5-MoE's router has them: one one of one at most tokens, two at a few; in bf16."""
    random = np.random.default_rng(seed)
    truth = np.zeros((2, 110, 8))
    truth[..., 3] = 1.0
    gaps = random.uniform(-0.02, 0.02, (2, 3))
    draws = [truth.copy() for _ in range(4)]
    for numbers, noise in zip([truth, *draws], [0.0, *(2.0**-10 * random.standard_normal((4, 2, 3)))], strict=True):
        first = 1 / (1 + np.exp(gaps + noise))
        numbers[:, :3, 3], numbers[:, :3, 4] = first, 1 - first
    return [bfloat16(draw) for draw in draws], fp32(truth)


def test_one_more_draw_passes_where_most_numbers_are_exact():
    valid, failing = np.ones((2, 110), bool), 0
    for seed in range(300):
        (*draws, port), truth = scores_behind_a_threshold(seed)
        failing += judge(port, draws[0], truth, valid, LIMIT, None, measure(draws, truth, valid))["status"] == "fail"
    assert failing == 0


def test_a_score_that_is_off_is_found_where_most_numbers_are_exact():
    (*draws, port), truth = scores_behind_a_threshold(0)
    valid = np.ones((2, 110), bool)
    numbers = port.floats(port.data[...]).copy()
    numbers[1, 50, 3] -= 0.02
    result = judge(bfloat16(numbers), draws[0], truth, valid, LIMIT, None, measure(draws, truth, valid))
    assert result["worst_token"]["index"] == [1, 50] and result["status"] == "fail"


def weights_of_a_rare_expert(seed):
    """Weights of a router that takes one of 4 experts, one of them at two tokens alone, as Zaya's; draws in bf16."""
    random = np.random.default_rng(seed)
    rare = np.zeros((3, 40), bool)
    rare[:2, 0] = True
    scores = np.where(rare, 0.2, random.uniform(0.6, 0.75, rare.shape))
    experts = np.eye(4, dtype=bool)[np.where(rare, 0, 2)]
    draws = [scores + scores * (1 - scores) * 0.01 * random.standard_normal(rare.shape) for _ in range(5)]
    return [bfloat16(experts * draw[..., None]) for draw in draws], fp32(experts * scores[..., None]), experts


def test_one_more_draw_passes_where_two_tokens_choose_an_expert():
    valid, failing = np.ones((3, 40), bool), []
    for seed in range(300):
        (*draws, port), truth, experts = weights_of_a_rare_expert(seed)
        noise = measure(draws, truth, valid, experts)
        if judge(port, draws[0], truth, valid, LIMIT, None, noise, experts)["status"] == "fail":
            failing.append(seed)
    assert not failing


def test_a_weight_that_is_off_is_found_where_two_tokens_choose_an_expert():
    (*draws, port), truth, experts = weights_of_a_rare_expert(0)
    valid = np.ones((3, 40), bool)
    numbers = port.floats(port.data[...]).copy()
    numbers[1, 0, 0] *= 1.1
    result = judge(
        bfloat16(numbers), draws[0], truth, valid, LIMIT, None, measure(draws, truth, valid, experts), experts
    )
    assert result["worst_token"]["index"] == [1, 0] and result["status"] == "fail"


def one_token_again_and_again(seed):
    """A LayerNorm's output for a prompt that repeats one token: each channel has one number, and each draw one error of it.

    One variant, and the port, round the product before the bias is added: small sums then have large errors.
    """
    random = np.random.default_rng(seed)
    truth = random.standard_normal(64)
    errors = random.uniform(-0.5, 0.5, (5, 64)) * 2.0**-10
    errors[:3] *= np.abs(truth)
    draws = np.broadcast_to((truth + errors)[:, None, None], (5, 1, 24, 64))
    last_bits = 1 + 2.0**-22 * random.integers(-2, 3, (1, 24, 64))  # sums over other numbers of positions
    return [fp32(draw) for draw in draws], fp32(truth * last_bits)


def test_one_more_draw_passes_where_all_tokens_are_one():
    valid, failing = np.ones((1, 24), bool), 0
    for seed in range(300):
        (*draws, port), truth = one_token_again_and_again(seed)
        failing += judge(port, draws[0], truth, valid, LIMIT, None, measure(draws, truth, valid))["status"] == "fail"
    assert failing == 0


def test_a_channel_that_is_off_is_found_where_all_tokens_are_one():
    (*draws, port), truth = one_token_again_and_again(0)
    numbers, valid = port.data[...].copy(), np.ones((1, 24), bool)
    numbers[..., 7] *= 1.02
    result = judge(fp32(numbers), draws[0], truth, valid, LIMIT, None, measure(draws, truth, valid))
    assert result["worst_block"]["index"] == 7 and result["status"] == "fail"
