"""The CUDA kernels compile with all bodies, fit and do not spill: nvcc, no GPU."""

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product

import mlx.core as mx
import pytest

from instances import DTYPES, EVERYTHING, calls, problem
from mlx_flash import tiles
from mlx_flash.kernel_files import read_header
from mlx_flash.launch import KernelCall, cuda_header, cuda_source, scratch_places

ELEMENTS = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.bool_: "bool",
}
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


# One file of all kernels each: what the tiles are tuned for, whose registers must not
# spill; then everything at once, and the products of GPUs without wgmma.
TUNED = [
    *product(["sm_90a"], ["cuda"], DTYPES, [(64, 64), (128, 128)], ["causal"]),
    ("sm_90a", "cuda", mx.bfloat16, (256, 256), "causal"),
    ("sm_90a", "cuda_precise", mx.float32, (64, 64), "causal"),
    ("sm_90a", "cuda_precise", mx.float32, (128, 128), "causal"),
]
OTHERS = [
    *product(["sm_90a"], ["cuda"], DTYPES, [(96, 33)], ["all"]),
    *product(["sm_90a"], ["cuda"], DTYPES, [(64, 64), (128, 128)], ["no array"]),
    ("sm_90a", "cuda", mx.bfloat16, (256, 256), "no array"),
    ("sm_90a", "cuda_precise", mx.float32, (128, 128), "no array"),
    ("sm_90a", "cuda", mx.float32, (256, 256), "causal"),
    ("sm_80", "cuda", mx.float32, (64, 64), "causal"),
    ("sm_80", "cuda", mx.bfloat16, (128, 128), "causal"),
    ("sm_80", "cuda_precise", mx.float32, (48, 48), "all"),
]
NO_ARRAY = {"low": -40, "high": 0, "segments": True, "sinks": True}
FEATURES = {"causal": {"high": 0}, "no array": NO_ARRAY, "all": EVERYTHING}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("case", [*TUNED, *OTHERS], ids=str)
def test_kernels_compile_for_cuda(tmp_path, case):
    architecture, gpu, dtype, (D, DV), features = case
    all_calls = list(calls(problem(D, DV, dtype, gpu=gpu, **FEATURES[features])))
    stems = dict.fromkeys(s for call in all_calls for s in call.kernel.headers)
    kernel = replace(all_calls[0].kernel, headers=tuple(stems))
    text = PRELUDE + cuda_header(kernel)
    for index, call in enumerate(all_calls):
        text += kernel_text(call, f"kernel_{index}")
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
            r"Function properties for \w*kernel_(\d+)\D.*?(\d+) bytes spill "
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
        if case in TUNED:
            assert spills <= 32, kernel.name


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("D", [1, 16, 40, 64, 96, 128, 160, 192, 256], ids="D{}".format)
def test_threadgroup_memory_fits_a_hopper_multiprocessor(D, dtype):
    for call in calls(problem(D, D, dtype, gpu="cuda", **EVERYTHING)):
        assert scratch_places(call.kernel)[1] <= tiles.SHARED_BYTES_LIMIT


def test_tile_headers_declare_the_same_constants():
    for name in ("AHEAD", "SLOTS", "IN_ABT", "IN_AB", "FINITE"):
        for gpu in ("metal", "cuda"):
            assert re.search(rf"\b{name} = ", read_header(gpu, "tile"))
