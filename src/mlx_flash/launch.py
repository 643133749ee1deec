"""Runs a kernel call: assembles its text, sends it to Metal, CUDA or the simulator."""

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


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel, on whatever runs it.

    Attributes:
        name: Of the kernel; also the stem of its header and its template function.
        headers: Stems of the headers it needs, in order.
        scratch: Threadgroup arrays ``(element type, name, rows)``; the number of rows
            is the product of named constants; a row has D elements of type T, or one
            float.
        arguments: What the template function is called with, as source text.
        inputs: Arrays by the name that ``arguments`` calls them.
        template: Template arguments of the function, in order.
        outputs: ``(name, shape, dtype)`` of each result.
        groups: Threadgroups along x, y, z.
        threads: Threads of a threadgroup.
        longest_last: Along x, later threadgroups have more to do.
    """

    name: str
    headers: tuple[str, ...]
    scratch: tuple[tuple[str, str, tuple[str, ...]], ...]
    arguments: tuple[str, ...]
    inputs: dict[str, mx.array]
    template: tuple[tuple[str, TemplateValue], ...]
    outputs: tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]
    groups: tuple[int, int, int]
    threads: int
    longest_last: bool = False


class LaunchArguments(TypedDict):
    """Arguments of a launch besides the inputs; the grid counts threads."""

    template: list[tuple[str, TemplateValue]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


class Kernel(Protocol):
    """What ``mx.fast.metal_kernel`` and ``simulator.metal_kernel`` return."""

    def __call__(
        self, *, inputs: list[mx.array], **arguments: Unpack[LaunchArguments]
    ) -> list[mx.array]:
        """Launch."""
        ...


# The attributes must be named in the body itself: MLX scans it, not the headers.
WORKER = (
    "const Worker at = {int(thread_index_in_threadgroup), "
    "int(simdgroup_index_in_threadgroup), int(thread_index_in_simdgroup), "
    "int(threadgroup_position_in_grid.x), int(threadgroup_position_in_grid.y), "
    "int(threadgroup_position_in_grid.z)};"
)


def metal_source(call: KernelCall) -> str:
    """The body: threadgroup arrays, which Metal wants at kernel scope, and one call."""
    row = {"T": ("RowStride<T, D>::value",), "float": ()}
    arrays = []
    for kind, name, rows in call.scratch:
        empty = scratch_rows(call, rows, "metal") == 0
        length = "RowStride<T, D>::CHUNK" if empty else " * ".join((*rows, *row[kind]))
        arrays.append(f"threadgroup {kind} {name}[{length}];")
    return "\n".join([*arrays, WORKER, function_call(call)])


def cuda_source(call: KernelCall) -> str:
    """The body: one dynamic array, cut into the threadgroup arrays, and one call."""
    places, _ = scratch_places(call)
    arrays = [
        f"{kind}* {name} = reinterpret_cast<{kind}*>(scratch + {place});"
        for (kind, name, _), place in zip(call.scratch, places, strict=True)
    ]
    block = "gridDim.x - 1 - blockIdx.x" if call.longest_last else "blockIdx.x"
    worker = (
        "const Worker at = {int(threadIdx.x), "
        "int(__shfl_sync(~0u, threadIdx.x / 32, 0)), int(threadIdx.x % 32), "
        f"int({block}), int(blockIdx.y), int(blockIdx.z)}};"
    )
    declaration = f"extern __shared__ __align__({SCRATCH_ALIGNMENT}) char scratch[];"
    return "\n".join([declaration, *arrays, worker, function_call(call)])


def function_call(call: KernelCall) -> str:
    """The call of the kernel's template function."""
    template = ", ".join(name for name, _ in call.template)
    function = f"{call.name}<{template}>" if template else call.name
    arguments = ", ".join((*call.arguments, *(name for _, name, _ in call.scratch)))
    return f"{function}({arguments}, at);"


SCRATCH_ALIGNMENT = 1024  # wgmma reads tiles whose swizzle repeats after 1024 bytes


def scratch_rows(call: KernelCall, rows: tuple[str, ...], gpu: str) -> int:
    """The number of rows of a threadgroup array."""
    constants = {"SLOTS": tiles.SLOTS[gpu]} | dict(call.template)
    return math.prod(cast(int, constants[name]) for name in rows)


def scratch_places(call: KernelCall) -> tuple[list[int], int]:
    """Where each threadgroup array starts in CUDA's one array, and its bytes."""
    template = dict(call.template)
    places, end = [], 0
    for kind, _, rows in call.scratch:
        places.append(end)
        size = 4 * scratch_rows(call, rows, "cuda")
        if kind == "T":
            element = cast(mx.Dtype, template["T"])
            size = size // 4 * cast(int, template["D"]) * element.size
        end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return places, end


def run(call: KernelCall, backend: str, precise: bool = False) -> list[mx.array]:
    """Launch on ``"metal"``, ``"cuda"`` or ``"simulator"``; returns the outputs.

    ``precise`` makes CUDA's float32 products exact to float32; elsewhere they are.
    """
    return kernel_object(call, backend, precise)(
        inputs=list(call.inputs.values()), **launch_arguments(call)
    )


def kernel_object(call: KernelCall, backend: str, precise: bool = False) -> Kernel:
    """The kernel that a call launches."""
    names = tuple(call.inputs), tuple(name for name, _, _ in call.outputs)
    if backend == "cuda":
        _, scratch_bytes = scratch_places(call)
        source = cuda_source(call)
        return cuda_kernel(
            call.name, *names, source, call.headers, precise, scratch_bytes
        )
    return metal_kernel(call.name, *names, metal_source(call), call.headers, backend)


def launch_arguments(call: KernelCall) -> LaunchArguments:
    """What a kernel is called with besides its inputs."""
    x, y, z = call.groups
    return {
        "template": list(call.template),
        "grid": (x * call.threads, y, z),
        "threadgroup": (call.threads, 1, 1),
        "output_shapes": [shape for _, shape, _ in call.outputs],
        "output_dtypes": [dtype for _, _, dtype in call.outputs],
    }


@cache
def metal_kernel(
    name: str,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    source: str,
    headers: tuple[str, ...],
    backend: str,
) -> Kernel:
    """The kernel object: one per text, for whatever shapes it runs."""
    if backend == "simulator":
        from mlx_flash import simulator  # needs more than the package's dependencies

        make = cast(Callable[..., Kernel], simulator.metal_kernel)
    else:
        make = cast(Callable[..., Kernel], mx.fast.metal_kernel)
    return make(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header="".join(read_header("metal", stem) for stem in headers),
        ensure_row_contiguous=False,
    )


# The headers of a kernel that CUDA replaces or adds to; the others are Metal's.
CUDA_HEADERS = {
    "common": (("cuda", "language"), ("metal", "common")),
    "tile": (("cuda", "wgmma"), ("cuda", "tile")),
}


def cuda_header(headers: tuple[str, ...], precise: bool) -> str:
    """All headers of a kernel, and how many products a float32 product is made of."""
    files = [
        file for stem in headers for file in CUDA_HEADERS.get(stem, (("metal", stem),))
    ]
    text = "".join(read_header(*file) for file in files)
    return f"#define FLOAT_TERMS {3 if precise else 1}\n{text}"


@cache
def cuda_kernel(
    name: str,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    source: str,
    headers: tuple[str, ...],
    precise: bool,
    scratch_bytes: int,
) -> Kernel:
    """The same for CUDA, where the size of threadgroup memory belongs to the kernel."""
    make = cast(Callable[..., Kernel], mx.fast.cuda_kernel)
    return make(
        name=f"{name}_precise" if precise else name,  # MLX may look at the name only
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=cuda_header(headers, precise),
        ensure_row_contiguous=False,
        shared_memory=scratch_bytes,
    )
