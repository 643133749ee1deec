"""The counters: right, repeatable, and pinned so that a change of cost is seen."""

import json

import mlx.core as mx
import pytest
from counts import DTYPES, FILE, counts, launches
from test_execution import MATRIX_HEADER, launch

from mlx_flash import kernels, simulator, tiles
from mlx_flash.options import Options

PINNED = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("D", tiles.HEAD_DIMS)
def test_kernels_cost_what_was_pinned(D, name):
    assert counts(D, DTYPES[name]) == PINNED[f"D{D}-{name}"]


def test_counts_are_repeatable():
    assert launches(32, mx.float32) == launches(32, mx.float32)


@pytest.mark.parametrize("D", [16, 64, 128])
def test_matrix_products_of_a_full_attention_are_those_of_the_equations(D):
    T = 64
    x = mx.random.normal((1, 1, T, D))
    options = {"options": Options(scale=1.0), "backend": "simulator"}
    kernels.check_lane_map("simulator")
    with simulator.record() as records:
        out, lse = kernels.attention_forward(x, x, x, **options)
        kernels.attention_backward(x, x, x, out, lse, x, mx.zeros(lse.shape), **options)
    products = {"attention_forward": 0, "attention_dq": 0, "attention_dkv": 0}
    for record in records:
        if record.kernel in products:
            products[record.kernel] += record.counters["mma_float"]
    one = T * T * D // 512  # an 8x8x8 product is 512 multiplications
    # fused: s, dp, dk, dv; split: s twice
    dkv = 4 if tiles.fuses_dk_and_dv(D, 4) else 5
    assert products == {
        "attention_forward": 2 * one,
        "attention_dq": 3 * one,
        "attention_dkv": dkv * one,
    }


def test_each_event_is_counted_once_per_simdgroup():
    source = """
    threadgroup float x[64];
    uint i = thread_index_in_threadgroup;
    x[i] = metal::exp2(a[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> m(1.0f);
    simdgroup_multiply_accumulate(m, m, m, m);
    float y = simd_sum(simd_shuffle_xor(x[63 - i], ushort(1)));
    out[i] = y + metal::log(y) + m.thread_elements()[0];
    """
    with simulator.record() as records:
        launch(source, [mx.ones(64)], (64,), threads=64, header=MATRIX_HEADER)
    (record,) = records
    expected = {
        "mma_float": 2,
        "threadgroup_barrier": 2,
        "simdgroup_barrier": 2,
        "shuffle": 2,
        "reduction": 2,
        "exponential": 2,
        "transcendental": 2,
        "device_bytes_read": 256,
        "device_bytes_written": 256,
        "threadgroup_bytes_read": 256,
        "threadgroup_bytes_written": 256,
        "threadgroup_accesses": 4,
        "threadgroup_memory": 256,
        "threadgroups": 1,
    }
    assert expected.items() <= record.counters.items()


@pytest.mark.parametrize(
    ("index", "degree"), [("i", 1), ("2 * i", 2), ("32 * i", 32), ("0", 1)]
)
def test_bank_conflicts_are_the_words_that_one_bank_serves(index, degree):
    source = f"""
    threadgroup float x[1024];
    uint i = thread_index_in_threadgroup;
    x[{index}] = 1.0f;
    out[i] = a[i];
    """
    with simulator.record() as records:
        launch(source, [mx.ones(32)], (32,))
    assert records[0].counters["threadgroup_accesses"] == 1
    assert records[0].counters["threadgroup_bank_steps"] == degree


@pytest.mark.parametrize(("active", "idle"), [(32, 0.0), (8, 0.75)])
def test_idle_lanes_are_those_that_do_nothing(active, idle):
    source = f"uint i = thread_position_in_grid.x; if (i < {active}) out[i] = a[i];"
    with simulator.record() as records:
        launch(source, [mx.ones(32)], (32,))
    counters = records[0].counters
    assert 1 - counters["lane_steps"] / counters["lane_slots"] == idle
