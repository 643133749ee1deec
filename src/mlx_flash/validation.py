"""Checks of the arguments of ``flash_attention``, and the values they stand for."""

from __future__ import annotations

import math
from numbers import Integral
from typing import NoReturn

import mlx.core as mx

from mlx_flash.options import Options

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# 64-bit ids are refused: they are compared in 32 bits, where two could become equal.
SEGMENT_IDS = (mx.int8, mx.int16, mx.int32, mx.uint8, mx.uint16, mx.uint32)
INTEGERS = (*SEGMENT_IDS, mx.int64, mx.uint64)


def describe(**arrays: mx.array) -> str:
    """The shapes and dtypes of arrays, as error messages print them."""
    return ", ".join(
        f"{name} {list(x.shape)} {str(x.dtype).removeprefix('mlx.core.')}"
        for name, x in arrays.items()
    )


def refuse(problem: str, **arrays: mx.array) -> NoReturn:
    """Raise ValueError that says what is wrong and what the arrays are."""
    raise ValueError(f"[flash_attention] {problem}, got {describe(**arrays)}")


def check_shapes(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raise ValueError unless the three shapes belong together."""
    problem = None
    if not (q.ndim == k.ndim == v.ndim == 4):
        problem = "q, k and v must have rank 4: [B, H, T, D]"
    elif not (q.shape[0] == k.shape[0] == v.shape[0]):
        problem = "q, k and v must have the same batch size"
    elif k.shape[1] != v.shape[1]:
        problem = "k and v must have the same number of heads"
    elif q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        problem = "the heads of k and v must divide the heads of q (do not tile them)"
    elif k.shape[2] != v.shape[2]:
        problem = "k and v must have the same number of keys"
    elif q.shape[3] != k.shape[3]:
        problem = "q and k must have the same head dim"
    elif q.shape[3] == 0:
        problem = "the head dim of q and k must be at least 1"
    elif v.shape[3] == 0:
        problem = "the head dim of v must be at least 1"
    if problem:
        refuse(problem, q=q, k=k, v=v)


def check_dtypes(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raise ValueError unless every input is float32, float16 or bfloat16."""
    if not {q.dtype, k.dtype, v.dtype} <= set(FLOATS):
        refuse(
            "q, k and v must be float32, float16 or bfloat16 (convert with .astype)",
            q=q,
            k=k,
            v=v,
        )


def make_options(
    D: int,
    Tq: int,
    Tk: int,
    *,
    scale: float | None,
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    softcap: float | None,
) -> Options:
    """The numbers of a call, defaults filled in.

    Raises:
        ValueError: One of them is outside its range.
    """
    scale = D**-0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"[flash_attention] scale must be finite, got {scale}")
    softcap = None if softcap is None else float(softcap)
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(
            "[flash_attention] softcap must be positive and finite (None: no cap), "
            f"got {softcap}"
        )
    left, right = window_sides(window, causal)
    own = Tk - Tq  # query i is aligned with key i + own
    low = None if left is None else own - left
    high = None if right is None else own + right
    return Options(scale, low, high, softcap)


def window_sides(
    window: int | tuple[int | None, int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query sees; None: all of them."""
    latest = 0 if causal else None
    if window is None:
        return None, latest
    if isinstance(window, (tuple, list)):
        if len(window) == 2 and all(x is None or is_whole(x, 0) for x in window):
            left, right = (None if x is None else int(x) for x in window)
            return left, right if latest is None else latest
    elif is_whole(window, 1):
        if causal:
            return int(window) - 1, latest
        raise ValueError(
            f"[flash_attention] window={window} needs causal=True; without it give the "
            f"keys before and after the query's own, as in window=({window - 1}, 0), "
            f"got causal={causal}"
        )
    raise ValueError(
        "[flash_attention] window must be an integer of at least 1 (that many keys up "
        "to the query's own) or a pair (left, right) of integers of at least 0 or "
        f"None, got {window!r}"
    )


def is_whole(x: object, least: int) -> bool:
    """Whether ``x`` is an integer, and at least that."""
    return isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least


def check_mask(mask: mx.array, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """The mask with four axes, each 1 or the full size of ``[B, H, Tq, Tk]``.

    Raises:
        ValueError: It is no array, or its shape or dtype does not fit.
    """
    if not isinstance(mask, mx.array):
        raise ValueError(
            "[flash_attention] mask must be an array of bool (True: visible) or of "
            "floats (added to the scores); for a causal mask use causal=True, got mask "
            f"{mask!r}"
        )
    if mask.dtype not in (mx.bool_, *FLOATS):
        refuse(
            "mask must be bool (True: visible) or float32, float16 or bfloat16 (added "
            "to the scores); convert with .astype",
            mask=mask,
            q=q,
            k=k,
            v=v,
        )
    full = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
    shape = [1] * (4 - mask.ndim) + list(mask.shape)
    if len(shape) != 4 or any(
        n not in (1, size) for n, size in zip(shape, full, strict=True)
    ):
        refuse(
            f"mask must broadcast to [B, H, Tq, Tk] = {full}",
            mask=mask,
            q=q,
            k=k,
            v=v,
        )
    return mask if mask.ndim == 4 else mask.reshape(shape)


def check_segments(
    segment_ids: mx.array | tuple[mx.array, mx.array],
    q: mx.array,
    k: mx.array,
    v: mx.array,
) -> tuple[mx.array, mx.array]:
    """The ids of the queries and of the keys, int32.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    B, Tq, Tk = q.shape[0], q.shape[2], k.shape[2]
    if isinstance(segment_ids, mx.array):
        if Tq != Tk:
            refuse(
                "one array of segment_ids needs as many queries as keys; give a pair "
                f"([B, Tq], [B, Tk]) = ([{B}, {Tq}], [{B}, {Tk}])",
                segment_ids=segment_ids,
                q=q,
                k=k,
                v=v,
            )
        segment_ids = (segment_ids, segment_ids)
    if (
        not isinstance(segment_ids, (tuple, list))
        or len(segment_ids) != 2
        or not all(isinstance(ids, mx.array) for ids in segment_ids)
    ):
        raise ValueError(
            "[flash_attention] segment_ids must be an integer array [B, T] or a pair "
            f"([B, Tq], [B, Tk]), got {segment_ids!r}"
        )
    q_ids, k_ids = segment_ids
    named = {"query ids": q_ids, "key ids": k_ids, "q": q, "k": k, "v": v}
    if q_ids.shape != (B, Tq) or k_ids.shape != (B, Tk):
        refuse(
            "segment_ids must have the shapes ([B, Tq], [B, Tk]) = "
            f"([{B}, {Tq}], [{B}, {Tk}])",
            **named,
        )
    if not {q_ids.dtype, k_ids.dtype} <= set(SEGMENT_IDS):
        refuse(
            "segment_ids must be integers of at most 32 bits (convert with "
            ".astype(mx.int32))",
            **named,
        )
    return q_ids.astype(mx.int32), k_ids.astype(mx.int32)


def check_sinks(sinks: mx.array, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """The sinks in float32.

    Raises:
        ValueError: They are not ``[H]`` floats.
    """
    if not isinstance(sinks, mx.array):
        raise ValueError(
            f"[flash_attention] sinks must be an array [H] of floats, got {sinks!r}"
        )
    if sinks.shape != (q.shape[1],) or sinks.dtype not in FLOATS:
        refuse(
            f"sinks must be float32, float16 or bfloat16 [H] = [{q.shape[1]}]",
            sinks=sinks,
            q=q,
            k=k,
            v=v,
        )
    return sinks.astype(mx.float32)
