"""The text that MLX hands to Metal, for many instances: buffers, address spaces."""

import re

import mlx.core as mx
import pytest

from instances import EVERYTHING, calls, instances, name_of, problem
from mlx_flash import tiles
from mlx_flash.launch import KernelCall, compiled_kernel, launch_arguments
from mlx_flash.simulator import kernel as simulator_kernel
from mlx_flash.simulator.program import generated_kernel, parse_parameters
from mlx_flash.simulator.strict import check_text

EVERY_INSTANCE = pytest.mark.parametrize("call", instances(), ids=name_of)
STRIDED = {"q", "k", "v", "out", "dout", "lse", "dlse", "lse2", "delta", "mask"}
BUFFERS_LIMIT = simulator_kernel.BUFFERS_LIMIT


def text_of(call: KernelCall) -> str:
    kernel = compiled_kernel(call.kernel, "metal")
    return generated_kernel(kernel, call.inputs, **launch_arguments(call))[1]


def buffers_of(call: KernelCall) -> list[str]:
    parameters = parse_parameters(text_of(call))
    return [p.name for p in parameters if p.attribute.startswith("buffer")]


def signature_of(call: KernelCall) -> str:
    return re.search(r"\[\[kernel\]\] void \w+\((.*?)\) \{\n", text_of(call), re.S)[1]


def threadgroup_bytes(call: KernelCall) -> int:
    """Bytes of the threadgroup arrays, from the constants of the text."""
    constants = dict(call.kernel.template)
    total = 0
    for array in call.kernel.scratch:
        row_bytes = 4
        if array.columns:
            size = constants["T"].size
            width = tiles.width(constants[array.columns], constants["DS"])
            row_bytes = tiles.row_stride(width, size) * size
        rows = 1
        for name in array.rows:
            rows *= constants.get(name, 1)  # SLOTS is 1
        if array.rows[0] == "DS" and constants["DS"] == 1:
            rows = 0
        total += rows * row_bytes
    return total


@EVERY_INSTANCE
def test_instance_binds_its_arrays_and_the_strides_it_reads(call):
    expected = []
    for name in call.kernel.inputs:
        expected.append(name)
        if name in STRIDED:
            expected.append(f"{name}_strides")
    assert buffers_of(call) == [*expected, *call.kernel.outputs]


@EVERY_INSTANCE
def test_instance_fits_the_buffers_of_metal_and_its_threadgroup_memory(call):
    assert len(buffers_of(call)) <= BUFFERS_LIMIT
    assert threadgroup_bytes(call) <= tiles.THREADGROUP_BYTES_LIMIT
    assert call.kernel.threads <= simulator_kernel.THREADS_LIMIT


@EVERY_INSTANCE
def test_instance_text_is_ascii_and_uses_an_attribute(call):
    text = text_of(call)
    assert text.isascii()
    assert "[[threadgroup_position_in_grid]]" in signature_of(call)
    assert "double" not in re.sub(r"//.*", "", text)


@EVERY_INSTANCE
def test_instance_is_strict_msl(call):
    assert check_text(text_of(call), name=call.kernel.name) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_arrays_of_few_elements_arrive_in_device_memory(dtype):
    tiny = {"B": 1, "H": 1, "T": 1, "mask_shape": (1, 1, 1, 1)}
    for call in calls(problem(1, 1, dtype, **tiny, **EVERYTHING)):
        signature = signature_of(call)
        for name in set(call.kernel.inputs) - {"sizes", "numbers", "batches"}:
            assert re.search(rf"const device \w+\* {name} ", signature), name


def test_lengths_batch_heads_and_numbers_do_not_change_the_text():
    few = problem(32, 32, mx.float16, B=2, H=4, T=64, **EVERYTHING)
    changed = EVERYTHING | {"low": -99, "high": -1, "softcap": 3.0}
    many = problem(32, 32, mx.float16, B=3, H=8, T=777, **changed)
    assert [text_of(c) for c in calls(few)] == [text_of(c) for c in calls(many)]


def test_every_instance_has_its_own_name():
    names = [name_of(call) for call in instances()]
    assert len(set(names)) == len(names)


def test_mlx_gives_every_instance_its_own_name():
    """MLX forgets what it compiled when another text comes under the same name."""
    names = [
        re.search(r"\[\[kernel\]\] void (\w+)\(", text_of(call))[1]
        for call in instances()
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("row", "tile"), tiles.TABLE.items(), ids=str)
def test_tile_fits_in_registers_and_threadgroup_memory(row, tile):
    kernel, D, element_bytes = row
    registers = tiles.fragment_registers(kernel, tile, D, element_bytes)
    assert registers <= tiles.REGISTERS_LIMIT
    bytes_needed = tiles.threadgroup_bytes(kernel, tile, D, element_bytes)
    assert bytes_needed <= tiles.THREADGROUP_BYTES_LIMIT


def test_every_head_dim_has_a_tile_of_every_kernel():
    for size in (2, 4):
        for D in range(1, tiles.LARGEST_HEAD_DIM + 1):
            fused = tiles.fuses_dk_and_dv(D, size)
            for name in (
                "forward",
                "delta",
                "dq",
                *(["dkv"] if fused else ["dk", "dv"]),
            ):
                tile = tiles.tile(f"attention_{name}", D, size)
                assert tile.rows % (8 * tile.fragments) == 0


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("D", range(8, tiles.LARGEST_HEAD_DIM + 1, 8))
def test_row_stride_is_an_odd_multiple_of_16_bytes(D, element_bytes):
    stride = tiles.row_stride(D, element_bytes) * element_bytes
    assert stride >= D * element_bytes
    assert stride % 32 == 16
