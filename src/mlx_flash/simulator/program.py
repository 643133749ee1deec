"""The C++ program of a kernel, made from the very text that MLX generates for Metal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_flash.simulator.errors import SimulatorError


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


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel function: a buffer, or a position in the grid."""

    name: str
    attribute: str
    is_reference: bool

    @property
    def is_buffer(self) -> bool:
        """Whether the host binds it."""
        return self.attribute.startswith("buffer(")

    @property
    def argument(self) -> str:
        """C++ text that passes it."""
        if not self.is_buffer:
            return f"simulator::{self.attribute}(lane)"
        kind = "Reference" if self.is_reference else "Pointer"
        index = self.attribute[len("buffer(") : -1]
        return f"simulator::{kind}Argument{{addresses[{index}]}}"


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters of the kernel function in MLX's generated text."""
    signature = re.search(r"\[\[kernel\]\] void \w+\(\n(.*?)\) \{\n", text, re.S)
    if not signature:
        raise SimulatorError(f"[simulator] no kernel function in the text:\n{text}")
    found = re.findall(r"([&*]?) ?(\w+) \[\[(.+?)\]\],?\n?", signature[1])
    return tuple(Parameter(name, what, mark == "&") for mark, name, what in found)


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


def program(name: str, source: str, text: str) -> str:
    """The C++ program: Metal's words, the kernel, and a function that launches it."""
    arguments = ", ".join(parameter.argument for parameter in parse_parameters(text))
    function = re.search(r"decltype\((.+?)\) ", text) or re.search(
        r"\[\[kernel\]\] void (\w+)\(", text
    )
    if not function:
        raise SimulatorError(f"[simulator] no kernel function in the text:\n{text}")
    lines = numbered(name, source, text)
    lines = re.sub(r"^template \[\[host_name.*$", "", lines, flags=re.M)
    # `constant` is C++'s const, which must not be said twice
    lines = re.sub(r"\bconst constant\b|\bconstant const\b", "constant", lines)
    return f"""\
#include <metal_stdlib>
#include <metal_atomic>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
{share_threadgroup_arrays(lines)}
SIMULATOR_FUNCTION
void run_kernel(void* const* addresses, const simulator::Lane& lane) {{
  {function[1]}({arguments});
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
