"""``metal_kernel``: takes MLX's own generated text, compiles it, runs it on the CPU."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_flash.simulator.compiler import build, load
from mlx_flash.simulator.errors import SimulatorError

GUARD_BYTES = 4096
ALIGNMENT = 64
POISON = 0xFF
MESSAGE_BYTES = 8192
BUFFERS_LIMIT = 31
THREADS_LIMIT = 1024

# numpy has no bfloat16: those arrays travel as their bits.
NUMPY_DTYPES = {
    mx.bool_: np.bool_,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.float32: np.float32,
}


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
) -> Callable[..., list[mx.array]]:
    """A kernel that runs on the CPU; the constructor of ``mx.fast.metal_kernel``.

    Args:
        name: Of the kernel, for messages.
        input_names: Parameter names of the inputs.
        output_names: Parameter names of the outputs.
        source: Body of the kernel.
        header: Text before the kernel: functions, includes.
        ensure_row_contiguous: Copy inputs that are not row-contiguous first.
        atomic_outputs: Not implemented yet.
        compile_options: As for MLX; the simulator's arithmetic is always the safe one.

    Returns:
        A callable with the call of MLX's kernels: ``inputs``, ``template``, ``grid``
        (in threads), ``threadgroup``, ``output_shapes``, ``output_dtypes``,
        ``init_value``, ``verbose``, ``stream``. It evaluates its inputs and returns
        evaluated arrays.

    Raises:
        NotImplementedError: ``atomic_outputs`` is set.
        SimulatorError: On a call, when the kernel does not compile or when it wrote
            out of bounds, diverged at a barrier or exceeded a limit of Metal.
    """
    if atomic_outputs:
        raise NotImplementedError("[simulator] atomic_outputs is not implemented yet")
    # older MLX does not know the argument
    options: dict[str, Any] = {}
    if compile_options is not None:
        options["compile_options"] = compile_options
    generator = mx.fast.metal_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        **options,
    )

    def call(
        *,
        inputs: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        del stream  # the CPU has one place to run
        n_threads = math.prod(threadgroup)
        if n_threads > THREADS_LIMIT:
            raise SimulatorError(
                f"[simulator] kernel {name!r} asks for threadgroups of {n_threads} "
                f"threads; Metal allows {THREADS_LIMIT}"
            )
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        evaluate(arrays, name)
        record = generated_kernel(
            generator,
            arrays,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            **({"template": list(template)} if template else {}),
        )
        text = record[1]
        if verbose:
            print(text)
        launch = compiled(name, source, text)
        return run(
            launch,
            arrays,
            shape_uses=record[8],
            row_contiguous=record[9],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            init_value=init_value,
        )

    return call


def evaluate(arrays: list[mx.array], name: str) -> None:
    """Evaluate the inputs, with advice where MLX forbids it."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        raise SimulatorError(
            f"[simulator] kernel {name!r} cannot run while MLX traces a function "
            "(mx.compile, mx.vmap): the simulator needs the values; call it without "
            "the transform, or use mlx_flash.use_backend('reference')"
        ) from error


def generated_kernel(
    generator: Any, arrays: list[mx.array], **call: Any
) -> Sequence[Any]:
    """The arguments of MLX's CustomKernel primitive: text, grid, what it would bind.

    MLX writes the kernel's text while a function is exported, on any machine. Inputs of
    the same shape and dtype stand in for the real ones.
    """
    records: list[dict[str, Any]] = []
    mx.export_function(
        records.append,
        lambda *inputs: tuple(generator(inputs=list(inputs), **call)),
        *arrays,
    )
    for record in records:
        if record["type"] == "primitive" and record["name"] == "CustomKernel":
            return record["arguments"]  # type: ignore[no-any-return]
    raise SimulatorError("[simulator] MLX did not generate a kernel")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel function: a buffer, or a position in the grid."""

    name: str
    attribute: str
    is_reference: bool

    @property
    def argument(self) -> str:
        """C++ text that passes it."""
        buffer = re.fullmatch(r"buffer\((\d+)\)", self.attribute)
        if not buffer:
            return f"simulator::{self.attribute}(lane)"
        kind = "Reference" if self.is_reference else "Pointer"
        return f"simulator::{kind}Argument{{buffers[{buffer[1]}]}}"


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as a shared library."""

    name: str
    parameters: tuple[Parameter, ...]
    library: ctypes.CDLL


@cache
def compiled(name: str, source: str, text: str) -> CompiledKernel:
    """Compile a generated text, once per process."""
    parameters = parse_parameters(text)
    n_buffers = sum(p.attribute.startswith("buffer") for p in parameters)
    if n_buffers > BUFFERS_LIMIT:
        raise SimulatorError(
            f"[simulator] kernel {name!r} takes {n_buffers} buffers; "
            f"Metal allows {BUFFERS_LIMIT}"
        )
    library = build(program(name, source, text, parameters), name)
    return CompiledKernel(name, parameters, load(library))


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters of the kernel function in MLX's generated text."""
    signature = re.search(r"\[\[kernel\]\] void \w+\(\n(.*?)\) \{\n", text, re.S)
    if not signature:
        raise SimulatorError(f"[simulator] no kernel function in the text:\n{text}")
    found = re.findall(r"([&*]?) ?(\w+) \[\[(.+?)\]\],?\n?", signature[1])
    return tuple(Parameter(name, what, mark == "&") for mark, name, what in found)


def program(
    name: str, source: str, text: str, parameters: tuple[Parameter, ...]
) -> str:
    """The C++ program: Metal's words, the kernel, and a function that launches it."""
    # `constant` is C++'s const, which must not be said twice
    text = re.sub(r"\bconst constant\b|\bconstant const\b", "constant", text)
    before, after = text.split(source, 1)
    instance = re.search(r"decltype\((.+?)\) ", after)
    function = instance[1] if instance else re.search(r"void (\w+)\(\n", before)[1]  # type: ignore[index]
    after = re.sub(r"^template \[\[host_name.*$", "", after, flags=re.M)
    arguments = ", ".join(parameter.argument for parameter in parameters)
    return f"""\
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#line 1 "header of {name}"
{share_threadgroup_arrays(before)}
#line 1 "source of {name}"
{share_threadgroup_arrays(source)}
#line 1 "end of {name}"
{after}
static void run_kernel(void* const* buffers, const simulator::Lane& lane) {{
  {function}({arguments});
}}
SIMULATOR_ENTRY(run_kernel)
"""


def share_threadgroup_arrays(text: str) -> str:
    """Turn ``threadgroup`` variables into references to storage that a group shares.

    A C++ compiler would give each fiber its own. Pointers to threadgroup memory are
    ordinary variables and stay as they are.
    """
    declarator = r"(\w+)\s*((?:\[[^\]]*\]\s*)*)"
    declaration = re.compile(
        r"\bthreadgroup\s+([\w:]+(?:\s*<[^;{}()]*>)?)\s+"
        rf"({declarator}(?:,\s*{declarator})*);"
    )
    count = 0

    def rewrite(match: re.Match[str]) -> str:
        nonlocal count
        result = []
        for name, dimensions in re.findall(declarator, match[2]):
            result.append(
                f"auto& {name} = simulator::threadgroup_memory<{match[1]}{dimensions}>"
                f'({count}, "{name}");'
            )
            count += 1
        return " ".join(result)

    return declaration.sub(rewrite, text)


class GuardedBuffer:
    """Memory of one array between two guard zones, aligned as a GPU's buffers are."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        total = n_bytes + 2 * GUARD_BYTES + ALIGNMENT
        self.memory = np.full(total, POISON, np.uint8)
        address = self.memory.ctypes.data
        self.start = GUARD_BYTES + (-(address + GUARD_BYTES)) % ALIGNMENT

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes between the guards."""
        return self.memory[self.start : self.start + self.n_bytes]

    def damage(self) -> int | None:
        """Offset of the first changed guard byte from the array's start, or None."""
        changed = self.memory != POISON
        changed[self.start : self.start + self.n_bytes] = False
        first = changed.argmax()
        return int(first) - self.start if changed[first] else None


def run(
    kernel: CompiledKernel,
    arrays: list[mx.array],
    *,
    shape_uses: Sequence[tuple[bool, bool, bool]],
    row_contiguous: bool,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None,
) -> list[mx.array]:
    """One launch: guarded copies of the arrays, the kernel, the checks afterwards."""
    addresses: list[int] = []
    keep: list[Any] = []
    guarded: list[tuple[str, GuardedBuffer]] = []
    buffers = [p.name for p in kernel.parameters if p.attribute.startswith("buffer")]

    def bind(buffer: GuardedBuffer, offset: int = 0) -> None:
        addresses.append(buffer.data.ctypes.data + offset)
        guarded.append((buffers[len(addresses) - 1], buffer))

    for array, (use_shape, use_strides, use_ndim) in zip(
        arrays, shape_uses, strict=True
    ):
        view = numpy_view(array)
        if row_contiguous:
            view = np.ascontiguousarray(view)
        bind(*guarded_copy(view))
        strides = [step // view.itemsize for step in view.strides]
        for used, numbers in (
            (use_shape, np.array(view.shape, np.int32)),
            (use_strides, np.array(strides, np.int64)),
            (use_ndim, np.array(view.ndim, np.int32)),
        ):
            if used and array.ndim:
                keep.append(numbers)
                addresses.append(numbers.ctypes.data)

    outputs = []
    for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
        item = np.dtype(NUMPY_DTYPES[dtype])
        buffer = GuardedBuffer(int(np.prod(shape, dtype=np.int64)) * item.itemsize)
        result = buffer.data.view(item).reshape(shape)
        if init_value is not None:
            result[...] = numpy_view(mx.array(init_value).astype(dtype))
        bind(buffer)
        outputs.append(result)

    call_library(kernel, addresses, grid, threadgroup)
    for name, buffer in guarded:
        damage = buffer.damage()
        if damage is not None:
            where = "after its end" if damage >= 0 else "before its start"
            raise SimulatorError(
                f"[simulator] kernel {kernel.name!r} wrote outside buffer {name!r} "
                f"({buffer.n_bytes} bytes): at byte {damage}, {where}"
            )
    return [
        mx.array(result).view(dtype) if dtype == mx.bfloat16 else mx.array(result)
        for result, dtype in zip(outputs, output_dtypes, strict=True)
    ]


def call_library(
    kernel: CompiledKernel,
    addresses: list[int],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> None:
    """Run the grid; raise what the machine reports."""
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    failed = kernel.library.simulator_launch(
        (ctypes.c_void_p * len(addresses))(*addresses),
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(
            *(min(g, t) for g, t in zip(grid, threadgroup, strict=True))
        ),
        message,
        ctypes.c_size_t(MESSAGE_BYTES),
    )
    if failed:
        raise SimulatorError(
            f"[simulator] kernel {kernel.name!r} {message.value.decode()}"
        )


def numpy_view(array: mx.array) -> npt.NDArray[Any]:
    """The array's own memory, with its strides."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits, copy=False)


def guarded_copy(view: npt.NDArray[Any]) -> tuple[GuardedBuffer, int]:
    """The bytes that a view spans, between guards, and where its first element is."""
    if view.size == 0:
        return GuardedBuffer(0), 0
    low, high = np.lib.array_utils.byte_bounds(view)
    buffer = GuardedBuffer(high - low)
    buffer.data[:] = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (high - low)).from_address(low)
    )
    return buffer, view.ctypes.data - low
