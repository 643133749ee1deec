"""The gradients with respect to q, k and v."""

import math
from functools import partial

import mlx.core as mx
import pytest
from hypothesis import given

from mlx_flash.kernels import Problem as KernelProblem
from mlx_flash.kernels import dkv_call
from mlx_flash.launch import run
from mlx_flash.options import Options
from oracle import (
    assert_bit_equal,
    assert_equal_up_to_rounding,
    assert_within_bound,
    relative_error,
    to_numpy,
    truth,
)
from strategies import (
    EVERY_DTYPE,
    EVERY_HEAD_DIM,
    EVERY_MASK,
    LAYOUTS,
    Problem,
    problems,
)

SMALL = Problem(H=4, HKV=2, causal=True)


@EVERY_MASK
@EVERY_DTYPE
@EVERY_HEAD_DIM
def test_gradients_of_ragged_grouped_heads_are_within_bound(
    gradients, D, dtype, causal
):
    problem = Problem(dtype=dtype, H=4, HKV=1, Tq=45, Tk=71, D=D, causal=causal)
    arrays = problem.arrays()
    actual = gradients(*arrays, **problem.options)
    assert_within_bound(actual, *arrays, **problem.options)


@EVERY_MASK
@EVERY_HEAD_DIM
def test_float32_gradients_are_within_5e_6_of_float64(gradients, D, causal):
    arrays = Problem(H=4, HKV=1, Tq=45, Tk=71, D=D).arrays()
    options = {"scale": D**-0.5, "causal": causal}
    expected = truth(*(to_numpy(x) for x in arrays), **options)
    for name, gradient in gradients(*arrays, **options).items():
        assert relative_error(gradient, expected[name]) < 5e-6, name


@given(problem=problems())
def test_gradients_of_any_problem_are_within_bound(gradients, problem):
    arrays = problem.arrays()
    actual = gradients(*arrays, **problem.options)
    assert_within_bound(actual, *arrays, **problem.options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_cotangent_does_not_matter(gradients, layout):
    q, k, v, dout, dlse = SMALL.arrays()
    dout = LAYOUTS[layout](dout)
    dlse = LAYOUTS[layout](dlse[..., None])[..., 0]
    actual = gradients(q, k, v, dout, dlse, **SMALL.options)
    contiguous = mx.contiguous(dout), mx.contiguous(dlse)
    expected = gradients(q, k, v, *contiguous, **SMALL.options)
    for name, gradient in actual.items():
        assert_bit_equal(gradient, expected[name])


def test_gradients_of_a_sum_equal_those_of_a_cotangent_of_ones(attention, gradients):
    q, k, v, dout, _ = SMALL.arrays()

    def loss(q, k, v):
        return attention(q, k, v, **SMALL.options).sum()

    actual = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    ones = mx.contiguous(mx.ones(dout.shape))
    expected = gradients(q, k, v, ones, **SMALL.options)
    for gradient, name in zip(actual, expected, strict=True):
        assert_bit_equal(gradient, expected[name])


def test_gradients_through_merged_heads_and_a_projection_are_within_bound(attention):
    q, k, v, *_ = SMALL.arrays()
    B, H, T, D = q.shape
    weight = mx.random.normal((H * D,), key=mx.random.key(3))

    def loss(q, k, v):
        out = attention(q, k, v, **SMALL.options)
        return (out.transpose(0, 2, 1, 3).reshape(B, T, H * D) @ weight).sum()

    grads = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    actual = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    dout = mx.broadcast_to(weight.reshape(1, H, 1, D), q.shape)
    assert_within_bound(actual, q, k, v, dout, **SMALL.options)


@EVERY_MASK
def test_gradients_of_lse_alone_are_within_bound(attention, causal):
    q, k, v, dout, dlse = SMALL.arrays()

    def loss(q, k, v):
        return (attention(q, k, v, causal=causal, return_lse=True)[1] * dlse).sum()

    grads = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    actual = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert_within_bound(actual, q, k, v, 0 * dout, dlse, causal=causal)
    assert mx.all(actual["dv"] == 0).item()


def test_gradient_of_a_broadcast_key_head_sums_over_the_heads(attention, gradients):
    q, k, v, dout, _ = Problem(H=4, HKV=1).arrays()

    def loss(k, v):
        k, v = (mx.broadcast_to(x, (*q.shape[:2], *x.shape[2:])) for x in (k, v))
        return (attention(q, k, v) * dout).sum()

    dk, dv = mx.grad(loss, argnums=(0, 1))(k, v)
    assert_within_bound({"dk": dk, "dv": dv}, q, k, v, dout)


@pytest.mark.parametrize(
    "argnums",
    [(0,), (1,), (2,), (0, 2), (1, 2)],
    ids=["dq", "dk", "dv", "dq-dv", "dk-dv"],
)
def test_gradient_of_some_inputs_equals_that_of_all(attention, argnums):
    q, k, v, dout, _ = SMALL.arrays()

    def loss(q, k, v):
        return (attention(q, k, v, **SMALL.options) * dout).sum()

    expected = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    actual = mx.grad(loss, argnums=argnums)(q, k, v)
    actual = [actual] if len(argnums) == 1 else actual  # as mx.grad returns them
    for place, gradient in zip(argnums, actual, strict=True):
        assert_bit_equal(gradient, expected[place])


def test_gradients_at_very_negative_scores_are_those_of_the_softmax(gradients):
    unit = mx.zeros((1, 1, 1, 16)).at[..., 0].add(1.0)
    k = mx.concatenate([-100 * unit, -101 * unit], axis=2)
    v = mx.concatenate([0 * unit, unit], axis=2)
    actual = gradients(unit, k, v, unit, scale=1.0)
    p = 1 / (1 + math.e)
    slope = p * (1 - p)
    first = {name: to_numpy(x)[0, 0, :, 0] for name, x in actual.items()}
    # The exponents are differences of scores, as precise as float32 is near 100.
    assert_equal_up_to_rounding(first["dq"], [-slope], magnitude=100)
    assert_equal_up_to_rounding(first["dk"], [-slope, slope], magnitude=100)
    assert_equal_up_to_rounding(first["dv"], [1 - p, p], magnitude=100)


def test_gradients_come_in_the_dtype_of_their_input(attention):
    arrays = SMALL.arrays()[:3]
    dtypes = (mx.float16, mx.float32, mx.bfloat16)
    mixed = [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    def loss(q, k, v):
        return attention(q, k, v).sum()

    actual = mx.grad(loss, argnums=(0, 1, 2))(*mixed)
    promoted = [x.astype(mx.float32) for x in mixed]
    expected = mx.grad(loss, argnums=(0, 1, 2))(*promoted)
    for gradient, reference, dtype in zip(actual, expected, dtypes, strict=True):
        assert_bit_equal(gradient, reference.astype(dtype))


@EVERY_MASK
def test_dkv_with_one_output_equals_dkv_with_both(kernels, kernels_name, causal):
    q, k, v, dout, delta = SMALL.arrays()  # the tiles have both only in float32
    _, lse = kernels(q, k, v, causal=causal, scale=0.2, return_lse=True)
    high = k.shape[2] - q.shape[2] if causal else None
    gpu = "cuda" if kernels_name == "cuda" else "metal"
    problem = KernelProblem(q, k, v, Options(0.2, high=high), gpu=gpu)
    call = partial(dkv_call, problem, [], dout, lse / math.log(2), delta)
    dk, dv = run(call("attention_dkv"), kernels_name)
    (only_dk,) = run(call("attention_dk"), kernels_name)
    (only_dv,) = run(call("attention_dv"), kernels_name)
    assert_equal_up_to_rounding(only_dk, dk)
    assert_equal_up_to_rounding(only_dv, dv)
