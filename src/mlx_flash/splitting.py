"""Cuts long launches into several, so that none runs long enough for a watchdog.

macOS ends a command that keeps the GPU from drawing the screen for seconds. A launch
covers whole blocks of rows, each of which is computed as before: the results have the
same bits, split or not.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

# The most work of one launch, in 8x8x8 matrix products, by the start of the device's
# name; the longest name that fits counts. On Apple GPUs about a quarter of a second at
# half of the arithmetic rate (modelled, not yet measured), of the smallest chip of each
# family; the last row is for everything else. Data center GPUs draw no screen.
LIMITS = {
    "Apple M1": 3e8,
    "Apple M1 Pro": 6e8,
    "Apple M1 Max": 12e8,
    "Apple M1 Ultra": 24e8,
    "Apple M2": 4e8,
    "Apple M2 Pro": 8e8,
    "Apple M2 Max": 15e8,
    "Apple M2 Ultra": 30e8,
    "Apple M3": 4e8,
    "Apple M3 Pro": 7e8,
    "Apple M3 Max": 15e8,
    "Apple M3 Ultra": 30e8,
    "Apple M4": 5e8,
    "Apple M4 Pro": 10e8,
    "Apple M4 Max": 20e8,
    "NVIDIA A100": 1e12,
    "NVIDIA H100": 1e12,
    "NVIDIA H200": 1e12,
    "NVIDIA B200": 1e12,
    "": 3e8,
}


@cache
def products_limit(backend: str) -> float:
    """The most 8x8x8 products of a launch on a back end's device."""
    device = ""
    if backend in ("metal", "cuda"):
        device = str(mx.device_info().get("device_name", ""))
    return LIMITS[max((name for name in LIMITS if device.startswith(name)), key=len)]


def pieces(
    n_rows: int,
    n_columns: int,
    low: int | None,
    high: int | None,
    block: int,
    depth: int,
    backend: str,
) -> list[slice]:
    """Rows of each launch: whole blocks, as many as fit into the limit.

    Args:
        n_rows: Rows of the score matrix that the launches share.
        n_columns: Its columns.
        low: Row i is computed from the columns j >= i + low.
        high: And j <= i + high.
        block: Rows of a threadgroup.
        depth: Multiplications per score: all heads and head dims.
        backend: Where the launches run.
    """
    limit = products_limit(backend)
    if n_rows * n_columns * depth <= limit * 512:
        return [slice(0, n_rows)]
    cuts, products = [0], 0.0
    for start in range(0, n_rows, block):
        first = 0 if low is None else max(0, start + low)
        last = n_columns if high is None else min(n_columns, start + block + high)
        cost = block * max(last - first, 0) * depth / 512
        if products and products + cost > limit:
            cuts.append(start)
            products = 0.0
        products += cost
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], n_rows], strict=True)]
