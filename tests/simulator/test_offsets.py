"""Places beyond 2^31 elements, without the memory: the kernels' own words for offsets.

The words run in small kernels. Where they read or write, their base pointer is moved
back by the distance, so that what they touch lies in a small array.
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_flash import simulator
from mlx_flash.kernel_files import read_header

HEADER = "".join(read_header("metal", stem) for stem in ("common", "tile", "mask"))
WORKER = """
const int lane = int(thread_index_in_simdgroup);
const Worker at = {lane, 0, 0, lane, 0, 0, 0};
const Strides steps = {strides[0], strides[1], strides[2], strides[3]};
const int b = place[0], h = place[1], t = place[2];
"""


def run(source, place, strides, distance, a, shape, dtype=mx.float32):
    """One simdgroup at a place (b, h, t, ...), with all checks of memory."""
    kernel = simulator.metal_kernel(
        "offsets",
        ["place", "strides", "distance", "a"],
        ["out"],
        source=WORKER + source,
        header=HEADER,
        checks=["bounds", "uninitialised", "strict"],
    )
    (out,) = kernel(
        inputs=[
            mx.array(place, mx.int32),
            mx.array(strides, mx.int64),
            mx.array([distance], mx.int64),
            a,
        ],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        init_value=0,
    )
    return np.array(out)


POSITIONS = [
    (1, 2, 3),
    (0, 0, 2**15 + 1),
    (2**15 + 1, 2**15 + 3, 2**16 + 5),
    (2**16 + 1, 7, 2**16 + 9),
    (3, 2**20, 2**31 - 1),
    (2**31 - 1, 2**31 - 1, 2**31 - 1),
]
STRIDES = [(2**30, 2**25, 24, 1), (0, 2**29 + 1, 2**30, 8), (-(2**30) - 8, 1, -24, 3)]


@pytest.mark.parametrize("strides", STRIDES, ids=str)
@pytest.mark.parametrize("place", POSITIONS, ids=str)
def test_offset_of_a_row_is_exact(place, strides):
    source = "if (lane == 0) out[0] = offset(steps, b, h, t);"
    out = run(source, place, strides, 0, mx.zeros(8), (1,), mx.int64)
    expected = sum(i * step for i, step in zip(place, strides, strict=False))
    assert out.item() == expected


@pytest.mark.parametrize(
    ("B", "T", "H", "D"),
    [(2**15, 2**15, 33, 64), (3, 2**17, 128, 256), (70000, 65537, 1, 8)],
)
def test_offsets_of_outputs_are_exact(B, T, H, D):
    b, h, t = B - 1, H - 1, T - 1
    source = """
    if (lane == 0) {
      out[0] = output_offset(place[3], place[4], place[5], b, h, t);
      out[1] = row_offset(Sizes{place[4], 1, place[3], 1}, b, h);
    }
    """
    out = run(source, (b, h, t, T, H, D), (0,) * 4, 0, mx.zeros(8), (2,), mx.int64)
    assert list(out) == [((b * T + t) * H + h) * D, (b * H + h) * T]


# (b, h, t), strides: each axis alone reaches far, and all of them do.
FAR = {
    "batch": ((1, 0, 0), (2**33, 0, 12, 1)),
    "head": ((0, 5, 0), (0, 2**31, 12, 1)),
    "row": ((0, 0, 2**28), (0, 0, 12, 1)),
    "all": ((3, 2**16, 2**29), (2**33, 2**17, 16, 2)),
    "backward": ((1, 1, 2**29), (-(2**34), 2**32, -12, 1)),
}
EVERY_DISTANCE = pytest.mark.parametrize(("place", "strides"), FAR.values(), ids=FAR)
N_ROWS = 7  # that exist, of the 8 of a fragment


def memory(place, strides, columns):
    """An array, the moved base's distance from it, and the rows at the place."""
    values = np.arange(1, 129, dtype=np.float32)
    origin = 100 if strides[2] < 0 else 2  # the place's first element in the array
    distance = sum(i * step for i, step in zip(place, strides, strict=False)) - origin
    r, d = np.ogrid[:N_ROWS, :columns]
    return mx.array(values), distance, values[origin + r * strides[2] + d * strides[3]]


@EVERY_DISTANCE
def test_stage_reads_far_rows(place, strides):
    source = f"""
    threadgroup float x_tg[8 * RowStride<float, 8>::value];
    const Operand<float> from = {{a - distance[0], steps}};
    stage<8, 5, 8, 32, false>(x_tg, from, b, h, t, t + {N_ROWS}, lane);
    threadgroup_sync();
    for (int i = lane; i < 64; i += 32) {{
      out[i] = x_tg[i / 8 * RowStride<float, 8>::value + i % 8];
    }}
    """
    a, distance, rows = memory(place, strides, 5)
    out = run(source, place, strides, distance, a, (8, 8))
    assert np.array_equal(out, np.pad(rows, [(0, 1), (0, 3)]))


@EVERY_DISTANCE
def test_load_rows_reads_far_rows(place, strides):
    source = f"""
    RowTile<float, 1, 1> x;
    const Operand<float> from = {{a - distance[0], steps}};
    load_rows<5>(x, from, b, h, t, t + {N_ROWS}, 0, at);
    for (int e = 0; e < 2; ++e) {{
      out[8 * tile_row(at, 0) + tile_col(at, e)] = x.frag[0][0].thread_elements()[e];
    }}
    """
    a, distance, rows = memory(place, strides, 5)
    out = run(source, place, strides, distance, a, (8, 8))
    assert np.array_equal(out, np.pad(rows, [(0, 1), (0, 3)]))


@EVERY_DISTANCE
def test_row_numbers_are_read_from_far_rows(place, strides):
    source = f"""
    RowValues<1> x;
    threadgroup float x_tg[8];
    const RowOperand from = {{a - distance[0], steps}};
    load_row_values(x, from, b, h, t, t + {N_ROWS}, at);
    stage_values<8, 32>(x_tg, from, b, h, t, t + {N_ROWS}, at);
    threadgroup_sync();
    out[tile_row(at, 0)] = x.value[0];
    if (lane < 8) out[8 + lane] = x_tg[lane];
    """
    a, distance, rows = memory(place, strides, 1)
    out = run(source, place, strides, distance, a, (2, 8))
    assert np.array_equal(out, [[*rows[:, 0], 0.0]] * 2)


@EVERY_DISTANCE
def test_mask_elements_are_read_from_far_rows(place, strides):
    """With the key far away, too."""
    key = 2**30
    source = f"""
    const MaskArray<float> mask = {{a - distance[0], steps}};
    for (int i = lane; i < 8 * {N_ROWS}; i += 32) {{
      out[i] = mask_element(mask, b, h, t + i / 8, {key} + i % 8);
    }}
    """
    a, distance, rows = memory(place, strides, 8)
    out = run(source, place, strides, distance + key * strides[3], a, (N_ROWS, 8))
    assert np.array_equal(out, rows)


def test_segment_ids_are_read_from_a_far_batch():
    b, Tq, Tk = 70000, 40000, 50000
    source = f"""
    const Segments ids = {{a - {b}L * {Tq} - 20, a - {b}L * {Tk} - 40, a, a, 0, 0}};
    const Sizes n = {{1, 1, {Tq}, {Tk}}};
    for (int i = lane; i < 64; i += 32) {{
      out[i] = q_id(ids, n, b, 20 + i / 8) == k_id(ids, n, b, 40 + i % 8);
    }}
    """
    ids = np.array([0, 0, 1, 2, 2, 2, 0, 1], np.int32)
    out = run(source, (b, 0, 0), (0,) * 4, 0, mx.array(ids), (8, 8), mx.int32)
    assert np.array_equal(out, ids[:, None] == ids)


def test_ids_of_blocks_are_read_from_a_far_batch():
    b, own, others = 70000, 40000, 50000
    source = f"""
    const device int* own = a - ({b}L * {own} + 3);
    const device int* other = a + 2 - ({b}L * {others} + 5);
    Segments ids = {{a, a, own, own + 1, other, other + 1, 0, 0}};
    Worker far = at;
    far.batch = b;
    far.block = 3;
    const bool meet = blocks_meet(ids, b, {own}, 3, {others}, 5);
    select_block(ids, {own}, {others}, far);
    if (lane == 0) {{
      out[0] = ids.lowest;
      out[1] = ids.highest;
      out[2] = ids.other_lowest[5];
      out[3] = ids.other_highest[5];
      out[4] = meet;
    }}
    """
    ids = mx.array([4, 6, 5, 7, 0, 0, 0, 0], mx.int32)
    out = run(source, (b, 0, 0), (0,) * 4, 0, ids, (5,), mx.int32)
    assert list(out) == [4, 6, 5, 7, 1]


@pytest.mark.parametrize(
    ("row", "row_step"), [(0, 8), (2**28, 24), (2**16, 2**17 + 8)], ids=str
)
def test_store_rows_writes_far_rows(row, row_step):
    n_rows = N_ROWS if row_step < 64 else 1
    source = f"""
    AccTile<1, 1> x;
    for (int j = 0; j < 2; ++j) {{
      x.set(0, j, a[0] * (8 * tile_row(at, 0) + tile_col(at, j)));
    }}
    store_rows<5>(out - {row}L * {row_step}, {row_step}, x, {row}, {row} + {n_rows},
                  at);
    """
    out = run(source, (0, 0, 0), (0,) * 4, 0, mx.ones(8), (8 * 24,))
    expected = np.zeros(8 * 24)
    for r in range(n_rows):
        expected[r * row_step :][:5] = 8 * r + np.arange(5)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("row", "n_cols"), [(0, 6), (2**29, 12), (2**16, 2**17)], ids=str
)
def test_store_tile_writes_far_rows(row, n_cols):
    n_rows = N_ROWS if n_cols < 64 else 1
    source = f"""
    AccTile<1, 1> x;
    for (int j = 0; j < 2; ++j) {{
      x.set(0, j, a[0] * (8 * tile_row(at, 0) + tile_col(at, j)));
    }}
    const int col = {n_cols} - 6;
    store_tile(out - {row}L * {n_cols} - col, x, {row}, {row} + {n_rows}, col, {n_cols},
               at);
    """
    out = run(source, (0, 0, 0), (0,) * 4, 0, mx.ones(8), (8 * 12,))
    expected = np.zeros(8 * 12)
    for r in range(n_rows):
        expected[r * n_cols :][:6] = 8 * r + np.arange(6)
    assert np.array_equal(out, expected)
