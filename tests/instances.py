"""The kernels that the library can produce, as calls on small arrays."""

from collections.abc import Iterator
from itertools import product

import mlx.core as mx

from mlx_flash import kernels, tiles
from mlx_flash.kernels import Problem
from mlx_flash.launch import KernelCall, metal_source
from mlx_flash.options import Options

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
HEAD_DIMS = (1, 8, 16, 40, 64, 80, 96, 128, 160, 192, 256)
UNEQUAL_HEAD_DIMS = ((192, 128), (96, 64), (64, 128), (63, 65))
# What a call may have besides q, k and v.
FEATURES = {
    "plain": {},
    "causal": {"high": 0},
    "window": {"low": -4, "high": 0},
    "segments": {"segments": True},
    "bool_mask": {"mask": mx.bool_},
    "float32_mask": {"mask": mx.float32},
    "bfloat16_mask": {"mask": mx.bfloat16},
    "float16_mask": {"mask": mx.float16},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
}
EVERYTHING = {
    "low": -4,
    "high": 3,
    "segments": True,
    "mask": mx.float32,
    "softcap": 2.0,
    "sinks": True,
}


def problem(
    D: int,
    DV: int,
    dtype: mx.Dtype,
    *,
    B: int = 1,
    H: int = 2,
    T: int = 9,
    low: int | None = None,
    high: int | None = None,
    softcap: float | None = None,
    segments: bool = False,
    mask: mx.Dtype | None = None,
    mask_shape: tuple[int, ...] | None = None,
    sinks: bool = False,
    gpu: str = "metal",
) -> Problem:
    """A problem of zeros with the given features."""
    q, v = mx.zeros((B, H, T, D), dtype), mx.zeros((B, H, T, DV), dtype)
    ids = mx.zeros((B, T), mx.int32) if segments else None
    return Problem(
        q,
        q,
        v,
        Options(1.0, low, high, softcap),
        None if mask is None else mx.zeros(mask_shape or (B, H, T, T), mask),
        ids,
        ids,
        mx.zeros((H,)) if sinks else None,
        gpu,
    )


def calls(x: Problem) -> Iterator[KernelCall]:
    """The calls of one attention and its backward."""
    rows = mx.zeros(x.q.shape[:3])
    dout = mx.zeros((*x.q.shape[:3], x.v.shape[3]), x.v.dtype)
    ids = [mx.zeros(8, mx.int32)] * 4 if x.q_segments is not None else []
    segment_blocks = kernels.segment_blocks_call(x, "attention_dq")
    if segment_blocks:
        yield segment_blocks
    yield kernels.forward_call(x, ids)
    yield kernels.delta_call(dout, dout, rows, rows, x.gpu)
    yield kernels.dq_call(x, ids, dout, rows, rows)
    largest = max(x.q.shape[3], x.v.shape[3])
    fused = tiles.fuses_dk_and_dv(largest, x.q.itemsize, x.gpu)
    for kernel in ["attention_dkv"] if fused else ["attention_dk", "attention_dv"]:
        yield kernels.dkv_call(x, ids, dout, rows, rows, kernel)
    if x.mask is not None and x.mask.dtype != mx.bool_:
        yield kernels.dmask_call(x, ids, dout, rows, rows, sums=kernels.sums_of(x.mask))


def problems() -> Iterator[Problem]:
    """Head dims with and without everything, each feature, each shape of a mask."""
    pairs = [(D, D) for D in HEAD_DIMS] + [*UNEQUAL_HEAD_DIMS]
    for (D, DV), dtype in product(pairs, DTYPES):
        yield problem(D, DV, dtype, high=0)
        yield problem(D, DV, dtype, **EVERYTHING)
    for features, D, dtype in product(FEATURES.values(), (64, 160), DTYPES):
        yield problem(D, D, dtype, **features)
    for shape in product((1, 2), (1, 2), (1, 9), (1, 9)):
        for D, dtype in ((16, mx.float32), (160, mx.float16)):
            yield problem(D, D, dtype, B=2, mask=dtype, mask_shape=shape)


def instances() -> list[KernelCall]:
    """Calls of these problems, each text of a kernel once."""
    every = {
        (metal_source(kernel), kernel.template, kernel.more_template): call
        for x in problems()
        for call in calls(x)
        for kernel in [call.kernel]
    }
    return list(every.values())


def name_of(call: KernelCall) -> str:
    """A readable test id."""
    kernel = call.kernel
    values = (
        f"{name}={str(value).removeprefix('mlx.core.')}"
        for name, value in kernel.template + kernel.more_template
        if value is not False
    )
    segments = ["segments"] if "q_ids" in kernel.inputs else []
    return "-".join((kernel.name, *values, *segments))
