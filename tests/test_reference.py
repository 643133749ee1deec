"""The first rungs of the ladder: NumPy float64, MLX's own operations, the reference."""

import math
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

import oracle
from mlx_flash import reference
from mlx_flash.validation import check_mask, check_segments, check_sinks, make_options
from oracle import assert_equal_up_to_rounding, assert_within_bound, to_numpy
from strategies import (
    EVERY_DTYPE,
    EVERY_FEATURE,
    EVERY_MASK,
    FEATURES,
    MASK_AXES,
    Problem,
    problems,
)

PAIRS = [
    pair
    for pair in combinations(FEATURES, 2)
    if pair != ("bool-mask", "additive-mask")  # a call has one mask
]
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS, ids="-with-".join)


def arguments(q, k, v, *, scale, causal=False, window=None, softcap=None, **arrays):
    """What the public operation makes of the options of a call."""
    D, Tq, Tk = q.shape[3], q.shape[2], k.shape[2]
    numbers = {"causal": causal, "window": window, "softcap": softcap}
    given = {"options": make_options(D, Tq, Tk, scale=scale, **numbers)}
    if "mask" in arrays:
        given["mask"] = check_mask(arrays["mask"], q, k, v)
    if "segment_ids" in arrays:
        segments = check_segments(arrays["segment_ids"], q, k, v)
        given["q_segments"], given["k_segments"] = segments
    if "sinks" in arrays:
        given["sinks"] = check_sinks(arrays["sinks"], q, k, v)
    return given


def run(q, k, v, dout, dlse, **options):
    """Outputs and explicit gradients of the reference, by name."""
    given = arguments(q, k, v, **options)
    out, lse = reference.attention_forward(q, k, v, **given)
    grads = reference.attention_backward(q, k, v, out, lse, dout, dlse, **given)
    for name in grads.keys() & options.keys():  # as they were before the checks
        grads[name] = grads[name].reshape(options[name].shape)
        grads[name] = grads[name].astype(options[name].dtype)
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in grads.items()}


def assert_gradients_equal_finite_differences(problem):
    arrays, options = problem.arrays(), problem.options | {"scale": 0.7}
    q, k, v, dout, dlse = (to_numpy(x) for x in arrays)
    inputs = {"q": q, "k": k, "v": v}
    for name in ("mask", "sinks"):
        if options.get(name) is not None and options[name].dtype != mx.bool_:
            inputs[name] = options[name] = to_numpy(options[name])
    grads = oracle.gradients(q, k, v, dout, dlse, **options)
    assert set(grads) == {f"d{name}" for name in inputs}
    for name, x in inputs.items():

        def loss(x, name=name):
            changed = {"q": q, "k": k, "v": v} | options | {name: x}
            out, lse = oracle.attention(**changed)
            # the lse of an empty row is -inf whatever the inputs are
            return (dout * out).sum() + (dlse * oracle.finite(lse)).sum()

        expected = oracle.finite_differences(loss, x)
        np.testing.assert_allclose(grads[f"d{name}"], expected, atol=1e-8, err_msg=name)


@EVERY_MASK
@pytest.mark.parametrize(("Tq", "Tk"), [(3, 5), (5, 3), (1, 1)])
def test_float64_gradients_equal_finite_differences(Tq, Tk, causal):
    problem = Problem(H=2, HKV=1, Tq=Tq, Tk=Tk, D=2, causal=causal, seed=1)
    assert_gradients_equal_finite_differences(problem)


@EVERY_PAIR
def test_float64_gradients_of_two_features_equal_finite_differences(pair):
    fields = FEATURES[pair[0]] | FEATURES[pair[1]]
    problem = Problem(H=2, HKV=1, Tq=4, Tk=5, D=2, Dv=3, seed=2, **fields)
    assert_gradients_equal_finite_differences(problem)


@EVERY_FEATURE
def test_float64_oracle_equals_native_operation_and_its_gradient(feature):
    problem = Problem(H=4, HKV=2, Tq=71, scale=0.2, **FEATURES[feature])
    arrays, options = problem.arrays(), problem.options
    expected = oracle.native(*arrays, **options)
    actual = oracle.truth(*(to_numpy(x) for x in arrays), **options)
    assert actual.keys() == expected.keys()
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


@given(problem=problems())
def test_reference_of_any_problem_matches_float64(problem):
    arrays, options = problem.arrays(), problem.options
    options["scale"] = options["scale"] or 0.0
    assert_within_bound(run(*arrays, **options), *arrays, **options)


@EVERY_PAIR
@EVERY_DTYPE
def test_reference_with_two_features_matches_float64(dtype, pair):
    fields = FEATURES[pair[0]] | FEATURES[pair[1]]
    problem = Problem(dtype=dtype, H=4, HKV=2, D=12, Dv=20, scale=0.3, **fields)
    arrays, options = problem.arrays(), problem.options
    assert_within_bound(run(*arrays, **options), *arrays, **options)


@pytest.mark.parametrize(
    "feature", ["causal", "window", "sides", "additive-mask", "segments"]
)
@pytest.mark.parametrize("extra", [0, 3, -3], ids=["Tk=Tq", "Tk=Tq+3", "Tk=Tq-3"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_reference_at_chunk_edges_matches_float64(chunks, edge, extra, feature):
    Tq = chunks * reference.CHUNK + edge
    problem = Problem(Tq=Tq, Tk=Tq + extra, D=8, scale=0.3, **FEATURES[feature])
    arrays, options = problem.arrays(), problem.options
    assert_within_bound(run(*arrays, **options), *arrays, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": True},
        {"window": (3, 4)},
        {"window": (3, 4), "sinks": "float32"},
        {"window": (0, 0), "mask": "float32"},
    ],
    ids=str,
)
def test_reference_with_a_chunk_of_empty_rows_matches_float64(fields):
    problem = Problem(Tq=2 * reference.CHUNK + 5, Tk=7, D=8, scale=0.3, **fields)
    arrays, options = problem.arrays(), problem.options
    assert_within_bound(run(*arrays, **options), *arrays, **options)


@pytest.mark.parametrize("axes", MASK_AXES, ids=lambda axes: axes or "none")
def test_reference_sums_the_mask_gradient_over_the_axes_it_lacks(axes):
    Tq = reference.CHUNK + 9
    fields = {"mask": "float32", "mask_axes": axes, "seed": 2}
    problem = Problem(B=2, H=4, HKV=2, Tq=Tq, D=4, scale=0.3, **fields)
    arrays, options = problem.arrays(), problem.options
    actual = run(*arrays, **options)
    assert actual["dmask"].size == math.prod(
        {"B": 2, "H": 4, "Q": Tq, "K": 71}[axis] for axis in axes
    )
    assert_within_bound(actual, *arrays, **options)


@EVERY_FEATURE
def test_explicit_gradients_equal_automatic_differentiation_of_forward(feature):
    problem = Problem(H=4, HKV=2, Tq=71, D=8, scale=0.3, **FEATURES[feature])
    q, k, v, dout, dlse = problem.arrays()
    given = arguments(q, k, v, **problem.options)
    names = [name for name in ("mask", "sinks") if name in given]
    names = [name for name in names if given[name].dtype != mx.bool_]

    def forward(q, k, v, *others):
        changed = given | dict(zip(names, others, strict=True))
        return reference.attention_forward(q, k, v, **changed)

    primals = [q, k, v, *(given[name] for name in names)]
    _, expected = mx.vjp(forward, primals, [dout, dlse])
    actual = run(q, k, v, dout, dlse, **problem.options)
    for name, value in zip(["q", "k", "v", *names], expected, strict=True):
        gradient = actual[f"d{name}"].reshape(value.shape)
        assert_equal_up_to_rounding(gradient, value)


def test_keys_outside_the_window_of_a_chunk_are_not_read():
    options = make_options(
        4, 1000, 1100, scale=1.0, causal=True, window=10, softcap=None
    )
    ranges = [
        (keys.start, keys.stop) for _, keys in reference.chunks(1000, 1100, options)
    ]
    assert ranges == [(91, 356), (347, 612), (603, 868), (859, 1100)]


def peak_memory(function, T, fields):
    """Bytes that a call needs on top of its inputs."""
    problem = Problem(H=4, HKV=2, Tq=T, Tk=T, D=16, scale=0.25, **fields)
    arrays, options = problem.arrays(), problem.options
    mx.eval(options)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*arrays, **options))
    return mx.get_peak_memory() - before


def forward_alone(q, k, v, *_, **options):
    return reference.attention_forward(q, k, v, **arguments(q, k, v, **options))


# A mask of Tq x Tk is itself quadratic, and so is its gradient.
LINEAR = {
    **{name: fields for name, fields in FEATURES.items() if "mask" not in fields},
    "full": {},
    "key-mask": {"mask": "bool_", "mask_axes": "BK"},
    "key-bias": {"mask": "float32", "mask_axes": "HK"},
    "query-bias": {"mask": "float32", "mask_axes": "HQ"},
}
EVERY_LINEAR = pytest.mark.parametrize("fields", LINEAR.values(), ids=LINEAR)


@EVERY_LINEAR
def test_peak_memory_of_forward_is_linear_in_length(fields):
    once, twice = (peak_memory(forward_alone, T, fields) for T in (1024, 2048))
    assert twice < 2.6 * once


@EVERY_LINEAR
def test_peak_memory_of_forward_and_backward_is_linear_in_length(fields):
    once, twice = (peak_memory(run, T, fields) for T in (1024, 2048))
    assert twice < 2.6 * once


@EVERY_FEATURE
def test_compiled_reference_matches_float64(feature):
    problem = Problem(H=4, HKV=2, scale=0.3, **FEATURES[feature])
    arrays, options = problem.arrays(), problem.options
    compiled = mx.compile(lambda *arrays: run(*arrays, **options))
    assert_within_bound(compiled(*arrays), *arrays, **options)
