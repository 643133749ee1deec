"""The benchmark's own check, at lengths that only a GPU does in time."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_flash import flash_attention
from oracle import SPACING, assert_bit_equal

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from bench_attention import Case, errors, forward_and_backward, rows

LONG = [
    Case("bfloat16", 128, 16383),
    Case("float16", 64, 16384),
    Case("float16", 80, 4097, causal=False),
    Case("float32", 64, 16384),
    Case("float32", 128, 8191),
]


@pytest.fixture
def gpu(request):
    if request.config.getoption("--executor") not in ("metal", "cuda"):
        pytest.skip("long sequences need a GPU")


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_sequence_agrees_with_float64(gpu, case):
    # float32 sums thousands of terms; in 16 bits the rounding of the results dominates
    spacings = 64 if case.dtype == "float32" else 1
    assert errors(case)["mlx_flash"] <= spacings * SPACING[getattr(mx, case.dtype)]


def test_rows_of_65536_keys_agree_with_float64(gpu):
    T, D = 65536, 128
    q, k, v, _ = Case("bfloat16", D, T, H=2, HKV=1).arrays()
    out = flash_attention(q, k, v, causal=True)
    k, v = (np.array(x[0, 0].astype(mx.float32), np.float64) for x in (k, v))
    for head, row in ((0, 0), (1, 1), (0, 4095), (1, 32768), (0, T - 2), (1, T - 1)):
        query = np.array(q[0, head, row].astype(mx.float32), np.float64)
        s = k[: row + 1] @ query * D**-0.5
        p = np.exp(s - s.max())
        expected = p @ v[: row + 1] / p.sum()
        error = np.array(out[0, head, row].astype(mx.float32)) - expected
        relative = np.linalg.norm(error) / np.linalg.norm(expected)
        assert relative <= SPACING[mx.bfloat16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_20_long_calls_are_bit_equal(gpu, dtype):
    arrays = Case(dtype, 64, 4000).arrays()

    def attention(q, k, v):
        return flash_attention(q, k, v, causal=True)

    first = forward_and_backward(attention, arrays)
    for _ in range(20):
        for again, result in zip(
            forward_and_backward(attention, arrays), first, strict=True
        ):
            assert_bit_equal(again, result)


def test_benchmark_gives_a_row_per_implementation_and_direction():
    case = Case("float32", 16, 64, H=2, HKV=1)
    assert errors(case)["mlx_flash"] < 1e-5
    table = list(rows(case, repeats=2))
    kinds = {(row["implementation"], row["direction"]) for row in table}
    assert len(table) == len(kinds) == 6
    assert all(row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"] for row in table)
