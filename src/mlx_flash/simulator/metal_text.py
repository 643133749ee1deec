"""Metal's text as C++ that has one address space."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlx_flash.simulator.errors import SimulatorError

MLX_INCLUDE = Path(mx.__file__).parent / "include"
MLX_KERNELS = "mlx/backend/metal/kernels"
# What MLX puts in front of every custom kernel.
PREAMBLE = f"{MLX_KERNELS}/utils.h"
# Overloads for bfloat, written in intrinsics of Apple's compiler; <metal_stdlib> of the
# simulator has them.
BUILT_IN = frozenset({f"{MLX_KERNELS}/bf16_math.h"})

ARRAYS_LIMIT = 64  # MAX_ARRAYS in include/runtime.h


# ---- Files


def flatten(text: str, name: str, folders: Sequence[Path]) -> str:
    """The text with the files that it includes, and ``#line`` directives.

    Headers in angle brackets that are in none of the folders are left to the compiler:
    they are Metal's. A file with ``#pragma once`` or an include guard is taken once,
    where it is included first.

    Args:
        text: May include files in quotes.
        name: Of the text, for messages.
        folders: Where to look for included files.

    Raises:
        SimulatorError: A file in quotes is in none of the folders.
    """
    taken: set[Path] = set()
    return "\n".join(lines_of(text, name, tuple(folders), taken)) + "\n"


INCLUDE_LINE = re.compile(
    r'\s*#\s*include\s*(?:"(?P<quoted>[^"]+)"|<(?P<angled>[^>]+)>)'
)
ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b.*$", re.M)
GUARD = re.compile(r"\s*#\s*ifndef\s+(\w+)\s*#\s*define\s+\1\b")


def lines_of(
    text: str, name: str, folders: tuple[Path, ...], taken: set[Path]
) -> Iterator[str]:
    """The lines of a text, those of its included files among them."""
    text = without_comments(text)
    yield f'#line 1 "{name}"'
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE_LINE.match(line)
        header = match and (match["quoted"] or match["angled"])
        if not match or not header:
            yield line
            continue
        if header in BUILT_IN:
            yield ""
            continue
        paths = (folder / header for folder in folders)
        path = next((path for path in paths if path.is_file()), None)
        if path is None and match["quoted"]:
            raise SimulatorError(
                f"[simulator] {name}:{number} includes {header!r}, which is in none of "
                f"the folders {[str(folder) for folder in folders]}"
            )
        if path is None:
            yield line
            continue
        if path not in taken:
            content = without_comments(path.read_text(encoding="utf-8"))
            if ONCE.search(content) or GUARD.match(content):
                taken.add(path)
                content = ONCE.sub("", content, count=1)
            # a file in quotes may be relative to the one that includes it
            yield from lines_of(content, path.name, (*folders, path.parent), taken)
        yield f'#line {number + 1} "{name}"'


def without_comments(text: str) -> str:
    """The text, each comment replaced by as many line ends as it has."""
    piece = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.S)
    return piece.sub(lambda match: match[1] or only_lines(match[0]) or " ", text)


def only_lines(text: str) -> str:
    """As many line ends as the text has."""
    return "\n" * text.count("\n")


@cache
def mlx_preamble() -> str:
    """What MLX puts before every custom kernel, from the headers of its package.

    Empty if the package does not carry them: a kernel that uses one of the names does
    not compile then, and the message has the name.
    """
    if not (MLX_INCLUDE / PREAMBLE).is_file():
        return ""
    text = flatten(f'#include "{PREAMBLE}"\n', "preamble of MLX", [MLX_INCLUDE])
    return one_address_space(text)


# ---- Address spaces


SPECIFIERS = re.compile(
    r"\b(?:(?:static|extern|inline|constexpr|const|constant)\s+)+"
    r"(?:static|extern|inline|constexpr|const|constant)\b"
)
SPACES = re.compile(r"\b(?:thread|device|threadgroup)\b")
MARK = re.compile(
    r"""^[ \t]*\#(?:\\\n|[^\n])*       # a directive, with its continued lines
    |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'
    |[(){};]""",
    re.MULTILINE | re.VERBOSE,
)


def one_address_space(text: str) -> str:
    """The text as C++ reads it once the address spaces are but ``const`` or nothing.

    ``const`` is said once; methods for objects in constant memory are methods; of
    definitions that differ in address spaces only, the first stays. Line numbers stay
    as they are.
    """
    text = SPECIFIERS.sub(const_said_once, without_comments(text))
    # its name is a word for an address space, which would go
    text = re.sub(r"\[\[\s*threadgroup\s*\(\s*\w+\s*\)\s*\]\]", "", text)
    text = re.sub(
        r"(\)\s*(?:const\s+)?)constant\b(?=\s*(?:noexcept\b|[:{;]))", r"\1", text
    )
    marks = list(MARK.finditer(text))
    copies: list[tuple[int, int]] = []
    find_copies(text, marks, 0, 0, copies)
    for start, end in sorted(copies, reverse=True):
        text = text[:start] + only_lines(text[start:end]) + text[end:]
    return text


def const_said_once(match: re.Match[str]) -> str:
    """A run of specifiers with at most one ``const`` or ``constant``."""
    first, *more = re.split(r"\b(const(?:ant)?)\b", match[0], maxsplit=1)
    return (
        first + more[0] + re.sub(r"\bconst(?:ant)?\b", "", more[1]) if more else first
    )


def find_copies(
    text: str,
    marks: Sequence[re.Match[str]],
    index: int,
    start: int,
    copies: list[tuple[int, int]],
) -> int:
    """Add the spans of a scope's definitions that only repeat one for another space.

    Args:
        text: Without comments.
        marks: Its directives, strings, brackets and semicolons.
        index: Of the first mark of the scope.
        start: Of the scope in the text.
        copies: Gets the spans.

    Returns:
        Index of the mark that closes the scope.
    """
    seen: dict[str, str] = {}

    def end_definition(end: int) -> None:
        nonlocal start
        words = " ".join(text[start:end].split())
        key = re.sub(r"\bconstant\b", "const", SPACES.sub("", words))
        key = re.sub(r"(?:const\s+)*const\b", "const", key)
        key = re.sub(r"\s", "", key)
        if key and seen.setdefault(key, words) != words:
            copies.append((start, end))
        start = end

    parentheses = 0
    while index < len(marks):
        mark = marks[index]
        what = mark[0].lstrip()[0]
        if what == "#":
            if not text[start : mark.start()].strip():
                start = mark.end()
        elif what in "()":
            parentheses += 1 if what == "(" else -1
        elif parentheses:
            pass
        elif what == "}":
            return index
        elif what == ";":
            end_definition(mark.end())
        elif what == "{":
            head = re.sub(
                r"\b(?:const|constant|noexcept)\b", "", text[start : mark.start()]
            )
            head = SPACES.sub("", head).strip()
            if head.endswith(")"):  # a function
                index = closing_brace(marks, index)
                if index < len(marks):
                    end_definition(marks[index].end())
            else:
                index = find_copies(text, marks, index + 1, mark.end(), copies)
                if re.match(r"(?:inline\s+)?namespace\b|extern\b", head):
                    start = marks[index].end() if index < len(marks) else len(text)
        index += 1
    return index


def closing_brace(marks: Sequence[re.Match[str]], index: int) -> int:
    """Index of the mark that closes the brace at ``index``."""
    depth = 0
    for position in range(index, len(marks)):
        depth += {"{": 1, "}": -1}.get(marks[position][0], 0)
        if not depth:
            return position
    return len(marks)


# ---- Threadgroup memory


def share_threadgroup_arrays(text: str) -> str:
    """Turn ``threadgroup`` variables into references to storage that a group shares.

    A C++ compiler would give each fiber its own. Pointers to threadgroup memory are
    ordinary variables and stay as they are. Metal wants the variables in kernels, so
    they are numbered by kernel.

    Raises:
        SimulatorError: A kernel has more of them than the simulator can hold.
    """
    declarator = r"(\w+)\s*((?:\[[^\]]*\]\s*)*)"
    declaration = re.compile(
        r"(?P<kernel>\[\[[^\]]*\bkernel\b|\bkernel\s+void\b)"
        r"|\bthreadgroup\s+(?P<type>(?:typename\s+)?[\w:]+(?:\s*<[^;{}()]*>)?)\s+"
        rf"(?P<names>{declarator}(?:,\s*{declarator})*);"
    )
    count = 0

    def rewrite(match: re.Match[str]) -> str:
        nonlocal count
        if match["kernel"]:
            count = 0
            return match[0]
        result = []
        for name, dimensions in re.findall(declarator, match["names"]):
            if count == ARRAYS_LIMIT:
                raise SimulatorError(
                    f"[simulator] threadgroup array {name!r} is one too many: a kernel "
                    f"may have {ARRAYS_LIMIT}"
                )
            result.append(
                f"auto& {name} = simulator::threadgroup_memory<"
                f'{match["type"]}{dimensions}>({count}, "{name}");'
            )
            count += 1
        return " ".join(result)

    return declaration.sub(rewrite, text)


# ---- Vectors


SWIZZLE = re.compile(r"(?<=[\w)\]])\.([xyzw]{2,4}|[rgba]{2,4})\b(?!\s*\()")


def with_swizzles(text: str) -> str:
    """The text with ``v.yx`` as a call of a method, and those methods defined.

    They return constants: a swizzle that is assigned to does not compile.
    """
    names = sorted(set(SWIZZLE.findall(text)))
    methods = []
    for name in names:
        elements = ", ".join(f"(*this)[{'xyzwrgba'.index(x) % 4}]" for x in name)
        vector = f"vec<T, {len(name)}>"
        methods.append(
            f"const {vector} {name}() const {{ return {vector}({elements}); }}"
        )
    if not names:
        return text
    calls = SWIZZLE.sub(r".\1()", text)
    return f"#define SIMULATOR_SWIZZLES {' '.join(methods)}\n{calls}"


# ---- The kernel function


# Attributes of parameters that the machine provides: functions of include/runtime.h.
POSITIONS = frozenset(
    (
        "dispatch_quadgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "grid_origin",
        "grid_size",
        "quadgroup_index_in_threadgroup",
        "quadgroups_per_threadgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "thread_execution_width",
        "thread_index_in_quadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_threadgroup",
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_simdgroup",
        "threads_per_threadgroup",
    )
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel function: a buffer, or a position in the grid.

    Attributes:
        name: As declared.
        declaration: The text before the attributes.
        attributes: Such as ``buffer(0)``.
    """

    name: str
    declaration: str
    attributes: tuple[str, ...]

    @property
    def attribute(self) -> str:
        """What it is: the first attribute."""
        return self.attributes[0]

    @property
    def buffer(self) -> int | None:
        """Index of the buffer, None for a position."""
        match = re.fullmatch(r"buffer\s*\(\s*(\d+)\s*\)", self.attribute)
        return int(match[1]) if match else None

    @property
    def condition(self) -> str | None:
        """The function constant without which the buffer is not there."""
        for attribute in self.attributes[1:]:
            if match := re.fullmatch(r"function_constant\s*\(\s*(\w+)\s*\)", attribute):
                return match[1]
        return None

    @property
    def is_constant(self) -> bool:
        """Whether the buffer is in constant memory."""
        return re.search(r"\bconstant\b", self.declaration) is not None

    @property
    def argument(self) -> str:
        """C++ text that passes it."""
        if self.buffer is None:
            return f"simulator::argument(simulator::{self.attribute}(lane))"
        kind = "Reference" if "&" in self.declaration else "Pointer"
        return f"simulator::{kind}Argument{{addresses[{self.buffer}]}}"


def kernel_parameters(text: str, function: str) -> tuple[Parameter, ...]:
    """Parameters of the kernel function of that name.

    Raises:
        SimulatorError: There is no such kernel, or it takes what a CPU cannot give it.
    """
    name = re.escape(function)
    start = re.search(
        r"(?:\[\[[^\]]*\bkernel\b[^\]]*\]\]|\bkernel\b)\s*(?:\[\[[^\]]*\]\]\s*)?"
        rf"void\s+{name}\s*\(",
        text,
    )
    if not start:
        raise SimulatorError(f"[simulator] there is no kernel {function!r} in the text")
    parameters = []
    for part in arguments_of(without_comments(text), text_position(text, start.end())):
        match = re.fullmatch(
            r"(?P<declaration>.*?\b(?P<name>\w+))\s*(?:\[\w*\]\s*)?"
            r"\[\[(?P<attributes>.*)\]\]\s*",
            part.strip(),
            re.S,
        )
        if not match:
            raise SimulatorError(
                f"[simulator] kernel {function!r}: parameter {part.strip()!r} has no "
                "attribute such as [[buffer(0)]]"
            )
        attributes = tuple(arguments_of(match["attributes"] + ")", 0))
        parameter = Parameter(match["name"], match["declaration"], attributes)
        if parameter.buffer is None and parameter.attribute not in POSITIONS:
            raise SimulatorError(
                f"[simulator] kernel {function!r}: parameter {parameter.name!r} is "
                f"[[{parameter.attribute}]]; the simulator has numbered buffers and "
                "positions"
            )
        parameters.append(parameter)
    return tuple(parameters)


def text_position(text: str, offset: int) -> int:
    """Where an offset is once the comments are gone."""
    return len(without_comments(text[:offset]))


def arguments_of(text: str, start: int) -> list[str]:
    """The parts between commas, up to the parenthesis that closes the list."""
    parts, depth, first = [], 0, start
    for match in re.compile(r"[(\[{<>}\]),]").finditer(text, start):
        mark = match[0]
        if depth == 0 and mark in ",)":
            parts.append(text[first : match.start()].strip())
            first = match.end()
            if mark == ")":
                break
        elif mark != ",":
            depth += 1 if mark in "([{<" else -1
    return [part for part in parts if part]


# ---- Function constants


FUNCTION_CONSTANT = re.compile(
    r"\bconstant\s+(?P<type>[\w:]+)\s+(?P<name>\w+)\s*"
    r"\[\[\s*function_constant\s*\(\s*(?P<index>\d+)\s*\)\s*\]\]\s*;"
)


def function_constants(text: str) -> dict[str, int]:
    """Index of each function constant that the text declares, by name."""
    return {m["name"]: int(m["index"]) for m in FUNCTION_CONSTANT.finditer(text)}


def with_constants(text: str, values: dict[int, bool | int | float]) -> str:
    """The text with values for its function constants.

    One without a value is only declared, under a name that tells: a kernel that uses it
    cannot be linked.

    Raises:
        ValueError: A value has no such constant.
    """
    known = function_constants(text)
    if unknown := sorted(set(values) - set(known.values())):
        raise ValueError(
            f"[simulator] the text has no function constants {unknown}; it has {known}"
        )

    def define(match: re.Match[str]) -> str:
        kind, name, index = match["type"], match["name"], int(match["index"])
        if index in values:
            return f"constant {kind} {name} = {kind}({literal(values[index])});"
        return (
            f"extern constant {kind} {name} "
            f'__asm__("function_constant_{index}_{name}_has_no_value") '
            '__attribute__((visibility("hidden")));'
        )

    def is_defined(match: re.Match[str]) -> str:
        return str(known.get(match[1]) in values).lower()

    text = re.sub(r"\bis_function_constant_defined\s*\(\s*(\w+)\s*\)", is_defined, text)
    return FUNCTION_CONSTANT.sub(define, text)


def literal(value: bool | int | float) -> str:
    """A number as C++ text."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value.hex()}f" if isinstance(value, float) else str(value)


def host_names(text: str) -> dict[str, str]:
    """The instantiated kernels by the names that the host calls them."""
    found = re.findall(
        r'\btemplate\s*\[\[\s*host_name\s*\(\s*"([^"]+)"\s*\)\s*\]\]'
        r"[^;]*?\bdecltype\s*\(([^;]+?)\)\s*[\w:]+\s*<[^;]*;",
        text,
    )
    return {name: " ".join(function.split()) for name, function in found}


def without_instantiations(text: str) -> str:
    """The text without its ``template [[host_name("...")]] ...;`` lines."""
    instantiation = re.compile(r"\btemplate\s*\[\[\s*host_name\b[^;]*;")
    return instantiation.sub(lambda match: only_lines(match[0]), text)
