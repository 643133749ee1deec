"""The public operation: its contract, and the autograd chain of its back ends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import cast

import mlx.core as mx

from mlx_flash import kernels, reference
from mlx_flash.backends import backend
from mlx_flash.options import Options
from mlx_flash.validation import (
    check_dtypes,
    check_mask,
    check_segments,
    check_shapes,
    check_sinks,
    make_options,
)


def flash_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    mask: mx.array | None = None,
    segment_ids: mx.array | tuple[mx.array, mx.array] | None = None,
    sinks: mx.array | None = None,
    return_lse: bool = False,
    precise: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    r"""Exact attention, ``softmax(scale * q @ k.T + mask) @ v``, in linear memory.

    The score matrix is never stored, in the forward or in the backward.
    Differentiable once in ``q``, ``k``, ``v``, an additive ``mask`` and ``sinks``;
    scores and sums are float32; results are bit-reproducible.

    Dimensions: ``B`` batch, ``H`` query heads, ``HKV`` key/value heads (divides
    ``H``), ``Tq``/``Tk`` queries/keys, ``D`` head dimension of q and k, ``Dv`` of v.

    A query sees a key if ``causal``, ``window``, ``mask`` and ``segment_ids`` all
    allow it. A query that sees no key returns zeros and passes no gradient
    (``mx.fast.scaled_dot_product_attention`` returns the mean of v there).

    Args:
        q: Queries ``[B, H, Tq, D]``; float32, float16 or bfloat16, any strides.
        k: Keys ``[B, HKV, Tk, D]``, not tiled to ``H``: query head ``h`` reads
            head ``h // (H // HKV)``.
        v: Values ``[B, HKV, Tk, Dv]``. Mixed dtypes of q, k and v promote as MLX
            promotes them.
        scale: Multiplies the scores, dimensionless, kept in float32; 0 and negative
            values work. Default: ``D ** -0.5``.
        causal: Query ``i`` sees keys ``j <= i + Tk - Tq`` (aligned bottom right)::

                Tq=2, Tk=5:  1 1 1 1 0      Tq=3, Tk=2:  0 0
                             1 1 1 1 1                   1 0
                                                         1 1

        window: An integer ``W >= 1`` (needs ``causal``): a query sees the ``W`` newest
            of its keys, its own ``i + Tk - Tq`` included. A pair ``(left, right)``:
            that many keys before and after its own, which it sees too; None: all of
            that side. With ``causal``, none after its own.
        softcap: ``c > 0``: a score ``x`` becomes ``c * tanh(x / c)``, before the mask.
        mask: Bool (True: visible), or float32, float16 or bfloat16, added to the
            scores. Broadcasts to ``[B, H, Tq, Tk]`` and is never expanded. An additive
            value below -6e35, such as -inf or the lowest finite float32 or bfloat16,
            hides the key as False does. The gradient of an additive mask has its shape
            and dtype, and is computed only if it is asked for.
        segment_ids: Integers of at most 32 bits: ``[B, T]``, or a pair
            ``([B, Tq], [B, Tk])``. A query sees keys with its own id only. For packed
            sequences see :func:`mlx_flash.segment_ids_from_cu_seqlens`.
        sinks: ``[H]``, float32, float16 or bfloat16: the score of one more key per
            head, which has no value; it only enters the denominator.
        return_lse: Also return the natural logarithm of each row's softmax
            denominator, the sink included. It is differentiable; for a query without a
            key it is -inf, or the sink.
        precise: Only matters on CUDA, in float32. False: products in TF32 (11 bits of
            mantissa), as in MLX's own operations there, unless ``MLX_ENABLE_TF32=0``
            tells MLX otherwise. True: as accurate as float32, three times the products.
            Other back ends always compute float32 products.
        stream: Stream or device of the operation, its backward included.

    Returns:
        ``out`` ``[B, H, Tq, Dv]`` in the promoted dtype; with ``return_lse`` the pair
        ``(out, lse)``, ``lse`` ``[B, H, Tq]`` float32. The kernels lay the memory of
        ``out`` out as ``[B, Tq, H, Dv]``, so that merging the heads with
        ``out.transpose(0, 2, 1, 3).reshape(B, Tq, H * Dv)`` copies nothing.

    Raises:
        ValueError: Ranks, sizes, head counts, head dims or dtypes disagree, or a
            number is outside its range.
        NotImplementedError: The inputs are valid but no kernel covers them, or a
            gradient of a gradient, a forward-mode derivative or, of the kernels, a
            ``mx.vmap`` is asked for.

    Note:
        NaN and infinities. In ``q`` and ``k`` they reach the results of those queries
        and keys that see them and no others. In ``v`` and in the cotangent of ``out``
        they may also reach results that do not see them: a hidden key has weight 0,
        and 0 * NaN is NaN. To keep it out, every call would have to look at every
        value; MLX's own attention does not either. A query whose cotangents are all 0,
        such as padding, contributes nothing to any gradient, whatever its numbers are.

    Source: FlashAttention-2, https://arxiv.org/abs/2307.08691, Alg. 1 and 2.
    """
    check_shapes(q, k, v)
    check_dtypes(q, k, v)
    B, H, Tq, D = q.shape
    Tk, Dv = v.shape[2:]
    options = make_options(
        D, Tq, Tk, scale=scale, causal=causal, window=window, softcap=softcap
    )
    dtype = mx.result_type(q, k, v)
    with mx.stream(stream or mx.default_stream(mx.default_device())):
        others: dict[str, mx.array] = {}  # the arrays besides q, k and v
        if mask is not None:
            others["mask"] = check_mask(mask, q, k, v)
        if segment_ids is not None:
            segments = check_segments(segment_ids, q, k, v)
            others["q_segments"], others["k_segments"] = segments
        if sinks is not None:
            others["sinks"] = check_sinks(sinks, q, k, v)
        q, k, v = (x if x.dtype == dtype else x.astype(dtype) for x in (q, k, v))
        if B * H * Tq * Tk == 0:
            out = mx.zeros((B, H, Tq, Dv), dtype)
            lse = mx.full((B, H, Tq), -math.inf, mx.float32)
            if "sinks" in others and lse.size:
                lse = mx.broadcast_to(others["sinks"][:, None], lse.shape)
        else:
            attention = attention_function(
                backend(),
                options,
                tuple(others),
                precise or not mlx_uses_tf32(),
                return_lse,
                stream,
            )
            out, lse = attention(q, k, v, *others.values())
    return (out, lse) if return_lse else out


def mlx_uses_tf32() -> bool:
    """Whether MLX multiplies float32 in TF32 on CUDA: MLX's own switch."""
    return os.environ.get("MLX_ENABLE_TF32", "1") != "0"


Attention = Callable[..., tuple[mx.array, mx.array]]
AttentionGradients = Callable[..., dict[str, mx.array]]


@lru_cache(maxsize=256)
def attention_function(
    backend_name: str,
    options: Options,
    names: tuple[str, ...],
    precise: bool,
    return_lse: bool,
    stream: mx.Stream | mx.Device | None,
) -> Attention:
    """``(q, k, v, *others) -> (out, lse)`` with its VJP.

    Args:
        backend_name: What runs it.
        options: The numbers of the attention.
        names: Those of the arrays besides q, k and v that are given, in their order:
            every array must be an argument of its own to get a gradient.
        precise: As in :func:`flash_attention`.
        return_lse: As there: if not, lse has no cotangent.
        stream: Where the backward runs; the forward runs where it is called.
    """
    forward, backward = passes(backend_name, precise)
    return differentiable(
        partial(forward, options=options),
        partial(backward, options=options),
        names=("q", "k", "v", *names),
        is_kernel=backend_name != "reference",
        return_lse=return_lse,
        stream=stream,
    )


def passes(backend_name: str, precise: bool) -> tuple[Attention, AttentionGradients]:
    """``attention_forward`` and ``attention_backward`` of a back end."""
    if backend_name == "reference":
        return reference.attention_forward, reference.attention_backward
    return (
        partial(kernels.attention_forward, backend=backend_name, precise=precise),
        partial(kernels.attention_backward, backend=backend_name, precise=precise),
    )


def differentiable(
    forward: Attention,
    backward: AttentionGradients,
    *,
    names: tuple[str, ...],
    is_kernel: bool,
    return_lse: bool,
    stream: mx.Stream | mx.Device | None,
) -> Attention:
    """A forward pass whose VJP is a backward pass.

    Args:
        forward: Takes arrays by name, returns ``(out, lse)``.
        backward: Takes the same, ``out``, ``lse`` and their cotangents ``dout`` and
            ``dlse``; returns gradients by name.
        names: Those of the arrays, in the order of the result's arguments.
        is_kernel: ``mx.vmap`` and ``mx.jvp`` must not see the operations of the passes.
        return_lse: If not, lse has no cotangent.
        stream: Where the backward runs; the forward runs where it is called.
    """

    @mx.custom_function
    def attention(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        if is_kernel:
            arrays = for_kernels(*arrays)
        return forward(**dict(zip(names, arrays, strict=True)))

    attention.jvp(refuse_forward_mode)

    @attention.vjp
    def gradient(
        primals: tuple[mx.array, ...],
        cotangents: tuple[mx.array, mx.array],
        outputs: tuple[mx.array, mx.array],
    ) -> tuple[mx.array, ...]:
        given = dict(zip(names, primals, strict=True))
        (out, lse), (dout, dlse) = outputs, cotangents
        with mx.stream(stream or mx.default_stream(mx.default_device())):
            if not return_lse:  # MLX would make zeros, by a kernel of its own
                dlse = mx.broadcast_to(kernels.constant((0.0,), mx.float32), lse.shape)
            if is_kernel:  # the forward looked at the others
                dout, dlse = for_kernels(dout, dlse)
            gradients = backward(**given, out=out, lse=lse, dout=dout, dlse=dlse)
            # A bool mask and ids have no gradient, but MLX wants one per input.
            return tuple(
                cast(mx.array, last_derivative(gradients[name], out, dout, dlse))
                if name in gradients
                else mx.zeros_like(x)
                for name, x in given.items()
            )

    return cast(Attention, attention)


# Kernels that run on the host leave no trace, so the gradient of a gradient would
# silently be 0. A gradient passes through this, beside arrays that depend on all
# inputs; each one alone, so that a gradient that nobody asks for is not computed.
@mx.custom_function
def last_derivative(gradient: mx.array, *_: mx.array) -> mx.array:
    """The gradient itself."""
    return gradient


@last_derivative.vjp
def second_order(*_: object) -> None:
    """Refuse."""
    raise NotImplementedError(
        "[flash_attention] a gradient of a gradient is not implemented; use "
        "mx.fast.scaled_dot_product_attention where second order is needed"
    )


def refuse_forward_mode(*_: object) -> None:
    """Refuse: on the host, kernels would give silent zeros."""
    raise NotImplementedError(
        "[flash_attention] forward-mode differentiation (mx.jvp) is not implemented; "
        "use mx.vjp or mx.grad, or mx.fast.scaled_dot_product_attention"
    )


def refuse_vmap(*_: object) -> None:
    """Refuse."""
    raise NotImplementedError(
        "[flash_attention] mx.vmap of the kernels is not implemented; fold the mapped "
        "axes into B by a reshape, or use mlx_flash.use_backend('reference')"
    )


# A transformation reaches the kernels before the operation that they are part of, and
# MLX would refuse in words of its own.
@mx.custom_function
def guarded(*arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays themselves."""
    return arrays


guarded.jvp(refuse_forward_mode)
guarded.vmap(refuse_vmap)


def for_kernels(*arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays themselves, which ``mx.vmap`` and ``mx.jvp`` may not transform."""
    return cast("tuple[mx.array, ...]", guarded(*arrays))
