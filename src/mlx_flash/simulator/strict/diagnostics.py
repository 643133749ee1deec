"""What Clang says, in the words of Metal and under this check's rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlx_flash.simulator.strict.libclang import ERROR, MAIN, TranslationUnit
from mlx_flash.simulator.strict.opencl import THREADGROUP_BYTES

CLANG_WORDS = {
    "__local": "device",
    "__global": "threadgroup",
    "__constant": "constant",
    "__private": "thread",
    "__generic": "(no address space)",
    "__bf16": "bfloat",
    "metal_strict::construct": "a vector's constructor",
    "metal_strict::native_vec": "vec",
}
SPACE = re.compile(r"(?:\b(?:device|threadgroup|constant|thread)\b|\(no address space)")
TYPE_PAIR = re.compile(
    r"'([^']*[*&[][^']*)' (?:with|from|to)[^']*'([^']*[*&[][^']*)'"
    r"|object parameter of type '([^']*)' with an expression of type '([^']*)'"
    r"|would make '([^']*)' equal '([^']*)'"
)
USEFUL_NOTE = re.compile(
    r"no known conversion|cannot (pass|bind|deduce a type)|conflicting|could not match"
    r"|not satisfied"
)

# What Metal accepts and Clang's OpenCL mode does not, or what is known already.
IGNORED = re.compile(
    # a cast between half and bfloat
    r"cast from '[^'*]*(half|float16_t|bfloat)[^'*]*' to '[^'*]*' is not allowed"
    # a vector's constructor under a name that `vector_aliases` does not know
    r"|excess elements in scalar initializer"
    # a struct copied out of constant memory
    r"|in address space 'constant' to object in address space '\(no address space\)'"
    # a method or conversion of a temporary object
    r"|cannot initialize object parameter of type '[^']*thread (?P<object>.*)' with an "
    r"expression of type '(?P=object)'"
    # a reference to a temporary object, which has no address space
    r"|cannot bind to a temporary object because of address space mismatch"
    r"|reference to type 'const thread [^']*' cannot bind to a value of unrelated type"
    r"|in default address space to object in address space 'thread'"
    rf"|'(const )?thread [^']*' (to value of type|equal) '(?![^']*{SPACE.pattern})"
    # pointer += object that converts to an integer
    r"|invalid operands to binary expression \('[^']*\*' and 'thread [\w:]+<"
    # bfloat in braces, which the second reading finds
    r"|cannot be narrowed from type '[^']*' to '[^']*bfloat"
    # words that Metal lacks as well, which the tokens told
    r"|in C\+\+ for OpenCL|exceptions disabled|requires cl_khr_fp64|identifier 'std'"
    r"|'thread_local' storage class"
)

BFLOAT = r"'[^'*]*\bbfloat'"
FLOAT = r"'[^'*]*\b(?:float|half)\d?'"
READINGS = (
    (
        r"cast from .*(address space|is not allowed)",
        "address-space-cast",
        "a cast cannot leave an address space; copy the values",
    ),
    (
        r"cannot bind to vector element",
        "vector-element",
        "copy the element into a variable, and back",
    ),
    (
        r"pointers to functions|address of function",
        "function-pointer",
        "pass a type with a static method as template argument",
    ),
    (
        r"undeclared|unknown type name|no (member|template|type) named|did not find",
        "unknown-name",
        "not among the names of Metal known here; check spelling and #include",
    ),
    (
        rf"(initialize|assigning to) [^'*]*{BFLOAT}.* type {FLOAT}"
        rf"|conversion from {FLOAT} to {BFLOAT}",
        "implicit-bfloat",
        "neither float nor half becomes a bfloat by itself; write T(x)",
    ),
    (
        rf"(initialize|assigning to) [^'*]*'[^'*]*\bhalf'.* type {BFLOAT}",
        "implicit-half",
        "no bfloat becomes a half by itself; write half(x)",
    ),
    ("", "compile-error", "neither C++ nor Metal"),
)


def errors(unit: TranslationUnit) -> Iterator[tuple[int, str]]:
    """Line of the text, and message with notes in Metal's words, of Clang's errors.

    Raises:
        RuntimeError: An error has nothing to do with the text.
    """
    for item in unit.diagnostics:
        if item.severity < ERROR:
            continue
        notes = [note for note in item.children if "included from" not in note.spelling]
        calls = [note for note in notes if "requested here" in note.spelling]
        places = [item.location, *(note.location for note in calls)]
        message = in_metal("; ".join(part.spelling for part in (item, *notes)))
        for place in places:
            if str(place.file) == MAIN:
                yield place.line, message
                break
        else:
            raise RuntimeError(f"[check_text] error outside the text: {message}")


def in_metal(message: str) -> str:
    """One of Clang's messages in Metal's words."""
    message = re.sub(r"'[^']*' \(aka ('[^']*')\)", r"\1", message)
    message = re.sub(r"identifier_|(?<=[*&])__private\b", "", message)
    message = re.sub(r" __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"\1", message)
    for word, metal in CLANG_WORDS.items():
        message = message.replace(word, metal)
    return message


def reading(error: str) -> tuple[str, str]:
    """Rule and message of one of Clang's errors."""
    if total := re.search(rf"evaluates to '(\d+) <= {THREADGROUP_BYTES}'", error):
        return (
            "threadgroup-memory",
            f"{total[1]} bytes of threadgroup memory where {THREADGROUP_BYTES} are the "
            "limit; take smaller tiles",
        )
    head, *notes = error.split("; ")
    head = re.sub(r"assertion failed due to requirement '.*'", "assertion failed", head)
    detail = next((note for note in notes if USEFUL_NOTE.search(note)), "")
    if "no matching" in head and detail:
        head += f" ({detail.split(': ', 1)[-1]})"
    if "cast from" not in head and crosses_spaces(head):
        return "address-space", f"{head}; name the same address space on both sides"
    for pattern, rule, advice in READINGS:
        if re.search(pattern, head):
            return rule, f"{head}; {advice}"
    raise AssertionError("the last pattern fits everything")


def crosses_spaces(message: str) -> bool:
    """Whether a message is about pointers, or objects, of two address spaces."""
    if pair := TYPE_PAIR.search(message):
        spaces = [SPACE.search(side) for side in pair.groups() if side is not None]
        return len({space and space[0] for space in spaces}) > 1
    return "address space '" in message or "changes address space" in message
