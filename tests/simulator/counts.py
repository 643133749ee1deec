"""Exact counts of every kernel, at one shape per pair of head dims and per feature.

``python tests/simulator/counts.py`` rewrites counts.json after a wanted change of cost.
"""

import json
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import kernels, simulator
from mlx_flash.options import Options

FILE = Path(__file__).with_suffix(".json")
DTYPES = {"float32": mx.float32, "float16": mx.float16}
HEAD_DIMS = ((16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256))
T = 80
BAND = {"low": -24, "high": 8}
# name: head dims, options, which other arrays there are
CASES = {
    f"D{D}-DV{DV}-{dtype}": (D, DV, dtype, {"high": 0}, ())
    for D, DV in (*HEAD_DIMS, (96, 64), (64, 160))
    for dtype in DTYPES
} | {
    "window": (64, 64, "float16", BAND, ()),
    "softcap": (64, 64, "float16", {"softcap": 2.0}, ()),
    "segments": (64, 64, "float16", {}, ("segments",)),
    "mask": (64, 64, "float16", {}, ("mask",)),
    "sinks": (64, 64, "float16", {}, ("sinks",)),
    "everything": (
        160,
        64,
        "float32",
        BAND | {"softcap": 2.0},
        ("segments", "mask", "sinks"),
    ),
}

# Reads of memory are left out: a compiler may keep a value in a register.
UNPINNED = {
    "device_bytes_read",
    "constant_bytes_read",
    "threadgroup_bytes_read",
    "threadgroup_accesses",
    "threadgroup_bank_steps",
    "lane_steps",
    "lane_slots",
}


def launches(name: str) -> list[simulator.LaunchRecord]:
    """The attention of a case, with grouped heads, and its backward, counted."""
    D, DV, dtype, numbers, others = CASES[name]
    mx.random.seed(0)

    def draw(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(DTYPES[dtype])

    q, dout = draw(1, 2, T, D), draw(1, 2, T, DV)
    k, v = draw(1, 1, T, D), draw(1, 1, T, DV)
    ids = mx.arange(T)[None] // 30
    arrays = {
        "segments": {"q_segments": ids, "k_segments": ids},
        "mask": {"mask": mx.random.normal((T, T))[None, None]},
        "sinks": {"sinks": mx.random.normal((2,))},
    }
    options = {"options": Options(0.1, **numbers), "backend": "simulator"}
    for other in others:
        options |= arrays[other]
    kernels.check_lane_map("simulator")
    with simulator.record() as records:
        out, lse = kernels.attention_forward(q, k, v, **options)
        saved = q, k, v, out, lse, dout, mx.zeros(lse.shape)
        kernels.attention_backward(*saved, **options)
    return records


def counts(name: str) -> list[dict[str, object]]:
    """The pinned counts of each launch, those that are 0 left out."""
    return [
        {"kernel": record.kernel}
        | {
            name: count
            for name, count in record.counters.items()
            if count and name not in UNPINNED
        }
        for record in launches(name)
    ]


def main() -> None:
    """Rewrite the file."""
    table = {name: counts(name) for name in tqdm(CASES, unit="case")}
    FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
