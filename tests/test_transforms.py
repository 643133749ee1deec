"""MLX's function transformations around the operation."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from oracle import assert_bit_equal, assert_equal_up_to_rounding, assert_within_bound
from strategies import Problem

PROBLEM = Problem(H=4, HKV=2, causal=True)
BACKWARD = ("dq", "dk", "dv")


def native_attention(q, k, v):
    with mx.stream(mx.cpu):
        scale = q.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")


class SelfAttention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(32, 3 * 64)
        self.merge = nn.Linear(64, 32)

    def __call__(self, x):
        B, T, _ = x.shape
        heads = self.project(x).reshape(B, T, 3, 2, 32).transpose(2, 0, 3, 1, 4)
        out = self.attend(heads[0], heads[1], heads[2])
        return self.merge(out.transpose(0, 2, 1, 3).reshape(B, T, 64))


@pytest.fixture
def squared(attention):
    """A scalar function of q, k and v that uses both outputs, and its cotangents."""

    def loss(q, k, v):
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return 0.5 * (out.square().sum() + lse.square().sum())

    return loss


def test_gradients_of_module_parameters_equal_those_of_native_attention(attention):
    x = mx.random.normal((2, 45, 32), key=mx.random.key(0))
    module = SelfAttention(lambda q, k, v: attention(q, k, v, causal=True))
    other = SelfAttention(native_attention)
    other.update(module.parameters())

    def loss(model, x):
        return model(x).square().mean()

    value, grads = nn.value_and_grad(module, loss)(module, x)
    expected_value, expected = nn.value_and_grad(other, loss)(other, x)
    assert_equal_up_to_rounding(value, expected_value)
    expected = dict(tree_flatten(expected))
    assert len(expected) == 4
    for name, gradient in tree_flatten(grads):
        assert_equal_up_to_rounding(gradient, expected[name])


def test_gradients_of_a_function_of_both_outputs_are_within_bound(attention, squared):
    q, k, v, *_ = PROBLEM.arrays()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    grads = mx.grad(squared, argnums=(0, 1, 2))(q, k, v)
    actual = dict(zip(BACKWARD, grads, strict=True))
    assert_within_bound(actual, q, k, v, out, lse, causal=True)


def test_checkpointed_gradients_are_bit_equal(squared):
    q, k, v, *_ = PROBLEM.arrays()
    expected = mx.grad(squared, argnums=(0, 1, 2))(q, k, v)
    actual = mx.grad(mx.checkpoint(squared), argnums=(0, 1, 2))(q, k, v)
    for gradient, other in zip(actual, expected, strict=True):
        assert_bit_equal(gradient, other)


def test_one_array_as_q_k_and_v_gets_the_sum_of_the_gradients(squared):
    q, *_ = PROBLEM.arrays()
    parts = mx.grad(squared, argnums=(0, 1, 2))(q, q, q)
    actual = mx.grad(lambda x: squared(x, x, x))(q)
    assert_equal_up_to_rounding(actual, sum(parts))


def test_keys_shared_by_two_calls_get_the_sum_of_the_gradients(squared):
    q, k, v, *_ = PROBLEM.arrays()

    def shared(k):
        return squared(q, k, v) + squared(2 * q, k, v)

    parts = [mx.grad(squared, argnums=1)(x, k, v) for x in (q, 2 * q)]
    assert_equal_up_to_rounding(mx.grad(shared)(k), sum(parts))


@pytest.mark.parametrize("argnum", [0, 1, 2], ids=["q", "k", "v"])
def test_gradient_of_a_gradient_raises(squared, argnum):
    q, k, v, *_ = PROBLEM.arrays()

    def norm(*arrays):
        return mx.grad(squared, argnums=argnum)(*arrays).square().sum()

    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        mx.eval(mx.grad(norm, argnums=argnum)(q, k, v))


def test_compiled_function_and_gradient_equal_eager_ones(backend_name, squared):
    if backend_name == "simulator":
        pytest.skip("the simulator is eager only")
    arrays = PROBLEM.arrays()[:3]
    function = mx.value_and_grad(squared, argnums=(0, 1, 2))
    value, grads = mx.compile(function)(*arrays)
    expected_value, expected = function(*arrays)
    assert_equal_up_to_rounding(value, expected_value)
    for gradient, other in zip(grads, expected, strict=True):
        assert_equal_up_to_rounding(gradient, other)


def test_compile_on_the_simulator_raises_with_advice(kernels_name, kernels):
    if kernels_name != "simulator":
        pytest.skip("only the simulator is eager only")
    arrays = PROBLEM.arrays()[:3]
    with pytest.raises(RuntimeError, match=r"mx\.compile(.|\n)*reference"):
        mx.compile(kernels)(*arrays)


def test_stream_of_the_call_does_not_change_the_result(attention):
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip(
            "kernels of a GPU run there only, and two devices round differently"
        )
    q, k, v, *_ = PROBLEM.arrays()

    def loss(q, k, v, stream):
        out, lse = attention(q, k, v, return_lse=True, stream=stream)
        return out.sum() + lse.sum(), out, lse

    function = mx.value_and_grad(loss, argnums=(0, 1, 2))
    (_, *outputs), grads = function(q, k, v, None)
    for stream in (mx.cpu, mx.new_stream(mx.cpu)):
        (_, *other_outputs), other_grads = function(q, k, v, stream)
        results = [*outputs, *grads], [*other_outputs, *other_grads]
        for result, other in zip(*results, strict=True):
            assert_equal_up_to_rounding(result, other)


def test_forward_mode_raises(attention):
    q, k, v, *_ = Problem(Tq=9, Tk=9).arrays()
    with pytest.raises(NotImplementedError, match=r"mx\.jvp"):
        mx.jvp(lambda q: attention(q, k, v), [q], [q])
