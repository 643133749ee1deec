"""Work is that of the visible blocks: others are neither loaded nor multiplied."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlx_flash import kernels, simulator, tiles
from mlx_flash.options import Options

H = 2  # query heads, which share one key/value head


def packed_ids(T, n):
    """Ids of n segments, whose borders meet the blocks in different ways."""
    borders = np.linspace(0, T, n + 1).astype(int)[1:-1] + np.arange(n - 1)
    return np.searchsorted(borders, np.arange(T), side="right").astype(np.int32)


@dataclass(frozen=True)
class Case:
    T: int
    D: int
    DV: int
    dtype: mx.Dtype
    low: int | None = None
    high: int | None = None
    segments: int = 1

    def band(self):
        distance = np.arange(self.T) - np.arange(self.T)[:, None]
        low = -self.T if self.low is None else self.low
        high = self.T if self.high is None else self.high
        return (low <= distance) & (distance <= high)

    def same_segment(self):
        ids = packed_ids(self.T, self.segments)
        return ids[:, None] == ids

    def launches(self):
        mx.random.seed(3)

        def draw(heads, D):
            return mx.random.normal((1, heads, self.T, D)).astype(self.dtype)

        q, k, v, dout = (
            draw(*x) for x in ((H, self.D), (1, self.D), (1, self.DV), (H, self.DV))
        )
        options = {
            "options": Options(0.1, self.low, self.high),
            "mask": mx.zeros((1, 1, self.T, self.T)),
            "backend": "simulator",
        }
        if self.segments > 1:
            ids = mx.array(packed_ids(self.T, self.segments))[None]
            options |= {"q_segments": ids, "k_segments": ids}
        kernels.check_lane_map("simulator")
        with simulator.record() as records:
            out, lse = kernels.attention_forward(q, k, v, **options)
            saved = q, k, v, out, lse, dout, mx.zeros(lse.shape)
            kernels.attention_backward(*saved, **options)
        per_row = ("attention_delta", "segment_blocks")
        return [x for x in records if x.kernel not in per_row]

    def names(self):
        """Rows of the tile table, in the order of the launches."""
        fused = tiles.fuses_dk_and_dv(max(self.D, self.DV), self.dtype.size)
        dkv = ["attention_dkv"] if fused else ["attention_dk", "attention_dv"]
        return ["attention_forward", "attention_dq", *dkv, "attention_dmask"]


# Of the kernels whose row of the tile table has another name.
HEADERS = {"attention_dk": "attention_dkv", "attention_dv": "attention_dkv"}
# How many products with q or k (D columns), and with v or dout (DV), a block takes.
PRODUCTS = {
    "attention_forward": (1, 1),
    "attention_dq": (2, 1),
    "attention_dk": (2, 1),
    "attention_dv": (1, 1),
    "attention_dkv": (2, 2),
    "attention_dmask": (1, 1),
}


def seen_blocks(visible, rows, columns):
    """Which blocks of a mask have something to see in them."""
    T = len(visible)
    blocks = visible.reshape(T // rows, rows, T // columns, columns)
    return blocks.any(axis=(1, 3))


def expected_work(case, name):
    """8x8x8 products of a kernel, and bytes that it writes to threadgroup memory.

    A threadgroup stages the blocks that some row of its tile may see; a simdgroup
    multiplies those of them whose part of the band meets its own rows.
    """
    tile = tiles.tile(
        "attention_dq" if name == "attention_dmask" else name,
        max(case.D, case.DV),
        case.dtype.size,
    )
    band, same = case.band(), case.same_segment()
    if name in ("attention_dk", "attention_dv", "attention_dkv"):
        band, same = band.T, same.T  # own rows are keys
    together = tile.rows if tile.parts > 1 else 8 * tile.fragments
    loaded = seen_blocks(same, tile.rows, tile.block)
    multiplied = seen_blocks(band, together, tile.block) & np.repeat(
        loaded, tile.rows // together, axis=0
    )
    loaded = loaded & seen_blocks(band, tile.rows, tile.block)
    n_loaded, n_multiplied = H * int(loaded.sum()), H * int(multiplied.sum())

    with_D, with_DV = PRODUCTS[name]
    W, WV = (tiles.width(x, tile.parts) for x in (case.D, case.DV))
    fragments = together * tile.block // 64
    products = n_multiplied * fragments * (with_D * W + with_DV * WV) // 8

    written = n_loaded * tile.block * (W + WV) * case.dtype.size
    if name in ("attention_dk", "attention_dv", "attention_dkv"):
        row_numbers = 1 if name == "attention_dv" else 2
        written += n_loaded * tile.block * 4 * row_numbers
    if tile.parts > 1:
        meetings = 1 if name in ("attention_forward", "attention_dv") else 2
        written += n_multiplied * meetings * tile.parts * fragments * 64 * 4
    return products, written


CASES = {
    "causal": Case(512, 64, 64, mx.float16, high=0),
    "window of 64": Case(512, 64, 64, mx.float16, low=-63, high=0),
    "window of 32 to both sides": Case(256, 64, 64, mx.float16, low=-32, high=32),
    "8 segments": Case(512, 64, 64, mx.float16, segments=8),
    "8 causal segments": Case(256, 64, 64, mx.float16, high=0, segments=8),
    "window in parts": Case(128, 136, 160, mx.float32, low=-40, high=0),
    "segments in parts": Case(128, 136, 160, mx.float32, segments=5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_blocks_with_something_to_see_cost_work(case):
    launches = case.launches()
    assert len(launches) == len(case.names())
    for name, launch in zip(case.names(), launches, strict=True):
        assert launch.kernel == HEADERS.get(name, name)
        counters = launch.counters
        work = counters["mma_half"] + counters["mma_float"]
        assert (work, counters["threadgroup_bytes_written"]) == expected_work(
            case, name
        )
