"""The text that MLX hands to Metal, for every instance: buffers, address spaces."""

import re

import mlx.core as mx
import pytest

from instances import calls, instances, name_of
from mlx_flash import tiles
from mlx_flash.launch import KernelCall, kernel_object, launch_arguments
from mlx_flash.simulator.program import generated_kernel, parse_parameters
from mlx_flash.simulator.strict import check_text

STRIDED = {
    "attention_forward": ["q", "k", "v"],
    "attention_delta": ["out", "dout", "dlse"],
    "attention_dq": ["q", "k", "v", "dout", "lse", "delta"],
    "attention_dkv": ["q", "k", "v", "dout", "lse", "delta"],
}


def text_of(call: KernelCall) -> str:
    kernel = kernel_object(call, "metal")
    inputs = list(call.inputs.values())
    return generated_kernel(kernel, inputs, **launch_arguments(call))[1]


def signature_of(call: KernelCall) -> str:
    return re.search(r"\[\[kernel\]\] void \w+\((.*?)\) \{\n", text_of(call), re.S)[1]


@pytest.mark.parametrize("call", instances(), ids=name_of)
def test_instance_binds_its_arrays_and_the_strides_it_reads(call):
    parameters = parse_parameters(text_of(call))
    buffers = [p.name for p in parameters if p.attribute.startswith("buffer")]
    expected = []
    for name in call.inputs:
        expected.append(name)
        if name in STRIDED[call.name]:
            expected.append(f"{name}_strides")
    assert buffers == expected + [name for name, _, _ in call.outputs]
    assert len(buffers) <= 31


@pytest.mark.parametrize("call", instances(), ids=name_of)
def test_instance_text_is_ascii_and_uses_an_attribute(call):
    text = text_of(call)
    assert text.isascii()
    assert "[[threadgroup_position_in_grid]]" in signature_of(call)
    assert "double" not in re.sub(r"//.*", "", text)


@pytest.mark.parametrize("call", instances(), ids=name_of)
def test_instance_is_strict_msl(call):
    assert check_text(text_of(call), name=call.name) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_statistics_of_one_row_arrive_in_device_memory(dtype):
    for call in calls(16, dtype, True, B=1, H=1, T=1):
        signature = signature_of(call)
        for name in {"lse", "delta", "dlse"} & set(call.inputs):
            assert f"const device float* {name} " in signature


def test_lengths_and_batch_do_not_change_the_text():
    few = [text_of(c) for c in calls(32, mx.float16, True, B=1, H=4, T=64)]
    many = [text_of(c) for c in calls(32, mx.float16, True, B=3, H=8, T=777)]
    assert few == many


def test_every_instance_has_its_own_name():
    names = [name_of(call) for call in instances()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("row", "tile"), tiles.TABLE.items(), ids=str)
def test_tile_fits_in_registers_and_threadgroup_memory(row, tile):
    kernel, D, element_bytes = row
    registers = tiles.fragment_registers(kernel, tile, D, element_bytes)
    assert registers <= tiles.REGISTERS_LIMIT
    bytes_needed = tiles.threadgroup_bytes(kernel, tile, D, element_bytes)
    assert bytes_needed <= tiles.THREADGROUP_BYTES_LIMIT


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("D", tiles.HEAD_DIMS)
def test_row_stride_is_an_odd_multiple_of_16_bytes(D, element_bytes):
    stride = tiles.row_stride(D, element_bytes) * element_bytes
    assert stride >= D * element_bytes
    assert stride % 32 == 16
