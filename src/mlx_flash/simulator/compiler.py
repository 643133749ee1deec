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

import platformdirs

from mlx_flash.simulator.errors import SimulatorError

INCLUDE = Path(__file__).resolve().parent / "include"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    # a * b + c stays two roundings wherever it is inlined, so that bits do not change
    "-ffp-contract=off",
    "-w",
)


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    return Path(platformdirs.user_cache_dir("mlx_flash", appauthor=False)) / "simulator"


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


def build(text: str, name: str) -> Path:
    """Path of the shared library for a text; compiles it if nobody has before.

    Several processes may build the same text at once: each writes a file of its own
    and renames it into place, which is atomic.

    Raises:
        SimulatorError: The text does not compile; the message shows the lines.
    """
    command, identity = toolchain()
    digest = hashlib.sha256(f"{identity}\n{text}".encode()).hexdigest()[:32]
    library = cache_folder() / f"{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, output = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        result = subprocess.run(
            [*command, str(source), "-o", str(output)],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SimulatorError(
                f"[simulator] kernel {name!r} does not compile:\n"
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
    return "\n".join(found[:limit]) or messages


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
