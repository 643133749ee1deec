#!/usr/bin/env python3
"""Would a backward of five matrix products beat the one of seven?

python benchmarks/five_products.py

attention_dq and attention_dkv each make s and dp: 3 + 4 products. A backward of five
would let attention_dkv write ds for a slab of keys, in the input dtype, and make dq of
all slabs by plain products ds k, summed in float32. Prints what that would cost at
best, per causal call in bfloat16 (modelled: float16), B=1 H=16, beside the seven:

- modelled for Apple GPUs: the products of ds k at the full rate of the instruction, ds
  and the sums of dq moved at the full rate of memory;
- measured, on a GPU: attention_dkv slab by slab, and MLX's product of one ready ds of
  each slab. Nobody writes ds here and nobody sums dq, which favours five.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx
from bench_attention import measure
from cost_model import CHIPS, MEMORY_BYTES, predict, useful_products
from cost_report import HEADS, OWN, PRINTED, Case, works

from mlx_flash import backend, flash_attention, kernels
from mlx_flash.launch import KernelCall, run
from mlx_flash.options import Options

T = 16384
DS_BYTES = 2**30  # of the slab's ds
REPEATS = 9


def print_modelled(D: int) -> None:
    """Both backwards on Apple GPUs, by the cost model."""
    case = Case(D, "float16", causal=True)
    seven = works(OWN, case, T)
    dq, dkv = seven["attention_dq"], seven["attention_dkv"]
    ds_bytes = 2 * HEADS * case.pairs(T)
    writes_ds = replace(dkv.counts, device_write=dkv.counts.device_write + ds_bytes)
    slabs = HEADS * T * T * 2 / DS_BYTES
    dq_bytes = slabs * 2 * 4 * HEADS * T * D / 2  # half of the rows see a slab
    products = useful_products(1, HEADS * case.pairs(T), D)
    for name in PRINTED:
        chip = CHIPS[name]
        rate, _ = MEMORY_BYTES[chip.family]
        cycles = max(4 * products, (ds_bytes + dq_bytes) / rate)
        product = cycles / (chip.cores * chip.ghz * 1e6)
        of_dq, of_dkv, of_ds = (
            predict(work, chip).milliseconds
            for work in (dq, dkv, replace(dkv, counts=writes_ds))
        )
        print(
            f"D={D} {name}, modelled: seven {of_dq + of_dkv:.0f} ms = dq {of_dq:.0f} + "
            f"dkv {of_dkv:.0f}; five at best {of_ds + product:.0f} ms = dkv with ds "
            f"{of_ds:.0f} + ds k {product:.0f}"
        )


def print_measured(D: int) -> None:
    """Both backwards on this GPU."""
    gpu = kernels.gpu_of(backend(), precise=False)
    shape = 1, HEADS, T, D
    q, k, v, dout = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(4))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    call = kernels.delta_call(out, dout, lse, mx.zeros_like(lse), gpu)
    delta, lse2 = run(call, backend())
    mx.eval(q, k, v, dout, delta, lse2)
    problem = kernels.Problem(q, k, v, Options(D**-0.5, high=0), gpu=gpu)

    def of_keys(rows: slice) -> KernelCall:
        return kernels.dkv_call(problem.keys(rows), [], dout, lse2, delta)

    of_queries = kernels.dq_call(problem, [], dout, lse2, delta)
    dq = milliseconds(partial(run, of_queries, backend()))
    dkv = milliseconds(partial(run, of_keys(slice(0, T)), backend()))
    slab, in_slabs, product = DS_BYTES // (2 * HEADS * T), 0.0, 0.0
    for first in range(0, T, slab):
        rows = slice(first, first + slab)
        in_slabs += milliseconds(partial(run, of_keys(rows), backend()))
        # ds^T of the queries that see the slab
        ds = mx.random.normal((1, HEADS, slab, T - first)).astype(mx.bfloat16)
        k_slab = mx.contiguous(k[:, :, rows])
        mx.eval(ds, k_slab)
        product += milliseconds(partial(mx.matmul, ds.swapaxes(2, 3), k_slab))
    print(
        f"D={D} {mx.device_info()['device_name']}, measured: seven {dq + dkv:.2f} ms = "
        f"dq {dq:.2f} + dkv {dkv:.2f}; five without writing ds and summing dq "
        f"{in_slabs + product:.2f} ms = dkv in slabs {in_slabs:.2f} + ds k "
        f"{product:.2f}"
    )


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call."""
    return statistics.median(measure(call, calls=1, repeats=REPEATS))


if __name__ == "__main__":
    for D in (64, 128):
        print_modelled(D)
        if backend() in ("metal", "cuda"):
            print_measured(D)
