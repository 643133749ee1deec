"""``metal_kernel``: MLX's own generated text, executed and checked on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_flash.simulator import checks as checks_in_force
from mlx_flash.simulator.checks import LaunchRecord, Options, check_names
from mlx_flash.simulator.compiler import build
from mlx_flash.simulator.errors import SimulatorError
from mlx_flash.simulator.machine import (
    CONSTANT,
    INPUT,
    Input,
    Output,
    Work,
    numpy_view,
    run,
)
from mlx_flash.simulator.metal_text import Parameter
from mlx_flash.simulator.program import (
    generated_kernel,
    generated_program,
    numbered,
    parse_parameters,
)
from mlx_flash.simulator.strict import check_text

BUFFERS_LIMIT = 31
THREADS_LIMIT = 1024
SMALL_INPUT = 8  # MLX puts inputs of fewer elements into constant memory


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
    *,
    checks: str | Iterable[str] = (),
) -> Callable[..., list[mx.array]]:
    """A kernel that runs on the CPU; the constructor of ``mx.fast.metal_kernel``.

    Args:
        name: Of the kernel, for messages.
        input_names: Parameter names of the inputs.
        output_names: Parameter names of the outputs.
        source: Body of the kernel.
        header: Text before the kernel: functions, includes.
        ensure_row_contiguous: Copy inputs that are not row-contiguous first.
        atomic_outputs: The outputs are ``device atomic<T>*``.
        compile_options: As for MLX; the simulator's arithmetic is always the safe one.
        checks: ``"all"`` or names of ``simulator.CHECKS``, for every launch of this
            kernel; ``simulator.checked`` switches them on for all kernels.

    Returns:
        A callable with the call of MLX's kernels: ``inputs``, ``template``, ``grid``
        (in threads), ``threadgroup``, ``output_shapes``, ``output_dtypes``,
        ``init_value``, ``verbose``, ``stream``. It evaluates its inputs and returns
        evaluated arrays.

    Raises:
        ValueError: A check is unknown.
        SimulatorError: On a call, when the kernel does not compile or a check finds
            something; nothing is returned then.
    """
    own_checks = check_names(checks)
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
        atomic_outputs=atomic_outputs,
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
        check_threads(name, threadgroup)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        evaluate(arrays, name)
        generated = generated_kernel(
            generator,
            arrays,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            **({"template": list(template)} if template else {}),
        )
        text = generated[1]
        if verbose:
            print(text)
        buffers = buffers_of(name, text)
        n_inputs = len(buffers) - len(output_shapes)
        views = bound_views(arrays, generated[8], row_contiguous=generated[9])
        initial = None if init_value is None else mx.array(init_value)
        work = Work(
            name=name,
            program=compiled_program(name, source, text),
            inputs=tuple(
                Input(index, parameter.name, view, kind)
                for index, (parameter, (view, kind)) in enumerate(
                    zip(buffers[:n_inputs], views, strict=True)
                )
            ),
            outputs=tuple(
                Output(
                    n_inputs + index,
                    parameter.name,
                    tuple(shape),
                    dtype,
                    None if initial is None else numpy_view(initial.astype(dtype)),
                )
                for index, (parameter, shape, dtype) in enumerate(
                    zip(buffers[n_inputs:], output_shapes, output_dtypes, strict=True)
                )
            ),
            grid=grid,
            threadgroup=threadgroup,
        )
        options = dataclasses.replace(
            checks_in_force.current, checks=checks_in_force.current.checks | own_checks
        )
        if "strict" in options.checks:
            check_strictly(name, source, text)
        return launch(work, options, has_fixed_order=not atomic_outputs)

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


def check_threads(name: str, threadgroup: tuple[int, int, int]) -> None:
    """Raise if a threadgroup has more threads than Metal allows."""
    n_threads = math.prod(threadgroup)
    if n_threads > THREADS_LIMIT:
        raise SimulatorError(
            f"[simulator] kernel {name!r} asks for threadgroups of {n_threads} "
            f"threads; Metal allows {THREADS_LIMIT}"
        )


compiled_program = cache(generated_program)


@cache
def buffers_of(name: str, text: str) -> tuple[Parameter, ...]:
    """The kernel's buffers, in order."""
    buffers = tuple(p for p in parse_parameters(text) if p.buffer is not None)
    if len(buffers) > BUFFERS_LIMIT:
        raise SimulatorError(
            f"[simulator] kernel {name!r} takes {len(buffers)} buffers; "
            f"Metal allows {BUFFERS_LIMIT}"
        )
    return buffers


def bound_views(
    arrays: Sequence[mx.array],
    bindings: Sequence[tuple[bool, bool, bool]],
    *,
    row_contiguous: bool,
) -> Iterator[tuple[npt.NDArray[Any], int]]:
    """What MLX binds to the input buffers, in order, each with its kind of memory.

    Args:
        arrays: The inputs.
        bindings: Per input, whether its shape, strides and ndim are buffers too.
        row_contiguous: Copy inputs to row-contiguous memory first.
    """
    for array, (shape, strides, ndim) in zip(arrays, bindings, strict=True):
        view = numpy_view(array)
        if row_contiguous:
            view = np.ascontiguousarray(view).reshape(array.shape)
        yield view, CONSTANT if array.size < SMALL_INPUT else INPUT
        if not array.ndim:
            continue
        if shape:
            yield np.array(view.shape, np.int32), CONSTANT
        if strides:
            steps = [step // view.itemsize for step in view.strides]
            yield np.array(steps, np.int64), CONSTANT
        if ndim:
            yield np.array(view.ndim, np.int32), CONSTANT


@cache
def check_strictly(name: str, source: str, text: str) -> None:
    """Raise what Metal's compiler would reject and a C++ compiler accepts."""
    findings = check_text(numbered(name, source, text), name=name)
    if findings:
        lines = "".join(f"\n  {finding}" for finding in findings)
        raise SimulatorError(f"[simulator] kernel {name!r} is not strict MSL:{lines}")


def launch(work: Work, options: Options, *, has_fixed_order: bool) -> list[mx.array]:
    """Run the work once, and again in the ways that the checks ask for."""
    kind = "checked" if options.instrumented else "plain"
    outputs, counters = run(work, kind, options)
    for records in options.records:
        records.append(LaunchRecord(work.name, work.grid, work.threadgroup, counters))
    plain = "plain"
    if "uninitialised" in options.checks:
        plain = "initialised"
        build(work.program, work.name, plain)
    if "schedule" in options.checks and has_fixed_order:
        shuffled, _ = run(work, plain, options, seed=options.seed)
        compare_schedules(work, outputs, shuffled, options.seed)
    if "fast_math" in options.checks:
        reordered, _ = run(work, "fast_math", options)
        compare_fast_math(work, outputs, reordered)
    dtypes = [output.dtype for output in work.outputs]
    return [
        mx.array(result).view(dtype) if dtype == mx.bfloat16 else mx.array(result)
        for result, dtype in zip(outputs, dtypes, strict=True)
    ]


def compare_schedules(
    work: Work,
    in_order: list[npt.NDArray[Any]],
    shuffled: list[npt.NDArray[Any]],
    seed: int,
) -> None:
    """Raise if the order of the threads changed a bit of an output."""
    for output, a, b in zip(work.outputs, in_order, shuffled, strict=True):
        differs = a.view(np.uint8) != b.view(np.uint8)
        if differs.any():
            element = int(differs.reshape(-1).argmax()) // a.itemsize
            raise SimulatorError(
                f"[simulator] kernel {work.name!r}: the order in which threads run "
                f"(shuffled schedule, seed {seed}) changes output {output.name!r}, "
                f"first at element {element}: {a.reshape(-1)[element]} becomes "
                f"{b.reshape(-1)[element]}; run it with checks='race'"
            )


def compare_fast_math(
    work: Work, safe: list[npt.NDArray[Any]], fast: list[npt.NDArray[Any]]
) -> None:
    """Raise if fast math changes an output by more than its rounding."""
    for output, a, b in zip(work.outputs, safe, fast, strict=True):
        dtype = output.dtype
        if not mx.issubdtype(dtype, mx.floating):
            continue
        x, y = (
            np.array(mx.array(values).view(dtype).astype(mx.float32)).reshape(-1)
            for values in (a, b)
        )
        finite = np.isfinite(x)
        largest = float(np.abs(x[finite]).max(initial=0.0))
        # sums of a few hundred terms in another order, each rounded once
        tolerance = 64 * mx.finfo(dtype).eps * largest
        with np.errstate(invalid="ignore"):  # inf - inf
            close = np.abs(y - x) <= tolerance
        same = np.where(finite, close, (x == y) | np.isnan(x))
        if not same.all():
            element = int((~same).argmax())
            raise SimulatorError(
                f"[simulator] kernel {work.name!r}: compiled with fast math, output "
                f"{output.name!r} changes at element {element}: {x[element]} becomes "
                f"{y[element]}; do no arithmetic on infinities and NaNs, and do not "
                "rely on the order of additions"
            )
