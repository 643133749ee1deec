"""A strict check of Metal text, without Apple's compiler.

:func:`check_text` finds what Metal rejects and a lenient C++ compiler accepts. It reads
the text as tokens, for words that Metal lacks, and as C++ for OpenCL with libclang, for
OpenCL's address spaces follow Metal's rules; Metal's standard library is there as
declarations, in the folder ``strict_include``. Where bfloat occurs, libclang reads the
text once more with a bfloat that neither float nor half converts to.

It proves a mistake, never that Apple's compiler accepts the text. It does not see a
wrong attribute of a parameter, a constructor or operator used in another address space
than its own, or recursion that overloads or ``if constexpr`` leave open. Textures and
matrices other than ``simdgroup_matrix`` are not declared and count as unknown names.
"""

from __future__ import annotations

import atexit
import enum
import functools
import importlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

THREADGROUP_BYTES = 32768
BUFFERS = 31

INCLUDE = Path(__file__).parent / "strict_include"


@dataclass(frozen=True)
class Finding:
    """One place in a kernel's text that Metal rejects.

    Attributes:
        file: The file that a ``#line`` directive names, else the name of the kernel.
        line: The line in that file.
        rule: Short id of the rule, such as ``implicit-bfloat``.
        message: What is wrong, and what to write instead.
    """

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


def check_text(text: str, *, name: str) -> list[Finding]:
    """Everything in the text of one kernel that Metal is known to reject.

    The text is what MLX hands to Metal: headers, signature, body and the line that
    instantiates a template. MLX's preamble is added here. A template is checked as it
    is instantiated there, so check a kernel once per element type.

    Args:
        text: The generated text. It may hold ``#line N "file.h"`` directives.
        name: Stands for the file name of lines that no directive covers.

    Returns:
        The findings in the order of the text, at most one per line and rule.

    Raises:
        ImportError: libclang's Python binding is not installed.
        RuntimeError: The headers of the installed MLX do not pass the check themselves.
    """
    source = Source(text, name)
    problems = [*token_problems(source)]
    if all(problem.rule != "no-attribute" for problem in problems):
        problems += clang_problems(source)
    findings: dict[tuple[int, str], Finding] = {}
    for line, rule, message in sorted(problems, key=lambda problem: problem.line):
        file, file_line = source.place(line)
        findings.setdefault((line, rule), Finding(file, file_line, rule, message))
    return list(findings.values())


class Problem(NamedTuple):
    """A finding whose line is still that of the whole text."""

    line: int
    rule: str
    message: str


# ---- The text as tokens


class Token(NamedTuple):
    """A piece of the text: its kind, its characters and where they start."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Where the character after it is."""
        return self.start + len(self.text)


TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<directive>^[ \t]*\#[ \t]*(?:include|line|pragma|error)\b[^\n]*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<mark>::|->|&&|\|\||[^\s\w])""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
LINE = re.compile(r'\s*#\s*line\s+(\d+)(?:\s+"(.*)")?')
INCLUDED = re.compile(r'\s*#\s*include\s*(?P<name><.*?>|".*?"|.*)')
NO_TOKEN = Token("none", "", 0)
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}


class Source:
    """A kernel's text, its tokens, and the way from its lines to those of its files."""

    def __init__(self, text: str, name: str) -> None:
        self.non_ascii = [match.start() for match in re.finditer(r"[^\x00-\x7f]", text)]
        self.text = re.sub(r"[^\x00-\x7f]", "?", text)
        self.tokens = [
            Token(match.lastgroup or "", match[0], match.start())
            for match in TOKEN.finditer(self.text)
            if match.lastgroup != "comment"
        ]
        self.classes = set(re.findall(r"\b(?:struct|class)\s+(\w+)", self.text))
        self.files = [(0, 1, name)]
        for token in self.tokens:
            if directive := LINE.match(token.text):
                file = directive[2] or self.files[-1][2]
                self.files.append((self.line(token.start), int(directive[1]), file))

    def line(self, offset: int) -> int:
        """The line of the text, from 1, that holds the character at ``offset``."""
        return self.text.count("\n", 0, offset) + 1

    def place(self, line: int) -> tuple[str, int]:
        """The file, and its line, that a line of the text comes from."""
        before = [entry for entry in self.files if entry[0] < line]
        start, first, file = before[-1]
        return file, first + line - start - 1

    def at(self, index: int) -> Token:
        """The token at ``index``, or an empty one outside the text."""
        return self.tokens[index] if 0 <= index < len(self.tokens) else NO_TOKEN

    def begins_statement(self, index: int) -> bool:
        """Whether a statement or declaration can begin at the token at ``index``."""
        before = self.at(index - 1)
        return before.kind in ("none", "directive") or before.text in (";", "{", "}")

    def closing(self, index: int) -> int:
        """Index of the token that closes the bracket at ``index``."""
        opening, depth = self.at(index).text, 0
        for position in range(index, len(self.tokens)):
            depth += self.tokens[position].text == opening
            depth -= self.tokens[position].text == BRACKETS[opening]
            if depth == 0:
                return position
        return len(self.tokens)


EXCEPTION = ("exception", "Metal has no exceptions; return a value that tells")
HEAP = ("new-delete", "Metal has no heap; declare an array of fixed size")
TYPE_INFO = ("rtti", "Metal has no run-time types; use a template argument")
WORDS = {
    "catch": EXCEPTION,
    "delete": HEAP,
    "double": ("double", "Metal has no double; write float"),
    "dynamic_cast": TYPE_INFO,
    "goto": ("goto", "Metal has no goto; write a loop, or a function that returns"),
    "new": HEAP,
    "thread_local": ("static-variable", "Metal has no thread_local; write thread"),
    "throw": EXCEPTION,
    "try": EXCEPTION,
    "typeid": TYPE_INFO,
    "virtual": ("virtual", "Metal has no virtual functions; use a template argument"),
}
DOUBLE_LITERAL = re.compile(
    r"((\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+"
    r"|0[xX][\da-fA-F.]+[pP][+-]?\d+)[lL]?"
)


def token_problems(source: Source) -> Iterator[Problem]:
    """What the tokens alone tell."""
    for offset in source.non_ascii:
        message = "MLX hands over ASCII only; spell the character out"
        yield Problem(source.line(offset), "non-ascii", message)
    for index, token in enumerate(source.tokens):
        for rule, message in problems_of_token(source, index):
            yield Problem(source.line(token.start), rule, message)


def problems_of_token(source: Source, index: int) -> Iterator[tuple[str, str]]:
    """Rule and message of what is wrong with one token."""
    before, token, after = (source.at(index + step) for step in (-1, 0, 1))
    if include := INCLUDED.match(token.text):
        if not include["name"].startswith("<metal_"):
            yield (
                "include",
                f"MLX passes no include path, so {include['name']} is not found; "
                "put its text into the header of the kernel",
            )
    elif token.kind == "number" and DOUBLE_LITERAL.fullmatch(token.text):
        literal = token.text.rstrip("lL")
        yield "double-literal", f"{token.text} is a double; write {literal}f"
    elif token.text in WORDS and (before.text, token.text) != ("=", "delete"):
        yield WORDS[token.text]
    elif token.text == "std" and after.text == "::":
        name = source.at(index + 2).text
        yield "std-name", f"Metal has no std::{name}; see whether metal::{name} exists"
    elif token.text == "buffer" and before.text == "[":
        number = source.at(index + 2).text
        if number.isdigit() and int(number) >= BUFFERS:
            yield (
                "buffer-limit",
                f"there are buffers 0 to {BUFFERS - 1}, no {number}; pass fewer arrays",
            )
        if is_cut(source, index):
            yield (
                "no-attribute",
                "MLX cuts the signature of a source without attributes here; "
                "use one, such as thread_position_in_grid",
            )


def is_cut(source: Source, index: int) -> bool:
    """Whether a parameter list ends at the ``buffer`` of ``index`` and yet goes on."""
    following = [token.text for token in source.tokens[index + 4 : index + 20]]
    if following[:4] != ["]", "]", ")", "{"]:
        return False
    statement = following[: following.index(";")] if ";" in following else following
    return "buffer" in statement


# ---- Metal as C++ for OpenCL

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


# ---- What is used of libclang


class Named(Protocol):
    """An enumerator of ``clang.cindex``."""

    name: str


class Location(Protocol):
    """``clang.cindex.SourceLocation``."""

    file: object
    line: int
    offset: int


class Extent(Protocol):
    """``clang.cindex.SourceRange``."""

    start: Location
    end: Location


class Diagnostic(Protocol):
    """``clang.cindex.Diagnostic``."""

    severity: int
    spelling: str
    location: Location
    children: Sequence[Diagnostic]


class Type(Protocol):
    """``clang.cindex.Type``."""

    kind: Named
    spelling: str

    def get_address_space(self) -> int:
        """One of :class:`Space`. Clang crashes if the kind is ``INVALID``."""

    def get_canonical(self) -> Type:
        """The type without aliases."""

    def get_pointee(self) -> Type:
        """What a pointer or reference points to."""


class Cursor(Protocol):
    """``clang.cindex.Cursor``: a node of the syntax tree."""

    kind: Named
    spelling: str
    location: Location
    extent: Extent
    type: Type
    result_type: Type
    underlying_typedef_type: Type
    referenced: Cursor | None

    def get_children(self) -> Iterator[Cursor]:
        """The nodes right below."""

    def get_usr(self) -> str:
        """An id that all declarations of one thing share."""


class TranslationUnit(Protocol):
    """``clang.cindex.TranslationUnit``."""

    cursor: Cursor
    diagnostics: Sequence[Diagnostic]

    def save(self, filename: str) -> None:
        """Write the precompiled form."""


ERROR = 3  # clang.cindex.Diagnostic.Error
INCOMPLETE = 2  # clang.cindex.TranslationUnit.PARSE_INCOMPLETE
MAIN = "kernel.metal"
OPTIONS = (
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "x86_64-linux"),
    *("-Xclang", "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,"
      "+__opencl_c_program_scope_global_variables"),
    *("-I", str(INCLUDE), "-ferror-limit=0", "-w"),
)  # fmt: skip
NO_BFLOAT_FROM = "-DSTRICT_BFLOAT"


def parse(path: str, text: str, *options: str, flags: int = 0) -> TranslationUnit:
    """Parse ``text`` with libclang.

    Raises:
        ImportError: libclang's Python binding is not installed.
    """
    try:
        index = importlib.import_module("clang.cindex").Index.create(excludeDecls=True)
    except Exception as error:  # libclang raises its own kinds
        raise ImportError(
            "[check_text] libclang's Python binding is missing or broken; "
            "install it with: pip install libclang"
        ) from error
    unit = index.parse(path, [*OPTIONS, *options], [(path, text)], flags)
    return cast(TranslationUnit, unit)


def parse_kernel(text: str, *options: str) -> TranslationUnit:
    """Parse a translated kernel after MLX's preamble."""
    return parse(MAIN, text, "-include-pch", preamble(*options), *options)


@functools.cache
def preamble(*options: str) -> str:
    """Path of MLX's preamble in precompiled form, which lives as long as the process.

    MLX's ``bf16_math.h`` uses names that only Apple's compiler knows, so ``metal_math``
    and ``metal_simdgroup`` declare the functions of bfloat in its place.

    Raises:
        RuntimeError: The headers of the installed MLX do not pass the check themselves.
    """
    kernels = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
    text = "#include <metal_stdlib>\n"
    for name in ("bf16.h", "complex.h", "defines.h", "logging.h", "utils.h"):
        header = (kernels / name).read_text(encoding="utf-8")
        text += translate(Source(header.replace("#pragma once", ""), name)) + "\n"
    unit = parse("mlx_preamble.h", text, *options, flags=INCOMPLETE)
    for item in unit.diagnostics:
        if item.severity >= ERROR:
            raise RuntimeError(
                f"[check_text] cannot read MLX's headers in {kernels}: {item.spelling}"
            )
    folder = tempfile.mkdtemp(prefix="mlx_flash_strict_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(folder) / "preamble.pch")
    unit.save(path)
    return path


def clang_problems(source: Source) -> Iterator[Problem]:
    """What libclang finds in the text."""
    text = translate(source)
    unit = parse_kernel(text)
    if any("vector element type 'bool'" in item.spelling for item in unit.diagnostics):
        text = re.sub(r"\bbool\b", "char", text)
        unit = parse_kernel(text)
    for line, error in errors(unit):
        if not IGNORED.search(error):
            yield Problem(line, *reading(error))
    yield from declaration_problems(unit, text)
    if "bfloat" in text:
        for line, error in errors(parse_kernel(text, NO_BFLOAT_FROM)):
            if reading(error)[0] == "implicit-bfloat":
                yield Problem(line, *reading(error))


# ---- What Clang says

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


# ---- What the declarations say

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
