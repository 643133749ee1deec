"""The equations in plain MLX operations, forward and explicit backward.

This is the specification that the kernels are tested against, and the back end where
there is no GPU. It visits the queries in chunks, so that memory stays linear in Tq and
Tk: nothing larger than ``[B, H, CHUNK, Tk]`` exists at a time. The numbers in brackets
are the equations of metal/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx

# Query rows per chunk: large enough to keep the matrix products busy, small enough
# that one chunk of scores stays far below the inputs of a long sequence.
CHUNK = 256


def attention_forward(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool
) -> tuple[mx.array, mx.array]:
    """Output and log-sum-exp of attention.

    Args:
        q: ``[B, H, Tq, D]``.
        k: ``[B, HKV, Tk, D]``.
        v: ``[B, HKV, Tk, Dv]``.
        scale: Multiplies the scores.
        causal: Query i sees keys j <= i + Tk - Tq.

    Returns:
        out ``[B, H, Tq, Dv]`` in the dtype of q, lse ``[B, H, Tq]`` float32.
    """
    k_heads, v_heads = key_heads(k), key_heads(v)
    offset = k.shape[2] - q.shape[2]
    # Each chunk depends on the one before: evaluated in another order, the scores of
    # many chunks would exist at once, and memory would be quadratic.
    outs, lses = [], []
    for rows, n_keys in query_chunks(q.shape[2], k.shape[2], causal):
        q_rows = query_heads(q[:, :, rows], k.shape[1])
        s = scores(q_rows, k_heads[..., :n_keys, :], offset + rows.start, scale, causal)
        m = finite(s.max(axis=-1, keepdims=True))
        p = mx.exp(s - m)  # 0 all along an empty row
        l = p.sum(axis=-1, keepdims=True)
        acc = p @ v_heads[..., :n_keys, :]
        out = mx.where(l == 0.0, 0.0, acc / l)
        outs.append(merge_heads(out).astype(q.dtype))
        lses.append(merge_heads(m + mx.log(l))[..., 0])  # (4)
        (q,) = mx.depends([q], [outs[-1], lses[-1]])
    return mx.concatenate(outs, axis=2), mx.concatenate(lses, axis=2)


def attention_backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    out: mx.array,
    lse: mx.array,
    dout: mx.array,
    dlse: mx.array,
    *,
    scale: float,
    causal: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """Gradients of :func:`attention_forward`, from its outputs and their cotangents.

    Args:
        q: ``[B, H, Tq, D]``.
        k: ``[B, HKV, Tk, D]``.
        v: ``[B, HKV, Tk, Dv]``.
        out: ``[B, H, Tq, Dv]``.
        lse: ``[B, H, Tq]`` float32.
        dout: Cotangent of out.
        dlse: Cotangent of lse.
        scale: Multiplies the scores.
        causal: Query i sees keys j <= i + Tk - Tq.

    Returns:
        dq, dk, dv in the shapes and dtypes of q, k, v.
    """
    HKV = k.shape[1]
    k_heads, v_heads = key_heads(k), key_heads(v)
    offset = k.shape[2] - q.shape[2]
    dk = mx.zeros(k.shape, mx.float32)
    dv = mx.zeros(v.shape, mx.float32)
    dqs = []  # each chunk depends on the one before, as in the forward
    for rows, n_keys in query_chunks(q.shape[2], k.shape[2], causal):
        q_rows = query_heads(q[:, :, rows], HKV)
        dout_rows = query_heads(dout[:, :, rows], HKV)
        out_rows = query_heads(out[:, :, rows], HKV)
        lse_rows = query_heads(lse[:, :, rows, None], HKV)
        dlse_rows = query_heads(dlse[:, :, rows, None], HKV)
        k_visible, v_visible = k_heads[..., :n_keys, :], v_heads[..., :n_keys, :]

        delta = (dout_rows * out_rows).sum(-1, keepdims=True) - dlse_rows  # (6)
        s = scores(q_rows, k_visible, offset + rows.start, scale, causal)
        p = mx.exp(s - finite(lse_rows))  # (5)
        dp = dout_rows @ v_visible.swapaxes(-1, -2)  # (8)
        ds = p * (dp - delta)  # (9)
        dqs.append(merge_heads(scale * (ds @ k_visible)).astype(q.dtype))  # (10)
        # The query heads of a group share their keys: their gradients add.
        dk_rows = (ds.swapaxes(-1, -2) @ (scale * q_rows)).sum(axis=2)  # (11)
        dv_rows = (p.swapaxes(-1, -2) @ dout_rows).sum(axis=2)  # (7)
        dk = dk.at[:, :, :n_keys].add(dk_rows)
        dv = dv.at[:, :, :n_keys].add(dv_rows)
        q, dout = mx.depends([q, dout], [dqs[-1], dk, dv])
    return mx.concatenate(dqs, axis=2), dk.astype(k.dtype), dv.astype(v.dtype)


def query_chunks(Tq: int, Tk: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """Chunks of query rows, each with the number of keys its rows can see."""
    for start in range(0, Tq, CHUNK):
        stop = min(start + CHUNK, Tq)
        n_keys = min(max(stop + Tk - Tq, 1), Tk) if causal else Tk
        yield slice(start, stop), n_keys


def scores(
    q_rows: mx.array, k: mx.array, first_diagonal: int, scale: float, causal: bool
) -> mx.array:
    """``scale * q k^T`` for a chunk of rows, -inf where a key is invisible.

    The first row of the chunk sees keys ``j <= first_diagonal``, the next one more.
    """
    s = (scale * q_rows) @ k.swapaxes(-1, -2)
    if not causal:
        return s
    last_visible = mx.arange(q_rows.shape[-2])[:, None] + first_diagonal
    return mx.where(mx.arange(k.shape[-2]) <= last_visible, s, -math.inf)


def finite(x: mx.array) -> mx.array:
    """Replace the -inf of an empty row by 0, so that no inf - inf arises."""
    return mx.where(x == -math.inf, 0.0, x)


def query_heads(x: mx.array, HKV: int) -> mx.array:
    """``[B, H, T, D]`` as float32 ``[B, HKV, H // HKV, T, D]``."""
    return x.astype(mx.float32).reshape(x.shape[0], HKV, -1, *x.shape[2:])


def key_heads(x: mx.array) -> mx.array:
    """``[B, HKV, T, D]`` as float32 ``[B, HKV, 1, T, D]``."""
    return x.astype(mx.float32)[:, :, None]


def merge_heads(x: mx.array) -> mx.array:
    """``[B, HKV, H // HKV, T, D]`` as ``[B, H, T, D]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])
