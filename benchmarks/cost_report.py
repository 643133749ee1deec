#!/usr/bin/env python3
"""What the kernels cost on Apple GPUs by a published model: time from counted work.

python benchmarks/cost_report.py [--T 4096] [--peer] [--results FOLDER]

Runs every kernel on the simulator at two lengths, which gives its exact work at any
other, and feeds that to cost_model.py. MLX's steel_attention is counted alike, and with
--peer the kernels of mlx-train-perf, if that is installed (pip install --no-deps
mlx-train-perf). Prints a table, writes modelled.csv, modelled.md and modelled.png in
FOLDER. No number is a measurement.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import mlx.core as mx
import steel_attention
from cost_model import (
    CHIPS,
    TERMS,
    Body,
    Counts,
    Prediction,
    Work,
    counts_at,
    estimated,
    predict,
    useful_products,
)
from tqdm import tqdm

from mlx_flash import kernels, simulator, tiles
from mlx_flash.options import Options
from mlx_flash.simulator import LaunchRecord

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
DTYPES = ("float16", "bfloat16", "float32")
# Heads of a modelled launch: enough to fill every GPU.
HEADS = 16
# Printed; the CSV has all chips.
PRINTED = ("M1 Max", "M3 Max")
# Matrix products of the mathematics in each kernel.
PRODUCTS = {
    "attention_forward": 2,
    "attention_delta": 0,
    "attention_dq": 3,
    "attention_dkv": 4,
    "attention_dk": 3,
    "attention_dv": 2,
}
Inputs = tuple[mx.array, mx.array, mx.array, mx.array]
Records = dict[str, LaunchRecord]


@dataclass(frozen=True)
class Case:
    """One attention, of any length."""

    D: int
    dtype: str
    causal: bool

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return getattr(mx, self.dtype).size

    def arrays(self, T: int) -> Inputs:
        """One head: q, k, v and the cotangent of the output."""
        keys = mx.random.split(mx.random.key(T), 4)
        q, k, v, dout = (
            mx.random.normal((1, 1, T, self.D), key=key).astype(getattr(mx, self.dtype))
            for key in keys
        )
        return q, k, v, dout

    def pairs(self, T: int) -> float:
        """Visible scores of a head."""
        return T * (T + 1) / 2 if self.causal else T * T


@dataclass(frozen=True)
class Implementation:
    """Kernels that are counted.

    Attributes:
        name: Of the implementation.
        unit: A length of whole blocks for all its kernels.
        run: One head at a length, all kernels: the record of each, by name.
        body: What is estimated of a kernel.
        registers: Live fragment registers of a kernel.
        serves: Whether it has kernels for a case.
    """

    name: str
    unit: Callable[[Case], int]
    run: Callable[[Case, int], Records]
    body: Callable[[str, Case], Body | None]
    registers: Callable[[str, Case], float]
    serves: Callable[[Case], bool] = lambda case: True


# ---- this library


def own_kernels(case: Case) -> list[str]:
    """Names of its launches, in order: forward, then backward."""
    fused = tiles.fuses_dk_and_dv(case.D, case.element_bytes)
    last = ["attention_dkv"] if fused else ["attention_dk", "attention_dv"]
    return ["attention_forward", "attention_delta", "attention_dq", *last]


def own_tile(kernel: str, case: Case) -> tiles.Tile:
    """The tile of a kernel."""
    return tiles.tile(kernel, case.D, case.element_bytes)


def own_unit(case: Case) -> int:
    """Whole blocks of every kernel."""
    shapes = [own_tile(kernel, case) for kernel in own_kernels(case)]
    return math.lcm(*(n for t in shapes for n in (t.rows, t.block or 1)))


def own_run(case: Case, T: int) -> Records:
    """Forward and backward through the library."""
    q, k, v, dout = case.arrays(T)
    options = Options(case.D**-0.5, high=0 if case.causal else None)
    kernels.check_lane_map("simulator")
    with simulator.record() as records:
        out, lse = kernels.attention_forward(
            q, k, v, options=options, backend="simulator"
        )
        kernels.attention_backward(
            *(q, k, v, out, lse, dout, mx.zeros(lse.shape)),
            options=options,
            backend="simulator",
        )
    return dict(zip(own_kernels(case), records, strict=True))


def own_body(kernel: str, case: Case) -> Body | None:
    """Counted by hand in softmax.h, tile.h and the loops of the kernels."""
    if kernel == "attention_delta":
        return None
    t = own_tile(kernel, case)
    columns = tiles.width(case.D, t.parts) // t.parts
    accumulator = 2 * t.fragments * columns / 8
    chunk = 16 / case.element_bytes
    forward = kernel == "attention_forward"
    # forward: scale, maximum, subtract, sum. backward: scale, subtract, test of lse,
    # select, dp - delta, multiply; dv alone has no dp
    per_score = 4 if forward or kernel == "attention_dv" else 6
    meetings = 1 if forward or kernel == "attention_dv" else 2
    conversions = 0.0
    if case.dtype == "bfloat16":
        # M1/M2 have none: 5 instructions round a score to bfloat, a shift per element
        # makes a fragment float again
        per_score += 5 * (2 if kernel == "attention_dkv" else 1)
        conversions = 2 / t.fragments + 8 / t.block
    # dq and dk look for NaN in each element of one of the two staged tiles
    nan_check = 0 if forward or kernel == "attention_dv" else 3 * chunk / 2
    return Body(
        scores=2 * t.fragments * t.block / 8,
        per_score=per_score + meetings * (t.parts - 1),
        per_block=20 + (accumulator if forward else 0),
        rescales=t.fragments if forward else 0,
        per_chunk=20 + nan_check,
        per_product=conversions,
    )


def own_registers(kernel: str, case: Case) -> float:
    """Live fragment registers, from the tile."""
    t = own_tile(kernel, case)
    return tiles.fragment_registers(kernel, t, case.D, case.element_bytes)


OWN = Implementation("mlx_flash", own_unit, own_run, own_body, own_registers)

# ---- MLX's steel_attention


def steel_run(case: Case, T: int) -> Records:
    """The forward."""
    with simulator.record() as records:
        steel_attention.steel_attention(*case.arrays(T)[:3], causal=case.causal)
    return {"attention_forward": records[0]}


def steel_body(kernel: str, case: Case) -> Body:
    """One row fragment a simdgroup; its loader keeps pointers and tests no bounds."""
    fragments = steel_attention.block(case.D) / 8
    return Body(
        scores=2 * fragments,
        per_score=4,
        per_block=10 + 2 * case.D / 8,
        rescales=1,
        per_chunk=2,
        per_product=2 + 1 / fragments if case.dtype == "bfloat16" else 0,
    )


def steel_registers(kernel: str, case: Case) -> float:
    """Accumulator, scores and operands, all of them float; q comes from memory."""
    return 2 * case.D / 8 + 2 * steel_attention.block(case.D) / 8 + 8


def steel_serves(case: Case) -> bool:
    """Where its tiles fit into threadgroup memory: three of D columns, padded."""
    padded = 16 + case.D * case.element_bytes
    block = steel_attention.block(case.D)
    transposed = case.D * (16 + block * case.element_bytes)
    used = steel_attention.ROWS * padded + max(block * padded, transposed)
    return used <= tiles.THREADGROUP_BYTES_LIMIT


STEEL = Implementation(
    "steel_attention",
    lambda case: steel_attention.ROWS,
    steel_run,
    steel_body,
    steel_registers,
    steel_serves,
)

# ---- mlx-train-perf


def peer() -> Implementation:
    """The kernels of mlx-train-perf, as they choose their tiles for T = 8192.

    Raises:
        ImportError: It is not installed.
    """
    package = "mlx_train_perf.attention.kernel"
    dispatch = importlib.import_module(f"{package}.dispatch")
    launch = importlib.import_module(f"{package}.launch")
    rows, block = 32, 32

    def slab(kernel: str, case: Case) -> int:
        forward = dispatch.select_fwd_tile(8192, case.D)
        dq, dkv = dispatch.select_bwd_tiles(8192, case.D)
        tile = {"attention_forward": forward, "attention_dq": dq}.get(kernel, dkv)
        return tile.d_slab or 32

    def run(case: Case, T: int) -> Records:
        q, k, v, dout = case.arrays(T)
        options = {"scale": case.D**-0.5, "causal": case.causal}
        forward = dispatch.select_fwd_tile(8192, case.D)
        dq, dkv = dispatch.select_bwd_tiles(8192, case.D)
        with (
            mock.patch.object(mx.fast, "metal_kernel", simulator_metal_kernel),
            simulator.record() as records,
        ):
            out, lse = launch.launch_flash_fwd(q, k, v, tile=forward, **options)
            delta = launch.launch_bwd_D(dout, out)
            saved = q, k, v, dout, lse, delta
            for function, tile in (
                (launch.launch_bwd_dq, dq),
                (launch.launch_bwd_dkv, dkv),
            ):
                options |= {"variant": tile.variant, "d_slab": tile.d_slab}
                mx.eval(function(*saved, **options))
        names = [
            name for name in PRODUCTS if name not in ("attention_dk", "attention_dv")
        ]
        return dict(zip(names, records, strict=True))

    def body(kernel: str, case: Case) -> Body | None:
        """The same rules; operands come from device memory, two elements a load."""
        if kernel == "attention_delta":
            return None
        forward = kernel == "attention_forward"
        accumulator = 2 * rows / 8 * slab(kernel, case) / 8
        return Body(
            scores=2 * rows / 8 * block / 8,
            per_score=4 if forward else 6,
            per_block=20 + (accumulator if forward else 0),
            rescales=rows / 8 if forward else 0,
            # q k^T loads 8 fragments for 16 products, p v one for 4
            per_product=0.75 if case.dtype == "bfloat16" else 0,
        )

    def registers(kernel: str, case: Case) -> float:
        """All float: scores (and ds), accumulators of a slab, operands."""
        if kernel == "attention_delta":
            return 0
        scores = 2 * rows / 8 * block / 8
        accumulator = 2 * rows / 8 * slab(kernel, case) / 8
        operands = 2 * (rows / 8 + block / 8)
        count = {"attention_forward": (1, 1), "attention_dq": (2, 1)}
        n_scores, n_accumulators = count.get(kernel, (2, 2))
        return n_scores * scores + n_accumulators * accumulator + operands

    def serves(case: Case) -> bool:
        return case.D in (64, 96, 128) and case.dtype != "float16"

    return Implementation(
        "mlx-train-perf", lambda case: rows, run, body, registers, serves
    )


MLX_METAL_KERNEL = mx.fast.metal_kernel


def simulator_metal_kernel(*args, **options):
    """``simulator.metal_kernel``, which itself asks MLX for the text."""
    with mock.patch.object(mx.fast, "metal_kernel", MLX_METAL_KERNEL):
        return simulator.metal_kernel(*args, **options)


# ---- counting and reporting


def counts_of(record: LaunchRecord) -> Counts:
    """The counters of a launch in the model's terms."""
    c = record.counters
    return Counts(
        mma_float=c["mma_float"],
        mma_half=c["mma_half"],
        mma_bfloat=c["mma_bfloat"],
        exponential=c["exponential"],
        transcendental=c["transcendental"],
        shuffle=c["shuffle"],
        reduction=c["reduction"],
        threadgroup_read=c["threadgroup_bytes_read"],
        threadgroup_write=c["threadgroup_bytes_written"],
        device_read=c["device_bytes_read"],
        device_write=c["device_bytes_written"],
        barrier=c["threadgroup_barrier"],
        threadgroups=c["threadgroups"],
    )


def works(implementation: Implementation, case: Case, T: int) -> dict[str, Work]:
    """The work of each kernel at length T, HEADS heads."""
    L = implementation.unit(case)
    once, twice = (implementation.run(case, n) for n in (L, 2 * L))
    found = {}
    for kernel, record in once.items():
        points = (L, counts_of(record)), (2 * L, counts_of(twice[kernel]))
        counts = counts_at(T, *points).scaled(HEADS)
        body = implementation.body(kernel, case)
        found[kernel] = Work(
            counts=estimated(counts, body) if body else counts,
            useful=useful_products(PRODUCTS[kernel], HEADS * case.pairs(T), case.D),
            threads=math.prod(record.threadgroup),
            threadgroup_bytes=record.counters["threadgroup_memory"],
            registers=implementation.registers(kernel, case),
        )
    return found


def rows(implementation: Implementation, case: Case, T: int) -> Iterator[dict]:
    """A row per kernel and chip."""
    for kernel, work in works(implementation, case, T).items():
        for name, chip in CHIPS.items():
            yield row(implementation.name, kernel, case, T, name, work) | modelled(
                predict(work, chip)
            )


def row(
    implementation: str, kernel: str, case: Case, T: int, chip: str, work: Work
) -> dict[str, object]:
    """What was counted."""
    return {
        "implementation": implementation,
        "kernel": kernel,
        "D": case.D,
        "dtype": case.dtype,
        "mask": "causal" if case.causal else "full",
        "H": HEADS,
        "T": T,
        "chip": chip,
        "registers": work.registers,
        "threadgroup_bytes": work.threadgroup_bytes,
    }


def modelled(x: Prediction) -> dict[str, object]:
    """What the model makes of it."""
    return {
        "modelled_ms": round(x.milliseconds, 4),
        "modelled_utilisation": round(x.utilisation, 4),
        "modelled_cycles_per_product": round(x.cycles, 3),
        "resident_threadgroups": x.resident,
        "spill_factor": round(x.spill, 3),
        "residency_factor": round(x.residency, 3),
        "tail_factor": round(x.tail, 3),
        "memory_bound": int(x.memory_bound),
    } | {f"share_{term}": round(share, 4) for term, share in x.shares.items()}


def print_table(table: list[dict]) -> None:
    """The rows of the chips in PRINTED."""
    terms = " ".join(f"{term[:8]:>8}" for term in TERMS)
    print("All times and utilisations are modelled, none is measured.")
    print(
        f"{'implementation':15} {'kernel':17} {'D':>3} {'dtype':8} {'mask':6} "
        f"{'chip':7} {'ms':>9} {'util':>5} {terms} {'regs':>4} {'res':>3} "
        f"{'spill':>5} {'resid':>5}"
    )
    for x in table:
        if x["chip"] not in PRINTED:
            continue
        shares = " ".join(f"{x[f'share_{term}']:8.0%}" for term in TERMS)
        print(
            f"{x['implementation']:15} {x['kernel']:17} {x['D']:3} {x['dtype']:8} "
            f"{x['mask']:6} {x['chip']:7} {x['modelled_ms']:9.3f} "
            f"{x['modelled_utilisation']:5.0%} {shares} {x['registers']:4.0f} "
            f"{x['resident_threadgroups']:3} {x['spill_factor']:5.2f} "
            f"{x['residency_factor']:5.2f}"
        )


def markdown(table: list[dict], T: int) -> str:
    """Utilisation on the chips in PRINTED, a table per mask."""
    lines = [
        f"Modelled, not measured: utilisation in % on {' / '.join(PRINTED)}, "
        f"H = {HEADS}, T = {T}."
    ]
    head_dims = sorted({x["D"] for x in table})
    for mask in dict.fromkeys(x["mask"] for x in table):
        heads = " | ".join(f"D {D}" for D in head_dims)
        lines += ["", f"| {mask} | {heads} |", "|---" * (1 + len(head_dims)) + "|"]
        cells: dict[str, dict[int, list[str]]] = {}
        for x in table:
            if x["mask"] == mask and x["chip"] in PRINTED and PRODUCTS[x["kernel"]]:
                name = f"{x['implementation']} {x['kernel']} {x['dtype']}"
                cell = cells.setdefault(name, {}).setdefault(x["D"], [])
                cell.append(f"{100 * x['modelled_utilisation']:.0f}")
        for name, row_cells in cells.items():
            values = (" / ".join(row_cells.get(D, [])) for D in head_dims)
            lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def plot(table: list[dict], path: Path, T: int) -> None:
    """Utilisation by head dim, and what a useful product costs, by term."""
    import matplotlib.pyplot as plt

    full = [x for x in table if x["mask"] == "full" and x["chip"] in PRINTED]
    names = [k for k in PRODUCTS if PRODUCTS[k] and any(x["kernel"] == k for x in full)]
    figure, axes = plt.subplots(
        2 * len(PRINTED),
        len(names),
        figsize=(4.2 * len(names), 6.4 * len(PRINTED)),
        squeeze=False,
    )
    for i, chip in enumerate(PRINTED):
        for j, kernel in enumerate(names):
            mine = [x for x in full if (x["chip"], x["kernel"]) == (chip, kernel)]
            lines = dict.fromkeys((x["implementation"], x["dtype"]) for x in mine)
            for implementation, dtype in lines:
                points = [
                    x
                    for x in mine
                    if (x["implementation"], x["dtype"]) == (implementation, dtype)
                ]
                axes[2 * i, j].plot(
                    [x["D"] for x in points],
                    [100 * x["modelled_utilisation"] for x in points],
                    "o-" if implementation == OWN.name else "x:",
                    label=f"{implementation} {dtype}",
                )
            axes[2 * i, j].set_title(f"{chip}: {kernel}")
            axes[2 * i, j].set_ylim(0, 105)
            axes[2 * i, j].set_xlabel("D")
            axes[2 * i, j].legend(fontsize=5, ncols=2, loc="lower center")
            own = [x for x in mine if x["implementation"] == OWN.name]
            labels = [f"{x['dtype']} D{x['D']}" for x in own]
            left = [0.0] * len(own)
            for term in TERMS:
                parts = [
                    x["modelled_cycles_per_product"] * x[f"share_{term}"] for x in own
                ]
                axes[2 * i + 1, j].barh(labels, parts, left=left, label=term)
                left = [a + b for a, b in zip(left, parts, strict=True)]
            axes[2 * i + 1, j].tick_params(labelsize=6)
            axes[2 * i + 1, j].set_xlabel("modelled core-cycles per useful product")
        axes[2 * i, 0].set_ylabel("modelled utilisation, %")
        axes[2 * i + 1, 0].legend(fontsize=6)
    figure.suptitle(f"Modelled, not measured: H = {HEADS}, T = {T}, no mask")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    """Count, model, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--T", type=int, default=4096)
    parser.add_argument("--peer", action="store_true", help="count mlx-train-perf too")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results"
    )
    options = parser.parse_args()
    implementations = [OWN, STEEL]
    if options.peer:
        implementations.append(peer())
    work = [
        (implementation, Case(D, dtype, causal))
        for causal in (False, True)
        for dtype in DTYPES
        for D in HEAD_DIMS
        for implementation in implementations
    ]
    table = [
        x
        for implementation, case in tqdm(work, unit="case")
        if implementation.serves(case)
        for x in rows(implementation, case, options.T)
    ]
    print_table(table)
    options.results.mkdir(parents=True, exist_ok=True)
    with open(options.results / "modelled.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    (options.results / "modelled.md").write_text(markdown(table, options.T))
    plot(table, options.results / "modelled.png", options.T)


if __name__ == "__main__":
    main()
