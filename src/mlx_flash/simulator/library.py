"""``library_kernel``: a kernel out of a complete Metal text."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_flash.simulator import checks as checks_in_force
from mlx_flash.simulator.checks import check_names
from mlx_flash.simulator.kernel import check_threads, evaluate, launch
from mlx_flash.simulator.machine import (
    CONSTANT,
    INPUT,
    NUMPY_DTYPES,
    Input,
    Output,
    Work,
    numpy_view,
)
from mlx_flash.simulator.metal_text import (
    Parameter,
    flatten,
    function_constants,
    host_names,
    kernel_parameters,
    with_constants,
)
from mlx_flash.simulator.program import program

ABSENT: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
# What an output starts with, or the shape and dtype of one that starts unwritten.
OutputSpec = mx.array | npt.NDArray[Any] | tuple[Sequence[int], mx.Dtype]


def library_kernel(
    text: str,
    function: str,
    *,
    include: Sequence[str | PathLike[str]] = (),
    constants: Mapping[int, bool | int | float] | None = None,
    checks: str | Iterable[str] = (),
) -> Callable[..., dict[int, mx.array]]:
    """A kernel of a complete Metal text, run on the CPU.

    ``metal_kernel`` writes the signature of its kernel; here the text holds whole
    ``[[kernel]]`` functions, their structs and their function constants.

    Args:
        text: Metal text. Files that it includes in quotes are looked for in
            ``include``.
        function: The kernel with its template arguments, ``"softmax<float, 4>"``, or
            the ``host_name`` under which the text instantiates it.
        include: Folders.
        constants: Values of function constants by index. A kernel that uses one
            without a value does not compile.
        checks: As for ``metal_kernel``. ``"strict"`` is for texts that MLX generates:
            here it is refused, and ``"all"`` and ``simulator.checked`` leave it out.

    Returns:
        A callable ``kernel(buffers=..., outputs=..., grid=..., threadgroup=...)``:

        - ``buffers``: What the kernel reads, by buffer index: MLX and NumPy arrays and
          scalars in any strides, bytes, or ctypes structures.
        - ``outputs``: What it writes, by buffer index: ``(shape, dtype)``, or an array
          that it starts from. The array itself is not changed.
        - ``grid``: In threads, as everywhere in this package.
        - ``threadgroup``: In threads.

        It returns the outputs by buffer index. A buffer may be left out if the kernel
        declares it for a function constant that is false or has no value.

    Raises:
        ValueError: A check or a function constant is unknown.
        SimulatorError: The text has no such kernel or includes a file that is not
            there; or, on a call, the kernel does not compile or a check finds
            something.
    """
    own_checks = check_names(checks)
    if "strict" in own_checks:
        if checks != "all":
            raise ValueError(
                "[simulator] the check 'strict' reads texts that MLX generates, not "
                "libraries; leave it out"
            )
        own_checks -= {"strict"}
    name = function.split("<")[0].strip()
    folders = tuple(map(Path, include))
    values = dict(constants or {})
    flat = flatten(text, f"text of {name}", folders)
    function = host_names(flat).get(function, function)
    name = function.split("<")[0].strip()
    declared = function_constants(flat)
    parameters = kernel_parameters(flat, name.split("::")[-1])
    source = with_constants(flat, values)
    buffer_parameters = {p.buffer: p for p in parameters if p.buffer is not None}

    def call(
        *,
        buffers: Mapping[int, Any],
        outputs: Mapping[int, OutputSpec],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> dict[int, mx.array]:
        check_threads(name, threadgroup)
        given = {*buffers, *outputs}
        if unknown := sorted(given - {*buffer_parameters}):
            raise ValueError(
                f"[simulator] kernel {name!r} has no buffers {unknown}; it has "
                f"{ {index: p.name for index, p in buffer_parameters.items()} }"
            )
        if twice := sorted({*buffers} & {*outputs}):
            raise ValueError(
                f"[simulator] kernel {name!r}: buffers {twice} are in buffers and in "
                "outputs; an output may start from an array"
            )
        for index, parameter in buffer_parameters.items():
            on = values.get(declared.get(parameter.condition or "", -1), False)
            if index not in given and (on or not parameter.condition):
                raise ValueError(
                    f"[simulator] kernel {name!r} needs buffer {index} "
                    f"({parameter.name})"
                )
        work = Work(
            name=name,
            program=compiled_program(source, function, parameters),
            inputs=tuple(
                Input(
                    index,
                    parameter.name,
                    # an absent buffer has no bytes: the checks catch a use of it
                    values_of(buffers.get(index, ABSENT), name, parameter),
                    CONSTANT if parameter.is_constant else INPUT,
                )
                for index, parameter in buffer_parameters.items()
                if index not in outputs
            ),
            outputs=tuple(
                output_of(spec, name, index, buffer_parameters[index])
                for index, spec in outputs.items()
            ),
            grid=grid,
            threadgroup=threadgroup,
        )
        options = checks_in_force.current
        options = dataclasses.replace(options, checks=options.checks | own_checks)
        # atomic sums depend on the order of the threads, and may
        results = launch(work, options, has_fixed_order="atomic" not in source)
        return dict(zip(outputs, results, strict=True))

    return call


@cache
def compiled_program(
    source: str, function: str, parameters: tuple[Parameter, ...]
) -> str:
    """The C++ program; a library brings what it needs of MLX's preamble itself."""
    return program("", source, function, parameters)


def values_of(value: Any, name: str, parameter: Parameter) -> npt.NDArray[Any]:
    """The memory of a buffer's value.

    Raises:
        TypeError: It has no layout, or one that Metal lacks.
    """
    if isinstance(value, mx.array):
        evaluate([value], name)
        return numpy_view(value)
    if isinstance(value, bytes | ctypes.Structure):
        return np.frombuffer(bytes(value), np.uint8)
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(
            f"[simulator] kernel {name!r}, buffer {parameter.buffer} "
            f"({parameter.name}): {type(value).__name__} does not say how many bytes "
            "it has; pass an array, a NumPy scalar such as np.int32(1), bytes or a "
            "ctypes structure"
        )
    array = np.asarray(value)
    if array.dtype.type not in NUMPY_DTYPES.values():
        raise TypeError(
            f"[simulator] kernel {name!r}, buffer {parameter.buffer} "
            f"({parameter.name}): Metal has no {array.dtype}; convert it first"
        )
    return array


def output_of(spec: OutputSpec, name: str, index: int, parameter: Parameter) -> Output:
    """An output, unwritten or with the values of an array."""
    if isinstance(spec, tuple):
        shape, dtype = spec
        return Output(index, parameter.name, tuple(shape), dtype, None)
    array = spec if isinstance(spec, mx.array) else mx.array(spec)
    evaluate([array], name)
    return Output(index, parameter.name, array.shape, array.dtype, numpy_view(array))
