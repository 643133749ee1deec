"""What the declarations of a parsed kernel say: spaces, casts, recursion, globals."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple

from mlx_flash.simulator.strict.diagnostics import in_metal
from mlx_flash.simulator.strict.libclang import MAIN, Cursor, TranslationUnit, Type
from mlx_flash.simulator.strict.tokens import Problem

FUNCTIONS = {
    "CONSTRUCTOR",
    "CONVERSION_FUNCTION",
    "CXX_METHOD",
    "FUNCTION_DECL",
    "FUNCTION_TEMPLATE",
}
CASTS = {"CSTYLE_CAST_EXPR", "CXX_REINTERPRET_CAST_EXPR", "CXX_STATIC_CAST_EXPR"}
VARIABLES = {"FIELD_DECL", "PARM_DECL", "VAR_DECL"}
POINTERS = {"LVALUEREFERENCE", "POINTER", "RVALUEREFERENCE"}


class Space(enum.IntEnum):
    """Address spaces as Clang counts them, under Metal's names."""

    UNNAMED_IN_TEMPLATE = 0
    THREADGROUP = 1
    DEVICE = 2
    CONSTANT = 3
    THREAD = 4
    UNNAMED = 5


def declaration_problems(unit: TranslationUnit, text: str) -> Iterator[Problem]:
    """What the declarations, casts and calls of the text tell."""
    calls = Calls(text)
    for cursor, function in walk(unit.cursor):
        calls.add(cursor, function)
        for rule, message in problems_of_cursor(cursor, function, text):
            yield Problem(cursor.location.line, rule, message)
    yield from calls.problems()


def walk(unit: Cursor) -> Iterator[tuple[Cursor, Cursor | None]]:
    """The nodes of the text, each with the function that it is in."""
    templates: set[int] = set()
    for cursor in unit.get_children():
        if str(cursor.location.file) != MAIN:
            continue
        if cursor.kind.name == "FUNCTION_TEMPLATE":
            templates.add(cursor.location.offset)
        elif cursor.location.offset in templates:
            continue  # an instantiation, which repeats its template
        yield from walk_below(cursor, None)


def walk_below(
    cursor: Cursor, function: Cursor | None
) -> Iterator[tuple[Cursor, Cursor | None]]:
    """A node, and all nodes below it, each with the function that it is in."""
    yield cursor, function
    if cursor.kind.name in FUNCTIONS:
        function = cursor
    for child in cursor.get_children():
        yield from walk_below(child, function)


def declared_text(cursor: Cursor, text: str) -> str:
    """A declaration up to the name that it declares."""
    return text[cursor.extent.start.offset : cursor.location.offset]


def problems_of_cursor(
    cursor: Cursor, function: Cursor | None, text: str
) -> Iterator[tuple[str, str]]:
    """Rule and message of what is wrong with one node."""
    kind = cursor.kind.name
    if kind == "LAMBDA_EXPR":
        yield "lambda", "Metal 3 has no lambdas; write a struct with a method"
    elif kind == "VAR_DECL":
        yield from problems_of_variable(cursor, function, text)
    declared = None
    if kind in VARIABLES or kind in CASTS:
        declared = cursor.type
    elif kind in FUNCTIONS:
        declared = cursor.result_type
    elif kind in ("TYPEDEF_DECL", "TYPE_ALIAS_DECL"):
        declared = cursor.underlying_typedef_type
    if declared is not None and lacks_space(declared):
        spelling = in_metal(declared.spelling).replace("(no address space) ", "")
        yield (
            "no-address-space",
            f"'{spelling}' {in_metal(cursor.spelling)} needs an address space; "
            "write thread, device, threadgroup or constant before the type",
        )


def lacks_space(declared: Type) -> bool:
    """Whether a type is a pointer or reference to no address space, at any depth.

    A reference to a pointer, ``device T*&``, may do without its own.
    """
    if declared.kind.name == "INVALID":
        return False
    declared = declared.get_canonical()
    if declared.kind.name not in POINTERS:
        return False
    pointee = declared.get_pointee()
    if pointee.kind.name in ("AUTO", "INVALID"):
        return False
    if pointee.kind.name == "POINTER" and declared.kind.name != "POINTER":
        return lacks_space(pointee)
    if pointee.get_address_space() in (Space.UNNAMED, Space.UNNAMED_IN_TEMPLATE):
        return True
    return lacks_space(pointee)


def problems_of_variable(
    cursor: Cursor, function: Cursor | None, text: str
) -> Iterator[tuple[str, str]]:
    """Rule and message of what is wrong with where a variable lives."""
    name, declared = in_metal(cursor.spelling), declared_text(cursor, text)
    if re.search(r"\bstatic threadgroup\b", declared):
        if function is None or not is_kernel(function, text):
            yield (
                "threadgroup-scope",
                f"{name} is outside of a kernel; declare it in one and pass it down",
            )
    elif cursor.type.get_address_space() == Space.CONSTANT:
        return
    elif function is None:
        yield "global-variable", f"{name} is not constant; write constant before it"
    elif re.search(r"\bstatic\b", declared):
        yield "static-variable", f"{name} is static and not constant; pass it along"


def is_kernel(function: Cursor, text: str) -> bool:
    """Whether a function is declared ``[[kernel]]`` or ``kernel``."""
    before = text[: function.location.offset]
    start = max(before.rfind(mark) for mark in ";{}") + 1
    return re.search(r"\bkernel\b", before[start:]) is not None


class Call(NamedTuple):
    """A call in the text: ids of the two functions, name of the second, and line."""

    caller: str
    callee: str
    name: str
    line: int


class Calls:
    """The functions of the text and how they call each other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ids: dict[int, str] = {}
        self.overloads: dict[tuple[str, int], set[str]] = {}
        self.calls: list[tuple[Cursor, Cursor]] = []

    def add(self, cursor: Cursor, function: Cursor | None) -> None:
        """Take notice of a node and of the function that it is in."""
        if cursor.kind.name in FUNCTIONS:
            children = [child.kind.name for child in cursor.get_children()]
            signature = (cursor.spelling, children.count("PARM_DECL"))
            self.ids[cursor.location.offset] = cursor.get_usr()
            self.overloads.setdefault(signature, set()).add(cursor.get_usr())
        elif cursor.kind.name == "CALL_EXPR" and function is not None:
            self.calls.append((cursor, function))

    def problems(self) -> Iterator[Problem]:
        """Calls that lead back to the function they are in."""
        calls = [call for pair in self.calls if (call := self.resolved(*pair))]
        callees: dict[str, set[str]] = {}
        for call in calls:
            callees.setdefault(call.caller, set()).add(call.callee)
        for call in calls:
            if call.caller in reachable(call.callee, callees):
                message = f"{call.name} leads back to this function; write a loop"
                yield Problem(call.line, "recursion", message)

    def resolved(self, cursor: Cursor, function: Cursor) -> Call | None:
        """The call, if it is certain which function of the text it calls."""
        target, ids = cursor.referenced, set[str]()
        if target is not None:
            if str(target.location.file) == MAIN:
                ids = {self.ids.get(target.location.offset, "")}
        elif "if constexpr" not in self.text_of(function):
            target = overload_reference(cursor)
            if target is not None and not self.has_template_arguments(target):
                arguments = len(list(cursor.get_children())) - 1
                ids = self.overloads.get((target.spelling, arguments), ids)
        if target is None or len(ids) != 1:
            return None
        (callee,) = ids
        line = cursor.location.line
        return Call(function.get_usr(), callee, target.spelling, line)

    def text_of(self, function: Cursor) -> str:
        """The whole text of a function."""
        return self.text[function.extent.start.offset : function.extent.end.offset]

    def has_template_arguments(self, name: Cursor) -> bool:
        """Whether a name is followed by ``<``: it may be another instantiation."""
        end = name.location.offset + len(name.spelling)
        return self.text[end:].lstrip().startswith("<")


def overload_reference(call: Cursor) -> Cursor | None:
    """The name that a call inside of a template uses, while its meaning is open."""
    node: Cursor | None = call
    while node is not None and node.kind.name != "OVERLOADED_DECL_REF":
        node = next(iter(node.get_children()), None)
    return node


def reachable(start: str, callees: dict[str, set[str]]) -> set[str]:
    """All functions that a function leads to, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        new = callees.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found
