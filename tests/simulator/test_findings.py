"""What the simulator reports, whatever the mode: each fault planted in a kernel."""

import mlx.core as mx
import pytest
from test_execution import MATRIX_HEADER, launch

from mlx_flash import simulator

A = mx.arange(64.0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("out[i + 1] = a[i];", r"outside buffer 'out' \(256 bytes\): at byte 256"),
        ("out[int(i) - 1] = a[i];", r"outside buffer 'out'.*byte -4, before its start"),
        ("const_cast<device float*>(a)[64 + i] = 0.0f;", r"outside buffer 'a'"),
    ],
    ids=["past-the-end", "before-the-start", "past-an-input"],
)
def test_write_outside_a_buffer_is_reported(source, message):
    with pytest.raises(simulator.SimulatorError, match=message):
        launch("uint i = thread_position_in_grid.x;" + source, [A], (64,), threads=64)


def test_write_past_a_threadgroup_array_is_reported():
    source = """
    threadgroup float x[8], y[8];
    uint i = thread_position_in_grid.x;
    x[i] = a[i];
    y[i] = a[i];
    """
    message = (
        r"threadgroup \(0, 0, 0\).*past the end of threadgroup array x \(32 bytes\)"
    )
    with pytest.raises(simulator.SimulatorError, match=message):
        launch(source, [A], (1,), threads=9)


def test_barrier_in_a_branch_is_reported_with_threads_and_line():
    source = """
    uint i = thread_index_in_threadgroup;
    out[i] = 0.0f;
    if (i < 40) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    """
    message = (
        r"kernel 'test' in threadgroup \(1, 0, 0\): the threads diverged[^\n]*\n"
        r"  threads 0-39 wait at threadgroup_barrier, source of test:5\n"
        r"  threads 40-63 have returned"
    )
    with pytest.raises(simulator.SimulatorError, match=message):
        launch(
            "if (threadgroup_position_in_grid.x == 0) return;" + source,
            [],
            (64,),
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
        )


def test_different_barriers_reached_by_different_threads_are_reported():
    source = """
    uint i = thread_index_in_threadgroup;
    out[i] = 0.0f;
    if (i < 32)
      threadgroup_barrier(mem_flags::mem_threadgroup);
    else
      threadgroup_barrier(mem_flags::mem_threadgroup);
    """
    with pytest.raises(simulator.SimulatorError, match=r"test:5\n.*test:7"):
        launch(source, [], (64,), threads=64)


def test_simdgroup_operation_in_a_branch_is_reported():
    source = """
    uint i = thread_index_in_threadgroup;
    float x = a[i];
    if (i < 16) x = simd_sum(x);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = x;
    """
    message = r"threads 0-15 wait at simd_sum.*test:4\n  threads 16-31 wait at thread"
    with pytest.raises(simulator.SimulatorError, match=message):
        launch(source, [A], (32,))


def test_matrix_product_by_a_partial_simdgroup_is_reported():
    source = """
    simdgroup_matrix<float, 8, 8> x(1.0f);
    simdgroup_multiply_accumulate(x, x, x, x);
    out[thread_index_in_simdgroup] = 0.0f;
    """
    with pytest.raises(simulator.SimulatorError, match="without all its 32 lanes"):
        launch(source, [], (31,), threads=31, header=MATRIX_HEADER)


def test_too_much_threadgroup_memory_is_reported():
    source = """
    threadgroup float x[8192], y[4];
    x[thread_index_in_threadgroup] = y[0];
    """
    with pytest.raises(
        simulator.SimulatorError, match=r"32784 bytes .* y; Metal allows"
    ):
        launch(source, [], (1,))


def test_too_many_threads_are_reported():
    source = "out[thread_index_in_threadgroup] = 0.0f;"
    with pytest.raises(
        simulator.SimulatorError, match="1025 threads; Metal allows 1024"
    ):
        launch(source, [], (1,), threads=1025)


def test_too_many_buffers_are_reported():
    names = [f"x{i}" for i in range(31)]
    kernel = simulator.metal_kernel(
        "wide", names, ["out"], "out[thread_position_in_grid.x] = x0[0];"
    )
    with pytest.raises(simulator.SimulatorError, match="takes 32 buffers"):
        kernel(
            inputs=[A] * 31,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )


def test_compile_error_shows_the_kernels_own_line():
    source = "uint i = thread_position_in_grid.x;\nout[i] = no_such_function(a[i]);"
    message = r"source of test:2: .*no_such_function.*\n    out\[i\] = no_such"
    with pytest.raises(simulator.SimulatorError, match=message):
        launch(source, [A], (64,), threads=64)


def test_compile_error_in_a_header_with_line_directives_names_its_file():
    header = '#line 7 "helper.h"\ninline float twice(float x) { return 2.0f * y; }\n'
    source = "out[thread_position_in_grid.x] = twice(a[0]);"
    with pytest.raises(simulator.SimulatorError, match=r"helper\.h:7: .*'?y'?"):
        launch(source, [A], (64,), threads=64, header=header)


def test_tracing_by_compile_is_refused_with_advice():
    def double(a):
        return launch("out[thread_position_in_grid.x] = 2.0f * a[0];", [a], (1,))

    with pytest.raises(simulator.SimulatorError, match=r"mx\.compile.*'reference'"):
        mx.compile(double)(A)
