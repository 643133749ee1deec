"""What is used of libclang, which has no types of its own, and how it is called."""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx

from mlx_flash.simulator.strict.opencl import INCLUDE, translate
from mlx_flash.simulator.strict.tokens import Source


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
