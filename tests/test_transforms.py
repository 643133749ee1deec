"""MLX's function transformations around the operation."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_flash import flash_attention, kernels, reference, use_backend
from mlx_flash.attention import attention_function
from mlx_flash.options import Options
from oracle import assert_bit_equal, assert_equal_up_to_rounding, assert_within_bound
from strategies import Problem

PROBLEM = Problem(H=4, HKV=2, causal=True)
EVERYTHING = Problem(
    **{"H": 4, "HKV": 2, "Tq": 45, "Tk": 45, "D": 24, "Dv": 40, "causal": True},
    **{"window": 20, "softcap": 1.5, "mask": "float32", "mask_axes": "HQK"},
    **{"segments": "packed", "sinks": "float32"},
)
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


def test_derivative_of_a_gradient_by_its_cotangent_raises(attention):
    q, k, v, weight, _ = Problem(Tq=9, Tk=9).arrays()

    def norm(weight):
        def loss(q):
            return (attention(q, k, v) * weight).sum()

        return mx.grad(loss)(q).square().sum()

    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        mx.eval(mx.grad(norm)(weight))


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


@pytest.fixture
def of_everything(attention):
    """A scalar function of q, k, v, mask and sinks with all features, and those."""
    options = EVERYTHING.options
    mask, sinks = options.pop("mask"), options.pop("sinks")

    def loss(q, k, v, mask, sinks):
        given = {"mask": mask, "sinks": sinks, "return_lse": True}
        out, lse = attention(q, k, v, **options, **given)
        return 0.5 * (out.square().sum() + lse.square().sum())

    return loss, (*EVERYTHING.arrays()[:3], mask, sinks)


def test_checkpointed_gradients_of_all_features_are_bit_equal(of_everything):
    loss, arrays = of_everything
    expected = mx.grad(loss, argnums=range(5))(*arrays)
    actual = mx.grad(mx.checkpoint(loss), argnums=range(5))(*arrays)
    for gradient, other in zip(actual, expected, strict=True):
        assert_bit_equal(gradient, other)


def test_compiled_gradients_of_all_features_equal_eager_ones(
    backend_name, of_everything
):
    if backend_name == "simulator":
        pytest.skip("the simulator is eager only")
    loss, arrays = of_everything
    expected = mx.grad(loss, argnums=range(5))(*arrays)
    actual = mx.compile(mx.grad(loss, argnums=range(5)))(*arrays)
    for gradient, other in zip(actual, expected, strict=True):
        assert_equal_up_to_rounding(gradient, other)


@pytest.mark.parametrize("argnum", range(5), ids=["q", "k", "v", "mask", "sinks"])
def test_gradient_of_one_input_equals_that_among_all(of_everything, argnum):
    loss, arrays = of_everything
    expected = mx.grad(loss, argnums=range(5))(*arrays)[argnum]
    assert_bit_equal(mx.grad(loss, argnums=argnum)(*arrays), expected)


@pytest.mark.parametrize("argnum", [3, 4], ids=["mask", "sinks"])
def test_second_order_and_forward_mode_of_mask_and_sinks_raise(of_everything, argnum):
    loss, arrays = of_everything

    def norm(*arrays):
        return mx.grad(loss, argnums=argnum)(*arrays).square().sum()

    with pytest.raises(NotImplementedError, match="gradient of a gradient"):
        mx.eval(mx.grad(norm, argnums=argnum)(*arrays))

    def of_one(x):
        return loss(*arrays[:argnum], x, *arrays[argnum + 1 :])

    with pytest.raises(NotImplementedError, match=r"mx\.jvp"):
        mx.jvp(of_one, [arrays[argnum]], [arrays[argnum]])


def test_ids_and_bool_masks_have_a_gradient_of_zero(attention):
    q, k, v, *_ = Problem(Tq=9, Tk=9).arrays()
    ids = mx.zeros((1, 9))

    def loss(q, ids):
        segments = ids.astype(mx.int32)
        mask = ids[:, None, :] < 1
        return attention(q, k, v, segment_ids=segments, mask=mask).sum()

    dq, dids = mx.grad(loss, argnums=(0, 1))(q, ids)
    assert_bit_equal(dq, mx.grad(lambda q: attention(q, k, v).sum())(q))
    assert mx.all(dids == 0).item()


def test_mapped_reference_equals_a_loop():
    problem = EVERYTHING.resized(Tq=12, Tk=12, H=2, HKV=1)
    options = problem.options
    arrays = [mx.stack([x, 2 * x, -x]) for x in problem.arrays()[:3]]

    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
        return 0.5 * (out.square().sum() + lse.square().sum())

    function = mx.value_and_grad(loss, argnums=(0, 1, 2))
    with use_backend("reference"):
        values, grads = mx.vmap(function)(*arrays)
        for place in range(3):
            value, gradients = function(*(x[place] for x in arrays))
            assert_equal_up_to_rounding(values[place], value)
            for mapped, gradient in zip(grads, gradients, strict=True):
                assert_equal_up_to_rounding(mapped[place], gradient)


def test_mapped_kernels_raise_with_advice(kernels):
    arrays = [x[None] for x in PROBLEM.arrays()[:3]]
    with pytest.raises((NotImplementedError, RuntimeError), match="reference"):
        mx.eval(mx.vmap(kernels)(*arrays))


@pytest.mark.parametrize("mapped", ["q", "v", "dout"])
def test_map_is_refused_before_a_kernel_is_asked(monkeypatch, mapped):
    """Of a kernel's inputs or of its cotangents: in words of this library."""

    def as_reference(function):
        return lambda *arrays, backend, precise, **given: function(*arrays, **given)

    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(kernels, name, as_reference(getattr(reference, name)))
    function = attention_function("metal", Options(scale=1.0), (), False, False, None)
    q, k, v, dout, _ = Problem(Tq=5, Tk=7, D=4).arrays()
    arrays = {"q": q, "v": v, "dout": dout}

    def gradient(x):
        given = arrays | {mapped: x}

        def output(q, v):
            return function(q, k, v)[0]

        return mx.vjp(output, [given["q"], given["v"]], [given["dout"]])[1][0]

    assert gradient(arrays[mapped]).shape == q.shape
    with pytest.raises(NotImplementedError, match=r"mx\.vmap of the kernels.*fold"):
        mx.vmap(gradient)(arrays[mapped][None])


def test_forward_mode_raises(attention):
    q, k, v, *_ = Problem(Tq=9, Tk=9).arrays()
    with pytest.raises(NotImplementedError, match=r"mx\.jvp"):
        mx.jvp(lambda q: attention(q, k, v), [q], [q])
