"""Machine addresses of a compiled kernel as lines of its text."""

from __future__ import annotations

import bisect
import re
from functools import cache
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile


def resolve(message: str, library: Path, base: int) -> str:
    """Replace each ``@{address}`` in a report by ``file:line``."""

    def place(match: re.Match[str]) -> str:
        # a return address: the call is the instruction before it
        return line_at(library, int(match[1], 16) - base - 1)

    return re.sub(r"@\{([0-9a-f]+)\}", place, message)


def line_at(library: Path, address: int) -> str:
    """``file:line`` of an address in a library, or the address if it is not known."""
    starts, lines = line_table(library)
    index = bisect.bisect_right(starts, address) - 1
    return lines[index] if index >= 0 else f"address {address:#x}"


@cache
def line_table(library: Path) -> tuple[list[int], list[str]]:
    """Start addresses in order and the line of each; empty if the file has none."""
    try:
        with library.open("rb") as file:
            elf: Any = ELFFile(file)
            info = elf.get_dwarf_info() if elf.has_dwarf_info() else None
            rows = sorted(line_rows(info)) if info else []
    except ELFError:  # not ELF: macOS
        rows = []
    return [address for address, _ in rows], [line for _, line in rows]


def line_rows(info: Any) -> list[tuple[int, str]]:
    """Address and ``file:line`` of every row of the line tables."""
    rows = []
    for unit in info.iter_CUs():
        program = info.line_program_for_CU(unit)
        if program is None:
            continue
        files = program["file_entry"]
        first = 1 if program["version"] < 5 else 0
        for entry in program.get_entries():
            state = entry.state
            if state is None or state.end_sequence:
                continue
            name = files[state.file - first].name.decode()
            rows.append((state.address, f"{Path(name).name}:{state.line}"))
    return rows
