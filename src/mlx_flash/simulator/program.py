"""The C++ program of a kernel, made from the very text that Metal would get."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_flash.simulator.errors import SimulatorError
from mlx_flash.simulator.metal_text import (
    Parameter,
    kernel_parameters,
    mlx_preamble,
    one_address_space,
    share_threadgroup_arrays,
    with_swizzles,
    without_instantiations,
)


def generated_kernel(
    generator: Any, arrays: list[mx.array], **call: Any
) -> Sequence[Any]:
    """The arguments of MLX's CustomKernel primitive: text, grid, what it would bind.

    MLX writes the kernel's text while a function is exported, on any machine.
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


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters of the kernel function in MLX's generated text."""
    function = re.search(r"\[\[kernel\]\] void (\w+)\(\n", text)
    if not function:
        raise SimulatorError(f"[simulator] no kernel function in the text:\n{text}")
    return kernel_parameters(text, function[1])


def numbered(name: str, source: str, text: str) -> str:
    """The generated text with #line directives for the header and for the source.

    A header may bring directives of its own, as this library's do.
    """
    before, after = text.split(source, 1)
    return f"""\
#line 1 "header of {name}"
{before}
#line 1 "source of {name}"
{source}
#line 1 "end of {name}"
{after}"""


def generated_program(name: str, source: str, text: str) -> str:
    """The C++ program of the text that MLX generates."""
    parameters = parse_parameters(text)
    function = re.search(r"decltype\((.+?)\) ", text) or re.search(
        r"\[\[kernel\]\] void (\w+)\(", text
    )
    assert function
    lines = numbered(name, source, text)
    return program(mlx_preamble(), lines, function[1], parameters)


def program(
    preamble: str, text: str, function: str, parameters: Sequence[Parameter]
) -> str:
    """The C++ program: Metal's words, the kernel, and a function that launches it."""
    arguments = ", ".join(parameter.argument for parameter in parameters)
    text = one_address_space(without_instantiations(text))
    return with_swizzles(f"""\
#include <metal_stdlib>
#include <metal_atomic>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
{preamble}{share_threadgroup_arrays(text)}
#line 1 "launch"
SIMULATOR_FUNCTION
void run_kernel(void* const* addresses, const simulator::Lane& lane) {{
  // the address of a function template takes its default arguments, a call deduces them
  constexpr auto function = &{function};
  function({arguments});
}}
SIMULATOR_ENTRY(run_kernel)
""")
