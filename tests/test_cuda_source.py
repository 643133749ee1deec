"""The CUDA kernels compile with all bodies, fit and do not spill: nvcc, no GPU."""

import re
import shutil
import subprocess
from dataclasses import replace

import mlx.core as mx
import pytest

from instances import EVERYTHING, calls, problem
from mlx_flash.kernel_files import read_header
from mlx_flash.launch import KernelCall, cuda_header, cuda_source, scratch_places

ELEMENTS = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.bool_: "bool",
}
HEAD_DIMS = [(48, 48), (64, 64), (128, 128), (256, 256), (96, 33)]
SHARED_BYTES_LIMIT = 227 * 1024
REGISTERS = 65536  # of a multiprocessor; a launch that needs more fails

# What MLX puts before a kernel. Its compiler takes functions for device functions; nvcc
# must be told, in a spelling that survives the kernels' definition of `device`.
PRELUDE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#undef __device__
#define inline __attribute__((__device__)) inline
struct Steps {
  long step[10];
  inline const long& operator[](int axis) const { return step[axis]; }
};
"""


def kernel_text(call: KernelCall, name: str) -> str:
    """The function that MLX generates around the source of a call."""
    kernel = call.kernel
    source = cuda_source(kernel)
    parameters = []
    for input_name, array in zip(kernel.inputs, call.inputs, strict=True):
        parameters.append(f"const {ELEMENTS[array.dtype]}* {input_name}")
        if f"{input_name}_strides" in source:
            parameters.append(f"const __grid_constant__ Steps {input_name}_strides")
    for output_name, dtype in zip(kernel.outputs, call.dtypes, strict=True):
        parameters.append(f"{ELEMENTS[dtype]}* {output_name}")
    constants = []
    for parameter, value in (*kernel.template, *kernel.more_template):
        if isinstance(value, mx.Dtype):
            constants.append(f"using {parameter} = {ELEMENTS[value]};")
        elif isinstance(value, bool):
            constants.append(f"constexpr bool {parameter} = {str(value).lower()};")
        else:
            constants.append(f"constexpr int {parameter} = {value};")
    body = "\n".join([*constants, source])
    return f"__global__ void {name}({', '.join(parameters)}) {{\n{body}\n}}\n"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("D", "DV"), HEAD_DIMS, ids="D{}".format)
@pytest.mark.parametrize("features", [{"high": 0}, EVERYTHING], ids=["causal", "all"])
@pytest.mark.parametrize(
    ("dtype", "precise"),
    [
        (mx.float32, False),
        (mx.float32, True),
        (mx.float16, False),
        (mx.bfloat16, False),
    ],
    ids=["tf32", "float32", "float16", "bfloat16"],
)
def test_kernels_compile_for_cuda(
    tmp_path, dtype, precise, D, DV, features, architecture
):
    gpu = "cuda_precise" if precise else "cuda"
    all_calls = list(calls(problem(D, DV, dtype, gpu=gpu, **features)))
    stems = dict.fromkeys(s for call in all_calls for s in call.kernel.headers)
    kernel = replace(all_calls[0].kernel, headers=tuple(stems))
    text = PRELUDE + cuda_header(kernel)
    for index, call in enumerate(all_calls):
        text += kernel_text(call, f"{call.kernel.name}_{index}")
    (tmp_path / "kernels.cu").write_text(text, encoding="ascii")
    command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    result = subprocess.run(
        [*command, "kernels.cu", "-o", "kernels.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    # ptxas reports the functions in an order of its own
    used = {
        int(index): (int(registers), int(spills))
        for index, spills, registers in re.findall(
            r"Function properties for \w*attention_[a-z]+_(\d+)\D.*?(\d+) bytes spill "
            r"stores.*?Used (\d+) registers",
            result.stderr,
            re.S,
        )
    }
    assert len(used) == len(all_calls)
    for index, call in enumerate(all_calls):
        registers, spills = used[index]
        kernel = call.kernel
        assert -(-registers // 8) * 8 * kernel.threads <= REGISTERS, kernel.name
        # what the tiles are chosen for
        is_tuned = kernel.name != "attention_dmask" and "low" not in features
        if architecture == "sm_90a" and not precise and is_tuned:
            assert spills <= 32, kernel.name


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("D", [1, 16, 40, 64, 96, 128, 160, 192, 256], ids="D{}".format)
def test_threadgroup_memory_fits_a_hopper_multiprocessor(D, dtype):
    for call in calls(problem(D, D, dtype, gpu="cuda", **EVERYTHING)):
        assert scratch_places(call.kernel)[1] <= SHARED_BYTES_LIMIT


def test_tile_headers_declare_the_same_constants():
    for name in ("AHEAD", "SLOTS", "IN_ABT", "IN_AB", "FINITE"):
        for gpu in ("metal", "cuda"):
            assert re.search(rf"\b{name} = ", read_header(gpu, "tile"))
