"""``simulator.library_kernel``: kernels of a complete Metal text."""

import ctypes

import mlx.core as mx
import numpy as np
import pytest

from mlx_flash import simulator

TEXT = """
#include <metal_stdlib>
using namespace metal;

constant int steps [[function_constant(0)]];
constant bool squared [[function_constant(1)]];
constant float offset [[function_constant(2)]];
constant bool has_weights [[function_constant(3)]];

struct Sizes {
  int n;
  float scale;
};

// Scales what lies `steps` further on.
template <typename T, int N = 1>
[[kernel, max_total_threads_per_threadgroup(64)]] void shifted(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(2)]],
    const constant Sizes& sizes [[buffer(5)]], // the hole in the numbers is meant
    const device T* weights [[buffer(6), function_constant(has_weights)]],
    ushort i [[thread_position_in_grid]],
    uint2 group [[threadgroup_position_in_grid]]) {
  T value = x[(i + steps) % sizes.n] * T(sizes.scale) * T(N) + T(group.y);
  if (squared) value *= value;
  if (is_function_constant_defined(offset)) value += T(offset);
  if (has_weights) value *= weights[i];
  y[i] = value;
}

template [[host_name("shifted_by_three")]] [[kernel]] decltype(shifted<float, 3>)
    shifted<float, 3>;

kernel void add_up(device float* sum [[buffer(0)]],
                   device const float& x [[buffer(1)]]) {
  sum[0] += x;
}

kernel void borrowed(threadgroup float* memory [[threadgroup(0)]],
                     device float* out [[buffer(0)]]) {
  out[0] = memory[0];
}
"""
X = np.arange(8, dtype=np.float32)


class Sizes(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int), ("scale", ctypes.c_float))


def shifted(constants, function="shifted<float>", extra=None, **options):
    kernel = simulator.library_kernel(TEXT, function, constants=constants, **options)
    results = kernel(
        buffers={0: X, 5: Sizes(8, 2.0), **(extra or {})},
        outputs={2: ((8,), mx.float32)},
        grid=(8, 1, 1),
        threadgroup=(4, 1, 1),
    )
    return np.array(results[2])


def test_function_constants_have_the_values_they_are_given():
    constants = {0: 3, 1: False, 3: False}
    assert np.array_equal(shifted(constants), 2 * np.roll(X, -3))
    assert np.array_equal(shifted(constants | {1: True}), 4 * np.roll(X, -3) ** 2)
    assert np.array_equal(shifted(constants | {2: 0.125}), 2 * np.roll(X, -3) + 0.125)


def test_function_constant_without_a_value_is_an_error_where_it_is_used():
    with pytest.raises(
        simulator.SimulatorError, match="function_constant_0_steps_has_no"
    ):
        shifted({1: False, 3: False})


def test_host_name_selects_the_instantiation():
    out = shifted({0: 0, 1: False, 3: False}, "shifted_by_three")
    assert np.array_equal(out, 6 * X)


def test_buffer_behind_a_true_function_constant_is_needed():
    constants = {0: 0, 1: False, 3: True}
    with pytest.raises(ValueError, match=r"needs buffer 6 \(weights\)"):
        shifted(constants)
    out = shifted(constants, extra={6: mx.arange(8.0)})
    assert np.array_equal(out, 2 * X * X)


def test_positions_come_in_the_declared_type():
    kernel = simulator.library_kernel(
        TEXT, "shifted<float>", constants={0: 0, 1: False, 3: False}
    )
    results = kernel(
        buffers={0: X, 5: Sizes(8, 0.0)},
        outputs={2: np.full(8, -1, np.float32)},
        grid=(8, 1, 1),
        threadgroup=(4, 1, 1),
    )
    assert np.array_equal(results[2], np.zeros(8))


def test_output_may_start_from_an_array_which_stays_as_it_is():
    start = mx.array([1.0, 5.0])
    kernel = simulator.library_kernel(TEXT, "add_up", checks="uninitialised")
    results = kernel(
        buffers={1: np.float32(2)},
        outputs={0: start},
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    assert np.array_equal(results[0], [3.0, 5.0])
    assert np.array_equal(start, [1.0, 5.0])


def test_output_that_starts_from_nothing_is_not_read():
    kernel = simulator.library_kernel(TEXT, "add_up", checks="uninitialised")
    with pytest.raises(simulator.SimulatorError, match="reads buffer sum at byte 0"):
        kernel(
            buffers={1: np.float32(2)},
            outputs={0: ((2,), mx.float32)},
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )


ABSENT = """
constant bool has_extra [[function_constant(0)]];
kernel void reads(device float* out [[buffer(0)]],
                  const device float* extra [[buffer(1), function_constant(has_extra)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] = extra[i];
}
"""


def test_use_of_an_absent_buffer_is_out_of_bounds():
    kernel = simulator.library_kernel(
        ABSENT, "reads", constants={0: False}, checks="bounds"
    )
    with pytest.raises(
        simulator.SimulatorError, match=r"buffer extra, which has 0 \(text of reads:6\)"
    ):
        kernel(
            buffers={},
            outputs={0: ((4,), mx.float32)},
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
        )


RACE = """
#include "half_of.h"
#include "half_of.h"
kernel void halves(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = half_of(x[i]);
  out[i] = shared[63 - i];
}
"""
HALF_OF = """
#pragma once
/* One function for
   each address space. */
template <typename T>
T half_of(const device T& x) { return x / 2; }
template <typename T>
T half_of(const threadgroup T& x) { return x / 2; }
template <typename T>
T half_of(constant T& x) { return x / 2; }
template <typename T>
T half_of(T x, T y) { return (x + y) / 2; }
"""


def test_race_in_a_text_with_includes_is_reported_with_its_line(tmp_path):
    (tmp_path / "half_of.h").write_text(HALF_OF)
    kernel = simulator.library_kernel(RACE, "halves", include=[tmp_path])
    arguments = {
        "buffers": {0: np.arange(64, dtype=np.float32)},
        "outputs": {1: ((64,), mx.float32)},
        "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1),
    }
    with (
        simulator.checked("race"),
        pytest.raises(simulator.SimulatorError, match=r"race: .*text of halves:7"),
    ):
        kernel(**arguments)


def test_error_in_an_included_file_names_its_line(tmp_path):
    (tmp_path / "half_of.h").write_text(HALF_OF.replace("x / 2", "x / two", 1))
    kernel = simulator.library_kernel(RACE, "halves", include=[tmp_path])
    with pytest.raises(simulator.SimulatorError, match=r"half_of.h:6: .*two"):
        kernel(
            buffers={0: X},
            outputs={1: ((64,), mx.float32)},
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
        )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"function": "missing"}, simulator.SimulatorError, "no kernel 'missing'"),
        (
            {"function": "borrowed"},
            simulator.SimulatorError,
            r"parameter 'memory' is \[\[threadgroup\(0\)\]\]",
        ),
        ({"constants": {7: True}}, ValueError, r"no function constants \[7\]"),
        ({"checks": "strict"}, ValueError, "'strict' reads texts that MLX generates"),
        (
            {"text": '#include "nowhere.h"\n'},
            simulator.SimulatorError,
            "text of add_up:1 includes 'nowhere.h'",
        ),
    ],
    ids=["function", "threadgroup-parameter", "constant", "strict", "include"],
)
def test_text_that_cannot_run_is_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        simulator.library_kernel(**({"text": TEXT, "function": "add_up"} | arguments))


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ({}, ValueError, r"needs buffer 1 \(x\)"),
        ({0: X, 1: X}, ValueError, r"buffers \[0\] are in buffers and in outputs"),
        ({1: X, 4: X}, ValueError, r"has no buffers \[4\]"),
        ({1: 2.0}, TypeError, r"buffer 1 \(x\): float does not say how many bytes"),
        ({1: X.astype(np.float64)}, TypeError, "Metal has no float64"),
    ],
    ids=["missing", "twice", "unknown", "python-scalar", "float64"],
)
def test_wrong_buffers_are_refused_by_name(buffers, error, message):
    kernel = simulator.library_kernel(TEXT, "add_up")
    with pytest.raises(error, match=message):
        kernel(
            buffers=buffers,
            outputs={0: ((2,), mx.float32)},
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
