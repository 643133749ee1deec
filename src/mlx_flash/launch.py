"""Runs a kernel: assembles its text, sends it to Metal, CUDA or the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypedDict, cast

import mlx.core as mx

from mlx_flash import tiles
from mlx_flash.kernel_files import read_header

if TYPE_CHECKING:
    from typing_extensions import Unpack

TemplateValue = int | bool | mx.Dtype
Template = tuple[tuple[str, TemplateValue], ...]


@dataclass(frozen=True)
class Scratch:
    """A threadgroup array.

    Attributes:
        name: In the source.
        rows: Names of constants; their product is the number of rows.
        columns: ``"D"`` or ``"DV"``: rows of so many columns of type T, or ``""``: one
            float a row.
    """

    name: str
    rows: tuple[str, ...]
    columns: str = ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """The text of a kernel, whatever shapes it runs. Compared by identity.

    Attributes:
        name: Of the kernel; also the stem of its header and its template function.
        headers: Stems of the headers it needs, in order.
        scratch: Its threadgroup arrays.
        arguments: What the template function is called with, as source text.
        inputs: Names of the input arrays, as ``arguments`` calls them.
        outputs: Names of the results.
        template: Template arguments of the function, in order.
        more_template: Those that only the text of ``arguments`` needs.
        gpu: Whose tiles it has, a key of ``tiles.TABLES``.
        threads: Threads of a threadgroup.
        longest_last: Along x, later threadgroups have more to do.
    """

    name: str
    headers: tuple[str, ...]
    scratch: tuple[Scratch, ...]
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: Template
    gpu: str
    threads: int
    more_template: Template = ()
    longest_last: bool = False


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel.

    Attributes:
        kernel: The kernel.
        inputs: Arrays, in the order of its names.
        shapes: Of each output.
        dtypes: Of each output.
        groups: Threadgroups along x, y, z.
    """

    kernel: Kernel
    inputs: list[mx.array]
    shapes: list[tuple[int, ...]]
    dtypes: list[mx.Dtype]
    groups: tuple[int, int, int]


class LaunchArguments(TypedDict):
    """Arguments of a launch besides the inputs; the grid counts threads."""

    template: list[tuple[str, TemplateValue]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


class CompiledKernel(Protocol):
    """What ``mx.fast.metal_kernel`` and ``simulator.metal_kernel`` return."""

    def __call__(
        self, *, inputs: list[mx.array], **arguments: Unpack[LaunchArguments]
    ) -> list[mx.array]:
        """Launch."""
        ...


def metal_source(kernel: Kernel) -> str:
    """The body: threadgroup arrays, which Metal wants at kernel scope, and one call."""
    arrays = []
    for array in kernel.scratch:
        kind, length = "float", " * ".join(array.rows)
        if array.columns:
            stride = f"RowStride<T, Width<{array.columns}, DS>::value>"
            kind, length = "T", f"{length} * {stride}::value"
        if scratch_rows(kernel, array) == 0:  # nobody uses it, but it needs a size
            length = "1"
        arrays.append(f"threadgroup {kind} {array.name}[{length}];")
    return "\n".join([*arrays, metal_worker(kernel), function_call(kernel)])


def metal_worker(kernel: Kernel) -> str:
    """Who runs; the attributes must be named in the body, since MLX scans only that."""
    simd = "int(simdgroup_index_in_threadgroup)"
    parts = "DS" if "DS" in dict(kernel.template) else "1"
    return (
        "const Worker at = {int(thread_index_in_threadgroup), "
        f"{simd} / {parts}, {simd} % {parts}, int(thread_index_in_simdgroup), "
        "int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y), "
        "int(threadgroup_position_in_grid.z)};"
    )


def cuda_source(kernel: Kernel) -> str:
    """The body: one dynamic array, cut into the threadgroup arrays, and one call."""
    places, _ = scratch_places(kernel)
    arrays = []
    for array, place in zip(kernel.scratch, places, strict=True):
        kind = "T" if array.columns else "float"
        arrays.append(
            f"{kind}* {array.name} = reinterpret_cast<{kind}*>(scratch + {place});"
        )
    block = "gridDim.x - 1 - blockIdx.x" if kernel.longest_last else "blockIdx.x"
    worker = (
        "const Worker at = {int(threadIdx.x), "
        "int(__shfl_sync(~0u, threadIdx.x / 32, 0)), 0, int(threadIdx.x % 32), "
        f"int({block}), int(blockIdx.y), int(blockIdx.z)}};"
    )
    declaration = f"extern __shared__ __align__({SCRATCH_ALIGNMENT}) char scratch[];"
    return "\n".join([declaration, *arrays, worker, function_call(kernel)])


def function_call(kernel: Kernel) -> str:
    """The call of the kernel's template function."""
    template = ", ".join(name for name, _ in kernel.template)
    function = f"{kernel.name}<{template}>" if template else kernel.name
    scratch = (array.name for array in kernel.scratch)
    arguments = ", ".join((*kernel.arguments, *scratch))
    return f"{function}({arguments}, at);"


SCRATCH_ALIGNMENT = 1024  # wgmma reads tiles whose swizzle repeats after 1024 bytes


def scratch_rows(kernel: Kernel, array: Scratch) -> int:
    """The number of rows of a threadgroup array."""
    constants = dict(kernel.template)
    if array.rows[0] == "DS" and constants["DS"] == 1:  # no parts of a sum to meet
        return 0
    constants["SLOTS"] = tiles.SLOTS[kernel.gpu]
    if array.columns:
        element = cast(mx.Dtype, constants["T"])
        constants["SLOTS"] = tiles.tile_slots(element.size, kernel.gpu)
    return math.prod(cast(int, constants[name]) for name in array.rows)


def scratch_places(kernel: Kernel) -> tuple[list[int], int]:
    """Where each threadgroup array starts in CUDA's one array, and its bytes."""
    template = dict(kernel.template)
    places, end = [], 0
    for array in kernel.scratch:
        places.append(end)
        size = 4 * scratch_rows(kernel, array)
        if array.columns:
            element = cast(mx.Dtype, template["T"])
            width = tiles.width(cast(int, template[array.columns]), gpu=kernel.gpu)
            size = size // 4 * width * element.size
        end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return places, end


def run(call: KernelCall, backend: str) -> list[mx.array]:
    """Launch on ``"metal"``, ``"cuda"`` or ``"simulator"``; returns the outputs."""
    kernel = compiled_kernel(call.kernel, backend)
    return kernel(inputs=call.inputs, **launch_arguments(call))


def launch_arguments(call: KernelCall) -> LaunchArguments:
    """What a kernel is called with besides its inputs."""
    x, y, z = call.groups
    threads = call.kernel.threads
    return {
        "template": [*call.kernel.template, *call.kernel.more_template],
        "grid": (x * threads, y, z),
        "threadgroup": (threads, 1, 1),
        "output_shapes": call.shapes,
        "output_dtypes": call.dtypes,
    }


@cache
def compiled_kernel(kernel: Kernel, backend: str) -> CompiledKernel:
    """The kernel object of MLX or of the simulator."""
    if backend == "cuda":
        return cuda_kernel(kernel)
    make = cast(Callable[..., CompiledKernel], mx.fast.metal_kernel)
    if backend == "simulator":
        from mlx_flash import simulator  # needs more than the package's dependencies

        make = cast(Callable[..., CompiledKernel], simulator.metal_kernel)
    return make(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=metal_source(kernel),
        header=metal_header(kernel),
        ensure_row_contiguous=False,
    )


def metal_header(kernel: Kernel) -> str:
    """All headers of a kernel."""
    return "".join(read_header("metal", stem) for stem in kernel.headers)


# The headers of a kernel that CUDA replaces or adds to; the others are Metal's.
CUDA_HEADERS = {
    "common": (("cuda", "language"), ("metal", "common")),
    "tile": (("cuda", "wgmma"), ("cuda", "tile")),
}


def cuda_header(kernel: Kernel) -> str:
    """All headers of a kernel, and how many products a float32 product is made of."""
    files = [
        file
        for stem in kernel.headers
        for file in CUDA_HEADERS.get(stem, (("metal", stem),))
    ]
    text = "".join(read_header(*file) for file in files)
    terms = 3 if kernel.gpu == "cuda_precise" else 1
    return f"#define FLOAT_TERMS {terms}\n{text}"


def cuda_kernel(kernel: Kernel) -> CompiledKernel:
    """The same for CUDA, where the size of threadgroup memory belongs to the kernel."""
    make = cast(Callable[..., CompiledKernel], mx.fast.cuda_kernel)
    _, scratch_bytes = scratch_places(kernel)
    return make(
        name=f"{kernel.name}_{kernel.gpu}",  # MLX may look at the name only
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=cuda_source(kernel),
        header=cuda_header(kernel),
        ensure_row_contiguous=False,
        shared_memory=scratch_bytes,
    )
