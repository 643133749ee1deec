"""MLX's own Metal attention on the simulator, from the headers of the installed MLX."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np

from mlx_flash import simulator
from mlx_flash.simulator.metal_text import MLX_INCLUDE, MLX_KERNELS

METAL_NAME = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
HEADER = "steel/attn/kernels/steel_attention.h"
ROWS, SIMDGROUPS = 32, 4  # of queries, of a threadgroup


def block(D: int) -> int:
    """Keys of a block, as MLX chooses it."""
    return 32 if D < 128 else 16


def mlx_kernel(header: str, function: str, constants: dict[int, bool | int]):
    """A kernel of one of MLX's headers, after what MLX puts in front of each.

    Raises:
        FileNotFoundError: The installed MLX does not carry the header.
    """
    files = [f"{MLX_KERNELS}/utils.h", f"{MLX_KERNELS}/{header}"]
    for file in files:
        if not (MLX_INCLUDE / file).is_file():
            raise FileNotFoundError(
                f"the installed mlx {mx.__version__} does not carry {file}"
            )
    text = "".join(f'#include "{file}"\n' for file in files)
    return simulator.library_kernel(
        text, function, include=[MLX_INCLUDE], constants=constants
    )


def strides_of(x: mx.array):
    """Strides in elements of the first three of four dimensions."""
    bits = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    array = np.array(bits, copy=False)
    return (ctypes.c_int64 * 3)(*[step // array.itemsize for step in array.strides[:3]])


class Parameters(ctypes.Structure):
    """The struct of MLX's launch: sizes, full blocks and remainders, strides."""

    _fields_ = (
        ("B", ctypes.c_int),
        ("H", ctypes.c_int),
        ("D", ctypes.c_int),
        ("Tq", ctypes.c_int),
        ("Tk", ctypes.c_int),
        ("group", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("q_blocks", ctypes.c_int),
        ("k_blocks", ctypes.c_int),
        ("q_full", ctypes.c_int),
        ("k_full", ctypes.c_int),
        ("q_rest", ctypes.c_int),
        ("k_rest", ctypes.c_int),
        ("q_offset", ctypes.c_int),
        ("q_strides", ctypes.c_int64 * 3),
        ("k_strides", ctypes.c_int64 * 3),
        ("v_strides", ctypes.c_int64 * 3),
        ("out_strides", ctypes.c_int64 * 3),
    )


def steel_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    causal: bool,
    mask: mx.array | None = None,
    WN: int = 1,
) -> tuple[mx.array, mx.array]:
    """``out`` and ``lse`` of MLX's kernel for many queries."""
    (B, H, Tq, D), (_, HKV, Tk, _) = q.shape, k.shape
    BQ, BK, WM = ROWS, block(D), SIMDGROUPS
    name = METAL_NAME[q.dtype]
    mask_type = "float" if mask is None or mask.dtype != mx.bool_ else "bool"
    kernel = mlx_kernel(
        HEADER,
        f"attention<{name}, {BQ}, {BK}, {D}, {D}, {WM}, {WN}, {mask_type}>",
        {
            200: Tq % BQ == 0,
            201: Tk % BK == 0,
            300: mask is not None,
            301: causal,
            302: False,
            303: True,
        },
    )
    q_blocks, k_blocks = -(-Tq // BQ), -(-Tk // BK)
    out_strides = (ctypes.c_int64 * 3)(H * Tq * D, Tq * D, D)
    sizes = (B, H, D, Tq, Tk, H // HKV, D**-0.5, q_blocks, k_blocks)
    rests = (Tq // BQ, Tk // BK, Tq % BQ, Tk % BK, Tk - Tq)
    strides = (*map(strides_of, (q, k, v)), out_strides)
    buffers = {0: q, 1: k, 2: v, 4: Parameters(*sizes, *rests, *strides)}
    if mask is not None:
        buffers |= {5: strides_of(mx.broadcast_to(mask, (B, H, Tq, Tk))), 6: mask}
        buffers[5] = bytes(buffers[5])
    results = kernel(
        buffers=buffers,
        outputs={3: (q.shape, q.dtype), 8: ((B, H, Tq), mx.float32)},
        grid=(q_blocks * 32, H * WM, B * WN),
        threadgroup=(32, WM, WN),
    )
    return results[3], results[8]
