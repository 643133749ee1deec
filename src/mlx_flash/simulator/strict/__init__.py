"""A strict check of Metal text, without Apple's compiler.

:func:`check_text` finds what Metal rejects and a lenient C++ compiler accepts. It reads
the text as tokens, for words that Metal lacks, and as C++ for OpenCL with libclang, for
OpenCL's address spaces follow Metal's rules; Metal's standard library is there as
declarations, in the folder ``include``. Where bfloat occurs, libclang reads the
text once more with a bfloat that neither float nor half converts to.

It proves a mistake, never that Apple's compiler accepts the text. It does not see a
wrong attribute of a parameter, a constructor or operator used in another address space
than its own, or recursion that overloads or ``if constexpr`` leave open. Textures and
matrices other than ``simdgroup_matrix`` are not declared and count as unknown names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_flash.simulator.strict.declarations import declaration_problems
from mlx_flash.simulator.strict.diagnostics import IGNORED, errors, reading
from mlx_flash.simulator.strict.libclang import NO_BFLOAT_FROM, parse_kernel
from mlx_flash.simulator.strict.opencl import translate
from mlx_flash.simulator.strict.tokens import Problem, Source, token_problems


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
