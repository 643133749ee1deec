#!/usr/bin/env python3
"""Times flash_attention beside MLX's own attention, in one run on one device.

python benchmarks/bench_attention.py [--cases NAME,NAME,...] [--results FOLDER]

Every case is checked against float64 first, on one head; a wrong result stops the run
before anything is timed. Then both implementations run the same inputs, forward
alone and forward with backward; short ones also with both under mx.compile, as in a
compiled training step, where the time of Python is not counted. Writes
FOLDER/<device>.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_flash import backend, flash_attention

Arrays = list[mx.array]
Function = Callable[[mx.array, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Case:
    """One attention problem; q, k and v have the same number of rows."""

    dtype: str
    D: int
    T: int
    B: int = 1
    H: int = 16
    HKV: int = 16
    causal: bool = True
    window: int | None = None
    segments: int = 1

    @property
    def name(self) -> str:
        """What ``--cases`` calls it."""
        mask = "causal" if self.causal else "full"
        if self.window:
            mask = f"window{self.window}"
        if self.segments > 1:
            mask += f"-{self.segments}segments"
        heads = f"-H{self.H}-HKV{self.HKV}" if self.H != self.HKV else ""
        return f"{self.dtype}-D{self.D}-T{self.T}-{mask}{heads}"

    @property
    def forward_flops(self) -> float:
        """Useful operations: two products, over the visible scores only."""
        return 4 * self.B * self.H * self.visible * self.D

    @property
    def visible(self) -> float:
        """Scores of a head that some query sees."""
        length = self.T / self.segments
        window = min(self.window or length, length)
        seen = length**2
        if self.causal:  # all rows see the window, the first ones less
            seen = length * window - window * (window - 1) / 2
        return self.segments * seen

    @property
    def segment_ids(self) -> np.ndarray:
        """Ids ``[T]`` of segments of equal length."""
        return np.arange(self.T) * self.segments // self.T

    def shown(self, rows: slice) -> np.ndarray:
        """Which keys some query rows see, bool ``[rows, T]``."""
        i, j = np.arange(self.T)[rows, None], np.arange(self.T)
        shown = self.segment_ids[rows, None] == self.segment_ids
        if self.causal:
            shown &= j <= i
        if self.window:
            shown &= j > i - self.window
        return shown

    def arrays(self) -> Arrays:
        """The arrays q, k, v and the cotangent of the output, random."""
        keys = mx.random.split(mx.random.key(self.T + self.D), 4)
        heads = self.H, self.HKV, self.HKV, self.H
        arrays = [
            mx.random.normal((self.B, n, self.T, self.D), key=key).astype(
                getattr(mx, self.dtype)
            )
            for n, key in zip(heads, keys, strict=True)
        ]
        mx.eval(arrays)
        return arrays


SWEEPS = [
    Case(dtype, D, T)
    for dtype, D, longest in (
        ("bfloat16", 64, 16384),
        ("bfloat16", 128, 16384),
        ("float32", 64, 16384),
        ("float32", 128, 8192),
    )
    for T in (256, 512, 1024, 2048, 4096, 8192, 16384)
    if longest >= T
]
CUDA_CASES = [
    *SWEEPS,
    Case("bfloat16", 128, 16383),
    Case("bfloat16", 128, 4096, causal=False),
    Case("bfloat16", 128, 8192, H=32, HKV=8),
    Case("bfloat16", 128, 16384, window=1024),
    Case("bfloat16", 128, 16384, segments=8),
    Case("bfloat16", 256, 8192),
    Case("float32", 64, 8192, window=512),
]
# Where MLX keeps the whole score matrix, its backward needs 3 GiB for the longest.
METAL_CASES = [
    *(
        Case(dtype, D, T, causal=causal)
        for causal in (True, False)
        for dtype in ("float16", "bfloat16", "float32")
        for D in (64, 128)
        for T in (512, 1024, 2048, 4096)
    ),
    Case("float16", 128, 4095),
    Case("float16", 128, 4096, H=32, HKV=8),
    Case("float16", 128, 4096, window=512),
    Case("float16", 128, 4096, segments=8),
    Case("float16", 256, 2048),
    Case("float32", 64, 4096, window=512),
]
CPU_CASES = [
    *(Case("float32", 64, T, H=2, HKV=2) for T in (256, 512, 1024)),
    Case("float32", 64, 1024, H=2, HKV=2, window=128),
    Case("float32", 64, 1024, H=2, HKV=2, segments=8),
]


def implementations(case: Case) -> dict[str, Function]:
    """What is compared, by name.

    MLX has no windows and no segments: it is given an array mask, made in advance.
    """
    mask: str | mx.array | None = "causal" if case.causal else None
    segment_ids = None
    if case.segments > 1:
        ids = mx.array(case.segment_ids, mx.int32)
        segment_ids = mx.broadcast_to(ids, (case.B, case.T))
    if case.window or case.segments > 1:
        mask = mx.array(case.shown(slice(None)))
        mx.eval(mask)

    def native(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=case.D**-0.5, mask=mask
        )

    def flash(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        out = flash_attention(
            q, k, v, causal=case.causal, window=case.window, segment_ids=segment_ids
        )
        assert isinstance(out, mx.array)
        return out

    return {"mlx": native, "mlx_flash": flash}


def forward_and_backward(attention: Function, arrays: Arrays) -> Arrays:
    """The output and the gradients of q, k and v."""
    q, k, v, dout = arrays
    out, gradients = mx.vjp(attention, [q, k, v], [dout])
    return [*out, *gradients]


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, case: Case):
    """Output and gradients of one head in float64, in chunks of query rows."""
    T, D = q.shape
    out, dq = np.empty_like(q), np.empty_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for first in range(0, T, 1024):
        rows = slice(first, first + 1024)
        s = q[rows] @ k.T * D**-0.5
        s[~case.shown(rows)] = -np.inf
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out[rows] = p @ v
        delta = (dout[rows] * out[rows]).sum(axis=1, keepdims=True)
        ds = p * (dout[rows] @ v.T - delta)
        dq[rows] = ds @ k * D**-0.5
        dk += ds.T @ q[rows] * D**-0.5
        dv += p.T @ dout[rows]
    return out, dq, dk, dv


# Spacing of the numbers near 1 that the products take: of the dtype; float32 runs in
# TF32 on CUDA, in MLX's own operations too.
SPACING = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-10}


def errors(case: Case) -> dict[str, float]:
    """For both implementations the largest |result - exact| / |exact| (norms).

    One head is enough: the kernels run the same code for each.
    """
    case = replace(case, B=1, H=1, HKV=1)
    arrays = case.arrays()
    q, k, v, dout = (np.array(x[0, 0].astype(mx.float32), np.float64) for x in arrays)
    truth = exact(q, k, v, dout, case)
    found = {}
    for name, attention in implementations(case).items():
        results = forward_and_backward(attention, arrays)
        relative = [
            np.linalg.norm(np.array(x[0, 0].astype(mx.float32)) - y) / np.linalg.norm(y)
            for x, y in zip(results, truth, strict=True)
        ]
        found[name] = float(max(relative)) if np.isfinite(relative).all() else np.inf
    return found


def measure(call: Callable[[], object], calls: int, repeats: int) -> list[float]:
    """Sorted milliseconds per call; each repeat evaluates several calls at once."""
    times = []
    for _ in range(repeats + 2):
        mx.synchronize()
        start = time.perf_counter()
        mx.eval([call() for _ in range(calls)])
        mx.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / calls)
    return sorted(times[2:])  # the first two warm up


def extra_memory(call: Callable[[], object]) -> int:
    """Bytes that a call needs at its peak, its results included."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


SHORT = 1024  # up to this T the time of Python shows


def rows(case: Case, repeats: int) -> Iterator[dict[str, object]]:
    """Measure a case: a row per implementation and direction."""
    arrays = case.arrays()
    calls = 20 if case.T <= SHORT else 1
    for name, attention in implementations(case).items():
        directions = {
            "forward": (1.0, lambda f=attention: f(*arrays[:3])),
            "forward+backward": (
                3.5,
                lambda f=attention: forward_and_backward(f, arrays),
            ),
        }
        if case.T <= SHORT:
            step = mx.compile(partial(forward_and_backward, attention))
            directions["compiled"] = 3.5, lambda f=step: f(arrays)
        for direction, (factor, call) in directions.items():
            times = measure(call, calls, repeats)
            median = statistics.median(times)
            yield {
                "case": case.name,
                "direction": direction,
                "implementation": name,
                "dtype": case.dtype,
                "B": case.B,
                "H": case.H,
                "HKV": case.HKV,
                "T": case.T,
                "D": case.D,
                "causal": int(case.causal),
                "ms_p50": round(median, 4),
                "ms_p20": round(times[len(times) // 5], 4),
                "ms_p80": round(times[-1 - len(times) // 5], 4),
                "tflops": round(factor * case.forward_flops / median / 1e9, 1),
                "extra_mib": round(extra_memory(call) / 2**20, 1),
            }


def plot(table: list[dict[str, object]], path: Path, title: str) -> None:
    """Time and memory of forward+backward against T, a column per kind of case."""
    import matplotlib.pyplot as plt

    kinds: dict[str, list[dict[str, object]]] = {}
    for row in table:
        if row["direction"] == "forward+backward" and row["H"] == row["HKV"]:
            kind = re.sub(r"-T\d+", "", str(row["case"]))
            kinds.setdefault(kind, []).append(row)
    kinds = {k: v for k, v in kinds.items() if len({row["T"] for row in v}) > 1}
    if not kinds:
        print("no plot: every kind of case has one length only")
        return
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(4 * len(kinds), 7), sharex=True, squeeze=False
    )
    for column, (kind, points) in zip(axes.T, kinds.items(), strict=True):
        for name in ("mlx", "mlx_flash"):
            mine = sorted(
                (row for row in points if row["implementation"] == name),
                key=lambda row: row["T"],
            )
            lengths = [row["T"] for row in mine]
            column[0].loglog(lengths, [r["ms_p50"] for r in mine], "o-", label=name)
            column[1].loglog(lengths, [r["extra_mib"] for r in mine], "o-", label=name)
        column[0].set_title(kind)
        column[1].set_xlabel("T")
    axes[0, 0].set_ylabel("forward+backward, ms")
    axes[1, 0].set_ylabel("extra memory, MiB")
    axes[0, 0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def device_name() -> str:
    """What the timings belong to."""
    name = mx.device_info().get("device_name", "cpu")
    return name if isinstance(name, str) else "cpu"


def main() -> None:
    """Check, time, write."""
    of_backend = {"metal": METAL_CASES, "cuda": CUDA_CASES}
    cases = {case.name: case for case in of_backend.get(backend(), CPU_CASES)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(cases), help="names, by comma")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results"
    )
    options = parser.parse_args()
    chosen = [cases[name] for name in options.cases.split(",")]

    for case in chosen:
        found = errors(case)
        texts = (f"{name} {error:.1e}" for name, error in found.items())
        print(f"{case.name:36} errors: {', '.join(texts)}", flush=True)
        if not found["mlx_flash"] <= 2 * found["mlx"] + SPACING[case.dtype]:
            sys.exit(f"{case.name}: wrong result, nothing was timed")

    table = []
    for case in chosen:
        for row in rows(case, options.repeats):
            row |= {
                "device": device_name(),
                "backend": backend(),
                "mlx": mx.__version__,
                "date": datetime.date.today().isoformat(),
            }
            table.append(row)
            print(
                "{case:36} {direction:16} {implementation:9} {ms_p50:9.3f} ms "
                "{tflops:6.1f} TFLOP/s {extra_mib:9.1f} MiB".format(**row),
                flush=True,
            )

    options.results.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"\W+", "-", device_name()).strip("-").lower()
    with open(options.results / f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    title = f"{device_name()}, MLX {mx.__version__}, {datetime.date.today()}"
    plot(table, options.results / f"{stem}.png", title)


if __name__ == "__main__":
    main()
