"""The public operation: validation, and the autograd chain of the four kernels."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import cast

import mlx.core as mx

from mlx_flash import kernels, reference
from mlx_flash.backends import backend

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


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
    Differentiable once in ``q``, ``k`` and ``v``; scores and sums are float32;
    results are bit-reproducible.

    Dimensions: ``B`` batch, ``H`` query heads, ``HKV`` key/value heads (divides
    ``H``), ``Tq``/``Tk`` queries/keys, ``D`` head dimension of q and k, ``Dv`` of v.

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

            A query that sees no key returns zeros and passes no gradient.
            (``mx.fast.scaled_dot_product_attention`` returns the mean of v there.)
        window: Not implemented yet.
        softcap: Not implemented yet.
        mask: Not implemented yet.
        segment_ids: Not implemented yet.
        sinks: Not implemented yet.
        return_lse: Also return the natural logarithm of each row's softmax
            denominator; it is differentiable, and -inf for a query without a key.
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
        ValueError: Ranks, sizes, head counts, head dims or dtypes disagree, or
            ``scale`` is not finite.
        NotImplementedError: The inputs are valid but no kernel covers them, or a
            gradient of a gradient or a forward-mode derivative is asked for.

    Source: FlashAttention-2, https://arxiv.org/abs/2307.08691, Alg. 1 and 2.
    """
    check_shapes(q, k, v)
    check_dtypes(q, k, v)
    unsupported = {
        "window": window,
        "softcap": softcap,
        "mask": mask,
        "segment_ids": segment_ids,
        "sinks": sinks,
    }
    for name, value in unsupported.items():
        if value is not None:
            raise NotImplementedError(
                f"[flash_attention] {name} is not implemented yet; use "
                "mx.fast.scaled_dot_product_attention with an array mask"
            )
    head_dim = q.shape[-1]
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"[flash_attention] scale must be finite, got {scale}")

    dtype = mx.result_type(q, k, v)
    with mx.stream(stream or mx.default_stream(mx.default_device())):
        q, k, v = (x if x.dtype == dtype else x.astype(dtype) for x in (q, k, v))
        B, H, Tq, _ = q.shape
        if B * H * Tq * k.shape[2] * v.shape[-1] == 0:
            out = mx.zeros((B, H, Tq, v.shape[-1]), dtype)
            lse = mx.full((B, H, Tq), -math.inf, mx.float32)
        else:
            attention = attention_function(
                backend(), scale, bool(causal), precise or not mlx_uses_tf32(), stream
            )
            out, lse = attention(q, k, v)
    return (out, lse) if return_lse else out


def describe(q: mx.array, k: mx.array, v: mx.array) -> str:
    """The shapes and dtypes of the inputs, as error messages print them."""
    return ", ".join(
        f"{name} {list(x.shape)} {str(x.dtype).removeprefix('mlx.core.')}"
        for name, x in (("q", q), ("k", k), ("v", v))
    )


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
    if problem:
        raise ValueError(f"[flash_attention] {problem}, got {describe(q, k, v)}")


def check_dtypes(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raise ValueError unless every input is float32, float16 or bfloat16."""
    if not {q.dtype, k.dtype, v.dtype} <= set(DTYPES):
        raise ValueError(
            "[flash_attention] q, k and v must be float32, float16 or bfloat16 "
            f"(convert with .astype), got {describe(q, k, v)}"
        )


def mlx_uses_tf32() -> bool:
    """Whether MLX multiplies float32 in TF32 on CUDA: MLX's own switch."""
    return os.environ.get("MLX_ENABLE_TF32", "1") != "0"


Attention = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


@lru_cache(maxsize=256)
def attention_function(
    backend_name: str,
    scale: float,
    causal: bool,
    precise: bool,
    stream: mx.Stream | mx.Device | None,
) -> Attention:
    """``(q, k, v) -> (out, lse)`` with its VJP, for one back end and one mask."""
    if backend_name == "reference":
        forward = reference.attention_forward
        backward = reference.attention_backward
    else:
        forward = partial(
            kernels.attention_forward, backend=backend_name, precise=precise
        )
        backward = partial(
            kernels.attention_backward, backend=backend_name, precise=precise
        )

    @mx.custom_function
    def attention(q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        return forward(q, k, v, scale=scale, causal=causal)

    # The backward is a custom function of its own, so that differentiating it raises
    # everywhere: a kernel that runs on the host would otherwise give silent zeros.
    @mx.custom_function
    def attention_gradient(
        *arrays: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v, out, lse, dout, dlse = arrays
        with mx.stream(stream or mx.default_stream(mx.default_device())):
            return backward(q, k, v, out, lse, dout, dlse, scale=scale, causal=causal)

    @attention_gradient.vjp
    def second_order(*_: object) -> None:
        raise NotImplementedError(
            "[flash_attention] a gradient of a gradient is not implemented; use "
            "mx.fast.scaled_dot_product_attention where second order is needed"
        )

    # Forward mode would give silent zeros on the host, too.
    @attention.jvp
    def forward_mode(*_: object) -> None:
        raise NotImplementedError(
            "[flash_attention] forward-mode differentiation (mx.jvp) is not "
            "implemented; use mx.vjp or mx.grad, or "
            "mx.fast.scaled_dot_product_attention"
        )

    @attention.vjp
    def gradient(
        primals: tuple[mx.array, ...],
        cotangents: tuple[mx.array, mx.array],
        outputs: tuple[mx.array, mx.array],
    ) -> object:
        return attention_gradient(*primals, *outputs, *cotangents)

    return cast(Attention, attention)
