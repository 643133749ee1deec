"""Compiles a kernel's text with the machine's C++ compiler, once per content."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from mlx_flash.cache import CACHE_FOLDER
from mlx_flash.simulator.errors import SimulatorError

INCLUDE = Path(__file__).resolve().parent / "include"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    # a * b + c stays two roundings wherever it is inlined, so that bits do not change
    "-ffp-contract=off",
    "-pthread",
)
# How a kernel is built. "checked" reports every load and store (include/checks.h): it
# is compiled for the thread sanitizer but not linked with it. "fast_math" may reorder
# sums and assumes that there are no infinities and no NaNs. "initialised" is refused
# where the compiler, which looks closer at -O3, sees a variable that may be read before
# it has a value.
BUILDS: dict[str, tuple[str, ...]] = {
    "plain": ("-w",),
    "initialised": ("-O3", "-Werror=uninitialized", "-Werror=maybe-uninitialized"),
    "checked": ("-w", "-fsanitize=thread", "-g1", "-DSIMULATOR_CHECKED"),
    "fast_math": (
        "-w",
        "-fassociative-math",
        "-freciprocal-math",
        "-ffinite-math-only",
        "-fno-signed-zeros",
        "-fno-trapping-math",
        "-fno-math-errno",
    ),
}


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    return CACHE_FOLDER / "simulator"


@cache
def find_compiler() -> tuple[str, ...]:
    """The C++ compiler: ``$CXX``, else c++, g++ or clang++.

    Raises:
        SimulatorError: There is none.
    """
    command = shlex.split(os.environ.get("CXX", ""))
    for name in command[:1] or ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return (path, *command[1:])
    raise SimulatorError(
        "[simulator] no C++ compiler found (tried $CXX, c++, g++, clang++); install "
        "one: 'apt-get install g++' on Debian or Ubuntu, 'dnf install gcc-c++' on "
        "Fedora, 'xcode-select --install' on macOS"
    )


@cache
def toolchain() -> tuple[tuple[str, ...], str]:
    """The compile command, and a text that changes whenever its output might."""
    compiler = find_compiler()
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    command = (*compiler, *FLAGS, f"-I{INCLUDE}")
    processor = platform.machine()
    if processor == "x86_64":
        command = (*command, "-march=native")
        info = Path("/proc/cpuinfo")
        flags = (
            re.search(r"^flags.*$", info.read_text(), re.M) if info.exists() else None
        )
        processor += flags.group() if flags else platform.node()
    headers = "".join(path.read_text() for path in sorted(INCLUDE.iterdir()))
    return command, "\n".join([*command, version, processor, headers])


@cache
def digest(text: str, kind: str) -> str:
    """Changes whenever the compiled library might."""
    _, identity = toolchain()
    content = "\n".join([identity, *BUILDS[kind], text])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def build(text: str, name: str, kind: str = "plain") -> Path:
    """Path of the shared library for a text; compiles it if nobody has before.

    Several processes may build the same text at once: each writes a file of its own
    and renames it into place, which is atomic.

    Raises:
        SimulatorError: The text does not compile, or not as this kind; the message
            shows the lines.
    """
    library = cache_folder() / f"{digest(text, kind)}.so"
    if library.exists():
        return library
    command, _ = toolchain()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, output = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        machine_code = source.with_suffix(".o")
        source.write_text(text)
        for step in (
            [*command, *BUILDS[kind], "-c", str(source), "-o", str(machine_code)],
            [*command, "-shared", str(machine_code), "-o", str(output)],
        ):
            result = subprocess.run(step, capture_output=True, text=True, check=False)
            if result.returncode:
                problem = "does not compile"
                if kind == "initialised":
                    problem = "may read a variable that nothing initialised"
                raise SimulatorError(
                    f"[simulator] kernel {name!r} {problem}:\n"
                    + explain(result.stderr, text)
                )
        output.replace(library)
    return library


@cache
def load(library: Path) -> ctypes.CDLL:
    """The library, loaded once per process."""
    return ctypes.CDLL(str(library))


def explain(messages: str, text: str, limit: int = 8) -> str:
    """The compiler's errors, each with the kernel's own line below it."""
    lines = numbered_lines(text)
    found = []
    for match in re.finditer(
        r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", messages, re.M
    ):
        file, line, message = match[1], int(match[2]), match[3]
        shown = lines.get((file, line), "").strip()
        found.append(f"  {Path(file).name}:{line}: {message}\n    {shown}".rstrip())
    return "\n".join([*dict.fromkeys(found)][:limit]) or messages


def numbered_lines(text: str) -> dict[tuple[str, int], str]:
    """Every line of a text by the file and number that its #line directives give it."""
    lines: dict[tuple[str, int], str] = {}
    file, number = "", 0
    for line in text.splitlines():
        directive = re.match(r'#line (\d+) "(.*)"', line)
        if directive:
            file, number = directive[2], int(directive[1])
            continue
        lines[file, number] = line
        number += 1
    return lines
