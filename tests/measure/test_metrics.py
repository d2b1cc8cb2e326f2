"""The comparison of one tap: every number against a plain longdouble computation of the same, and every trap."""

import json
import math
import tracemalloc

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from layerproof.measure import metrics
from layerproof.measure.groups import MAX_BLOCKS, R_MAX, bf16_rounding
from layerproof.measure.metrics import compare, judge
from layerproof.tensors.tensor import (
    FLOAT32_MAX,
    STORAGE,
    DtypeMismatch,
    ShapeMismatch,
    Tensor,
    bf16_ulp,
    blocks,
    statistics,
)

BF16 = ml_dtypes.bfloat16
FLOATS = {"bfloat16": BF16, "float16": np.float16, "float32": np.float32}
RESOLUTION = 2.0**-136  # of numbers below 2^-126, which have fewer bits in an fp32 pattern
SMALL = settings(max_examples=40, deadline=None)


def tensor(values, dtype="float32"):
    """Values rounded to dtype and stored as the tensor files store them."""
    if dtype == "bfloat16":
        return Tensor(np.asarray(values, np.float32).astype(BF16).view(np.uint16), dtype)
    return Tensor(np.asarray(values).astype(STORAGE[dtype]), dtype)


def everywhere(of):
    return np.ones(of.shape[:2], bool)


def replaced(of, index, value):
    """The same tensor with another value at an index."""
    values = float_values(of)
    values[index] = value
    return tensor(values, of.dtype)


def noisy(seed, shape=(2, 16, 96), scale=1.0):
    """A truth, and port and golden that are two equally good bf16 computations of it."""
    random = np.random.default_rng(seed)
    truth = random.standard_normal(shape).astype(np.float32) * scale
    port, golden = (truth * (1 + 2**-9 * random.standard_normal(shape)) for _ in range(2))
    return tensor(port, "bfloat16"), tensor(golden, "bfloat16"), tensor(truth)


def float_values(of):
    return of.floats(of.data)


@st.composite
def taps(draw, dtypes=tuple(FLOATS)):
    """Port, golden, truth and valid, with a valid token at least; finite values, zeros and equal tensors among them."""
    shape = draw(array_shapes(min_dims=2, max_dims=4, max_side=5))
    elements = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 1e-3, -2.5]),
        st.floats(-60000, 60000, width=32),
        st.floats(-(2**-133), 2**-133, width=32),
    )
    truth = draw(arrays(np.float32, shape, elements=elements))
    golden, port = (draw(st.one_of(st.just(truth), arrays(np.float32, shape, elements=elements))) for _ in range(2))
    valid = draw(arrays(bool, shape[:2]))
    assume(valid.any())
    return (
        tensor(port, draw(st.sampled_from(dtypes))),
        tensor(golden, draw(st.sampled_from(dtypes))),
        tensor(truth),
        valid,
    )


def near(value, expected, absolute=0.0):
    assert (value is None) == (expected is None), (value, expected)
    if expected is not None:
        assert value == pytest.approx(float(expected), rel=1e-9, abs=float(absolute))


def root(values):
    return np.sqrt(np.sum(np.square(values)))


def plain_ratio(port, golden, truth):
    """R of longdouble arrays, straight from its definition."""
    values = truth.reshape(-1).astype(float)
    ulp = np.asarray([2.0 ** max(math.floor(math.log2(abs(x))) - 7, -133) if x else 0.0 for x in values], np.longdouble)
    noise = max(root(golden - truth), root(values.astype(ml_dtypes.bfloat16).astype(np.longdouble) - values))
    noise = noise or root(ulp) / np.sqrt(np.longdouble(12))
    error = root(port - truth)
    if noise == 0:
        return R_MAX if error else 0.0
    return min(error / noise, R_MAX)


@pytest.mark.slow
@SMALL
@given(taps())
def test_every_sum_agrees_with_longdouble(tap):
    *tensors, valid = tap
    result = compare(*tensors, valid=valid)
    p, g, t = (float_values(of)[valid].reshape(-1).astype(np.longdouble) for of in tensors)
    n, difference = p.size, np.abs(p - g)

    assert result["count"] == n
    near(result["R"], plain_ratio(p, g, t))
    near(result["R_port_rms"], root(p - t) / np.sqrt(n))
    near(result["R_golden_rms"], root(g - t) / np.sqrt(n))
    near(result["abs"]["max"], difference.max())
    near(result["abs"]["mean"], difference.mean())
    relative = np.array([d / abs(b) if b else d > 0 for d, b in zip(difference, g, strict=True)], np.longdouble)
    relative = np.minimum(relative, FLOAT32_MAX)
    near(result["rel"]["max"], relative.max())
    near(result["rel"]["mean"], relative.mean())
    near(result["rel_l2"], root(p - g) / root(g) if root(g) else None)
    near(result["golden_rel_l2"], root(g - t) / root(t) if root(t) else None)
    near(result["snr_db"], 20 * np.log10(root(g) / root(p - g)) if root(g) and root(p - g) else None, 1e-9)
    near(result["cosine"], np.sum(p * g) / (root(p) * root(g)) if root(p) and root(g) else None, 1e-9)

    varies, (a, b) = np.ptp(g) > 0, (p - p.mean(), g - g.mean())
    near(result["pearson"], np.sum(a * b) / (root(a) * root(b)) if varies and np.ptp(p) > 0 else None, 1e-9)
    scale = np.sum(a * b) / np.sum(b * b) if varies else None
    near(result["scale"], scale, 1e-9 * root(a) / root(b) if varies else 0)
    size = root(p) + root(a) / root(b) * root(g) if varies else 0
    near(result["offset"], None if scale is None else p.mean() - scale * g.mean(), 1e-9 * size)


@SMALL
@given(taps())
def test_every_group_agrees_with_longdouble(tap):
    *tensors, valid = tap
    result = compare(*tensors, valid=valid)
    p, g, t = (float_values(of).astype(np.longdouble) for of in tensors)

    for index in np.ndindex(*valid.shape):
        near(result["token_R"][index[0]][index[1]], plain_ratio(p[index], g[index], t[index]) if valid[index] else None)
    channels = [x[valid].reshape(valid.sum(), -1) for x in (p, g, t)]
    size = math.ceil(channels[0].shape[1] / MAX_BLOCKS)
    for i, ratio in enumerate(result["block_R"]):
        near(ratio, plain_ratio(*(x[:, i * size : (i + 1) * size] for x in channels)))
    assert len(result["block_R"]) == math.ceil(channels[0].shape[1] / size)
    if p.ndim == 4:
        for head, ratio in enumerate(result["head_R"]):
            near(ratio, plain_ratio(*(x[valid][:, head] for x in (p, g, t))))
    else:
        assert result["head_R"] is None and result["worst_head"] is None

    listed = [r for row in result["token_R"] for r in row]
    b, s = result["worst_token"]["index"]
    assert result["worst_token"]["R"] == result["token_R"][b][s] == max(r for r in listed if r is not None)
    assert result["worst_block"]["R"] == result["block_R"][result["worst_block"]["index"]] == max(result["block_R"])


@SMALL
@given(taps())
def test_medians_and_quantiles_are_within_a_thousandth(tap):
    *tensors, valid = tap
    result = compare(*tensors, valid=valid)
    p, g, t = (float_values(of)[valid].reshape(-1) for of in tensors)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(g != 0, np.abs(p - g) / np.abs(g), p != 0)
    assert result["abs"]["median"] == pytest.approx(np.median(np.abs(p - g)), rel=1e-3, abs=RESOLUTION)
    assert result["rel"]["median"] == pytest.approx(
        np.median(np.minimum(relative, FLOAT32_MAX)), rel=1e-3, abs=RESOLUTION
    )
    for name, error in (("port", np.abs(p - t)), ("golden", np.abs(g - t))):
        expected = np.quantile(error, result["qq"]["probability"], method="lower")
        assert result["qq"][name] == pytest.approx(expected, rel=1e-3, abs=RESOLUTION)


@SMALL
@given(taps(dtypes=("bfloat16", "float32")))
def test_histogram_counts_every_error_once(tap):
    *tensors, valid = tap
    result = compare(*tensors, valid=valid)
    p, g, t = (float_values(of)[valid].reshape(-1) for of in tensors)
    for name, error in (("port", np.abs(p - t)), ("golden", np.abs(g - t))):
        counts, exact = result["histogram"][name], result["histogram"]["exact"][name]
        assert exact == np.count_nonzero(error == 0)
        assert sum(counts) + exact == error.size
        edges = 10.0 ** np.asarray(result["histogram"]["log10_edges"])[1:-1]
        below = np.cumsum(counts)[:-1] + exact
        # an error is rounded to fp32 and then down by less than 0.1 %, so it may cross an edge that is as near
        for edge, count in zip(edges, below, strict=True):
            assert np.sum(error < edge * (1 - 2**-23)) <= count <= np.sum(error < edge * 1.001)


@SMALL
@given(taps(), st.integers(1, 200))
def test_chunks_make_no_difference(tap, chunk_elements):
    same(compare(*tap, chunk_elements=chunk_elements), compare(*tap, chunk_elements=1 << 20))


def same(left, right):
    """Equal, but for the order in which floats were summed; the offset is a difference of means of up to 10^4."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            same(*pair)
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-12, abs=1e-8)
    else:
        assert left == right


@SMALL
@given(taps())
def test_the_order_of_blocks_is_the_order_of_the_tensor(tap):
    golden, valid = tap[1], tap[3]
    seen = np.zeros(valid.shape, int)
    numbers = np.arange(valid.size).reshape(valid.shape)
    order = []
    for batch, seq in blocks(golden.shape, 7):
        seen[batch, seq] += 1
        order += numbers[batch, seq].reshape(-1).tolist()
    assert (seen == 1).all() and order == sorted(order)


def test_results_are_json_without_nan():
    port, golden, truth = noisy(0)
    port = replaced(port, (0, 0, 0), np.nan)
    for result in (judge(port, golden, truth, everywhere(port)), statistics(port)):
        assert json.loads(json.dumps(result, allow_nan=False)) == result


@SMALL
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]))
def test_equally_good_variants_pass_at_any_scale(seed, scale):
    result = judge(*noisy(seed, scale=scale), np.ones((2, 16), bool))
    assert result["status"] == "pass" and result["reason"] is None
    assert 0.8 < result["R"] < 1.25


def test_bf16_rounding_is_that_of_the_dtype():
    values = np.random.default_rng(3).standard_normal(4096) * 10.0 ** np.random.default_rng(4).integers(-30, 30, 4096)
    values = np.concatenate([values, [0.0, -0.0, 1.00390625, 1.01171875]])  # the last two are ties
    expected = values.astype(np.float32).astype(float)
    assert (bf16_rounding(expected) == expected.astype(ml_dtypes.bfloat16).astype(float) - expected).all()


def test_an_exact_massive_channel_does_not_raise_the_floor_of_the_others():
    _, golden, truth = noisy(11, (2, 8, 64))
    values, exact = float_values(golden), np.array(float_values(truth))
    values[..., 5] = exact[..., 5] = 64.0
    port = np.where(np.arange(64) == 5, 64.0, exact + 3 * (values - exact))
    result = judge(tensor(port, "float32"), tensor(values, "bfloat16"), tensor(exact, "float32"), everywhere(truth))
    assert result["R"] == pytest.approx(3, rel=0.01)


def test_bf16_ulp_is_the_step_to_the_next_bf16():
    patterns = np.arange(1, 0x7F80, dtype=np.uint16)
    values = Tensor(patterns[None], "bfloat16")
    steps = np.diff(float_values(values)[0])
    ulps = bf16_ulp(float_values(values)[0])
    assert (ulps[:-1] == steps).all()
    assert (bf16_ulp(-float_values(values)[0]) == ulps).all()
    assert bf16_ulp(np.array([0.0, -0.0])).tolist() == [0.0, 0.0]


def test_bf16_bits_become_the_same_floats_as_in_ml_dtypes():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    ours = Tensor(patterns[None], "bfloat16").floats(patterns)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
        theirs = patterns.view(BF16).astype(np.float64)
    assert np.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@SMALL
@given(data=st.data())
def test_ulp_counts_the_steps_between_two_floats(dtype, data):
    start = data.draw(st.floats(-100, 100, width=32))
    up = data.draw(st.integers(0, 50))
    walked = here = np.asarray(start, FLOATS[dtype])
    for _ in range(up):
        walked = np.nextafter(walked, np.asarray(np.inf, FLOATS[dtype]))
    tap = [np.full((1, 1, 1), x, np.float64) for x in (walked, here)]
    result = compare(tensor(tap[0], dtype), tensor(tap[1], dtype), tensor(tap[1]), np.ones((1, 1), bool))
    # stepping over zero, numpy gives one of the two zeros, which are the same place
    assert result["ulp"] == {"max": up, "mean": up, "median": up}


@pytest.mark.slow
def test_ulp_of_zeros_of_both_signs_and_of_extreme_floats():
    valid = np.ones((1, 1), bool)
    plus, minus, most = (tensor([[[x]]], "float64") for x in (0.0, -0.0, 3e38))
    assert compare(plus, minus, plus, valid)["ulp"]["max"] == 0
    least = tensor([[[-3e38]]], "float64")
    steps = 2 * int(np.float64(3e38).view(np.int64))
    assert compare(most, least, most, valid)["ulp"]["max"] == float(steps)
    assert compare(most, tensor([[[3e38]]], "float32"), most, valid)["ulp"] is None


def test_exact_golden_does_not_make_one_ulp_infinite():
    truth = np.linspace(1, 2, 128, endpoint=False, dtype=np.float32).reshape(1, 4, 32)  # all are bf16 numbers
    golden = tensor(truth, "bfloat16")
    result = judge(golden, golden, tensor(truth), everywhere(golden))
    assert (result["status"], result["R"], result["R_golden_rms"]) == ("pass", 0.0, 0.0)
    assert result["floor"] == pytest.approx(2**-7 / math.sqrt(12))

    port = replaced(golden, (0, 0, 0), 1 + 2**-7)
    result = judge(port, golden, tensor(truth), everywhere(port))
    assert result["R"] == pytest.approx(math.sqrt(12 / 128))
    assert result["status"] == "pass" and result["snr_db"] is not None


def test_all_zero_truth_and_exact_golden():
    zero = tensor(np.zeros((1, 2, 3)))
    result = judge(zero, zero, zero, everywhere(zero))
    assert (result["status"], result["R"], result["floor"]) == ("pass", 0.0, 0.0)
    assert result["token_R"] == [[0.0, 0.0]]
    for undefined in ("cosine", "pearson", "rel_l2", "snr_db", "scale", "offset", "golden_rel_l2"):
        assert result[undefined] is None
    assert result["fixed"] == {"max_abs": True, "mean_abs": True, "close": True, "cosine": None, "pearson": None}

    port = tensor(np.array([[[0, 0, 0], [0, 1e-6, 0]]]))
    result = judge(port, zero, zero, everywhere(zero))
    assert (result["status"], result["R"]) == ("fail", R_MAX)
    assert result["worst_token"] == {"index": [0, 1], "R": R_MAX}
    assert result["worst_block"] == {"index": 1, "R": R_MAX, "channels": [1, 2]}
    assert result["rel"]["max"] == 1.0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30, -7e-5])
def test_constant_tensors_have_no_pearson(value):
    constant = tensor(np.full((1, 7, 11), value))
    result = judge(constant, constant, constant, everywhere(constant))
    assert result["status"] == "pass" and result["cosine"] == pytest.approx(1)
    assert result["pearson"] is None and result["scale"] is None and result["offset"] is None
    wide = tensor(np.full((1, 7, 1001), value), "float64")  # whose mean is not exact
    assert compare(wide, wide, wide, everywhere(wide))["pearson"] is None
    shifted = tensor(np.full((1, 7, 11), value * 1.1))
    assert judge(shifted, constant, constant, everywhere(constant))["status"] == "fail"


def test_one_element():
    one = tensor([[[2.5]]])
    result = judge(one, one, one, everywhere(one))
    assert (result["status"], result["count"], result["close"]) == ("pass", 1, 1.0)
    assert result["worst_element"] == {"index": [0, 0, 0], "port": 2.5, "golden": 2.5, "truth": 2.5}
    assert statistics(one) == {"count": 1, "mean": 2.5, "std": 0.0, "min": 2.5, "max": 2.5, "nan": 0, "inf": 0}


def test_a_tap_without_features_is_one_value_a_token():
    port = tensor([[1.0, 2.0]])
    result = judge(port, port, port, everywhere(port))
    assert (result["count"], result["block_R"], result["worst_element"]["index"]) == (2, [0.0], [0, 0])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 3, 4, 0), (2, 3, 4)])
def test_comparing_nothing_fails(shape, dtype):
    nothing = tensor(np.zeros(shape), dtype)
    result = judge(nothing, nothing, nothing, np.zeros(shape[:2], bool))
    assert (result["status"], result["count"], result["R"]) == ("fail", 0, None)
    assert result["reason"].startswith("nothing was compared")
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(("bad", "name"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "-Inf")])
def test_nonfinite_port_fails_and_is_located(bad, name):
    port, golden, truth = noisy(1)
    values = float_values(port)
    values[1, 3, 5] = values[1, 7, 0] = bad
    result = judge(tensor(values, "bfloat16"), golden, truth, everywhere(port))
    assert result["status"] == "fail"
    assert f"the port is {name} at [1,3,5] where the golden is finite" in result["reason"]
    assert result["nonfinite"]["port_differs"]["count"] == 2
    seen = result["nonfinite"]["port"]
    assert (seen["nan"] + seen["inf"], seen["first"]) == (2, [1, 3, 5])
    assert result["count"] == values.size - 2 and result["R"] < 1.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [1, 2])
def test_nonfinite_reference_fails_and_says_so(bad, which):
    tensors = list(noisy(2))
    values = float_values(tensors[which])
    values[0, 2, 4] = bad
    tensors[which] = tensor(values, tensors[which].dtype)
    result = judge(*tensors, valid=everywhere(tensors[0]))
    name, other = {1: ("golden", "truth"), 2: ("truth", "golden")}[which]
    assert result["status"] == "fail" and "the port is finite at [0,2,4]" in result["reason"]
    assert f"the {name} is {metrics._name(bad)}" in result["reason"] and f"the {other} is finite" in result["reason"]


def test_matching_nonfinite_positions_are_no_failure():
    tensors = [float_values(of) for of in noisy(3)]
    for values in tensors:
        values[0, 0, :3] = np.nan, np.inf, -np.inf
        values[1, 1] = -np.inf
    tap = [tensor(values) for values in tensors]
    result = judge(*tap, valid=everywhere(tap[0]))
    assert result["status"] == "pass" and result["R"] == pytest.approx(1, abs=0.2)
    assert result["count"] == tensors[0].size - 3 - 96
    assert result["token_R"][1][1] is None
    assert result["nonfinite"]["port"] == {"nan": 1, "inf": 98, "first": [0, 0, 0]}


def test_nan_for_inf_is_not_a_match():
    tensors = [float_values(of) for of in noisy(3)]
    for values, bad in zip(tensors, (np.nan, -np.inf, -np.inf), strict=True):
        values[0, 0, 0] = bad
    tap = [tensor(values) for values in tensors]
    result = judge(*tap, valid=everywhere(tap[0]))
    assert result["status"] == "fail" and "the port is NaN at [0,0,0] where the golden is -Inf" in result["reason"]


def test_nonfinite_elements_do_not_leak_into_the_metrics():
    """With one element left out, everything is as if the token beside it were all there is."""
    port, golden, truth = (float_values(of) for of in noisy(4, (1, 2, 8)))
    whole = compare(*(tensor(x[:, :1]) for x in (port, golden, truth)), valid=np.ones((1, 1), bool))
    for x in (port, golden, truth):
        x[0, 1] = np.nan
    holed = compare(*(tensor(x) for x in (port, golden, truth)), valid=np.ones((1, 2), bool))
    for key in whole.keys() - {"nonfinite", "token_R", "fixed"}:
        same(holed[key], whole[key])
    assert set(holed["fixed"].values()) == {False}, "whoever computes them over all elements gets NaN"


def test_an_element_that_is_left_out_of_a_token_leaves_the_others_as_they_are():
    """Zeros among them, of which it is none: everything is as if its channel were not there."""
    port, golden, truth = (float_values(of) for of in noisy(4, (1, 2, 9)))
    port[0, :, 2] = golden[0, :, 2] = truth[0, :, 2]
    without = compare(*(tensor(x[..., :8]) for x in (port, golden, truth)), valid=np.ones((1, 2), bool))
    port[..., 8] = np.nan
    holed = compare(*(tensor(x) for x in (port, golden, truth)), valid=np.ones((1, 2), bool))
    assert without["histogram"]["exact"] == {"port": 2, "golden": 2}
    for key in without.keys() - {"nonfinite", "fixed", "block_R"}:
        same(holed[key], without[key])
    assert holed["block_R"] == [*without["block_R"], None]


def test_signalling_nan_is_counted_without_a_warning():
    snan = Tensor(np.full((1, 1, 2), 0x7F81, np.uint16), "bfloat16")
    with np.errstate(all="raise"):
        assert statistics(snan)["nan"] == 2


def test_shape_mismatch_fails_with_both_shapes():
    port, golden = tensor(np.zeros((2, 3))), tensor(np.zeros((2, 4)))
    result = judge(port, golden, golden, everywhere(golden))
    assert result["status"] == "fail" and "shape [2,3] where the golden has [2,4]" in result["reason"]
    assert result.keys() == judge(golden, golden, golden, everywhere(golden)).keys()
    assert (result["count"], result["R"]) == (0, None)
    with pytest.raises(ShapeMismatch):
        compare(golden, golden, port, everywhere(golden))


@pytest.mark.parametrize("kinds", [("int32", "float32"), ("bool", "bfloat16"), ("float16", "int64"), ("bool", "int32")])
def test_another_kind_of_dtype_fails(kinds):
    port, golden = (tensor(np.ones((1, 2, 3)), dtype) for dtype in kinds)
    result = judge(port, golden, golden, everywhere(golden))
    assert result["status"] == "fail" and f"{kinds[0]} where the golden is {kinds[1]}" in result["reason"]
    with pytest.raises(DtypeMismatch):
        compare(port, golden, golden, everywhere(golden))


def test_another_width_of_float_is_noted_and_passes():
    _, golden, truth = noisy(5)
    result = judge(tensor(float_values(truth), "float16"), golden, truth, everywhere(truth))
    assert result["status"] == "pass" and result["ulp"] is None
    assert result["dtype"] == {"port": "float16", "golden": "bfloat16", "truth": "float32"}


def test_data_that_is_not_stored_as_its_dtype_is_refused():
    with pytest.raises(DtypeMismatch, match="bfloat16 must be stored as uint16, not as float32"):
        Tensor(np.zeros((1, 1), np.float32), "bfloat16")
    with pytest.raises(DtypeMismatch, match="float8"):
        Tensor(np.zeros((1, 1), np.uint8), "float8")


@pytest.mark.parametrize("valid", [np.ones((1, 2), bool), np.ones((2, 16), np.uint8)])
def test_a_wrong_mask_is_the_callers_fault(valid):
    port, golden, truth = noisy(6)
    for call in (lambda: judge(port, golden, truth, valid), lambda: statistics(port, valid)):
        with pytest.raises(ValueError, match="needs bool"):
            call()


def test_massive_channels_hide_garbage_from_cosine_but_not_from_R():
    random = np.random.default_rng(7)
    truth = random.standard_normal((1, 8, 512)).astype(np.float32)
    truth[..., [3, 300]] = 1e4
    port = random.standard_normal(truth.shape).astype(np.float32)
    port[..., [3, 300]] = truth[..., [3, 300]]
    result = judge(
        tensor(port, "bfloat16"), tensor(truth, "bfloat16"), tensor(truth), np.ones(truth.shape[:2], bool), limit=1.5
    )
    assert result["cosine"] > 0.999 and result["pearson"] > 0.999
    assert result["fixed"]["cosine"] and result["fixed"]["pearson"]
    assert result["worst_block"]["R"] > 100

    # where the massive channels are exact in bf16, their floor is what remains: the rest must stand out against it
    moderate = np.where(np.arange(512) % 297 == 3, 60.0, 1.0).astype(np.float32)
    scaled = [x / np.where(truth == 1e4, 1e4, 1) * moderate for x in (port, truth)]
    result = judge(
        tensor(scaled[0], "bfloat16"), tensor(scaled[1], "bfloat16"), tensor(scaled[1]), np.ones((1, 8), bool)
    )
    assert result["status"] == "fail" and result["R"] > 10


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 1.02])
def test_a_factor_fails(factor):
    _, golden, truth = noisy(8)
    port = tensor(float_values(golden) * factor, "bfloat16")
    result = judge(port, golden, truth, everywhere(truth))
    assert result["status"] == "fail" and f"{result['excess']:.3g} times what is allowed" in result["reason"]
    assert abs(result["cosine"]) == pytest.approx(1, abs=1e-4)
    assert result["scale"] == pytest.approx(factor, rel=1e-3)


def test_one_wrong_token_or_head_is_named():
    port, golden, truth = noisy(9, (2, 8, 4, 16))
    values = float_values(port)
    values[1, 5, 2] += 1
    result = judge(tensor(values, "bfloat16"), golden, truth, everywhere(truth))
    assert result["status"] == "fail" and result["worst_token"]["index"] == [1, 5]
    assert result["worst_head"]["index"] == 2 and len(result["head_R"]) == 4
    assert result["worst_element"]["index"][:3] == [1, 5, 2]
    start, end = result["worst_block"]["channels"]
    assert 32 <= start < end <= 48


def test_the_worst_element_is_the_first_largest_error():
    truth = np.zeros((2, 2, 3))
    port = truth.copy()
    port[0, 1, 2] = port[1, 0, 0] = -4.0
    for chunk_elements in (1, 3, 6, 100):
        result = compare(
            tensor(port), tensor(truth), tensor(truth), np.ones((2, 2), bool), chunk_elements=chunk_elements
        )
        assert result["worst_element"] == {"index": [0, 1, 2], "port": -4.0, "golden": 0.0, "truth": 0.0}


@pytest.mark.parametrize("junk", [1e30, np.nan, np.inf])
def test_padding_shows_but_does_not_decide(junk):
    port, golden, truth = noisy(10)
    valid = everywhere(truth)
    valid[0, 9:] = False
    clean = judge(port, golden, truth, valid)
    values = float_values(port)
    values[0, 12, 1:3] = junk
    values[0, 13, 0] = 9.0
    dirty = judge(tensor(values, "bfloat16"), golden, truth, valid)
    assert clean["status"] == dirty["status"] == "pass"
    for key in clean.keys() - {"padding"}:
        assert clean[key] == dirty[key]
    assert clean["count"] == valid.sum() * 96
    assert clean["padding"]["R"] == pytest.approx(1, abs=0.2)
    assert dirty["padding"]["R"] > 10 and dirty["padding"]["abs_max"] > 7
    assert dirty["padding"]["count"] == 7 * 96 - (0 if np.isfinite(junk) else 2)
    assert judge(port, golden, truth, everywhere(truth))["padding"] is None


@SMALL
@given(taps())
def test_padding_is_compared_as_valid_tokens_are(tap):
    *tensors, valid = tap
    assume(not valid.all())
    padding, mirrored = compare(*tensors, valid=valid)["padding"], compare(*tensors, valid=~valid)
    assert padding["count"] == mirrored["count"]
    for key, expected in (("R", mirrored["R"]), ("rel_l2", mirrored["rel_l2"]), ("abs_max", mirrored["abs"]["max"])):
        same(padding[key], expected)


def test_the_limit_decides_and_is_inclusive():
    tap = noisy(13)
    valid = everywhere(tap[0])
    ratio = compare(*tap, valid)["R"]
    assert judge(*tap, valid, limit=ratio)["status"] == "pass"
    assert judge(*tap, valid, limit=ratio * 0.999)["status"] == "fail"


def test_close_is_relative_to_the_golden():
    golden, port = (tensor([[[x]]], "float64") for x in (1.0, 1.01105))  # 0.011 is allowed; by the port, 0.01111
    assert compare(port, golden, golden, everywhere(golden))["close"] == 0.0


def test_close_follows_the_allclose_convention():
    golden = np.linspace(-1, 1, 60).reshape(1, 4, 15)
    port = golden + np.random.default_rng(11).normal(0, 5e-3, golden.shape)
    result = compare(tensor(port, "float64"), tensor(golden, "float64"), tensor(golden), np.ones((1, 4), bool))
    assert result["close"] == np.isclose(port, golden, rtol=1e-2, atol=1e-3).mean()
    assert 0 < result["close"] < 0.95 and result["fixed"]["close"] is False


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (0.0, {"max_abs": True, "mean_abs": True, "close": True, "cosine": True, "pearson": True}),
        (5e-3, {"max_abs": True, "mean_abs": False, "close": True, "cosine": True, "pearson": True}),
        (2e-2, {"max_abs": False, "mean_abs": False, "close": False, "cosine": True, "pearson": True}),
        (-1.1, {"max_abs": False, "mean_abs": False, "close": False, "cosine": False, "pearson": True}),
    ],
)
def test_fixed_thresholds(change, holds):
    golden = np.linspace(0.5, 1.5, 64).reshape(1, 4, 16)
    result = compare(tensor(golden + change), tensor(golden), tensor(golden), np.ones((1, 4), bool))
    assert result["fixed"] == holds


def choices(*changed, tokens=400):
    """Chosen experts [1, tokens, 8]; in the changed tokens one is another."""
    values = np.tile(np.arange(8), (1, tokens, 1))
    values[0, list(changed), 7] = 99
    return tensor(values, "int32")


def test_exact_taps_count_tokens_and_name_the_first():
    valid = np.ones((1, 400), bool)
    valid[0, 300:] = False
    result = compare(choices(5, 9, 399), choices(9), choices(), valid, chunk_elements=50)
    assert (result["kind"], result["R"], result["count"], result["tokens"]) == ("exact", None, 2400, 300)
    assert result["mismatches"] == {"port_golden": 1, "port_truth": 2, "golden_truth": 1}
    assert result["share"] == {"port_golden": 1 / 300, "port_truth": 2 / 300, "golden_truth": 1 / 300}
    assert result["first"] == {"port_golden": [0, 5, 7], "port_truth": [0, 5, 7], "golden_truth": [0, 9, 7]}


@pytest.mark.parametrize(
    ("port", "golden", "status"), [(4, 0, "pass"), (5, 0, "fail"), (10, 4, "pass"), (11, 4, "fail"), (0, 100, "pass")]
)
def test_exact_taps_may_differ_as_the_golden_does_and_one_percent_more(port, golden, status):
    result = judge(choices(*range(port)), choices(*range(golden)), choices(), np.ones((1, 400), bool))
    assert result["status"] == status
    if status == "fail":
        assert f"differs from the truth in {port} of 400 tokens, first at [0,0,7]" in result["reason"]


def test_booleans_are_compared_exactly_and_int64_to_the_last_bit():
    mask = tensor([[[True, False], [True, True]]], "bool")
    flipped = tensor([[[True, False], [False, False]]], "bool")
    result = judge(flipped, mask, mask, everywhere(mask))
    assert result["mismatches"]["port_truth"] == 1 and result["status"] == "pass"
    assert judge(tensor([[[False, True], [False, False]]], "bool"), mask, mask, everywhere(mask))["status"] == "fail"

    big = tensor([[2**53, 2**53 + 1]], "int64")
    off = tensor([[2**53 + 1, 2**53 + 1]], "int64")
    assert compare(off, big, big, everywhere(big))["mismatches"]["port_golden"] == 1


@SMALL
@given(taps(), st.integers(1, 50))
def test_statistics_agree_with_longdouble(tap, chunk_elements):
    of, valid = tap[0], tap[3]
    values = float_values(of)[valid].astype(np.longdouble)
    result = statistics(of, valid, chunk_elements)
    assert (result["count"], result["nan"], result["inf"]) == (values.size, 0, 0)
    assert (result["min"], result["max"]) == (values.min(), values.max())
    near(result["mean"], values.mean(), 1e-15 * np.abs(values).max())
    near(result["std"], values.std(), 1e-15 * np.abs(values).max())


def test_statistics_of_nonfinite_integer_and_boolean_tensors():
    result = statistics(tensor([[[np.nan, np.inf, -np.inf, 1.0, 3.0]]]))
    assert result == {"count": 2, "mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0, "nan": 1, "inf": 2}
    assert statistics(tensor([[1, 2], [3, 4]], "int64"))["mean"] == 2.5
    assert statistics(tensor([[True, False]], "bool"))["mean"] == 0.5
    assert statistics(tensor(np.zeros((1, 2, 3))), np.zeros((1, 2), bool))["mean"] is None


def test_values_beyond_fp32_count_as_infinite():
    huge = tensor([[[1e300, 1.0]]], "float64")
    result = judge(huge, huge, huge, everywhere(huge))
    assert result["nonfinite"]["port"] == {"nan": 0, "inf": 1, "first": [0, 0, 0]}
    assert (result["status"], result["count"]) == ("pass", 1)


@given(arrays(np.float64, (1, 3, 4), elements=st.floats(width=64)), arrays(np.float64, (1, 3, 4)))
@SMALL
def test_no_input_gives_nan_in_the_result(left, right):
    a, b = tensor(left, "float64"), tensor(right, "float64")
    for tap in ((a, b, b), (b, a, b), (a, a, b), (a, b, a)):
        json.dumps(judge(*tap, valid=everywhere(a)), allow_nan=False)
    json.dumps(statistics(a), allow_nan=False)


def test_reads_hdf5_datasets(tmp_path):
    tap = noisy(12, (3, 20, 16))
    valid = everywhere(tap[0])
    valid[2, 11:] = False
    with h5py.File(tmp_path / "tap.h5", "w") as file:
        stored = [Tensor(file.create_dataset(str(i), data=of.data), of.dtype) for i, of in enumerate(tap)]
        assert compare(*stored, valid=valid, chunk_elements=100) == compare(*tap, valid=valid, chunk_elements=100)


def peak_bytes(call):
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("grown", ["batch", "seq"])
def test_peak_memory_does_not_grow_with_the_tensor(grown):
    per_token = 128  # bytes: token_R in fp64 and as a list of Python floats

    def peak(factor):
        shape = (2 * factor, 64, 512) if grown == "batch" else (2, 64 * factor, 512)
        zeros = Tensor(np.zeros(shape, np.uint16), "bfloat16")
        valid = everywhere(zeros)
        compared = peak_bytes(lambda: compare(zeros, zeros, zeros, valid, chunk_elements=1 << 14))
        described = peak_bytes(lambda: statistics(zeros, valid, chunk_elements=1 << 14))
        return compared - per_token * valid.size, described - per_token * valid.size

    for small, large in zip(peak(1), peak(8), strict=True):
        assert large < 1.05 * small
