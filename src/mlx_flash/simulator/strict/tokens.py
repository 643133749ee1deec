"""The text of a kernel as tokens, and the words that Metal lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BUFFERS = 31


class Problem(NamedTuple):
    """A finding whose line is still that of the whole text."""

    line: int
    rule: str
    message: str


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
