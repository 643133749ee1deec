"""The kinds of kernels that MLX's page on custom kernels shows, on the simulator.

Elementwise with and without a row-contiguous copy, a reduction over simdgroups, and
bilinear grid sampling with its gradient, which adds up in atomics.
"""

import mlx.core as mx
import numpy as np
import pytest
from test_execution import launch

from mlx_flash import simulator

# ---- Elementwise

EXP_OF_A_ROW_CONTIGUOUS_INPUT = """
uint i = thread_position_in_grid.x;
T x = a[i];
out[i] = metal::exp(x);
"""
EXP_OF_ANY_INPUT = """
uint i = thread_position_in_grid.x;
// the preamble's way from an element's number to its place; strides may be negative
int64_t place = elem_to_loc(int64_t(i), a_shape, a_strides, a_ndim);
T x = a[place];
out[i] = metal::exp(x);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("source", "copies"),
    [(EXP_OF_A_ROW_CONTIGUOUS_INPUT, True), (EXP_OF_ANY_INPUT, False)],
    ids=["row-contiguous", "strided"],
)
def test_exponential_of_a_strided_array(source, copies, dtype):
    whole = mx.array(np.random.default_rng(0).normal(size=(6, 5, 16)), dtype)
    a = whole.transpose(2, 0, 1)[1::3, ::-1]
    out = launch(
        source,
        [a],
        a.shape,
        dtype=dtype,
        grid=(a.size, 1, 1),
        threadgroup=(32, 1, 1),
        template=[("T", dtype)],
        ensure_row_contiguous=copies,
        checks=["bounds", "uninitialised"],
    )
    expected = np.exp(np.array(a.astype(mx.float32), np.float64))
    error = np.abs(np.array(out.astype(mx.float32)) / expected - 1).max()
    # a result is rounded once
    assert error <= mx.finfo(dtype).eps * (1 if dtype == mx.float32 else 0.5)


def test_strided_kernel_without_strides_reads_other_elements():
    a = mx.arange(64.0).reshape(8, 8).T
    source = EXP_OF_A_ROW_CONTIGUOUS_INPUT.replace("metal::exp(x)", "x")
    options = {"threads": 64, "template": [("T", mx.float32)]}
    out = launch(source, [a], a.shape, **options, ensure_row_contiguous=False)
    assert np.array_equal(out, np.arange(64.0).reshape(8, 8))


# ---- Reduction

ROW_SUMS = """
threadgroup float parts[4];
uint row = thread_position_in_grid.y;
uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
float sum = 0.0f;
for (int i = thread_position_in_threadgroup.x; i < a_shape[1]; i += 128)
  sum += float(a[row * a_shape[1] + i]);
sum = simd_sum(sum);
if (lane == 0) parts[simd] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
sum = simd_sum(lane < 4 ? parts[lane] : 0.0f);
if (thread_position_in_threadgroup.x == 0) out[row] = sum;
"""


@pytest.mark.parametrize(
    ("dtype", "checks"), [(mx.float16, "all"), (mx.int32, ())], ids=str
)
def test_row_sums_over_simdgroups_and_threadgroup_memory(dtype, checks):
    values = np.random.default_rng(1).integers(-20, 20, (6, 1000))
    a = mx.array(values, dtype)
    sizes = {"grid": (128, 6, 1), "threadgroup": (128, 1, 1)}
    out = launch(ROW_SUMS, [a], (6,), **sizes, checks=checks)
    assert np.array_equal(out, values.sum(axis=1))


def test_row_sums_without_the_barrier_are_a_race():
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    source = ROW_SUMS.replace(barrier, "")
    options = {"grid": (128, 1, 1), "threadgroup": (128, 1, 1), "checks": "race"}
    with pytest.raises(simulator.SimulatorError, match=r"race: .* parts"):
        launch(source, [mx.zeros((1, 256))], (1,), **options)


# ---- Grid sampling

# The four neighbours of a point, each with its weight; outside of the image is zero.
CORNERS = """
struct Corners {
  int row[2], column[2];
  float along_rows[2], along_columns[2];

  Corners(float2 point, int height, int width) thread {
    // pixel centres lie at odd multiples of half a pixel in -1 to 1
    const float2 at = ((point + 1.0f) * float2(width, height) - 1.0f) * 0.5f;
    const float2 low = floor(at);
    for (int i = 0; i < 2; ++i) {
      column[i] = int(low.x) + i;
      row[i] = int(low.y) + i;
      along_columns[i] = i ? at.x - low.x : 1.0f - (at.x - low.x);
      along_rows[i] = i ? at.y - low.y : 1.0f - (at.y - low.y);
    }
  }
  bool inside(int i, int j, int height, int width) const thread {
    return row[i] >= 0 && row[i] < height && column[j] >= 0 && column[j] < width;
  }
};
"""
# x: channel, y: point, z: image
SAMPLE = """
const uint3 at = thread_position_in_grid;
const int H = image_shape[1], W = image_shape[2], C = image_shape[3];
const uint point = at.z * points_shape[1] + at.y;
const Corners corners(float2(points[2 * point], points[2 * point + 1]), H, W);
float sum = 0.0f;
for (int i = 0; i < 2; ++i) {
  for (int j = 0; j < 2; ++j) {
    if (!corners.inside(i, j, H, W)) continue;
    const uint pixel = (at.z * H + corners.row[i]) * W + corners.column[j];
    sum += corners.along_rows[i] * corners.along_columns[j] * image[pixel * C + at.x];
  }
}
out[point * C + at.x] = sum;
"""
# Threads with a channel beyond the last one stay for the sum of the simdgroup.
SAMPLE_GRADIENT = """
const uint3 at = thread_position_in_grid;
const int H = image_shape[1], W = image_shape[2], C = image_shape[3];
const uint point = at.z * points_shape[1] + at.y;
const Corners corners(float2(points[2 * point], points[2 * point + 1]), H, W);
const bool exists = int(at.x) < C;
const float cotangent = exists ? dout[point * C + at.x] : 0.0f;
float2 slope = 0.0f;
for (int i = 0; i < 2; ++i) {
  for (int j = 0; j < 2; ++j) {
    if (!exists || !corners.inside(i, j, H, W)) continue;
    const uint pixel = (at.z * H + corners.row[i]) * W + corners.column[j];
    const float weight = corners.along_rows[i] * corners.along_columns[j];
    atomic_fetch_add_explicit(
        &dimage[pixel * C + at.x], weight * cotangent, memory_order_relaxed);
    const float value = image[pixel * C + at.x];
    slope += value * float2(j ? corners.along_rows[i] : -corners.along_rows[i],
                            i ? corners.along_columns[j] : -corners.along_columns[j]);
  }
}
slope *= cotangent * 0.5f * float2(W, H);
slope = float2(simd_sum(slope.x), simd_sum(slope.y));
if (thread_index_in_simdgroup == 0) {
  for (int i = 0; i < 2; ++i)
    atomic_fetch_add_explicit(&dpoints[2 * point + i], slope[i], memory_order_relaxed);
}
"""


def sampling_problem():
    rng = np.random.default_rng(2)
    image = rng.normal(size=(2, 5, 7, 40))
    points = rng.uniform(-1.2, 1.2, size=(2, 33, 2))  # some lie outside
    return image.astype(np.float32), points.astype(np.float32)


def sampled(image, points):
    """Grid sampling in float64 NumPy."""
    B, H, W, _ = image.shape
    size = np.array([W, H])
    at = ((points.astype(np.float64) + 1) * size - 1) / 2
    low = np.floor(at).astype(int)
    batch = np.arange(B)[:, None]
    padded = np.pad(image.astype(np.float64), ((0, 0), (1, 2), (1, 2), (0, 0)))
    out = 0
    for i in range(2):
        for j in range(2):
            corner = low + np.array([j, i])
            weight = (1 - np.abs(at - corner)).prod(axis=-1)
            column, row = np.moveaxis(np.clip(corner, -1, size), -1, 0)
            out = out + weight[..., None] * padded[batch, row + 1, column + 1]
    return out


def test_grid_sampling_on_a_grid_of_three_dimensions():
    image, points = sampling_problem()
    kernel = simulator.metal_kernel(
        "sample", ["image", "points"], ["out"], SAMPLE, header=CORNERS, checks="all"
    )
    (out,) = kernel(
        inputs=[image, points],
        grid=(40, 33, 2),
        threadgroup=(8, 3, 2),
        output_shapes=[(2, 33, 40)],
        output_dtypes=[mx.float32],
    )
    # a weight is the difference of coordinates of size 7, each rounded
    assert np.abs(np.array(out) - sampled(image, points)).max() < 1e-5


def sampling_gradient(**options):
    image, points = sampling_problem()
    dout = np.random.default_rng(3).normal(size=(2, 33, 40)).astype(np.float32)
    kernel = simulator.metal_kernel(
        "sample_gradient",
        ["image", "points", "dout"],
        ["dimage", "dpoints"],
        SAMPLE_GRADIENT,
        header=CORNERS,
        atomic_outputs=True,
        checks="all",
    )
    outputs = kernel(
        inputs=[image, points, dout],
        grid=(64, 33, 2),
        threadgroup=(64, 3, 1),
        output_shapes=[image.shape, points.shape],
        output_dtypes=[mx.float32, mx.float32],
        **options,
    )
    return (image, points, dout), outputs


def test_gradient_of_grid_sampling_adds_up_in_atomics():
    (image, points, dout), (dimage, dpoints) = sampling_gradient(init_value=0)
    # linear in the image: the gradient is the transpose, tested on a random direction
    rng = np.random.default_rng(4)
    direction = rng.normal(size=image.shape)
    expected = (sampled(direction, points) * dout).sum()
    assert abs((np.array(dimage) * direction).sum() - expected) < 1e-4 * 60
    # piecewise bilinear in the points: differences are exact but for a kink in between
    step = 1e-6
    for axis in range(2):
        shift = np.eye(2)[axis] * step
        up, down = (sampled(image, points + sign * shift) for sign in (1, -1))
        slope = ((up - down) / (2 * step) * dout).sum(axis=-1)
        assert np.abs(np.array(dpoints)[..., axis] - slope).max() < 1e-3


def test_atomic_sums_need_a_value_to_start_from():
    with pytest.raises(simulator.SimulatorError, match=r"uninitialised: .* dimage"):
        sampling_gradient()


# ---- Atomic outputs

COUNT = """
uint i = thread_position_in_grid.x;
for (int j = 0; j < TIMES; ++j)
  atomic_fetch_add_explicit(&out[i % 3], T(a[i]), memory_order_relaxed);
"""


@pytest.mark.parametrize(
    ("dtype", "checks"),
    [(mx.float32, ()), (mx.uint32, ()), (mx.int32, ()), (mx.uint32, "all")],
    ids=str,
)
def test_atomics_of_many_threadgroups_lose_nothing(dtype, checks):
    # threadgroups run on several cores, so that these get into each other's way
    size, times = (3 * 2**8, 2) if checks else (3 * 2**11, 1000)
    kernel = simulator.metal_kernel(
        "count", ["a"], ["out"], COUNT, atomic_outputs=True, checks=checks
    )
    (out,) = kernel(
        inputs=[mx.ones(size, dtype)],
        template=[("T", dtype), ("TIMES", times)],
        grid=(size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[dtype],
        init_value=0,
    )
    assert np.array_equal(out, [size // 3 * times] * 3)


def atomic_launch(source, dtype, **options):
    kernel = simulator.metal_kernel(
        "atomics", [], ["out"], source, atomic_outputs=True, **options
    )
    return kernel(
        inputs=[],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[dtype],
        init_value=0,
    )


def test_atomic_and_ordinary_access_are_a_race():
    source = """
    if (thread_position_in_grid.x == 40) *((device uint*)out) = 0;
    atomic_fetch_add_explicit(out, 1u, memory_order_relaxed);
    """
    with pytest.raises(simulator.SimulatorError, match=r"race: .* \(source of atomics"):
        atomic_launch(source, mx.uint32, checks="race")


@pytest.mark.parametrize(
    ("call", "dtype", "message"),
    [
        ("fetch_add", mx.float16, "Metal has atomics of int, uint, bool, float"),
        ("fetch_max", mx.float32, "Metal has no atomic_fetch_max_explicit for this"),
    ],
    ids=["half", "float-maximum"],
)
def test_atomics_that_metal_lacks_are_refused_by_name(call, dtype, message):
    source = f"""
    uint i = thread_position_in_grid.x;
    atomic_{call}_explicit(out, i, memory_order_relaxed);
    """
    with pytest.raises(simulator.SimulatorError, match=message):
        atomic_launch(source, dtype)
