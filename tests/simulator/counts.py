"""Exact counts of every kernel at one shape per head dim.

``python tests/simulator/counts.py`` rewrites counts.json after a wanted change of cost.
"""

import json
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import kernels, simulator, tiles
from mlx_flash.options import Options

FILE = Path(__file__).with_suffix(".json")
DTYPES = {"float32": mx.float32, "float16": mx.float16}

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


def launches(D: int, dtype: mx.Dtype) -> list[simulator.LaunchRecord]:
    """One causal attention with grouped heads and its backward, counted."""
    mx.random.seed(0)
    q, dout = (mx.random.normal((1, 2, 80, D)).astype(dtype) for _ in range(2))
    k, v = (mx.random.normal((1, 1, 80, D)).astype(dtype) for _ in range(2))
    options = {"options": Options(scale=0.1, high=0), "backend": "simulator"}
    kernels.check_lane_map("simulator")
    with simulator.record() as records:
        out, lse = kernels.attention_forward(q, k, v, **options)
        saved = q, k, v, out, lse, dout, mx.zeros(lse.shape)
        kernels.attention_backward(*saved, **options)
    return records


def counts(D: int, dtype: mx.Dtype) -> list[dict[str, object]]:
    """The pinned counts of each launch, those that are 0 left out."""
    return [
        {"kernel": record.kernel}
        | {
            name: count
            for name, count in record.counters.items()
            if count and name not in UNPINNED
        }
        for record in launches(D, dtype)
    ]


def main() -> None:
    """Rewrite the file."""
    cases = [(D, name) for D in tiles.HEAD_DIMS for name in DTYPES]
    table = {
        f"D{D}-{name}": counts(D, DTYPES[name]) for D, name in tqdm(cases, unit="case")
    }
    FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
