"""Windows, masks, segments, sinks, softcap: exact values and what they must equal."""

import math
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_flash import segment_ids_from_cu_seqlens
from oracle import (
    assert_bit_equal,
    assert_equal_up_to_rounding,
    assert_within_bound,
    visibility,
)
from strategies import EVERY_DTYPE, EVERY_FEATURE, FEATURES, MASK_AXES, Problem

LN2 = math.log(2.0)
BASE = Problem(H=4, HKV=2, Tq=45, Tk=45)
EVERYTHING = BASE.resized(
    **{"D": 24, "Dv": 40, "causal": True, "window": 20, "softcap": 1.5},
    **{"mask": "float32", "mask_axes": "HQK", "segments": "packed", "sinks": "float32"},
)
# What each kind of mask hides of 45 queries and 45 keys, in its own words.
HIDING = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 7},
    "sides": {"window": (7, 4)},
    "bool-mask": BASE.resized(mask="bool_").options,
    "additive-mask": BASE.resized(mask="float32").options,
    "segments": BASE.resized(segments="packed").options,
}
EVERY_HIDING = pytest.mark.parametrize("name", HIDING)


def column(*values):
    """``[1, 1, T, 1]``: a head dim of 1, so that a score is a product."""
    return mx.array(values, mx.float32)[None, None, :, None]


def ones(T):
    return column(*[1.0] * T)


def both(attention, gradients, q, k, v, dout, dlse, **options):
    """All results, by name."""
    out, lse = attention(q, k, v, **options, return_lse=True)
    return {"out": out, "lse": lse} | gradients(q, k, v, dout, dlse, **options)


def hidden_by(name, T=45):
    """Which of the T x T keys ``HIDING[name]`` hides in the first batch and head."""
    defaults = {"causal": False, "window": None, "mask": None, "segment_ids": None}
    options = {**defaults, **HIDING[name]}
    options.pop("scale", None)
    return ~visibility(T, T, **options)[0, 0]


# Exact values


def test_packed_segments_see_themselves_only(attention, gradients):
    q, k, v = ones(4), ones(4), column(1, 2, 4, 8)
    options = {"scale": 1.0, "causal": True, "segment_ids": mx.array([[0, 0, 1, 1]])}
    out, lse = attention(q, k, v, **options, return_lse=True)
    assert_equal_up_to_rounding(out, column(1, 1.5, 4, 6))
    assert_equal_up_to_rounding(lse[0, 0], [1, 1 + LN2, 1, 1 + LN2])
    actual = gradients(q, k, v, column(0, 0, 1, 1), **options)
    for name in ("dq", "dk", "dv"):
        assert mx.all(actual[name][:, :, :2] == 0).item(), name
    assert_equal_up_to_rounding(actual["dv"], column(0, 0, 1.5, 0.5))


def test_window_of_2_is_the_own_key_and_the_one_before(attention):
    q, k, v = ones(4), ones(4), column(1, 2, 4, 8)
    options = {"scale": 1.0, "causal": True, "window": 2}
    out, lse = attention(q, k, v, **options, return_lse=True)
    assert_equal_up_to_rounding(out, column(1, 1.5, 3, 6))
    assert_equal_up_to_rounding(lse[0, 0], [1, 1 + LN2, 1 + LN2, 1 + LN2])


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((1, 2), (7 / 3, 15 / 4, 30 / 4, 28 / 3, 12)),
        ((1, 0), (1, 1.5, 3, 6, 12)),
        ((0, 0), (1, 2, 4, 8, 16)),
        ((None, 0), (1, 3 / 2, 7 / 3, 15 / 4, 31 / 5)),
        ((0, None), (31 / 5, 30 / 4, 28 / 3, 12, 16)),
        ((None, None), (31 / 5,) * 5),
    ],
    ids=str,
)
def test_pair_as_window_counts_the_keys_of_each_side(attention, window, expected):
    out = attention(ones(5), ones(5), column(1, 2, 4, 8, 16), window=window)
    assert_equal_up_to_rounding(out, column(*expected))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"causal": True, "window": 2}, (3, 6)),
        ({"causal": True, "window": (1, 5)}, (3, 6)),
        ({"window": (1, 0)}, (3, 6)),
        ({"window": (0, 1)}, (6, 8)),
    ],
    ids=str,
)
def test_window_of_fewer_queries_than_keys_is_aligned_at_the_end(
    attention, options, expected
):
    out = attention(ones(2), ones(4), column(1, 2, 4, 8), **options)
    assert_equal_up_to_rounding(out, column(*expected))


def test_sink_takes_its_share_and_gets_its_gradient(attention):
    def outputs(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, scale=1.0, return_lse=True)

    primals = [ones(1), ones(1), column(2), mx.zeros((1,))]
    cotangents = [ones(1), mx.zeros((1, 1, 1))]
    (out, lse), grads = mx.vjp(outputs, primals, cotangents)
    p = math.e / (math.e + 1)
    assert_equal_up_to_rounding(out, 2 * p)  # 1.462117
    assert_equal_up_to_rounding(lse, math.log(math.e + 1))  # 1.313262
    slope = 2 * p * (1 - p)  # 0.393224
    for gradient, expected in zip(grads, (slope, slope, p, -slope), strict=True):
        assert_equal_up_to_rounding(gradient, expected, magnitude=1)


def test_gradient_of_an_additive_mask_is_that_of_its_scores(gradients):
    q, k, v = column(0), ones(2), column(0, 1)
    mask = mx.array([[math.log(3.0), 0.0]])
    actual = gradients(q, k, v, ones(1), mask=mask, scale=1.0)
    p = 0.75  # out = 1 - p
    expected = [[p * (p - 1), (1 - p) * p]]
    assert_equal_up_to_rounding(actual["dmask"], expected, magnitude=1)


def test_softcap_of_two_scores(attention, gradients):
    q, k, v, cap = column(1), column(3, -1), column(1, 0), 2.0
    options = {"scale": 1.0, "softcap": cap}
    out, lse = attention(q, k, v, **options, return_lse=True)
    a, b = cap * math.tanh(1.5), cap * math.tanh(-0.5)
    p = 1 / (1 + math.exp(b - a))
    assert_equal_up_to_rounding(out, p, magnitude=2)
    assert_equal_up_to_rounding(lse, a + math.log1p(math.exp(b - a)))
    slopes = [1 - math.tanh(1.5) ** 2, 1 - math.tanh(-0.5) ** 2]
    expected = [p * (1 - p) * slopes[0], -p * (1 - p) * slopes[1]]
    actual = gradients(q, k, v, ones(1), **options)
    assert_equal_up_to_rounding(actual["dk"][0, 0, :, 0], expected, magnitude=2)


def test_softcap_comes_before_the_mask(attention):
    q, v, mask = column(100, 100), column(1, 2), mx.array([[0.0, 3.0], [3.0, 0.0]])
    out = attention(q, ones(2), v, scale=1.0, softcap=1.0, mask=mask)
    p = 1 / (1 + math.exp(3))
    assert_equal_up_to_rounding(out, column(p + 2 * (1 - p), 1 - p + 2 * p))


def test_head_dim_of_40_has_its_own_default_scale(attention):
    q = mx.zeros((1, 1, 1, 40)).at[..., 0].add(1.0)
    _, lse = attention(q, q, q, return_lse=True)
    assert_equal_up_to_rounding(lse, 40**-0.5)


def test_scale_stays_float32_in_bfloat16(attention):
    q = mx.ones((1, 1, 1, 96), mx.bfloat16)
    _, lse = attention(q, q, q, return_lse=True)
    assert_equal_up_to_rounding(lse, 96**0.5)  # 9.797959; a bfloat16 scale: 9.796875


def test_value_head_dim_may_differ(attention, gradients):
    q, k, v = ones(2), ones(2), mx.arange(6.0).reshape(1, 1, 2, 3)
    out = attention(q, k, v)
    assert_equal_up_to_rounding(out[0, 0], [[1.5, 2.5, 3.5]] * 2)
    dv = gradients(q, k, v, mx.ones((1, 1, 2, 3)))["dv"]
    assert_equal_up_to_rounding(dv, 1.0)


# Against float64


@EVERY_FEATURE
@EVERY_DTYPE
def test_feature_alone_is_within_bound(attention, gradients, dtype, feature):
    problem = BASE.resized(dtype=dtype, Tk=71, **FEATURES[feature])
    arrays = problem.arrays()
    actual = both(attention, gradients, *arrays, **problem.options)
    assert_within_bound(actual, *arrays, **problem.options)


@EVERY_DTYPE
@pytest.mark.parametrize("layout", ["contiguous", "mixed"])
def test_all_features_together_are_within_bound(attention, gradients, layout, dtype):
    problem = EVERYTHING.resized(dtype=dtype, layout=layout, B=2, Tk=71)
    arrays = problem.arrays()
    actual = both(attention, gradients, *arrays, **problem.options)
    assert actual.keys() == {"out", "lse", "dq", "dk", "dv", "dmask", "dsinks"}
    assert_within_bound(actual, *arrays, **problem.options)


@pytest.mark.parametrize("axes", MASK_AXES, ids=lambda axes: axes or "none")
def test_mask_gradient_is_summed_over_the_axes_that_the_mask_lacks(
    attention, gradients, axes
):
    problem = BASE.resized(B=2, D=16, mask="float32", mask_axes=axes, seed=2)
    arrays, options = problem.arrays(), problem.options
    actual = both(attention, gradients, *arrays, **options)
    assert actual["dmask"].shape == options["mask"].shape
    assert_within_bound(actual, *arrays, **options)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_mask_of_fewer_axes_gets_its_gradient_in_its_shape(gradients, rank):
    q, k, v, dout, dlse = arrays = BASE.resized(Tk=71, D=16).arrays()
    mask = mx.random.normal((4, 45, 71)[3 - rank :], key=mx.random.key(1))
    actual = gradients(*arrays, mask=mask)
    assert actual["dmask"].shape == mask.shape
    assert_within_bound(actual, q, k, v, dout, dlse, mask=mask)


@pytest.mark.parametrize("mask_dtype", ["float32", "float16", "bfloat16"])
@EVERY_DTYPE
def test_mask_and_sinks_may_have_another_dtype_than_q(
    attention, gradients, dtype, mask_dtype
):
    problem = BASE.resized(dtype=dtype, mask=mask_dtype, sinks=mask_dtype)
    arrays, options = problem.arrays(), problem.options
    actual = both(attention, gradients, *arrays, **options)
    assert actual["dmask"].dtype == actual["dsinks"].dtype == options["mask"].dtype
    assert_within_bound(actual, *arrays, **options)


@pytest.mark.parametrize("T", [127, 128, 129])
def test_sparse_block_mask_of_any_length_is_within_bound(attention, gradients, T):
    arrays = Problem(H=2, HKV=1, Tq=T, Tk=T, D=16).arrays()
    block = mx.arange(T) // 32
    mask = (block[:, None] * 3 + block) % 4 == 0
    actual = both(attention, gradients, *arrays, mask=mask)
    assert_within_bound(actual, *arrays, mask=mask)


# Two ways to say the same


@EVERY_HIDING
def test_any_mask_equals_its_bool_array(attention, gradients, name):
    arrays = BASE.arrays()
    options = HIDING[name]
    actual = both(attention, gradients, *arrays, **options)
    visible = mx.array(~hidden_by(name))
    if name == "additive-mask":  # the numbers of what is not hidden stay
        visible = mx.where(visible, options["mask"], -math.inf)
    expected = both(attention, gradients, *arrays, mask=visible)
    for key, value in expected.items():
        assert_equal_up_to_rounding(actual[key], value)


def test_window_as_long_as_the_keys_is_bit_equal_to_causal(attention, gradients):
    arrays = BASE.resized(Tk=71).arrays()
    expected = both(attention, gradients, *arrays, causal=True)
    for window in (71, (70, 0), (None, 0), (None, None), (100, 7)):
        actual = both(attention, gradients, *arrays, causal=True, window=window)
        for name, value in expected.items():
            assert_bit_equal(actual[name], value)


@pytest.mark.parametrize("lowest", ["-inf", "float32", "bfloat16"])
def test_lowest_numbers_of_an_additive_mask_hide_as_false_does(
    attention, gradients, lowest
):
    arrays = BASE.arrays()
    visible = BASE.resized(mask="bool_").options["mask"]
    dtype = mx.bfloat16 if lowest == "bfloat16" else mx.float32
    value = -math.inf if lowest == "-inf" else mx.finfo(dtype).min
    additive = mx.where(visible, 0.0, value).astype(dtype)
    additive = mx.where(mx.arange(45)[:, None] == 3, value, additive)  # an empty row
    visible = mx.where(mx.arange(45)[:, None] == 3, False, visible)
    actual = both(attention, gradients, *arrays, mask=additive)
    assert mx.all(mx.where(visible, 0, actual.pop("dmask")) == 0).item()
    expected = both(attention, gradients, *arrays, mask=visible)
    for name, value in expected.items():
        assert_equal_up_to_rounding(
            mx.maximum(actual[name], -1e9), mx.maximum(value, -1e9)
        )


def test_lowest_float16_in_an_additive_mask_is_a_number(attention):
    mask = mx.full((1, 2), -65504.0, mx.float16)
    out, lse = attention(ones(1), ones(2), column(1, 3), mask=mask, return_lse=True)
    assert_equal_up_to_rounding(out, 2.0)
    assert_equal_up_to_rounding(lse, -65503.0 + LN2)


def test_mask_of_zeros_leaves_a_single_query(attention, gradients):
    arrays = Problem(H=2, HKV=1, Tq=1, Tk=64, D=64).arrays()
    expected = both(attention, gradients, *arrays)
    actual = both(attention, gradients, *arrays, mask=mx.zeros((1, 64)))
    for name, value in expected.items():
        assert_equal_up_to_rounding(actual[name], value)


def test_sinks_equal_a_factor_made_of_lse(attention, gradients):
    problem = BASE.resized(sinks="float32")
    q, k, v, dout, dlse = problem.arrays()
    sinks = problem.options["sinks"]
    expected = both(attention, gradients, q, k, v, dout, 0 * dlse, sinks=sinks)

    def with_factor(q, k, v, sinks):
        out, lse = attention(q, k, v, return_lse=True)
        return [out * mx.sigmoid(lse - sinks[:, None])[..., None]]

    (out,), grads = mx.vjp(with_factor, [q, k, v, sinks], [dout])
    assert_equal_up_to_rounding(out, expected["out"])
    for name, gradient in zip(("dq", "dk", "dv", "dsinks"), grads, strict=True):
        assert_equal_up_to_rounding(gradient, expected[name])


def test_sinks_of_minus_infinity_are_no_sinks(attention, gradients):
    arrays = BASE.resized(Tk=33).arrays()
    none = mx.full((4,), -math.inf)
    actual = both(attention, gradients, *arrays, causal=True, sinks=none)
    assert mx.all(actual.pop("dsinks") == 0).item()
    expected = both(attention, gradients, *arrays, causal=True)
    for name, value in expected.items():
        assert_equal_up_to_rounding(
            mx.maximum(actual[name], -1e9), mx.maximum(value, -1e9)
        )


def test_high_softcap_is_no_softcap(attention, gradients):
    arrays = BASE.arrays()
    expected = both(attention, gradients, *arrays)
    actual = both(attention, gradients, *arrays, softcap=1e5)
    for name, value in expected.items():
        assert_equal_up_to_rounding(actual[name], value, magnitude=1e3)


def test_packed_documents_equal_separate_calls(attention, gradients):
    q, k, v, dout, dlse = BASE.resized(Tq=70, Tk=70).arrays()
    offsets = [0, 17, 17, 48, 65]  # a document without tokens, and padding at the end
    ids = segment_ids_from_cu_seqlens(mx.array(offsets), 70)
    packed = both(
        attention, gradients, q, k, v, dout, dlse, causal=True, segment_ids=ids
    )
    for start, stop in pairwise(offsets):
        rows = slice(start, stop)
        parts = (x[:, :, rows] for x in (q, k, v, dout, dlse))
        alone = both(attention, gradients, *parts, causal=True)
        for name, value in alone.items():
            if stop > start:
                assert_equal_up_to_rounding(packed[name][:, :, rows], value)


def test_ids_of_queries_and_keys_may_differ(attention):
    ids = mx.array([[5, 7]]), mx.array([[7, 5, 9, 7]])
    out = attention(ones(2), ones(4), column(1, 2, 4, 8), segment_ids=ids)
    assert_equal_up_to_rounding(out, column(2, 4.5))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_ids_of_any_integer_dtype_are_compared_as_they_are(attention, dtype):
    q, k, v, *_ = BASE.arrays()
    ids = BASE.resized(segments="packed").options["segment_ids"]
    expected = attention(q, k, v, segment_ids=ids)
    actual = attention(q, k, v, segment_ids=ids.astype(getattr(mx, dtype)))
    assert_bit_equal(actual, expected)


def test_segment_ids_from_offsets():
    def ids(offsets, total_length=None):
        result = segment_ids_from_cu_seqlens(mx.array(offsets), total_length)
        assert result.dtype == mx.int32
        return result.tolist()

    assert ids([0, 2, 5]) == [[0, 0, 1, 1, 1]]
    assert ids([0, 2, 2, 3]) == [[0, 0, 2]]
    assert ids([0, 2, 3], 6) == [[0, 0, 1, 2, 2, 2]]
    assert ids([0, 0, 2], 3) == [[1, 1, 2]]
    assert ids([0, 4], 3) == [[0, 0, 0]]
    assert ids([0]) == [[]]
    with pytest.raises(ValueError, match=r"1-D array.*got cu_seqlens \[1, 2\] int32"):
        segment_ids_from_cu_seqlens(mx.array([[0, 2]]))
    with pytest.raises(ValueError, match=r"integer offset.*float32"):
        segment_ids_from_cu_seqlens(mx.array([0.0, 2.0]))
    with pytest.raises(ValueError, match=r"must not be negative, got -1"):
        segment_ids_from_cu_seqlens(mx.array([0, 2]), -1)


def test_segment_ids_from_offsets_compile():
    compiled = mx.compile(lambda offsets: segment_ids_from_cu_seqlens(offsets, 4))
    assert compiled(mx.array([0, 1, 3])).tolist() == [[0, 1, 1, 2]]


@pytest.mark.parametrize("feature", FEATURES)
def test_no_argument_is_dropped(attention, feature):
    problem = BASE.resized(**FEATURES[feature])
    q, k, v, *_ = problem.arrays()
    options = problem.options
    whole = attention(q, k, v, **options)
    for name in options.keys() & {"window", "softcap", "mask", "segment_ids", "sinks"}:
        others = {key: x for key, x in options.items() if key != name}
        assert mx.abs(attention(q, k, v, **others) - whole).max().item() > 1e-3, name


# Rows without keys, NaN, large scores


EMPTY_ROW = {
    "bool-mask": {"mask": mx.arange(4)[:, None] != mx.array([1] * 4)},
    "additive-mask": {
        "mask": mx.where(mx.arange(4)[:, None] == 1, -math.inf, mx.zeros((4, 4)))
    },
    "segments": {"segment_ids": (mx.array([[0, 1, 0, 0]]), mx.array([[0, 0, 0, 0]]))},
}


@pytest.mark.parametrize("sinks", [None, 0.5], ids=["", "sinks"])
@pytest.mark.parametrize("options", EMPTY_ROW.values(), ids=EMPTY_ROW)
def test_row_without_keys_is_zero_and_passes_no_gradient(
    attention, gradients, options, sinks
):
    q, k, v, dout, dlse = Problem(H=1, Tq=4, Tk=4, D=8).arrays()
    if sinks is not None:
        options = options | {"sinks": mx.array([sinks])}
    actual = both(attention, gradients, q, k, v, dout, dlse, **options)
    assert mx.all(actual["out"][:, :, 1] == 0).item()
    assert mx.all(actual["dq"][:, :, 1] == 0).item()
    lse = actual["lse"][0, 0, 1].item()
    assert lse == pytest.approx(-math.inf if sinks is None else sinks, rel=1e-6)
    if "dmask" in actual:
        assert mx.all(actual["dmask"][1] == 0).item()
    assert_within_bound(actual, q, k, v, dout, dlse, **options)


def test_window_of_queries_before_all_keys_is_empty(attention, gradients):
    problem = Problem(H=2, HKV=1, Tq=90, Tk=9, D=8, window=(2, 3), sinks="float32")
    arrays = problem.arrays()
    actual = both(attention, gradients, *arrays, **problem.options)
    assert mx.all(actual["out"][:, :, :70] == 0).item()
    assert_within_bound(actual, *arrays, **problem.options)


@EVERY_HIDING
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_key_that_is_not_finite_reaches_only_rows_that_see_it(
    attention, gradients, number, name
):
    q, k, v, dout, dlse = BASE.arrays()
    options = HIDING[name]
    before = both(attention, gradients, q, k, v, dout, dlse, **options)
    k = mx.where(mx.arange(45)[:, None] == 23, number, k)
    after = both(attention, gradients, q, k, v, dout, dlse, **options)
    rows = mx.array(np.flatnonzero(hidden_by(name)[:, 23]))
    assert rows.size > 5
    for result in ("out", "lse", "dq"):
        assert_bit_equal(after[result][:, :, rows], before[result][:, :, rows])


@EVERY_HIDING
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
def test_query_that_is_not_finite_reaches_only_keys_that_it_sees(
    attention, gradients, number, name
):
    q, k, v, dout, dlse = BASE.arrays()
    options = HIDING[name]
    before = both(attention, gradients, q, k, v, dout, dlse, **options)
    q = mx.where(mx.arange(45)[:, None] == 23, number, q)
    after = both(attention, gradients, q, k, v, dout, dlse, **options)
    keys = mx.array(np.flatnonzero(hidden_by(name)[23]))
    assert keys.size > 5
    for result in ("dk", "dv"):
        assert_bit_equal(after[result][:, :, keys], before[result][:, :, keys])


@EVERY_FEATURE
def test_rows_without_a_cotangent_contribute_nothing(attention, gradients, feature):
    problem = BASE.resized(**FEATURES[feature])
    q, k, v, dout, dlse = problem.arrays()
    last = mx.arange(45) >= 40  # padding
    dout, dlse = mx.where(last[:, None], 0.0, dout), mx.where(last, 0.0, dlse)
    before = gradients(q, k, v, dout, dlse, **problem.options)
    q = mx.where(last[:, None], math.nan, q)
    after = gradients(q, k, v, dout, dlse, **problem.options)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert mx.all(mx.isfinite(value)).item(), name
        assert_bit_equal(after[name], value)


def test_key_of_padding_that_is_nan_leaves_all_gradients(gradients):
    q, k, v, dout, dlse = BASE.arrays()
    last = mx.arange(45) == 44
    dout, dlse = mx.where(last[:, None], 0.0, dout), mx.where(last, 0.0, dlse)
    before = gradients(q, k, v, dout, dlse, causal=True)
    k = mx.where(last[:, None], math.nan, k)
    after = gradients(q, k, v, dout, dlse, causal=True)
    for name, value in before.items():
        assert_bit_equal(after[name], value)


@EVERY_FEATURE
@EVERY_DTYPE
def test_scores_of_60000_are_within_bound(attention, gradients, dtype, feature):
    problem = BASE.resized(dtype=dtype, D=16, scale=1.0, **FEATURES[feature])
    q, k, v, dout, dlse = problem.arrays()
    first = mx.arange(16) == 0
    even = mx.arange(45)[:, None] % 2 == 0
    q = mx.where(first, 250.0, mx.zeros_like(q)).astype(q.dtype)
    k = mx.where(first, mx.where(even, 240.0, -240.0), mx.zeros_like(k)).astype(q.dtype)
    arrays = q, k, v, dout, dlse
    actual = both(attention, gradients, *arrays, **problem.options)
    assert_within_bound(actual, *arrays, **problem.options)


def test_scores_beyond_float16_are_within_bound(attention, gradients):
    q, k, v, dout, dlse = BASE.resized(dtype="float16", D=64).arrays()
    arrays = 100 * q, 100 * k, v, dout, dlse  # scores up to 400000 before the scale
    actual = both(attention, gradients, *arrays, causal=True, window=11)
    assert_within_bound(actual, *arrays, causal=True, window=11)


# Training


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_training_on_a_padded_batch_stays_finite(attention, dtype):
    dtype = getattr(mx, dtype)
    lengths = mx.array([7, 3, 1])
    padding = mx.arange(7) >= lengths[:, None]
    mask = ~padding[:, None, None, :]
    x = mx.random.normal((3, 1, 7, 8), key=mx.random.key(0)).astype(dtype)
    weights = [0.3 * mx.random.normal((8, 8), key=mx.random.key(n)) for n in range(3)]

    def loss(*weights):
        q, k, v = (x @ w.astype(dtype) for w in weights)
        error = (attention(q, k, v, mask=mask, causal=True) - x).astype(mx.float32)
        return mx.where(padding[:, None, :, None], 0.0, error.square()).sum()

    losses = []
    for _ in range(10):
        value, grads = mx.value_and_grad(loss, argnums=(0, 1, 2))(*weights)
        weights = [w - 0.02 * g for w, g in zip(weights, grads, strict=True)]
        mx.eval(value, weights)
        losses.append(value.item())
    assert losses[-1] < 0.9 * losses[0]


class WithSinks(nn.Module):
    """A layer whose sinks and biases are parameters."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(16, 3 * 16)
        self.sinks = mx.array([0.5, -1.0])
        self.bias = mx.random.normal((2, 1, 21), key=mx.random.key(3))

    def __call__(self, x):
        B, T, _ = x.shape
        heads = self.project(x).reshape(B, T, 3, 2, 8).transpose(2, 0, 3, 1, 4)
        return self.attend(*heads, self.bias, self.sinks)


def native_with_sinks(q, k, v, bias, sinks):
    with mx.stream(mx.cpu):
        scale = q.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=bias, sinks=sinks
        )


def test_sinks_and_biases_of_a_module_get_their_gradients(attention):
    x = mx.random.normal((2, 21, 16), key=mx.random.key(0))
    results = []
    for attend in (
        lambda q, k, v, bias, sinks: attention(q, k, v, mask=bias, sinks=sinks),
        native_with_sinks,
    ):
        mx.random.seed(1)
        module = WithSinks(attend)
        loss = nn.value_and_grad(module, lambda x, m=module: m(x).square().sum())
        results.append(loss(x))
    (value, grads), (expected_value, expected) = results
    assert_equal_up_to_rounding(value, expected_value)
    for name in ("sinks", "bias"):
        assert mx.abs(expected[name]).min().item() > 0
        assert_equal_up_to_rounding(grads[name], expected[name])
    for name in ("weight", "bias"):
        gradient = grads["project"][name]
        assert_equal_up_to_rounding(gradient, expected["project"][name])


def test_mask_gradient_has_no_size_of_the_scores(attention, backend_name):
    """A bias per key of a long sequence: forward and backward stay linear in T."""
    if backend_name == "simulator":
        pytest.skip("the simulator keeps memory of its own")

    def peak(T):
        q, k, v, *_ = Problem(H=2, HKV=1, Tq=T, Tk=T, D=8).arrays()
        bias = mx.zeros((2, 1, T))
        mx.eval(bias)

        def loss(q, k, v, bias):
            return attention(q, k, v, mask=bias).sum()

        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias))
        return mx.get_peak_memory() - before

    once, twice = peak(1024), peak(2048)
    assert twice < 2.6 * once
