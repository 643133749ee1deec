"""The equations in plain MLX operations, forward and explicit backward.

This is the specification that the kernels are tested against, and the back end where
there is no GPU. It visits the queries in chunks, so that memory stays linear in Tq and
Tk: nothing larger than ``[B, H, CHUNK, Tk]`` exists at a time. The numbers in brackets
are the equations of metal/README.md.

All functions take the arrays of one attention under the same names:

- q ``[B, H, Tq, D]``, k ``[B, HKV, Tk, D]``, v ``[B, HKV, Tk, Dv]``
- mask, four axes, each 1 or the full size of ``[B, H, Tq, Tk]``: bool (True: visible),
  or a number that is added to the scaled and capped scores; a number below HIDDEN
  hides the key as False does
- q_segments ``[B, Tq]`` and k_segments ``[B, Tk]``: only equal ids see each other
- sinks ``[H]`` float32: the score of one more key per head, which has no value
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx

from mlx_flash.options import Options

# Query rows per chunk: large enough to keep the matrix products busy, small enough
# that one chunk of scores stays far below the inputs of a long sequence.
CHUNK = 256
# An additive mask below this hides a key: -inf and the lowest float32 and bfloat16.
HIDDEN = -6e35


def attention_forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    options: Options,
    mask: mx.array | None = None,
    q_segments: mx.array | None = None,
    k_segments: mx.array | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Output and log-sum-exp of attention.

    Returns:
        out ``[B, H, Tq, Dv]`` in the dtype of q, lse ``[B, H, Tq]`` float32.
    """
    HKV = k.shape[1]
    k_heads, v_heads = key_heads(k), key_heads(v)
    outs: list[mx.array] = []
    lses: list[mx.array] = []
    for rows, keys in chunks(q.shape[2], k.shape[2], options):
        # Each chunk waits for the one before: evaluated in another order, the scores
        # of many chunks would exist at once, and memory would be quadratic.
        q_rows = query_heads(after(q[:, :, rows], outs[-1:] + lses[-1:]), HKV)
        block = mask_block(mask, rows, keys, HKV)
        visible = visibility(rows, keys, options, block, q_segments, k_segments)
        _, s = scores(q_rows, k_heads[..., keys, :], block, options)
        if visible is not None:
            s = mx.where(visible, s, -math.inf)
        m = s.max(axis=-1, keepdims=True)
        if sinks is not None:
            z = sinks.reshape(HKV, -1, 1, 1)
            m = mx.maximum(m, z)
        m = finite(m)
        p = mx.exp(s - m)  # 0 all along an empty row
        l = p.sum(axis=-1, keepdims=True)
        if sinks is not None:
            l = l + mx.exp(z - m)
        acc = p @ v_heads[..., keys, :]
        out = mx.where(l == 0.0, 0.0, acc / l)
        outs.append(merge_heads(out).astype(q.dtype))
        lses.append(merge_heads(m + mx.log(l))[..., 0])  # (4)
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
    options: Options,
    mask: mx.array | None = None,
    q_segments: mx.array | None = None,
    k_segments: mx.array | None = None,
    sinks: mx.array | None = None,
) -> dict[str, mx.array]:
    """Gradients of :func:`attention_forward`, from its outputs and their cotangents.

    Args:
        q: As in the forward, like the other arrays that are not named here.
        k: Keys.
        v: Values.
        out: ``[B, H, Tq, Dv]``.
        lse: ``[B, H, Tq]`` float32.
        dout: Cotangent of out.
        dlse: Cotangent of lse.
        options: As in the forward.
        mask: As in the forward.
        q_segments: As in the forward.
        k_segments: As in the forward.
        sinks: As in the forward.

    Returns:
        Gradients in the shapes and dtypes of the arrays "q", "k", "v", and of "mask"
        if it is additive and "sinks" if they are given.
    """
    HKV = k.shape[1]
    arrays = q, k, v, out, lse, dout, dlse
    masks = mask, q_segments, k_segments
    # A zero in ds must stop a NaN of a key or a query that is not seen: 0 * NaN is NaN.
    # Where such a key or query is seen, ds is NaN itself.
    q_finite, k_finite = zero_unless_finite(q), zero_unless_finite(key_heads(k))
    dqs: list[mx.array] = []
    dk = mx.zeros(k.shape, mx.float32)
    dv = mx.zeros(v.shape, mx.float32)
    for rows, keys in chunks(q.shape[2], k.shape[2], options):
        done = [*dqs[-1:], dk, dv] if dqs else []  # each chunk waits, as in the forward
        p, _, ds = score_gradients(rows, keys, *arrays, options, *masks, done)
        q_rows = query_heads(q_finite[:, :, rows], HKV)
        dout_rows = query_heads(dout[:, :, rows], HKV)
        dq = options.scale * (ds @ k_finite[..., keys, :])  # (10)
        dqs.append(merge_heads(dq).astype(q.dtype))
        # The query heads of a group share their keys: their gradients add.
        dk_rows = (ds.swapaxes(-1, -2) @ (options.scale * q_rows)).sum(axis=2)  # (11)
        dv_rows = (p.swapaxes(-1, -2) @ dout_rows).sum(axis=2)  # (7)
        dk = dk.at[:, :, keys].add(dk_rows)
        dv = dv.at[:, :, keys].add(dv_rows)
    gradients = {
        "q": mx.concatenate(dqs, axis=2),
        "k": dk.astype(k.dtype),
        "v": dv.astype(v.dtype),
    }
    if mask is not None and mask.dtype != mx.bool_:
        gradients["mask"] = mask_gradient(
            *arrays, options, mask, q_segments, k_segments
        )
    if sinks is not None:
        delta = row_delta(out, dout, dlse[..., None])[..., 0]
        weight = mx.exp(sinks[:, None] - finite(lse))
        live = has_cotangent(dout, dlse[..., None])[..., 0]
        gradients["sinks"] = -mx.where(live, weight * delta, 0.0).sum(axis=(0, 2))
    return gradients


def mask_gradient(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    out: mx.array,
    lse: mx.array,
    dout: mx.array,
    dlse: mx.array,
    options: Options,
    mask: mx.array,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
) -> mx.array:
    """Gradient of an additive mask, summed over the axes that the mask lacks.

    A pass of its own, so that it costs nothing where nobody asks for it.
    """
    Tk = k.shape[2]
    lacking = [axis for axis, n in enumerate(mask.shape) if n == 1]
    parts: list[mx.array] = []
    for rows, keys in chunks(q.shape[2], Tk, options):
        arrays = q, k, v, out, lse, dout, dlse, options, mask, q_segments, k_segments
        _, ds, _ = score_gradients(rows, keys, *arrays, parts[-1:])
        part = merge_heads(ds).sum(axis=lacking, keepdims=True)
        if mask.shape[3] != 1:
            part = mx.pad(part, [(0, 0)] * 3 + [(keys.start, Tk - keys.stop)])
        if mask.shape[2] != 1:
            parts.append(part.astype(mask.dtype))
        else:
            parts = [part + parts[0] if parts else part]
    return mx.concatenate(parts, axis=2).astype(mask.dtype)


def score_gradients(
    rows: slice,
    keys: slice,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    out: mx.array,
    lse: mx.array,
    dout: mx.array,
    dlse: mx.array,
    options: Options,
    mask: mx.array | None,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    done: list[mx.array],
) -> tuple[mx.array, mx.array, mx.array]:
    """p, and the gradients of the scores with their mask and before softcap and mask.

    For a chunk, ``[B, HKV, H // HKV, rows, keys]``; all three are exactly 0 where the
    row does not see the key or has no cotangent, whatever the numbers there are.
    """
    HKV = k.shape[1]
    q_rows = query_heads(after(q[:, :, rows], done), HKV)
    dout_rows, out_rows = (query_heads(x[:, :, rows], HKV) for x in (dout, out))
    lse_rows, dlse_rows = (query_heads(x[:, :, rows, None], HKV) for x in (lse, dlse))
    block = mask_block(mask, rows, keys, HKV)
    visible = visibility(rows, keys, options, block, q_segments, k_segments)
    live = has_cotangent(dout_rows, dlse_rows)
    nonzero = live if visible is None else visible & live

    capped, s = scores(q_rows, key_heads(k)[..., keys, :], block, options)
    p = mx.where(nonzero, mx.exp(s - finite(lse_rows)), 0.0)  # (5)
    dp = dout_rows @ key_heads(v)[..., keys, :].swapaxes(-1, -2)  # (8)
    ds = p * (dp - row_delta(out_rows, dout_rows, dlse_rows))  # (9)
    ds = ds_before = mx.where(nonzero, ds, 0.0)
    if options.softcap is not None:
        slope = 1.0 - mx.square(capped / options.softcap)
        ds_before = mx.where(nonzero, ds * slope, 0.0)
    return p, ds, ds_before


def row_delta(out: mx.array, dout: mx.array, dlse: mx.array) -> mx.array:
    """``rowsum(dout * out) - dlse``, one number per row. (6)."""
    product = dout.astype(mx.float32) * out.astype(mx.float32)
    return product.sum(axis=-1, keepdims=True) - dlse


def has_cotangent(dout: mx.array, dlse: mx.array) -> mx.array:
    """Whether a row has any cotangent, one bool per row.

    A row without one, such as padding, contributes nothing even if it holds NaN.
    """
    return mx.any(dout != 0.0, axis=-1, keepdims=True) | (dlse != 0.0)


def chunks(Tq: int, Tk: int, options: Options) -> Iterator[tuple[slice, slice]]:
    """Chunks of query rows, each with the range of keys that its rows can see.

    At least one key, so that no array is empty.
    """
    for start in range(0, Tq, CHUNK):
        stop = min(start + CHUNK, Tq)
        first, end = 0, Tk
        if options.low is not None:
            first = min(max(start + options.low, 0), Tk - 1)
        if options.high is not None:
            end = min(stop + options.high, Tk)
        yield slice(start, stop), slice(first, max(end, first + 1))


def scores(
    q_rows: mx.array, k_heads: mx.array, block: mx.array | None, options: Options
) -> tuple[mx.array, mx.array]:
    """``scale * q k^T`` with the softcap, and the same with the additive mask."""
    capped = (options.scale * q_rows) @ k_heads.swapaxes(-1, -2)
    if options.softcap is not None:
        capped = options.softcap * mx.tanh(capped / options.softcap)
    if block is None or block.dtype == mx.bool_:
        return capped, capped
    return capped, capped + block.astype(mx.float32)


def visibility(
    rows: slice,
    keys: slice,
    options: Options,
    block: mx.array | None,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
) -> mx.array | None:
    """Which keys of a chunk its rows see; None if they see all of them."""
    i = mx.arange(rows.start, rows.stop)[:, None]
    j = mx.arange(keys.start, keys.stop)
    conditions = []
    if options.low is not None and rows.stop - 1 + options.low > keys.start:
        conditions.append(j >= i + options.low)
    if options.high is not None and rows.start + options.high < keys.stop - 1:
        conditions.append(j <= i + options.high)
    if q_segments is not None and k_segments is not None:
        same = q_segments[:, rows, None] == k_segments[:, None, keys]
        conditions.append(same[:, None, None])
    if block is not None:
        hidden = block < HIDDEN if block.dtype != mx.bool_ else ~block
        conditions.append(~hidden)
    if not conditions:
        return None
    visible, *others = conditions
    for condition in others:
        visible = visible & condition
    return visible


def mask_block(
    mask: mx.array | None, rows: slice, keys: slice, HKV: int
) -> mx.array | None:
    """The part of a mask that belongs to a chunk, ``[B, HKV, H // HKV, rows, keys]``.

    Axes of size 1 stay so.
    """
    if mask is None:
        return None
    B, H, Tq, Tk = mask.shape
    block = mask[:, :, rows if Tq != 1 else slice(1), keys if Tk != 1 else slice(1)]
    return block.reshape(B, HKV if H != 1 else 1, -1, *block.shape[2:])


def after(x: mx.array, done: list[mx.array]) -> mx.array:
    """``x``, not available before the arrays in ``done`` are evaluated.

    What ``mx.depends`` does, but with an operation that ``mx.vmap`` knows.
    """
    always = mx.array(True)
    for y in done:
        always = always | (y[(0,) * y.ndim] == 0)
    return mx.where(always, x, mx.zeros((), x.dtype)) if done else x


def finite(x: mx.array) -> mx.array:
    """Replace the -inf of an empty row by 0, so that no inf - inf arises."""
    return mx.where(x == -math.inf, 0.0, x)


def zero_unless_finite(x: mx.array) -> mx.array:
    """Replace NaN and infinities by 0."""
    return mx.where(mx.isfinite(x), x, mx.zeros((), x.dtype))


def query_heads(x: mx.array, HKV: int) -> mx.array:
    """``[B, H, T, D]`` as float32 ``[B, HKV, H // HKV, T, D]``."""
    return x.astype(mx.float32).reshape(x.shape[0], HKV, -1, *x.shape[2:])


def key_heads(x: mx.array) -> mx.array:
    """``[B, HKV, T, D]`` as float32 ``[B, HKV, 1, T, D]``."""
    return x.astype(mx.float32)[:, :, None]


def merge_heads(x: mx.array) -> mx.array:
    """``[B, HKV, H // HKV, T, D]`` as ``[B, H, T, D]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])
