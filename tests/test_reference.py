"""The first rungs of the ladder: NumPy float64, MLX's own operations, the reference."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from mlx_flash import reference
from oracle import assert_equal_up_to_rounding, assert_within_bound, to_numpy
from strategies import DTYPES, EVERY_DTYPE, EVERY_MASK, Problem, lengths

GRADIENTS = ("dq", "dk", "dv")


def run(q, k, v, dout, dlse, **options):
    """Outputs and explicit gradients of the reference, by name."""
    out, lse = reference.attention_forward(q, k, v, **options)
    grads = reference.attention_backward(q, k, v, out, lse, dout, dlse, **options)
    return {"out": out, "lse": lse} | dict(zip(GRADIENTS, grads, strict=True))


@EVERY_MASK
@pytest.mark.parametrize(("Tq", "Tk"), [(3, 5), (5, 3), (1, 1)])
def test_float64_gradients_equal_finite_differences(Tq, Tk, causal):
    arrays = Problem(H=2, HKV=1, Tq=Tq, Tk=Tk, D=2, seed=1).arrays()
    *inputs, dout, dlse = (to_numpy(x) for x in arrays)
    options = {"scale": 0.7, "causal": causal}
    grads = oracle.gradients(*inputs, dout, dlse, **options)
    for place, (name, grad) in enumerate(zip(GRADIENTS, grads, strict=True)):

        def loss(x, place=place):
            arrays = [*inputs[:place], x, *inputs[place + 1 :]]
            out, lse = oracle.attention(*arrays, **options)
            # the lse of an empty row is -inf whatever the inputs are
            return (dout * out).sum() + (dlse * oracle.finite(lse)).sum()

        expected = oracle.finite_differences(loss, inputs[place])
        np.testing.assert_allclose(grad, expected, atol=1e-8, err_msg=name)


@EVERY_MASK
def test_float64_oracle_equals_native_operation_and_its_gradient(causal):
    arrays = Problem(H=4, HKV=2).arrays()
    options = {"scale": 0.2, "causal": causal}
    expected = oracle.native(*arrays, **options)
    actual = oracle.truth(*(to_numpy(x) for x in arrays), **options)
    for name, value in actual.items():
        assert_equal_up_to_rounding(value, expected[name])


@EVERY_DTYPE
def test_bound_refuses_results_that_lack_one_key(dtype):
    q, k, v, dout, dlse = Problem(dtype=dtype, H=4, HKV=2).arrays()
    options = {"scale": 0.2, "causal": False}
    doubles = [to_numpy(x) for x in (q, k[:, :, :-1], v[:, :, :-1], dout, dlse)]
    lacking = oracle.truth(*doubles, **options)
    for name in ("out", "lse", "dq"):
        kind = mx.float32 if name == "lse" else q.dtype
        actual = {name: mx.array(lacking[name].astype(np.float32)).astype(kind)}
        with pytest.raises(AssertionError, match=f"{name} .*: error"):
            assert_within_bound(actual, q, k, v, dout, dlse, **options)


@given(
    dtype=st.sampled_from(DTYPES),
    Tq=lengths,
    Tk=lengths,
    D=st.integers(1, 40),
    Dv=st.integers(1, 40),
    causal=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_reference_of_any_head_dims_matches_float64(dtype, Tq, Tk, D, Dv, causal, seed):
    problem = Problem(dtype=dtype, H=4, HKV=2, Tq=Tq, Tk=Tk, D=D, seed=seed)
    q, k, *_ = problem.arrays()
    _, _, v, dout, dlse = problem.resized(D=Dv).arrays()
    options = {"scale": D**-0.5, "causal": causal}
    actual = run(q, k, v, dout, dlse, **options)
    assert_within_bound(actual, q, k, v, dout, dlse, **options)


@EVERY_MASK
@pytest.mark.parametrize("extra", [0, 3, -3], ids=["Tk=Tq", "Tk=Tq+3", "Tk=Tq-3"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_reference_at_chunk_edges_matches_float64(chunks, edge, extra, causal):
    Tq = chunks * reference.CHUNK + edge
    arrays = Problem(H=2, HKV=1, Tq=Tq, Tk=Tq + extra, D=8).arrays()
    options = {"scale": 0.3, "causal": causal}
    assert_within_bound(run(*arrays, **options), *arrays, **options)


def test_reference_with_a_chunk_of_empty_rows_matches_float64():
    arrays = Problem(H=2, HKV=1, Tq=2 * reference.CHUNK + 5, Tk=7, D=8).arrays()
    options = {"scale": 0.3, "causal": True}
    assert_within_bound(run(*arrays, **options), *arrays, **options)


@EVERY_MASK
def test_explicit_gradients_equal_automatic_differentiation_of_forward(causal):
    q, k, v, dout, dlse = Problem(H=4, HKV=2, D=8).arrays()
    options = {"scale": 0.3, "causal": causal}

    def forward(q, k, v):
        return reference.attention_forward(q, k, v, **options)

    _, expected = mx.vjp(forward, [q, k, v], [dout, dlse])
    actual = run(q, k, v, dout, dlse, **options)
    for name, value in zip(GRADIENTS, expected, strict=True):
        assert_equal_up_to_rounding(actual[name], value)


def peak_memory(function, T, **options):
    """Bytes that a call needs on top of its inputs."""
    arrays = Problem(H=4, HKV=2, Tq=T, Tk=T, D=16).arrays()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*arrays, **options))
    return mx.get_peak_memory() - before


@EVERY_MASK
@pytest.mark.parametrize("T", [1024, 2048], ids="T{}".format)
def test_peak_memory_of_forward_is_linear_in_length(T, causal):
    def forward(q, k, v, *_, **options):
        return reference.attention_forward(q, k, v, **options)

    options = {"scale": 0.25, "causal": causal}
    once, twice = (peak_memory(forward, n, **options) for n in (T, 2 * T))
    assert twice < 2.6 * once


@EVERY_MASK
def test_peak_memory_of_forward_and_backward_is_linear_in_length(causal):
    options = {"scale": 0.25, "causal": causal}
    once, twice = (peak_memory(run, T, **options) for T in (1024, 2048))
    assert twice < 2.6 * once


def test_compiled_reference_matches_float64():
    arrays = Problem(H=4, HKV=2, causal=True).arrays()
    options = {"scale": 0.3, "causal": True}
    compiled = mx.compile(lambda *arrays: run(*arrays, **options))
    assert_within_bound(compiled(*arrays), *arrays, **options)
