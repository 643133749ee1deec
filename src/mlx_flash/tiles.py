"""Tile sizes: a table (kernel, head dim, element size) -> Tile for each kind of GPU.

The ground of every row for Metal is the cost model for Apple GPUs: few live registers
(the limit is REGISTERS_LIMIT fragment registers a lane, beyond which the compiler
spills), two barriers a block, several threadgroups resident. All of it is modelled, not
yet measured on Apple hardware. The rows for CUDA were chosen by measurement on an H200
(benchmarks/results).

Rows that mlx_flash.tune() measured on this machine's GPU come before the tables. They
are for exactly one head dim, lie in a file of the user's cache folder, and are read
once.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flash.cache import CACHE_FOLDER
from mlx_flash.versions import MLX, own_version

LARGEST_HEAD_DIM = 256
REGISTERS_LIMIT = 72
THREADGROUP_BYTES_LIMIT = 32768
SHARED_BYTES_LIMIT = 227 * 1024  # the same on Hopper, which has the most
THREADS_LIMIT = 1024  # of a threadgroup


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work.

    Attributes:
        rows: Rows that a threadgroup owns: queries (BQ) of attention_forward and
            attention_dq, keys (BK) of attention_dkv.
        block: Rows of a streamed tile: keys (BK), respectively queries (BQ).
        fragments: 8-row fragments that a simdgroup owns (FQ, respectively FK).
        parts: Simdgroups that share these rows, each with its part of the columns (DS).
        rows_in_tg: The first left operand (q, respectively k) stays in threadgroup
            memory instead of registers.
        second_in_tg: So does the second (dout, respectively v).
    """

    rows: int
    block: int
    fragments: int = 1
    rows_in_tg: bool = False
    second_in_tg: bool = False
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.parts * self.rows // (8 * self.fragments)

    def with_at_most(self, threads: int) -> Tile:
        """The same tile with fewer rows, where a threadgroup has more threads."""
        if self.threads <= threads:
            return self
        return replace(self, rows=self.rows * threads // self.threads)


# Key: (kernel, largest head dim of the row, bytes of an element); the first row that is
# wide enough for q, k and v wins. "attention_dkv" gives dk and dv in one pass; head
# dims that have no such row use "attention_dk" and "attention_dv", the same body with
# one flag each.
# `registers` in the comments is fragment_registers(...) at the largest head dim.
TABLE: dict[tuple[str, int, int], Tile] = {
    # two row fragments share each k and v fragment: half the loads per product
    ("attention_forward", 64, 2): Tile(128, 16, fragments=2),  # registers 62
    # one row fragment, wider blocks: two would need 74 and more
    ("attention_forward", 96, 2): Tile(64, 32),  # registers 50
    ("attention_forward", 128, 2): Tile(64, 32),  # registers 62
    ("attention_forward", 256, 2): Tile(32, 16, parts=2),  # registers 56
    ("attention_forward", 32, 4): Tile(128, 16, fragments=2),  # registers 50
    ("attention_forward", 64, 4): Tile(64, 32),  # registers 50
    ("attention_forward", 96, 4): Tile(64, 16),  # registers 58
    ("attention_forward", 128, 4): Tile(64, 8),  # registers 70
    ("attention_forward", 256, 4): Tile(32, 8, parts=2),  # registers 70
    ("attention_dq", 80, 2): Tile(64, 32),  # registers 62
    ("attention_dq", 96, 2): Tile(64, 16),  # registers 60
    ("attention_dq", 128, 2): Tile(64, 16, rows_in_tg=True),  # registers 60
    ("attention_dq", 256, 2): Tile(32, 8, parts=2),  # registers 71
    ("attention_dq", 64, 4): Tile(64, 16),  # registers 62
    ("attention_dq", 80, 4): Tile(64, 8),  # registers 68
    ("attention_dq", 96, 4): Tile(32, 16, rows_in_tg=True),  # registers 62
    ("attention_dq", 128, 4): Tile(32, 16, parts=2),  # registers 62
    ("attention_dq", 256, 4): Tile(16, 8, parts=4),  # registers 56
    ("attention_dkv", 64, 2): Tile(64, 16),  # registers 62
    ("attention_dkv", 80, 2): Tile(64, 8),  # registers 68
    ("attention_dkv", 96, 2): Tile(64, 8, rows_in_tg=True),  # registers 68
    ("attention_dkv", 128, 2): Tile(32, 16, parts=2),  # registers 62
    ("attention_dkv", 256, 2): Tile(16, 16, parts=4),  # registers 62
    ("attention_dkv", 48, 4): Tile(32, 16),  # registers 66
    ("attention_dkv", 64, 4): Tile(32, 16, rows_in_tg=True),  # registers 66
    # one pass for both loses by the model
    ("attention_dv", 96, 4): Tile(64, 16),  # registers 58
    ("attention_dv", 128, 4): Tile(64, 8),  # registers 70
    ("attention_dv", 256, 4): Tile(32, 8, parts=2),  # registers 70
    ("attention_dk", 80, 4): Tile(64, 8),  # registers 68
    ("attention_dk", 96, 4): Tile(32, 16, rows_in_tg=True),  # registers 62
    ("attention_dk", 128, 4): Tile(32, 16, parts=2),  # registers 62
    ("attention_dk", 256, 4): Tile(16, 8, parts=4),  # registers 56
    # one pass, no blocks
    ("attention_delta", 256, 2): Tile(32, 0),
    ("attention_delta", 256, 4): Tile(32, 0),
}


# Chosen by the times of each kernel on an H200, T = 16384 (float32 D128: 8192), causal.
# One or two threadgroups of 128 to 384 threads fill the registers of a multiprocessor.
CUDA_TABLE: dict[tuple[str, int, int], Tile] = {
    # two threadgroups resident; a wider block would leave one
    ("attention_forward", 64, 2): Tile(128, 64, 2),
    # three warpgroups share each key and value; q in registers would leave two
    ("attention_forward", 128, 2): Tile(192, 64, 2, rows_in_tg=True),
    ("attention_forward", 64, 4): Tile(192, 64, 2, rows_in_tg=True),
    ("attention_forward", 128, 4): Tile(128, 64, 2),
    ("attention_forward", 256, 2): Tile(128, 64, 2, rows_in_tg=True),
    ("attention_forward", 256, 4): Tile(64, 16, 2, rows_in_tg=True),
    ("attention_dq", 64, 2): Tile(128, 128, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dq", 128, 2): Tile(128, 64, 2, rows_in_tg=True),
    ("attention_dq", 256, 2): Tile(128, 32, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dq", 256, 4): Tile(64, 16, 2, rows_in_tg=True),
    # 192, 64 is 4 % faster, but without wgmma it needs more registers than there are
    ("attention_dq", 64, 4): Tile(128, 32, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dq", 128, 4): Tile(128, 32, 2, rows_in_tg=True),
    ("attention_dkv", 64, 2): Tile(128, 128, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dkv", 128, 2): Tile(128, 64, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dkv", 64, 4): Tile(128, 64, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dkv", 128, 4): Tile(128, 32, 2, rows_in_tg=True),
    # one output alone: in float for precise=True (below), and where both would spill
    ("attention_dk", 128, 4): Tile(128, 32, 2, rows_in_tg=True),
    ("attention_dv", 128, 4): Tile(128, 32, 2, rows_in_tg=True),
    ("attention_dk", 256, 2): Tile(128, 32, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dk", 256, 4): Tile(64, 16, 2, rows_in_tg=True),
    ("attention_dv", 256, 2): Tile(128, 64, 2, rows_in_tg=True),
    ("attention_dv", 256, 4): Tile(64, 16, 2, rows_in_tg=True),
    # one pass, no blocks
    ("attention_delta", 256, 2): Tile(32, 0),
    ("attention_delta", 256, 4): Tile(32, 0),
}
# precise=True keeps two parts of each number and its own sums in registers, and has no
# wgmma: rows that do not spill, dk and dv apart above D = 64.
CUDA_PRECISE_TABLE: dict[tuple[str, int, int], Tile] = {
    row: tile for row, tile in CUDA_TABLE.items() if row != ("attention_dkv", 128, 4)
} | {
    ("attention_forward", 64, 4): Tile(128, 64, 2, rows_in_tg=True),
    ("attention_forward", 128, 4): Tile(128, 32, 2, rows_in_tg=True),
    ("attention_dq", 128, 4): Tile(128, 32, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dkv", 64, 4): Tile(128, 32, 2, rows_in_tg=True, second_in_tg=True),
    ("attention_dk", 128, 4): Tile(128, 32, 2, rows_in_tg=True, second_in_tg=True),
}
TABLES = {"metal": TABLE, "cuda": CUDA_TABLE, "cuda_precise": CUDA_PRECISE_TABLE}
# Blocks that take turns in threadgroup memory (SLOTS of metal/tile.h and cuda/tile.h).
SLOTS = {"metal": 1, "cuda": 2, "cuda_precise": 2}


# The kernels of a head dim: these, and dk and dv in one pass or in two.
ALWAYS = ("attention_forward", "attention_dq")
ONE_PASS = ("attention_dkv",)
TWO_PASSES = ("attention_dk", "attention_dv")


@cache
def tile(kernel: str, D: int, element_bytes: int, gpu: str = "metal") -> Tile:
    """The tuned row for a kernel, if there is one, else the table's.

    Raises:
        KeyError: The table has no row for this head dim.
        RuntimeError: The file of tuned tiles is damaged.
    """
    tuned = tuned_tiles(D, element_bytes, gpu)
    if kernel in tuned:
        return tuned[kernel]
    widths = sorted(
        width
        for name, width, size in TABLES[gpu]
        if (name, size) == (kernel, element_bytes) and width >= D
    )
    if not widths:
        raise KeyError((kernel, D, element_bytes))
    return TABLES[gpu][kernel, widths[0], element_bytes]


@cache
def fuses_dk_and_dv(D: int, element_bytes: int, gpu: str = "metal") -> bool:
    """Whether one attention_dkv launch gives both dk and dv."""
    tuned = tuned_tiles(D, element_bytes, gpu)
    if tuned:
        return "attention_dkv" in tuned
    return any(
        name == "attention_dkv" and width >= D and size == element_bytes
        for name, width, size in TABLES[gpu]
    )


Tuned = dict[tuple[str, int, int], dict[str, Tile]]  # by gpu, D and element_bytes
TUNED_FOLDER = CACHE_FOLDER / "tiles"


def tuned_tiles(D: int, element_bytes: int, gpu: str) -> Mapping[str, Tile]:
    """The tuned tiles of a head dim by kernel: of all its kernels, or of none.

    A file holds rows for the tables of its own device only, so the simulator, whose
    table is Metal's, has the tuned tiles of a Mac and no others.
    """
    return all_tuned_tiles().get((gpu, D, element_bytes), {})


@cache
def all_tuned_tiles() -> Tuned:
    """What :func:`mlx_flash.tune` stored for this machine's GPU."""
    path = tuned_tiles_file()
    return {} if path is None else read_tuned_tiles(path)


def tuned_tiles_file() -> Path | None:
    """One file for each device, version of this library and version of MLX.

    None: the machine has no GPU.
    """
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        return None
    version = own_version() or "checkout"
    name = f"{gpu_name()} mlx_flash {version} mlx {MLX}"
    return TUNED_FOLDER / (re.sub(r"[^\w.]+", "-", name) + ".json")


def gpu_name() -> str:
    """The device's own name."""
    return str(mx.device_info(mx.gpu)["device_name"])


def read_tuned_tiles(path: Path) -> Tuned:
    """The contents of a file; none if there is no file.

    Raises:
        RuntimeError: The file is damaged.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {
            (row["gpu"], row["D"], row["element_bytes"]): checked_kernels(
                row["kernels"]
            )
            for row in document["tiles"]
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RuntimeError(
            f"[flash_attention] the file of tuned tiles is damaged ({problem!r}); "
            f"delete {path}, and tune again if you like: python -m mlx_flash tune"
        ) from problem


def checked_kernels(kernels: dict[str, dict[str, Any]]) -> dict[str, Tile]:
    """The tiles of a head dim as a file has them.

    Raises:
        ValueError, KeyError, TypeError: They are no tiles.
    """
    if set(kernels) not in ({*ALWAYS, *ONE_PASS}, {*ALWAYS, *TWO_PASSES}):
        raise ValueError(f"kernels {sorted(kernels)}")
    for numbers in kernels.values():
        for name, example in asdict(Tile(8, 8)).items():
            if type(numbers[name]) is not type(example):
                raise TypeError(f"{name} is {numbers[name]!r}")
    return {kernel: Tile(**numbers) for kernel, numbers in kernels.items()}


def store_tuned_tiles(
    D: int, element_bytes: int, gpu: str, kernels: Mapping[str, Tile]
) -> Path:
    """Add a head dim to the file; this process uses it from here on.

    The new file is renamed into place, so that nobody ever reads half of one.
    """
    path = tuned_tiles_file()
    assert path is not None, "a GPU was measured"
    tuned = read_tuned_tiles(path) | {(gpu, D, element_bytes): dict(kernels)}
    document = {
        "device": gpu_name(),
        "mlx_flash": own_version(),
        "mlx": MLX,
        "tiles": [
            {
                "gpu": gpu,
                "D": D,
                "element_bytes": element_bytes,
                "kernels": {kernel: asdict(tile) for kernel, tile in of_row.items()},
            }
            for (gpu, D, element_bytes), of_row in sorted(tuned.items())
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder, path.name)
        written.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        written.replace(path)
    for cached in (all_tuned_tiles, tile, fuses_dk_and_dv):
        cached.cache_clear()
    return path


def blocks(length: int, block: int) -> int:
    """Blocks that cover a length."""
    return -(-length // block)


def tile_slots(element_bytes: int, gpu: str) -> int:
    """Tiles of a streamed operand (TileSlots of cuda/tile.h: in TF32 one more)."""
    return SLOTS[gpu] + (gpu == "cuda" and element_bytes == 4)


def width(D: int, parts: int = 1, gpu: str = "metal") -> int:
    """Columns of a tile of D columns (Width of metal/tile.h and cuda/tile.h)."""
    fragments = (8 if gpu == "metal" else 16) * parts
    return blocks(D, fragments) * fragments


def row_stride(D: int, element_bytes: int) -> int:
    """Elements from row to row in threadgroup memory (RowStride of metal/tile.h)."""
    chunk = 16 // element_bytes
    return D if (D // chunk) % 2 else D + chunk


def fragment_registers(kernel: str, t: Tile, D: int, element_bytes: int) -> int:
    """32-bit registers a lane that hold live fragments: operands, accumulators, s, p.

    An 8x8 fragment is two elements a lane: two registers in float, one in 16 bits.
    """
    operand = element_bytes // 2
    wide = t.fragments * width(D, t.parts) // (8 * t.parts)
    narrow = t.fragments * t.block // 8
    first = 0 if t.rows_in_tg else wide * operand
    one_product = first + 2 * wide + 2 * narrow + operand * narrow
    second = 0 if t.second_in_tg else wide * operand
    second_product = second + 2 * narrow
    loaded = 2
    if kernel in ("attention_forward", "attention_dv"):
        return one_product + loaded
    if kernel in ("attention_dq", "attention_dk"):
        return one_product + second_product + loaded
    if kernel == "attention_dkv":
        return one_product + second_product + 2 * wide + operand * narrow + loaded
    return 2 * operand  # attention_delta


def threadgroup_bytes(kernel: str, t: Tile, D: int, element_bytes: int) -> int:
    """Bytes of threadgroup memory that a kernel uses."""
    rows = 2 * t.block + (t.rows_in_tg + t.second_in_tg) * t.rows
    row_numbers = 0
    if kernel in ("attention_dkv", "attention_dk", "attention_dv"):
        row_numbers = 2 * 4 * t.block
    meetings = 1 if kernel == "attention_forward" else 2
    parts = meetings * 4 * t.parts * t.rows * t.block if t.parts > 1 else 0
    stride = row_stride(width(D, t.parts), element_bytes)
    return rows * stride * element_bytes + row_numbers + parts
