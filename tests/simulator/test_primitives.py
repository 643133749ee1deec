"""What other kernels use of Metal and of MLX's preamble, one by one."""

import mlx.core as mx
import numpy as np
import pytest
from test_execution import launch

from mlx_flash import simulator


def quads(function):
    return lambda x: function(x.reshape(-1, 4)).reshape(-1)


def all_lanes(function):
    return quads(lambda x: np.repeat(function(x, axis=1), 4).reshape(-1, 4))


def before(x):
    """Exclusive prefix sums."""
    return np.cumsum(x, axis=-1) - x


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("quad_shuffle(x, ushort(2))", quads(lambda x: np.repeat(x[:, 2], 4))),
        ("quad_broadcast(x, ushort(1))", quads(lambda x: np.repeat(x[:, 1], 4))),
        ("quad_shuffle_xor(x, ushort(3))", quads(lambda x: x[:, ::-1])),
        ("quad_shuffle_down(x, ushort(1))", quads(lambda x: x[:, [1, 2, 3, 3]])),
        ("quad_shuffle_up(x, ushort(1))", quads(lambda x: x[:, [0, 0, 1, 2]])),
        ("quad_shuffle_rotate_down(x, ushort(1))", quads(lambda x: np.roll(x, -1, 1))),
        ("quad_shuffle_rotate_up(x, ushort(1))", quads(lambda x: np.roll(x, 1, 1))),
        ("quad_sum(x)", all_lanes(np.sum)),
        ("quad_product(x)", all_lanes(np.prod)),
        ("quad_max(x)", all_lanes(np.max)),
        ("quad_min(x)", all_lanes(np.min)),
        ("quad_xor(x)", all_lanes(np.bitwise_xor.reduce)),
        ("quad_or(x)", all_lanes(np.bitwise_or.reduce)),
        ("quad_and(x)", all_lanes(np.bitwise_and.reduce)),
        ("quad_any(x > 40)", all_lanes(lambda x, axis: (x > 40).any(axis=axis))),
        ("quad_all(x > -30)", all_lanes(lambda x, axis: (x > -30).all(axis=axis))),
        ("quad_prefix_exclusive_sum(x)", quads(before)),
        ("quad_prefix_inclusive_sum(x)", quads(lambda x: np.cumsum(x, axis=1))),
        ("simd_prefix_exclusive_sum(x)", before),
        ("simd_prefix_inclusive_sum(x)", np.cumsum),
        ("simd_prefix_inclusive_product(x | 1)", lambda x: np.cumprod(x | 1)),
        (
            "simd_prefix_exclusive_product(x | 1)",
            lambda x: np.r_[1, np.cumprod(x | 1)[:-1]],
        ),
        ("simd_xor(x)", lambda x: np.full(32, np.bitwise_xor.reduce(x))),
        ("simd_any(x > 40)", lambda x: np.full(32, (x > 40).any())),
        ("simd_all(x > -30)", lambda x: np.full(32, (x > -30).all())),
        (
            "simd_shuffle_and_fill_up(x, -x, ushort(3))",
            lambda x: np.r_[-x[29:], x[:29]],
        ),
        (
            "simd_shuffle_and_fill_down(x, -x, ushort(3))",
            lambda x: np.r_[x[3:], -x[:3]],
        ),
        (
            "as_type<uint>(simd_shuffle_down(as_type<float>(x), ushort(1)))",
            lambda x: np.r_[x[1:], x[31:]],
        ),
        ("int(simd_shuffle_down(ulong(x) << 32, 2) >> 32)", lambda x: x[SHIFTED]),
        ("int(simd_shuffle(long(x) << 20, 7) >> 20)", lambda x: np.full(32, x[7])),
    ],
    ids=lambda value: value.split("(x")[0] if isinstance(value, str) else "",
)
def test_function_of_simdgroups_and_quadgroups(call, expected, results):
    a, values = results
    halves = [expected(half) for half in a.reshape(2, 32)]
    got = values[CALLS.index(call)]
    assert np.array_equal(got.reshape(2, 32), np.array(halves).astype(np.int32))


SHIFTED = np.minimum(np.arange(32) + 2, 31)
SHIFTED[30:] = [30, 31]
CALLS = [
    parameters[0]
    for mark in test_function_of_simdgroups_and_quadgroups.pytestmark
    for parameters in mark.args[1]
]


@pytest.fixture(scope="module")
def results():
    """All of those calls in one kernel."""
    a = np.random.default_rng(0).integers(-50, 50, 64).astype(np.int32)
    lines = [f"out[{i} * 64 + i] = {call};" for i, call in enumerate(CALLS)]
    source = "uint i = thread_position_in_grid.x; int x = a[i];\n" + "\n".join(lines)
    out = launch(source, [a], (len(CALLS), 64), dtype=mx.int32, threads=64)
    return a, np.array(out)


def test_prefix_sums_skip_the_lanes_that_have_returned():
    source = """
    uint i = thread_position_in_grid.x;
    if (i % 3 == 0) return;
    out[i] = simd_prefix_inclusive_sum(a[i]);
    """
    a = np.arange(1, 33, dtype=np.float32)
    out = np.array(launch(source, [a], (32,)))
    stays = np.arange(32) % 3 != 0
    assert np.array_equal(out[stays], np.cumsum(a[stays]))
    assert np.isnan(out[~stays]).all()


def test_bfloat_is_reduced_in_float():
    # in bfloat 256 + 1 is 256
    a = mx.array([256.0] + [1.0] * 31, mx.bfloat16)
    source = "uint i = thread_position_in_grid.x; out[i] = float(simd_sum(a[i]));"
    assert np.array_equal(launch(source, [a], (32,)), np.full(32, 288.0))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("float4(1, 2, 3, 4).wzyx", [4, 3, 2, 1]),
        ("float4(float2(1, 2).yx, 3, 4)", [2, 1, 3, 4]),
        ("float4(float3(1, 2, 3).rgb, 4)", [1, 2, 3, 4]),
        ("float4(float4(1, 2, 3, 4).xy, float4(1, 2, 3, 4).xx)", [1, 2, 1, 1]),
        ("float4(int4(7, -7, 9, 5) % int4(4))", [3, -3, 1, 1]),
        ("-float4(1, 2, 3, 4) * 2.0f", [-2, -4, -6, -8]),
        ("2 * float4(3, 5, 7, 9) / 4", [1.5, 2.5, 3.5, 4.5]),
        ("float4(ldexp(1.5f, 3), make_uniform(2), 0, 0)", [12, 2]),
        ("float4(all(int2(1, 2) < int2(2, 3)), any(int2(1) == int2(2)), 0, 0)", [1, 0]),
        ("float4(dot(float3(1, 2, 3), float3(4, 5, 6)), 0, 0, 0)", [32]),
        ("floor(float4(1.5f, -1.5f, 2, 0))", [1, -2, 2, 0]),
        ("float4(1.5h, 2.5bf, -1.0h, half(0.1f) == 0.1h)", [1.5, 2.5, -1, 1]),
        ("float4(sign(-2.0f), fract(2.25f), saturate(3.0f), mix(1.0f, 3.0f, 0.5f))",
         [-1, 0.25, 1, 2]),
        ("float4(popcount(11u), clz(1u), ctz(8u), abs(-3))", [3, 31, 3, 3]),
        # from the preamble
        ("float4(ceildiv(7, 2), ceildiv(8, 4), log1p(0.0f), hypot(3.0f, 4.0f))",
         [4, 2, 0, 5]),
        ("float4(Limits<float>::max, Limits<float>::finite_max,"
         " Limits<half>::finite_max, Limits<bfloat16_t>::min)",
         [np.inf, 3.4028235e38, 65504, -np.inf]),
        ("float4(Limits<uint8_t>::max, Limits<int32_t>::min, Limits<bool>::max,"
         " cast_to<bool>(0.5f))",
         [255, -(2.0**31), 1, 1]),
        ("float4((complex64_t(1, 2) * complex64_t(3, 4)).imag, float(complex64_t(5)),"
         " WorkPerThread<half>::n, 0)",
         [10, 5, 4]),
    ],
)  # fmt: skip
def test_vectors_and_names_of_the_preamble(expression, expected, vectors):
    got = vectors[list(EXPRESSIONS).index(expression)]
    want = np.array(expected + [0] * (4 - len(expected)), np.float32)
    assert np.array_equal(got, want)


EXPRESSIONS = [
    parameters[0]
    for mark in test_vectors_and_names_of_the_preamble.pytestmark
    for parameters in mark.args[1]
]


@pytest.fixture(scope="module")
def vectors():
    """All of those expressions in one kernel."""
    lines = [f"r = {e}; STORE({i})" for i, e in enumerate(EXPRESSIONS)]
    header = "#define STORE(n) for (int j = 0; j < 4; ++j) out[4 * n + j] = r[j];\n"
    source = "if (thread_position_in_grid.x) return; float4 r;\n" + "\n".join(lines)
    return np.array(launch(source, [], (len(EXPRESSIONS), 4), header=header))


def test_swizzle_that_is_assigned_to_does_not_compile():
    source = "float2 x = float2(thread_position_in_grid.x); x.yx = x; out[0] = x.x;"
    with pytest.raises(simulator.SimulatorError, match="does not compile"):
        launch(source, [], (1,))


@pytest.mark.parametrize(
    "dtype",
    [mx.bool_, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int64, mx.uint64],
    ids=str,
)
def test_integers_of_every_width_and_booleans(dtype):
    largest = 1 if dtype == mx.bool_ else mx.iinfo(dtype).max
    values = [max(largest - i, 0) if i % 2 else i % 4 for i in range(64)]
    a = mx.array(np.array(values, np.uint64)).astype(dtype)
    source = """
    uint i = thread_position_in_grid.x;
    T x = a[i];
    out[i] = is_same_v<T, bool> ? T(!x) : T(x - T(2));
    """
    out = launch(source, [a], (64,), dtype=dtype, threads=64, template=[("T", dtype)])
    expected = np.array(a)
    expected = (
        ~expected if dtype == mx.bool_ else expected - np.array(2, expected.dtype)
    )
    assert np.array_equal(out, expected)


def test_complex_arrays_arrive_and_leave():
    a = np.array([1 + 2j, 3 - 1j] * 8, np.complex64)
    source = "uint i = thread_position_in_grid.x; out[i] = a[i] * a[i];"
    out = launch(source, [a], (16,), dtype=mx.complex64, threads=16)
    assert np.array_equal(out, a * a)
