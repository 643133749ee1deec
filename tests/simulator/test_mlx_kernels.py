"""MLX's own Metal attention on the simulator, from the headers of the installed MLX.

The bounds are on the largest error over the largest result. In float32 a score is a
sum of D products of size 1, so its error is some sqrt(D) / 2**24 = 1e-6 at D = 128, and
that is the relative error of a probability; sums and exp2 add as much. In float16 the
inputs are exact and sums are in float32; the output is rounded to 1 / 2**11 = 5e-4, and
sdpa_vector in two passes rounds what the first hands on once more.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import oracle
from mlx_flash import simulator

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import steel_attention
from steel_attention import METAL_NAME

BOUND = {mx.float32: 5e-6, mx.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
HEAD_DIMS = pytest.mark.parametrize("D", [64, 128], ids="D{}".format)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def mlx_kernel(header, function, constants):
    """A kernel of one of MLX's headers; skips the test if MLX does not carry it."""
    try:
        return steel_attention.mlx_kernel(header, function, constants)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def steel(q, k, v, **options):
    try:
        return steel_attention.steel_attention(q, k, v, **options)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def normal(rng, dtype, *shape):
    """Random inputs as MLX stores them after a projection: ``[B, T, H, D]`` moved."""
    B, H, T, D = shape
    x = mx.array(rng.normal(size=(B, T, H, D)), dtype).swapaxes(1, 2)
    mx.eval(x)
    return x


def error_of(out, q, k, v, causal):
    expected, _ = oracle.attention(
        *map(oracle.to_numpy, (q, k, v)), scale=q.shape[-1] ** -0.5, causal=causal
    )
    return oracle.relative_error(out, expected)


# ---- steel_attention: blocks of queries, 8x8x8 products


def ragged(dtype, D, seed=0):
    """More keys than queries, and neither a multiple of a block."""
    rng = np.random.default_rng(seed)
    q = normal(rng, dtype, 2, 2, 40, D)
    return q, *(normal(rng, dtype, 2, 1, 70, D) for _ in range(2))


@DTYPES
@HEAD_DIMS
@CAUSAL
def test_steel_attention_is_as_exact_as_its_dtype(dtype, D, causal):
    q, k, v = ragged(dtype, D)
    out, lse = steel(q, k, v, causal=causal)
    assert error_of(out, q, k, v, causal) < BOUND[dtype]
    doubles = map(oracle.to_numpy, (q, k, v))
    _, expected = oracle.attention(*doubles, scale=D**-0.5, causal=causal)
    assert oracle.relative_error(lse, expected) < BOUND[mx.float32]


@DTYPES
def test_steel_attention_splits_the_head_dim_over_two_simdgroups(dtype):
    q, k, v = ragged(dtype, 128)
    out, _ = steel(q, k, v, causal=True, WN=2)
    assert error_of(out, q, k, v, True) < BOUND[dtype]


def test_steel_attention_reads_a_boolean_mask():
    q, k, v = ragged(mx.float32, 64)
    mask = mx.arange(70) <= mx.arange(40)[:, None] + 30
    out, _ = steel(q, k, v, causal=False, mask=mx.contiguous(mask))
    assert error_of(out, q, k, v, True) < BOUND[mx.float32]


def test_steel_attention_passes_every_check_and_counts_its_products():
    q, k, v = ragged(mx.float16, 64)
    with simulator.checked("all"), simulator.record() as records:
        out, _ = steel(q, k, v, causal=True)
    assert error_of(out, q, k, v, True) < BOUND[mx.float16]
    (record,) = records
    assert record.kernel == "attention"
    # queries 0-31 see keys 0-61, which are 2 blocks; queries 32-39 see all 3 blocks
    blocks = 4 * (2 + 3)
    # of q k^T as of p v: 4 simdgroups, 8 rows each, 32 keys, 64 dims
    assert record.counters["mma_float"] == blocks * 2 * 4 * (32 // 8) * (64 // 8)
    assert record.counters["mma_half"] == 0
    assert record.counters["device_bytes_written"] == 2 * out.size + 4 * out.size // 64


def test_steel_attention_assumes_the_lane_map_of_apple():
    q, k, v = ragged(mx.float32, 64)
    with simulator.lane_map(simulator.permuted_lane_map(1)):
        out, _ = steel(q, k, v, causal=False)
    assert error_of(out, q, k, v, False) > 0.1


# ---- sdpa_vector: few queries, the keys spread over the simdgroups


def vector_constants(causal, blocks=None):
    constants = {index: False for index in (20, 21, 23, 24, 25)} | {22: causal}
    return constants if blocks is None else constants | {26: blocks}


def few_queries(dtype, D):
    """Queries are row-contiguous here; keys and values have strides of their own."""
    rng = np.random.default_rng(1)
    q = mx.array(rng.normal(size=(1, 4, 3, D)), dtype)
    return q, *(normal(rng, dtype, 1, 2, 70, D) for _ in range(2))


def key_strides(x):
    _, head, row = steel_attention.strides_of(x)
    return np.uint64(head), np.uint64(row)


@DTYPES
@HEAD_DIMS
@CAUSAL
def test_sdpa_vector_is_as_exact_as_its_dtype(dtype, D, causal):
    q, k, v = few_queries(dtype, D)
    _, H, Tq, _ = q.shape
    kernel = mlx_kernel(
        "sdpa_vector.h",
        f"sdpa_vector<{METAL_NAME[dtype]}, {D}>",
        vector_constants(causal),
    )
    sizes = (np.int32(2), np.int32(70), *key_strides(k), *key_strides(v))
    scale = np.float32(D**-0.5)
    results = kernel(
        buffers={0: q, 1: k, 2: v, **dict(enumerate((*sizes, scale), 4))},
        outputs={3: (q.shape, dtype)},
        grid=(H * 1024, Tq, 1),
        threadgroup=(1024, 1, 1),
    )
    assert error_of(results[3], q, k, v, causal) < BOUND[dtype]


@DTYPES
def test_sdpa_vector_in_two_passes(dtype):
    D, blocks = 64, 32
    q, k, v = few_queries(dtype, D)
    _, H, Tq, _ = q.shape
    name = METAL_NAME[dtype]
    constants = vector_constants(True, blocks)
    first = mlx_kernel("sdpa_vector.h", f"sdpa_vector_2pass_1<{name}, {D}>", constants)
    second = mlx_kernel("sdpa_vector.h", f"sdpa_vector_2pass_2<{name}, {D}>", constants)
    sizes = (np.int32(70), *key_strides(k), *key_strides(v), np.float32(D**-0.5))
    with simulator.checked("schedule"):
        parts = first(
            buffers={0: q, 1: k, 2: v, **dict(enumerate(sizes, 7))},
            outputs={
                3: ((H, Tq, blocks, D), dtype),
                4: ((H, Tq, blocks), mx.float32),
                5: ((H, Tq, blocks), mx.float32),
            },
            grid=(2 * 32, 2, blocks * Tq),
            threadgroup=(32, 2, Tq),
        )
        results = second(
            buffers={0: parts[3], 1: parts[4], 2: parts[5], 4: np.int32(blocks)},
            outputs={3: (q.shape, dtype)},
            grid=(H * 1024, Tq, 1),
            threadgroup=(1024, 1, 1),
        )
    assert error_of(results[3], q, k, v, True) < BOUND[dtype]
