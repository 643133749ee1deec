"""Checked mode: each check finds its fault in a small kernel and names the line."""

import mlx.core as mx
import numpy as np
import pytest
from test_execution import MATRIX_HEADER, launch

from mlx_flash import simulator
from mlx_flash.simulator import compiler

A = mx.arange(64.0)

# Line 1 is empty: the fault stands on line 4 of each body.
REVERSE = """
threadgroup float x[64]; uint i = thread_index_in_threadgroup; x[i] = 0.0f;
threadgroup_barrier(mem_flags::mem_threadgroup);
x[i] = a[i];
{barrier}
out[i] = x[63 - i];
"""
RACE = REVERSE.format(barrier="")
RACE_WITH_WRONG_FLAG = REVERSE.format(
    barrier="threadgroup_barrier(mem_flags::mem_none);"
)
RACE_WITH_A_SIMDGROUP_BARRIER = REVERSE.format(
    barrier="simdgroup_barrier(mem_flags::mem_threadgroup);"
)
ORDERED = REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_threadgroup);")
WRITE_AFTER_READ = """
threadgroup float x[64];
uint i = thread_index_in_threadgroup;
x[i] = a[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
float y = x[(i + 1) % 64];
x[i] = y;
out[i] = y;
"""
RACE_ON_AN_OUTPUT = """
uint i = thread_position_in_grid.x;

out[0] = a[i];
"""
READ_PAST_THE_END = """
uint i = thread_position_in_grid.x;

out[i] = a[i + 1];
"""
WILD_WRITE = """
uint i = thread_position_in_grid.x;

out[i + 100000000] = a[i];
"""
READ_BEFORE_A_THREADGROUP_ARRAY = """
threadgroup float x[64];
int i = thread_index_in_threadgroup;
x[i] = a[i];
out[i] = x[i - 1];
"""
UNINITIALISED_THREADGROUP = """
threadgroup float x[65];
uint i = thread_index_in_threadgroup;
if (i != 5) x[i] = a[i];
out[i] = x[i];
"""
UNINITIALISED_OUTPUT = """
uint i = thread_position_in_grid.x;

out[i] += a[i];
"""
DIVERGENT = """
uint i = thread_index_in_threadgroup;

if (i < 7) threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = a[i];
"""


@pytest.mark.parametrize(
    ("source", "check", "message"),
    [
        (
            RACE,
            "race",
            r"race: thread 0 writes .* x at byte 0 \(source of test:4\)"
            r", which thread 63 read \(source of test:6\); put a threadgroup_barrier",
        ),
        (RACE_WITH_WRONG_FLAG, "race", r"source of test:6.*wrote \(source of test:4\)"),
        (RACE_WITH_A_SIMDGROUP_BARRIER, "race", r"63 read \(source of test:6\)"),
        (
            WRITE_AFTER_READ,
            "race",
            r"writes .* \(source of test:7\), which thread \d+ "
            r"read \(source of test:6\)",
        ),
        (
            RACE_ON_AN_OUTPUT,
            "race",
            r"writes buffer out at byte 0 \(source of test:4\)",
        ),
        (
            READ_PAST_THE_END,
            "bounds",
            r"bounds: thread 63 reads 4 bytes at byte 256 of "
            r"buffer a, which has 256 \(source of test:4\)",
        ),
        (
            WILD_WRITE,
            "bounds",
            r"bounds: thread 0 writes 4 bytes at byte \d+ .*\(source of test:4\)",
        ),
        (
            READ_BEFORE_A_THREADGROUP_ARRAY,
            "bounds",
            r"thread 0 reads 4 bytes at byte -4 "
            r"of threadgroup array x, which has 256 \(source of test:5\)",
        ),
        (
            UNINITIALISED_THREADGROUP,
            "uninitialised",
            r"thread 5 reads threadgroup array "
            r"x at byte 20 \(source of test:5\), which nothing has written",
        ),
        (
            UNINITIALISED_OUTPUT,
            "uninitialised",
            r"thread 0 reads buffer out at byte 0 "
            r"\(source of test:4\), which nothing has written",
        ),
        (
            DIVERGENT,
            "divergence",
            r"threads 0-6 wait at threadgroup_barrier, source of "
            r"test:4\n  threads 7-63 have returned",
        ),
    ],
    ids=[
        "missing-barrier",
        "barrier-with-the-wrong-flag",
        "simdgroup-barrier-across-simdgroups",
        "write-after-read",
        "two-threads-write-an-output",
        "read-past-the-end",
        "wild-write",
        "read-before-a-threadgroup-array",
        "uninitialised-threadgroup-memory",
        "uninitialised-output",
        "divergent-barrier",
    ],
)
@pytest.mark.parametrize("all_checks", [False, True], ids=["alone", "all"])
def test_planted_fault_is_reported_with_its_line(source, check, message, all_checks):
    checks = "all" if all_checks else check
    with pytest.raises(simulator.SimulatorError, match=message):
        launch(source, [A], (64,), threads=64, checks=checks)


@pytest.mark.skipif(
    "clang" in compiler.toolchain()[1].lower(),
    reason="only GCC looks for variables without a value",
)
def test_variable_without_a_value_is_reported_with_its_line():
    source = """
    float sum;
    for (uint i = 0; i < thread_index_in_simdgroup; ++i) sum += a[i];
    out[thread_position_in_grid.x] = sum;
    """
    with pytest.raises(
        simulator.SimulatorError,
        match=r"nothing initialised:\n  source of test:4: .*sum",
    ):
        launch(source, [A], (64,), threads=64, checks="uninitialised")


def test_ordered_kernel_passes_every_check():
    out = launch(ORDERED, [A], (64,), threads=64, checks="all")
    assert np.array_equal(out, np.arange(64.0)[::-1])


def test_race_across_threadgroups_is_reported():
    source = """
    uint i = thread_position_in_grid.x;
    out[thread_position_in_threadgroup.x] = a[i];
    """
    options = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "checks": "race"}
    with pytest.raises(
        simulator.SimulatorError, match="thread 0 of another threadgroup"
    ):
        launch(source, [A], (32,), **options)


def test_barrier_for_device_memory_orders_an_output():
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = a[i];
    threadgroup_barrier(mem_flags::mem_{kind});
    float y = out[63 - i];
    threadgroup_barrier(mem_flags::mem_{kind});
    out[i] = y;
    """
    options = {"threads": 64, "checks": "race"}
    out = launch(source.format(kind="device"), [A], (64,), **options)
    assert np.array_equal(out, np.arange(64.0)[::-1])
    with pytest.raises(simulator.SimulatorError, match=r"race.*buffer out"):
        launch(source.format(kind="threadgroup"), [A], (64,), **options)


def test_neighbouring_halves_written_by_two_threads_are_no_race():
    source = """
    threadgroup half x[64];
    uint i = thread_index_in_threadgroup;
    x[i] = half(a[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = float(x[i ^ 1]);
    """
    out = launch(source, [A], (64,), threads=64, checks="all")
    assert np.array_equal(out, np.arange(64) ^ 1)


def test_schedule_that_changes_the_result_is_reported():
    source = """
    threadgroup float last[1];
    uint i = thread_index_in_threadgroup;
    last[0] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = last[0];
    """
    message = r"shuffled schedule, seed 3\) changes output 'out', first at element 0"
    with (
        simulator.checked("schedule", seed=3),
        pytest.raises(simulator.SimulatorError, match=message),
    ):
        launch(source, [A], (64,), threads=64)


def test_fast_math_that_changes_the_result_is_reported():
    source = """
    uint i = thread_position_in_grid.x;
    float x = a[i] - INFINITY;
    out[i] = isinf(x) ? 1.0f : 2.0f;
    """
    with pytest.raises(simulator.SimulatorError, match="fast math, output 'out'"):
        launch(source, [A], (64,), threads=64, checks="fast_math")


def test_strict_check_reports_what_metal_rejects():
    source = "uint i = thread_position_in_grid.x;\nout[i] = a[i] * 0.5;"
    with pytest.raises(
        simulator.SimulatorError, match=r"not strict MSL:\n.*:2: double"
    ):
        launch(source, [A], (64,), threads=64, checks="strict")


def test_lane_map_moves_the_elements_but_not_the_product():
    source = """
    simdgroup_matrix<float, 8, 8> x, y(0.0f);
    simdgroup_load(x, a, 8);
    simdgroup_multiply_accumulate(y, x, x, y);
    simdgroup_store(y, out, 8);
    out[64 + thread_index_in_simdgroup] = x.thread_elements()[0];
    """
    apple = np.array(launch(source, [A], (96,), header=MATRIX_HEADER))
    with simulator.lane_map(simulator.permuted_lane_map(5)):
        permuted = np.array(launch(source, [A], (96,), header=MATRIX_HEADER))
    assert np.array_equal(apple[:64], permuted[:64])
    assert not np.array_equal(apple[64:], permuted[64:])
    assert np.array_equal(np.sort(apple[64:]), np.sort(permuted[64:]))


def test_nothing_is_checked_outside_the_context():
    launch(RACE, [A], (64,), threads=64)
    with (
        simulator.checked("race"),
        pytest.raises(simulator.SimulatorError, match="race"),
    ):
        launch(RACE, [A], (64,), threads=64)
    assert launch(RACE, [A], (64,), threads=64).shape == (64,)


def test_unknown_check_and_bad_lane_map_are_refused():
    with pytest.raises(ValueError, match=r"unknown checks \['speed'\]"):
        simulator.metal_kernel("x", [], ["out"], "", checks=["race", "speed"])
    with (
        pytest.raises(ValueError, match="not a permutation"),
        simulator.lane_map([0] * 32),
    ):
        pass
    with (
        pytest.raises(ValueError, match="seed must be positive"),
        simulator.checked(seed=0),
    ):
        pass
