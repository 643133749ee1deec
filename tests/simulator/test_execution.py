"""Metal's primitives on the simulator, one by one, against NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_flash import simulator

MATRIX_HEADER = """
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
"""


def launch(source, inputs, output_shape, *, dtype=mx.float32, threads=32, **options):
    """Run a body over ``threads`` threads in one threadgroup; inputs a, b, ..."""
    grid = options.pop("grid", (threads, 1, 1))
    threadgroup = options.pop("threadgroup", (threads, 1, 1))
    template = options.pop("template", [])
    kernel = simulator.metal_kernel(
        name="test",
        input_names=list("abc"[: len(inputs)]),
        output_names=["out"],
        source=source,
        **options,
    )
    (out,) = kernel(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[output_shape],
        output_dtypes=[dtype],
    )
    return out


def test_elementwise_kernel_reads_through_strides():
    a = mx.arange(24.0).reshape(4, 6).T
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = 2.0f * a[(i / 4) * a_strides[0] + (i % 4) * a_strides[1]];
    """
    options = {"ensure_row_contiguous": False, "threads": 24}
    out = launch(source, [a], a.shape, **options)
    assert np.array_equal(out, 2 * np.array(a))


def test_negative_strides_and_offsets_reach_the_kernel():
    a = mx.arange(32.0)[20:4:-2]
    source = "uint i = thread_position_in_grid.x; out[i] = a[i * a_strides[0]];"
    out = launch(source, [a], a.shape, threads=8, ensure_row_contiguous=False)
    assert np.array_equal(out, np.array(a))


def test_row_contiguous_copy_is_made_on_request():
    a = mx.arange(24.0).reshape(4, 6).T
    source = "uint i = thread_position_in_grid.x; out[i] = a[i];"
    out = launch(source, [a], a.shape, threads=24)
    assert np.array_equal(out, np.array(a))


def test_small_and_scalar_inputs_arrive():
    source = "uint i = thread_position_in_grid.x; out[i] = a * b[i] + float(c);"
    b = mx.array([1.0, 2.0, 3.0])
    out = launch(source, [0.5, b, 7], (3,), threads=3)
    assert np.array_equal(out, [7.5, 8.0, 8.5])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sixteen_bit_floats_convert_exactly_and_round_to_nearest_even(dtype):
    every = mx.arange(65536, dtype=mx.uint32).astype(mx.uint16).view(dtype)
    source = "uint i = thread_position_in_grid.x; out[i] = float(a[i]);"
    options = {"grid": (65536, 1, 1), "threadgroup": (256, 1, 1)}
    wide = launch(source, [every], every.shape, **options)
    assert np.array_equal(wide, every.astype(mx.float32), equal_nan=True)

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 65536, np.uint64).astype(np.uint32)
    values = mx.array(bits).view(mx.float32)
    source = "uint i = thread_position_in_grid.x; out[i] = T(a[i]);"
    options["template"] = [("T", dtype)]
    narrow = launch(source, [values], values.shape, dtype=dtype, **options)
    expected = values.astype(dtype).astype(mx.float32)
    assert np.array_equal(narrow.astype(mx.float32), expected, equal_nan=True)


def test_threadgroup_memory_is_shared_and_barriers_order_it():
    source = """
    threadgroup float reversed[128], unused;
    uint i = thread_index_in_threadgroup;
    reversed[127 - i] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = reversed[i];
    """
    a = mx.random.normal((128,))
    out = launch(source, [a], a.shape, threads=128)
    assert np.array_equal(out, np.array(a)[::-1])


def test_threadgroup_memory_starts_poisoned_in_every_threadgroup():
    source = """
    threadgroup float x[1];
    out[thread_position_in_grid.x] = x[0];
    x[0] = 1.0f;
    """
    out = launch(source, [], (4,), grid=(4, 1, 1), threadgroup=(1, 1, 1))
    assert np.isnan(np.array(out)).all()


def test_output_that_nobody_writes_stays_poisoned():
    out = launch("if (thread_position_in_grid.x == 1) out[1] = 2.0f;", [], (3,))
    assert np.array_equal(out, [np.nan, 2.0, np.nan], equal_nan=True)


def test_edge_threadgroup_shrinks():
    source = """
    uint3 i = thread_position_in_grid;
    out[i.y * threads_per_grid.x + i.x] = 100.0f * threads_per_threadgroup.x +
      10.0f * threads_per_threadgroup.y + threadgroup_position_in_grid.x;
    """
    out = launch(source, [], (3, 10), grid=(10, 3, 1), threadgroup=(4, 2, 1))
    x = np.array([[400 if i < 8 else 200 for i in range(10)]] * 3)
    y = np.array([[20], [20], [10]])
    assert np.array_equal(out, x + y + np.arange(10) // 4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("simd_shuffle_xor(x, ushort(5))", lambda x: x[np.arange(32) ^ 5]),
        ("simd_shuffle(x, ushort(3))", lambda x: np.full(32, x[3])),
        ("simd_broadcast(x, ushort(9))", lambda x: np.full(32, x[9])),
        ("simd_broadcast_first(x)", lambda x: np.full(32, x[0])),
        ("simd_shuffle_down(x, ushort(4))", lambda x: np.r_[x[4:], x[28:]]),
        ("simd_shuffle_up(x, ushort(4))", lambda x: np.r_[x[:4], x[:28]]),
        ("simd_shuffle_rotate_down(x, ushort(4))", lambda x: np.roll(x, -4)),
        ("simd_shuffle_rotate_up(x, ushort(4))", lambda x: np.roll(x, 4)),
        ("simd_max(x)", lambda x: np.full(32, x.max())),
        ("simd_min(x)", lambda x: np.full(32, x.min())),
        ("simd_sum(x)", lambda x: np.full(32, x.sum())),
    ],
    ids=lambda value: value.split("(")[0] if isinstance(value, str) else "",
)
def test_simdgroup_function_of_each_simdgroup(call, expected):
    a = mx.array(np.random.default_rng(1).integers(-50, 50, 64), mx.float32)
    source = f"""
    uint i = thread_position_in_grid.x;
    float x = a[i];
    out[i] = {call};
    """
    out = launch(source, [a], a.shape, threads=64)
    halves = [expected(half) for half in np.array(a).reshape(2, 32)]
    assert np.array_equal(np.array(out).reshape(2, 32), halves)


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_simdgroup_matrix_product_accumulates_in_float(dtype, transpose):
    rng = np.random.default_rng(2)
    a, b = (mx.array(rng.normal(size=(8, 24)), dtype) for _ in range(2))
    c = mx.array(rng.normal(size=(8, 8)), mx.float32)
    b_load = "simdgroup_load(y, b + 8, 24, ulong2(0), true);"
    if not transpose:
        b_load = "simdgroup_load(y, b, 24, ulong2(8, 0));"
    source = f"""
    simdgroup_matrix<T, 8, 8> x, y;
    simdgroup_matrix<float, 8, 8> z, d;
    simdgroup_load(x, a, 24);
    {b_load}
    simdgroup_load(z, c, 8);
    simdgroup_multiply_accumulate(d, x, y, z);
    uint lane = thread_index_in_simdgroup;
    simdgroup_store(d, out, 8);
    """
    out = launch(
        source, [a, b, c], (8, 8), template=[("T", dtype)], header=MATRIX_HEADER
    )
    x, y, z = (np.array(m.astype(mx.float32), np.float64) for m in (a, b, c))
    y = y[:, 8:16].T if transpose else y[:, 8:16]
    assert np.abs(np.array(out) - (x[:, :8] @ y + z)).max() < 1e-5


def test_uninitialised_simdgroup_matrix_is_poison():
    source = """
    simdgroup_matrix<float, 8, 8> x;
    uint lane = thread_index_in_simdgroup;
    simdgroup_store(x, out, 8);
    """
    out = launch(source, [], (8, 8), header=MATRIX_HEADER)
    assert np.isnan(np.array(out)).all()


def test_init_value_fills_the_outputs():
    kernel = simulator.metal_kernel(
        "fill", [], ["out"], "if (thread_position_in_grid.x == 0) out[0] = 5.0f;"
    )
    (out,) = kernel(
        inputs=[],
        grid=(4, 1, 1),
        threadgroup=(4, 1, 1),
        output_shapes=[(4,)],
        output_dtypes=[mx.float32],
        init_value=1.5,
    )
    assert np.array_equal(out, [5.0, 1.5, 1.5, 1.5])
