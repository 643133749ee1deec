"""Properties that attention has whatever its values are: no oracle is needed."""

import math

import mlx.core as mx
import numpy as np
import pytest

from oracle import (
    assert_bit_equal,
    assert_equal_up_to_rounding,
    assert_within_bound,
    to_numpy,
)
from strategies import EVERY_DTYPE, EVERY_MASK, LAYOUTS, LAYOUTS_OF_A_PROBLEM, Problem

BASE = Problem(H=4, HKV=2)


def normal(shape, seed):
    return mx.random.normal(shape, key=mx.random.key(seed))


def both(attention, gradients, q, k, v, dout, dlse, **options):
    """All five results, by name."""
    out, lse = attention(q, k, v, **options, return_lse=True)
    return {"out": out, "lse": lse} | gradients(q, k, v, dout, dlse, **options)


@EVERY_MASK
@EVERY_DTYPE
def test_values_of_one_give_an_output_of_one(attention, dtype, causal):
    q, k, v, *_ = BASE.resized(dtype=dtype).arrays()
    out = attention(q, k, mx.ones_like(v), causal=causal)
    assert_equal_up_to_rounding(out, 1.0, dtype=q.dtype)


@EVERY_MASK
def test_one_vector_added_to_every_key_leaves_the_output(attention, causal):
    q, k, v, *_ = BASE.arrays()
    shift = normal((1, 1, 1, q.shape[-1]), seed=1)
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    moved, moved_lse = attention(q, k + shift, v, causal=causal, return_lse=True)
    assert_equal_up_to_rounding(moved, out)
    assert_equal_up_to_rounding(
        moved_lse - lse, (q * shift).sum(axis=-1) * q.shape[-1] ** -0.5
    )


@EVERY_MASK
def test_key_gradients_sum_to_zero_over_the_keys(gradients, causal):
    q, k, v, dout, _ = BASE.arrays()
    dk = to_numpy(gradients(q, k, v, dout, causal=causal)["dk"])
    size = np.abs(dk).sum(axis=2).max()
    assert_equal_up_to_rounding(dk.sum(axis=2), 0.0, magnitude=size)


def test_permuting_the_keys_permutes_their_gradients_only(attention, gradients):
    q, k, v, dout, dlse = BASE.arrays()
    order = mx.random.permutation(k.shape[2], key=mx.random.key(2))
    before = both(attention, gradients, q, k, v, dout, dlse)
    k, v = k[:, :, order], v[:, :, order]
    after = both(attention, gradients, q, k, v, dout, dlse)
    for name, value in before.items():
        value = value[:, :, order] if name in ("dk", "dv") else value
        assert_equal_up_to_rounding(after[name], value)


@pytest.mark.parametrize("extra", [0, 26, -26], ids=["Tk=Tq", "Tk=Tq+26", "Tk=Tq-26"])
def test_causal_rows_do_not_depend_on_later_keys(attention, gradients, extra):
    problem = BASE.resized(Tq=45, Tk=45 + extra)
    q, k, v, dout, dlse = problem.arrays()
    rows = 37
    keys = rows + extra
    before = both(attention, gradients, q, k, v, dout, dlse, causal=True)
    later = normal(k[:, :, keys:].shape, seed=4)
    k = mx.concatenate([k[:, :, :keys], 5 * later], axis=2)
    v = mx.concatenate([v[:, :, :keys], -5 * later], axis=2)
    after = both(attention, gradients, q, k, v, dout, dlse, causal=True)
    for name in ("out", "lse", "dq"):
        assert_bit_equal(after[name][:, :, :rows], before[name][:, :, :rows])


def test_keys_that_no_row_with_a_cotangent_sees_get_zero_gradients(gradients):
    q, k, v, dout, dlse = BASE.arrays()
    rows = 20
    keys = rows + k.shape[2] - q.shape[2]
    dout = mx.where(mx.arange(q.shape[2])[:, None] < rows, dout, 0.0)
    dlse = mx.where(mx.arange(q.shape[2]) < rows, dlse, 0.0)
    actual = gradients(q, k, v, dout, dlse, causal=True)
    for name in ("dk", "dv"):
        assert mx.all(actual[name][:, :, keys:] == 0).item()
        assert mx.all(mx.any(actual[name][:, :, :keys] != 0, axis=-1)).item()


@pytest.mark.parametrize("split", [1, 16, 33, 70])
def test_two_sets_of_keys_merge_by_their_lse(attention, split):
    q, k, v, *_ = BASE.arrays()
    out, lse = attention(q, k, v, return_lse=True)
    first = attention(q, k[:, :, :split], v[:, :, :split], return_lse=True)
    second = attention(q, k[:, :, split:], v[:, :, split:], return_lse=True)
    merged_lse = mx.logaddexp(first[1], second[1])
    merged = sum(
        part * mx.exp(x - merged_lse)[..., None] for part, x in (first, second)
    )
    assert_equal_up_to_rounding(merged_lse, lse)
    assert_equal_up_to_rounding(merged, out)


@EVERY_MASK
def test_grouped_heads_equal_repeated_heads(attention, gradients, causal):
    q, k, v, dout, dlse = BASE.arrays()
    grouped = both(attention, gradients, q, k, v, dout, dlse, causal=causal)
    k, v = (mx.repeat(x, 2, axis=1) for x in (k, v))
    repeated = both(attention, gradients, q, k, v, dout, dlse, causal=causal)
    for name in ("dk", "dv"):
        repeated[name] = mx.unflatten(repeated[name], 1, (2, 2)).sum(axis=2)
    for name, value in grouped.items():
        assert_equal_up_to_rounding(value, repeated[name])


@EVERY_MASK
def test_output_is_linear_in_the_values(attention, causal):
    q, k, v, *_ = BASE.arrays()
    other = normal(v.shape, seed=5)
    parts = [attention(q, k, x, causal=causal) for x in (v, other)]
    whole = attention(q, k, v - 2 * other, causal=causal)
    assert_equal_up_to_rounding(whole, parts[0] - 2 * parts[1])


@EVERY_MASK
def test_value_gradient_is_the_adjoint_of_the_output(attention, gradients, causal):
    q, k, v, dout, _ = BASE.arrays()
    dv = to_numpy(gradients(q, k, v, dout, causal=causal)["dv"])
    products = to_numpy(attention(q, k, v, causal=causal)) * to_numpy(dout)
    assert_equal_up_to_rounding(
        (dv * to_numpy(v)).sum(), products.sum(), magnitude=np.abs(products).sum()
    )


@EVERY_MASK
@EVERY_DTYPE
def test_doubled_queries_with_half_the_scale_are_bit_equal(
    attention, gradients, dtype, causal
):
    q, k, v, dout, dlse = BASE.resized(dtype=dtype).arrays()
    options = {"causal": causal}
    before = both(attention, gradients, q, k, v, dout, dlse, scale=0.3, **options)
    after = both(attention, gradients, 2 * q, k, v, dout, dlse, scale=0.15, **options)
    for name in ("out", "lse", "dk", "dv"):
        assert_bit_equal(after[name], before[name])


@EVERY_MASK
@EVERY_DTYPE
def test_repeated_calls_are_bit_equal_and_leave_their_inputs(
    attention, gradients, dtype, causal
):
    arrays = BASE.resized(dtype=dtype).arrays()
    copies = [mx.array(x) for x in arrays]
    first = both(attention, gradients, *arrays, causal=causal)
    for _ in range(3):
        again = both(attention, gradients, *arrays, causal=causal)
        for name, value in first.items():
            assert_bit_equal(again[name], value)
    for x, copy in zip(arrays, copies, strict=True):
        assert_bit_equal(x, copy)


@EVERY_MASK
@EVERY_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS_OF_A_PROBLEM)
def test_layout_of_the_inputs_does_not_matter(
    attention, gradients, layout, dtype, causal
):
    arrays = BASE.resized(B=2, dtype=dtype, layout=layout).arrays()
    contiguous = [mx.contiguous(x) for x in arrays]
    actual = both(attention, gradients, *arrays, causal=causal)
    expected = both(attention, gradients, *contiguous, causal=causal)
    for name, value in actual.items():
        assert_bit_equal(value, expected[name])


def test_layouts_lie_differently_in_memory():
    strides = {
        np.array(BASE.resized(layout=layout).arrays()[0], copy=False).strides
        for layout in LAYOUTS
    }
    assert len(strides) == len(LAYOUTS)


@EVERY_DTYPE
def test_rows_without_a_key_are_zero_and_pass_no_gradient(attention, gradients, dtype):
    q, k, v, dout, dlse = BASE.resized(dtype=dtype, Tq=71, Tk=33).arrays()
    empty = q.shape[2] - k.shape[2]
    whole = both(attention, gradients, q, k, v, dout, dlse, causal=True)
    assert mx.all(whole["out"][:, :, :empty] == 0).item()
    assert mx.all(whole["lse"][:, :, :empty] == -math.inf).item()
    assert mx.all(whole["dq"][:, :, :empty] == 0).item()
    q, dout, dlse = q[:, :, empty:], dout[:, :, empty:], dlse[:, :, empty:]
    assert_within_bound(
        {"dk": whole["dk"], "dv": whole["dv"]}, q, k, v, dout, dlse, causal=True
    )


@EVERY_MASK
@EVERY_DTYPE
def test_nan_in_one_query_row_leaves_the_other_rows(
    attention, gradients, dtype, causal
):
    q, k, v, dout, dlse = BASE.resized(dtype=dtype).arrays()
    row = mx.arange(q.shape[2])[:, None] == 5
    before = both(attention, gradients, q, k, v, dout, dlse, causal=causal)
    q = mx.where(row, mx.array(math.nan, q.dtype), q)
    after = both(attention, gradients, q, k, v, dout, dlse, causal=causal)
    others = mx.array([i for i in range(q.shape[2]) if i != 5])
    for name in ("out", "lse", "dq"):
        assert_bit_equal(after[name][:, :, others], before[name][:, :, others])


@EVERY_MASK
@EVERY_DTYPE
def test_scores_of_60000_give_the_mean_of_the_largest(
    attention, gradients, dtype, causal
):
    q, k, v, dout, dlse = BASE.resized(dtype=dtype, Tq=71).arrays()
    first = mx.arange(q.shape[-1]) == 0
    even = mx.arange(k.shape[2])[:, None] % 2 == 0
    q = mx.where(first, 250.0, mx.zeros_like(q)).astype(q.dtype)
    k = mx.where(first, mx.where(even, 240.0, -240.0), mx.zeros_like(k)).astype(q.dtype)
    options = {"scale": 1.0, "causal": causal}
    actual = both(attention, gradients, q, k, v, dout, dlse, **options)
    assert_within_bound(actual, q, k, v, dout, dlse, **options)


@EVERY_MASK
@EVERY_DTYPE
def test_equal_scores_give_the_mean_of_the_visible_values(
    attention, gradients, dtype, causal
):
    q, k, v, dout, dlse = BASE.resized(dtype=dtype, Tq=71).arrays()
    q = mx.zeros_like(q)
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    count = mx.arange(1, 72) if causal else mx.full((71,), 71)
    assert_equal_up_to_rounding(lse, mx.broadcast_to(mx.log(count), lse.shape))
    actual = {"out": out} | gradients(q, k, v, dout, dlse, causal=causal)
    assert_within_bound(actual, q, k, v, dout, dlse, causal=causal)


@EVERY_MASK
@EVERY_DTYPE
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1), (1, 1, 1, 7), (1, 1, 7, 1), (1, 2, 3, 1), (2, 4, 1, 9)],
    ids=lambda shape: "B{}-H{}-Tq{}-Tk{}".format(*shape),
)
def test_tiny_problem_is_within_bound(attention, gradients, shape, dtype, causal):
    B, H, Tq, Tk = shape
    arrays = Problem(dtype=dtype, B=B, H=H, HKV=1, Tq=Tq, Tk=Tk).arrays()
    actual = both(attention, gradients, *arrays, causal=causal)
    assert_within_bound(actual, *arrays, causal=causal)


@EVERY_DTYPE
def test_single_key_returns_its_value_exactly(attention, backend_name, dtype):
    q, k, v, *_ = BASE.resized(dtype=dtype, Tk=1).arrays()
    if (backend_name, dtype) == ("cuda", "float32"):
        v = v.astype(mx.float16).astype(mx.float32)  # two TF32 parts hold 22 bits
    out = attention(q, k, v)
    expected = mx.broadcast_to(mx.repeat(v, 2, axis=1), out.shape)
    assert_bit_equal(mx.contiguous(out), mx.contiguous(expected))
