"""The output and the log-sum-exp."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from oracle import (
    assert_bit_equal,
    assert_equal_up_to_rounding,
    assert_within_bound,
    relative_error,
    to_numpy,
    truth,
)
from strategies import EVERY_DTYPE, EVERY_HEAD_DIM, EVERY_MASK, Problem, problems

LN2 = math.log(2.0)


def channel(*values):
    """``[1, 1, T, 16]`` with T values in the first channel and zeros elsewhere."""
    return mx.pad(
        mx.array(values, mx.float32)[None, None, :, None], [(0, 0)] * 3 + [(0, 15)]
    )


@EVERY_MASK
@EVERY_DTYPE
@EVERY_HEAD_DIM
def test_forward_of_ragged_grouped_heads_is_within_bound(attention, D, dtype, causal):
    problem = Problem(dtype=dtype, H=4, HKV=1, Tq=45, Tk=71, D=D, causal=causal)
    q, k, v, *_ = problem.arrays()
    out, lse = attention(q, k, v, **problem.options, return_lse=True)
    assert_within_bound({"out": out, "lse": lse}, q, k, v, **problem.options)


@EVERY_MASK
@EVERY_HEAD_DIM
def test_float32_forward_is_within_5e_6_of_float64(attention, D, causal):
    q, k, v, *_ = Problem(H=4, HKV=1, Tq=45, Tk=71, D=D).arrays()
    options = {"scale": D**-0.5, "causal": causal}
    out, lse = attention(q, k, v, **options, return_lse=True)
    expected = truth(*(to_numpy(x) for x in (q, k, v)), **options)
    assert relative_error(out, expected["out"]) < 5e-6
    assert relative_error(lse, expected["lse"]) < 5e-6


@given(problem=problems())
def test_forward_of_any_problem_is_within_bound(attention, problem):
    q, k, v, *_ = problem.arrays()
    out, lse = attention(q, k, v, **problem.options, return_lse=True)
    assert_within_bound({"out": out, "lse": lse}, q, k, v, **problem.options)


def test_causal_with_fewer_queries_than_keys_is_aligned_at_the_end(attention):
    q, k, v = channel(1, 1), channel(1, 1, 1), channel(1, 3, 8)
    out, lse = attention(q, k, v, scale=1.0, causal=True, return_lse=True)
    assert_equal_up_to_rounding(out, channel(2, 4))
    assert_equal_up_to_rounding(lse[0, 0], [1 + LN2, 1 + math.log(3)])


def test_causal_with_more_queries_than_keys_has_an_empty_first_row(attention):
    q, k, v = channel(1, 1, 1), channel(1, 1), channel(1, 3)
    out, lse = attention(q, k, v, scale=1.0, causal=True, return_lse=True)
    assert_equal_up_to_rounding(out, channel(0, 1, 2))
    assert lse[0, 0, 0].item() == -math.inf
    assert_equal_up_to_rounding(lse[0, 0, 1:], [1, 1 + LN2])


@pytest.mark.parametrize("D", [16, 48, 80], ids="D{}".format)
def test_default_scale_comes_from_the_true_head_dim(attention, D):
    q = mx.zeros((1, 1, 1, D)).at[..., 0].add(1.0)
    k = v = mx.concatenate([q, 0 * q], axis=2)
    out, lse = attention(q, k, v, return_lse=True)
    weight = math.exp(D**-0.5)
    assert_equal_up_to_rounding(out[0, 0, 0, 0], weight / (weight + 1))
    assert_equal_up_to_rounding(lse, math.log(weight + 1))


def test_very_negative_scores_keep_their_softmax(attention):
    q, k, v = channel(1), channel(-100, -101), channel(0, 1)
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    # The exponents are differences of scores, as precise as float32 is near 100.
    assert_equal_up_to_rounding(out, channel(1 / (1 + math.e)), magnitude=100)
    assert_equal_up_to_rounding(lse, -100 + math.log1p(math.exp(-1)))
    assert_within_bound({"out": out, "lse": lse}, q, k, v, scale=1.0)


def test_lse_of_two_zero_scores_is_the_natural_logarithm_of_2(attention):
    q, k, v = channel(0), channel(5, -3), channel(2, 4)
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    assert_equal_up_to_rounding(out, channel(3))
    assert_equal_up_to_rounding(lse, LN2)


def test_query_head_reads_the_key_head_of_its_group(attention):
    heads = mx.broadcast_to(mx.arange(2.0)[None, :, None, None], (1, 2, 9, 16))
    q, k, *_ = Problem(H=6, HKV=2, Tq=5, Tk=9, D=16).arrays()
    out = attention(q, k, heads)
    expected = mx.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])[None, :, None, None]
    assert_equal_up_to_rounding(out, mx.broadcast_to(expected, out.shape))


def test_last_of_more_than_32767_keys_is_found(attention):
    T = 32800
    k = mx.zeros((1, 1, T, 16)).at[:, :, -1].add(10.0)
    v = mx.zeros((1, 1, T, 16)).at[:, :, -1].add(3.0)
    out = attention(mx.ones((1, 1, 1, 16)), k, v, causal=True, scale=1.0)
    assert_equal_up_to_rounding(out, 3.0)


@pytest.mark.parametrize(
    ("dtypes", "promoted"),
    [
        (("float16", "float32", "float16"), "float32"),
        (("float16", "float16", "bfloat16"), "float32"),
        (("bfloat16", "float32", "float16"), "float32"),
    ],
    ids="-".join,
)
def test_mixed_dtypes_give_the_promoted_dtype(attention, dtypes, promoted):
    arrays = Problem(H=4, HKV=2).arrays()[:3]
    mixed = [
        x.astype(getattr(mx, name)) for x, name in zip(arrays, dtypes, strict=True)
    ]
    out = attention(*mixed)
    assert out.dtype == getattr(mx, promoted)
    assert_bit_equal(out, attention(*(x.astype(out.dtype) for x in mixed)))


def test_lse_is_returned_only_on_request(attention):
    q, k, v, *_ = Problem().arrays()
    out, lse = attention(q, k, v, return_lse=True)
    assert lse.shape == q.shape[:3]
    assert_bit_equal(attention(q, k, v), out)


def test_output_of_kernels_lies_in_memory_with_heads_side_by_side(kernels):
    q, k, v, *_ = Problem(B=2, H=4, HKV=2).arrays()
    out = kernels(q, k, v)
    mx.eval(out)
    _, H, T, D = out.shape
    strides = np.array(out, copy=False).strides
    assert strides == tuple(4 * n for n in (T * H * D, D, H * D, 1))
