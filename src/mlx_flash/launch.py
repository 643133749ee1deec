"""Runs a kernel call: assembles its text and sends it to Metal or to the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypedDict, cast

import mlx.core as mx

from mlx_flash.kernel_files import read_header

if TYPE_CHECKING:
    from typing_extensions import Unpack

TemplateValue = int | bool | mx.Dtype


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel of ``metal/``, on whatever runs it.

    Attributes:
        name: Of the kernel; also the stem of its header and its template function.
        headers: Stems of the headers it needs, in order.
        scratch: Threadgroup arrays ``(element type, name, length)``; the length is an
            expression of the template parameters.
        arguments: What the template function is called with, as source text.
        inputs: Arrays by the name that ``arguments`` calls them.
        template: Template arguments of the function, in order.
        outputs: ``(name, shape, dtype)`` of each result.
        groups: Threadgroups along x, y, z.
        threads: Threads of a threadgroup.
    """

    name: str
    headers: tuple[str, ...]
    scratch: tuple[tuple[str, str, str], ...]
    arguments: tuple[str, ...]
    inputs: dict[str, mx.array]
    template: tuple[tuple[str, TemplateValue], ...]
    outputs: tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]
    groups: tuple[int, int, int]
    threads: int


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
    arrays = [f"threadgroup {kind} {name}[{n}];" for kind, name, n in call.scratch]
    template = ", ".join(name for name, _ in call.template)
    function = f"{call.name}<{template}>" if template else call.name
    arguments = ", ".join((*call.arguments, *(name for _, name, _ in call.scratch)))
    return "\n".join([*arrays, WORKER, f"{function}({arguments}, at);"])


def run(call: KernelCall, backend: str) -> list[mx.array]:
    """Launch on ``"metal"`` or ``"simulator"``; returns the outputs."""
    return kernel_object(call, backend)(
        inputs=list(call.inputs.values()), **launch_arguments(call)
    )


def kernel_object(call: KernelCall, backend: str) -> Kernel:
    """The kernel that a call launches."""
    names = tuple(call.inputs), tuple(name for name, _, _ in call.outputs)
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
