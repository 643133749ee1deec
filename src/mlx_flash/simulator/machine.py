"""One launch of a compiled kernel: guarded memory, the call, what it reports."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_flash.simulator.checks import Options
from mlx_flash.simulator.compiler import build, load
from mlx_flash.simulator.errors import SimulatorError
from mlx_flash.simulator.locations import resolve

GUARD_BYTES = 4096
ALIGNMENT = 64
POISON = 0xFF
MESSAGE_BYTES = 8192

# The bits of `enum Check` in include/checks.h.
CHECK_BITS = {"race": 1, "bounds": 2, "uninitialised": 4}

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
    mx.complex64: np.complex64,
}


class Position(ctypes.Structure):
    """``simulator::Position``."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Buffer(ctypes.Structure):
    """``simulator::Buffer``."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("initialised", ctypes.c_int),
    )


class Launch(ctypes.Structure):
    """``simulator::Launch``; fields as in include/runtime.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("addresses", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(Buffer)),
        ("n_buffers", ctypes.c_uint),
        ("grid", Position),
        ("threadgroup", Position),
        ("lane_map", ctypes.c_char_p),
        ("seed", ctypes.c_uint64),
        ("host_threads", ctypes.c_uint),
        ("counters", ctypes.POINTER(ctypes.c_uint64)),
        ("checks", ctypes.c_uint),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_size_t),
        ("next_group", ctypes.c_uint),
        ("failed", ctypes.c_int),
    )


INPUT, OUTPUT, CONSTANT = 0, 1, 2  # Buffer.kind


class GuardedBuffer:
    """Memory of one array between two guard zones, aligned as a GPU's buffers are."""

    def __init__(
        self, name: str, n_bytes: int, kind: int, *, is_initialised: bool = True
    ) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self.kind = kind
        self.is_initialised = is_initialised
        self.memory = np.full(n_bytes + 2 * GUARD_BYTES + ALIGNMENT, POISON, np.uint8)
        address = self.memory.ctypes.data
        self.start = GUARD_BYTES + (-(address + GUARD_BYTES)) % ALIGNMENT

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes between the guards."""
        return self.memory[self.start : self.start + self.n_bytes]

    def damage(self) -> int | None:
        """Offset of the first changed guard byte from the array's start, or None."""
        for start, zone in (
            (0, self.memory[: self.start]),
            (self.start + self.n_bytes, self.memory[self.start + self.n_bytes :]),
        ):
            changed = zone != POISON
            if changed.any():
                return start + int(changed.argmax()) - self.start
        return None


@dataclass(frozen=True)
class Input:
    """An array that a kernel reads.

    Attributes:
        index: Of the buffer.
        name: Of the parameter.
        view: The values, in any strides.
        kind: INPUT or CONSTANT.
    """

    index: int
    name: str
    view: npt.NDArray[Any]
    kind: int


@dataclass(frozen=True)
class Output:
    """An array that a kernel writes.

    Attributes:
        index: Of the buffer.
        name: Of the parameter.
        shape: Its shape.
        dtype: Its dtype.
        initial: What it starts with, as NumPy stores the dtype; None: poison.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    initial: npt.NDArray[Any] | None


@dataclass(frozen=True)
class Work:
    """What a launch is to do, whatever the build it runs on.

    Attributes:
        name: The kernel's name.
        program: Its C++ program.
        inputs: What it reads.
        outputs: What it writes.
        grid: In threads.
        threadgroup: In threads.
    """

    name: str
    program: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def run(
    work: Work, kind: str, options: Options, *, seed: int = 0
) -> tuple[list[npt.NDArray[Any]], dict[str, int]]:
    """Launch; returns the outputs as NumPy arrays, and the counters of a checked build.

    Args:
        work: What to do.
        kind: Of the build, a key of ``compiler.BUILDS``.
        options: The lane map and the checks.
        seed: Of a shuffled schedule; 0 runs the lanes in order.

    Raises:
        SimulatorError: The kernel does not compile, or something was found.
    """
    indices = [x.index for x in work.inputs] + [x.index for x in work.outputs]
    addresses = [0] * (1 + max(indices, default=-1))
    buffers: list[GuardedBuffer] = []
    for argument in work.inputs:
        buffer, first = guarded_copy(argument.name, argument.view, argument.kind)
        buffers.append(buffer)
        addresses[argument.index] = buffer.data.ctypes.data + first
    results = []
    for output in work.outputs:
        item = np.dtype(NUMPY_DTYPES[output.dtype])
        n_bytes = int(np.prod(output.shape, dtype=np.int64)) * item.itemsize
        is_initialised = output.initial is not None
        buffer = GuardedBuffer(
            output.name, n_bytes, OUTPUT, is_initialised=is_initialised
        )
        result = buffer.data.view(item).reshape(output.shape)
        if output.initial is not None:
            result[...] = output.initial
        buffers.append(buffer)
        addresses[output.index] = buffer.data.ctypes.data
        results.append(result)

    counters = call_library(work, kind, options, seed, buffers, addresses)
    for buffer in buffers:
        damage = buffer.damage()
        if damage is not None:
            where = "after its end" if damage >= 0 else "before its start"
            raise SimulatorError(
                f"[simulator] kernel {work.name!r} wrote outside buffer "
                f"{buffer.name!r} ({buffer.n_bytes} bytes): at byte {damage}, {where}; "
                "run it with checks='bounds' to see the line"
            )
    return results, counters


def call_library(
    work: Work,
    kind: str,
    options: Options,
    seed: int,
    buffers: Sequence[GuardedBuffer],
    addresses: Sequence[int],
) -> dict[str, int]:
    """Run the grid; raise what the machine reports, return what it counted."""
    path = build(work.program, work.name, kind)
    library = load(path)
    is_checked = kind == "checked"
    names = counter_names(library) if is_checked else ()
    counters = (ctypes.c_uint64 * len(names))()
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    launch = Launch(
        addresses=(ctypes.c_void_p * len(addresses))(*addresses),
        buffers=(Buffer * len(buffers))(
            *(
                Buffer(
                    b.data.ctypes.data,
                    b.n_bytes,
                    b.name.encode(),
                    b.kind,
                    b.is_initialised,
                )
                for b in buffers
            )
        ),
        n_buffers=len(buffers),
        grid=Position(*work.grid),
        threadgroup=Position(*map(min, work.grid, work.threadgroup)),
        lane_map=bytes(options.lane_map),
        seed=seed,
        # one at a time where the order of events is watched
        host_threads=1 if is_checked else os.cpu_count() or 1,
        counters=counters,
        checks=sum(bit for name, bit in CHECK_BITS.items() if name in options.checks),
        message=ctypes.cast(message, ctypes.c_char_p),
        message_size=MESSAGE_BYTES,
    )
    if library.simulator_launch(ctypes.byref(launch)):
        text = message.value.decode()
        if is_checked:
            library.simulator_library_base.restype = ctypes.c_void_p
            text = resolve(text, path, library.simulator_library_base())
        shuffled = f" (shuffled schedule, seed {seed})" if seed else ""
        raise SimulatorError(f"[simulator] kernel {work.name!r}{shuffled} {text}")
    return dict(zip(names, counters, strict=True))


@cache
def counter_names(library: ctypes.CDLL) -> tuple[str, ...]:
    """Names of the counters, in the order in which the library fills them."""
    library.simulator_counter_names.restype = ctypes.c_char_p
    names = library.simulator_counter_names().decode().lower()
    return tuple(names.rstrip(",").split(","))


def numpy_view(array: mx.array) -> npt.NDArray[Any]:
    """The array's own memory, with its strides."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits, copy=False)


def guarded_copy(
    name: str, view: npt.NDArray[Any], kind: int
) -> tuple[GuardedBuffer, int]:
    """The bytes that a view spans, between guards, and where its first element is."""
    if view.size == 0:
        return GuardedBuffer(name, 0, kind), 0
    low, high = np.lib.array_utils.byte_bounds(view)
    buffer = GuardedBuffer(name, high - low, kind)
    span = (ctypes.c_uint8 * (high - low)).from_address(low)
    buffer.data[:] = np.ctypeslib.as_array(span)
    return buffer, view.ctypes.data - low
