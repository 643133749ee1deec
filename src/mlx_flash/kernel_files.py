"""Finds the kernel sources in a wheel and in a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def kernel_folder(name: str) -> Path:
    """Folder of the kernel sources, ``"metal"`` or ``"cuda"``.

    A wheel carries it inside the package, a checkout at the top level.

    Raises:
        FileNotFoundError: Neither place has it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / name, package.parents[1] / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"mlx_flash: kernel sources {name!r} not found at {package}"
    )


@cache
def read_header(folder: str, stem: str) -> str:
    """Text of one kernel header, with its own name and lines in compiler messages."""
    text = (kernel_folder(folder) / f"{stem}.h").read_text(encoding="ascii")
    return f'#line 1 "{stem}.h"\n{text}'
