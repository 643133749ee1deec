"""Metal text as C++ for OpenCL, which libclang reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlx_flash.simulator.strict.tokens import (
    INCLUDED,
    LINE,
    NO_TOKEN,
    Source,
    Token,
)

INCLUDE = Path(__file__).parent / "include"  # Metal's library as declarations
THREADGROUP_BYTES = 32768

VECTORS = {
    scalar + lanes
    for scalar in (
        *("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"),
        *("half", "bfloat", "float"),
    )
    for lanes in "234"
}
VECTOR_TYPE = r"(?:typename\s+)?(?:metal\s*::\s*)?(?:vec\s*<[^;]*>|(\w+))"
VECTOR_ALIAS = re.compile(
    rf"\busing\s+(\w+)\s*=\s*{VECTOR_TYPE}\s*;|\btypedef\s+{VECTOR_TYPE}\s+(\w+)\s*;"
)


class Edit(NamedTuple):
    """Replace the characters from ``start`` to ``end``."""

    start: int
    end: int
    text: str


def translate(source: Source) -> str:
    """The text as Clang's OpenCL mode takes it, line for line."""
    edits = [*threadgroup_edits(source)]
    vectors = {"vec"} | VECTORS | vector_aliases(source.text)
    for index, token in enumerate(source.tokens):
        before, after = source.at(index - 1).text, source.at(index + 1).text
        if token.kind == "directive" and not is_kept(token.text):
            edits.append(Edit(token.start, token.end, ""))
        elif token.kind == "number" and re.fullmatch(r"[\d.]+(bf|BF)", token.text):
            edits.append(Edit(token.start, token.end, f"bfloat({token.text[:-2]}f)"))
        elif token.text == "template" and after == "[":
            edits.append(Edit(token.end, attributes_end(source, index + 1), ""))
        elif token.text == "function_constant" and before == "[":
            edits += function_constant_edits(source, index)
        elif token.text == "thread" and qualifies_special_method(source, index):
            edits.append(Edit(token.start, token.end, ""))
        elif token.text in vectors:
            edits += constructor_edits(source, index)
    pieces, position = [], 0
    for edit in sorted(edits):
        pieces += [source.text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, source.text[position:]])


def is_kept(directive: str) -> bool:
    """Whether Clang is to see a directive: no ``#line``, no header that is not here."""
    include = INCLUDED.match(directive)
    if include is None:
        return LINE.match(directive) is None
    return (INCLUDE / include["name"].strip("<>")).is_file()


def attributes_end(source: Source, index: int) -> int:
    """Where the attributes ``[[...]] [[...]]`` that start at ``index`` end."""
    while source.at(index).text == "[":
        index = source.closing(index) + 1
    return source.at(index - 1).end


def function_constant_edits(source: Source, index: int) -> Iterator[Edit]:
    """``constant bool b [[function_constant(0)]]`` gets its value elsewhere."""
    while not source.begins_statement(index) and source.at(index).text not in "(,":
        index -= 1
    first = source.at(index)
    if first.text == "constant":
        yield Edit(first.start, first.start, "extern ")


def qualifies_special_method(source: Source, index: int) -> bool:
    """Whether ``thread`` follows the parameters of a constructor or an operator.

    There it has to go: with it, Clang takes no temporary object.
    """
    index -= 1 if source.at(index - 1).text == ")" else 2
    if source.at(index).text != ")":
        return False
    depth = 1
    while depth and index:
        index -= 1
        depth += {")": 1, "(": -1}.get(source.at(index).text, 0)
    name = [source.at(index - step).text for step in (1, 2, 3)]
    return name[0] in source.classes or "operator" in name


def vector_aliases(text: str) -> set[str]:
    """Names that the text gives to vector types."""
    names: set[str] = set()
    for using, used, defined, typedef in VECTOR_ALIAS.findall(text):
        if (used or defined or "float4") in VECTORS | names:
            names.add(using or typedef)
    return names


def constructor_edits(source: Source, index: int) -> Iterator[Edit]:
    """``float4(a, b)`` calls a function: Clang's vectors have no such constructor."""
    first, last = index, index
    if source.at(index - 1).text == "::":
        first = index - 2
        if source.at(first).text != "metal":
            return
    if source.at(index).text == "vec" and source.at(index + 1).text == "<":
        last = source.closing(index + 1)
    if source.at(last + 1).text == "(" and source.at(first - 1).text != "operator":
        start, end = source.at(first).start, source.at(last).end
        yield Edit(start, start, "metal_strict::construct<")
        yield Edit(end, end, ">")


def threadgroup_edits(source: Source) -> Iterator[Edit]:
    """Threadgroup arrays become static, each with an assertion on the sum so far."""
    scopes: list[list[str]] = [[]]
    for index, token in enumerate(source.tokens):
        if token.text == "{":
            scopes.append([])
        elif token.text == "}" and len(scopes) > 1:
            scopes.pop()
        elif token.text == "threadgroup":
            names, semicolon = threadgroup_variables(source, index)
            if names:
                scopes[-1] += names
                yield Edit(token.start, token.start, "static ")
                visible = [name for scope in scopes for name in scope]
                total = " + ".join(f"sizeof({name})" for name in visible)
                condition = f"{total} <= {THREADGROUP_BYTES}"
                assertion = f' static_assert({condition}, "threadgroup memory");'
                yield Edit(semicolon.end, semicolon.end, assertion)


def threadgroup_variables(source: Source, index: int) -> tuple[list[str], Token]:
    """Names that a declaration puts into threadgroup memory, and its semicolon.

    There are none if the word ``threadgroup`` at ``index`` begins something else: a
    parameter, a pointer, a function.
    """
    names: list[str] = []
    if not source.begins_statement(index) and source.at(index - 1).text != ")":
        return names, NO_TOKEN
    index += 1
    while source.at(index).text != ";":
        token, after = source.at(index), source.at(index + 1).text
        if token.text in ("", "*", "&", "&&", "(", ")", "{", "}"):
            return [], NO_TOKEN
        if token.text in ("<", "["):
            index = source.closing(index)
        elif token.kind == "word" and after in ("[", ",", ";"):
            names.append(token.text)
        index += 1
    return names, source.at(index)
