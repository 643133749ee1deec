"""Layers for ``mlx.nn`` models."""

from __future__ import annotations

from typing import Protocol, cast

import mlx.core as mx
from mlx import nn

from mlx_flash.attention import flash_attention


class Rope(Protocol):
    """A rotary embedding, such as ``mlx.nn.RoPE``."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """Rotate ``[B, H, T, D]``, whose first position is ``offset``."""
        ...


class MultiHeadAttention(nn.MultiHeadAttention):
    """``mlx.nn.MultiHeadAttention`` in linear memory, with what language models add.

    The parameters have the same names and, without grouped heads, the same shapes:
    weights load from one into the other, in both directions.

    Args:
        dims: Dimensions of the model, the default of all the others.
        num_heads: Query heads ``H``.
        query_input_dims: Dimensions of ``queries``.
        key_input_dims: Dimensions of ``keys``.
        value_input_dims: Dimensions of ``values``. Default: ``key_input_dims``.
        value_dims: ``H`` times the head dim of the values.
        value_output_dims: Dimensions of the result.
        bias: Whether the projections have one.
        num_kv_heads: Key and value heads ``HKV``, a divisor of ``H``. Default: ``H``.
        causal: As in :func:`mlx_flash.flash_attention`.
        window: As in :func:`mlx_flash.flash_attention`.
        rope: Rotates the projected keys, and the projected queries, whose last one has
            the position of the last key. A module among the model's parameters if it is
            one.

    Raises:
        ValueError: The heads do not divide the dimensions, or each other.
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        query_input_dims: int | None = None,
        key_input_dims: int | None = None,
        value_input_dims: int | None = None,
        value_dims: int | None = None,
        value_output_dims: int | None = None,
        bias: bool = False,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        rope: Rope | None = None,
    ) -> None:
        super().__init__(
            dims,
            num_heads,
            query_input_dims,
            key_input_dims,
            value_input_dims,
            value_dims,
            value_output_dims,
            bias,
        )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        value_dims = value_dims or dims
        if num_kv_heads < 1 or num_heads % num_kv_heads or value_dims % num_heads:
            raise ValueError(
                "[MultiHeadAttention] num_kv_heads must divide num_heads, and "
                f"num_heads value_dims, got num_kv_heads {num_kv_heads}, "
                f"num_heads {num_heads}, value_dims {value_dims}"
            )
        if num_kv_heads != num_heads:
            key_input_dims = key_input_dims or dims
            key_dims = dims // num_heads * num_kv_heads
            value_dims = value_dims // num_heads * num_kv_heads
            self.key_proj = nn.Linear(key_input_dims, key_dims, bias=bias)
            self.value_proj = nn.Linear(
                value_input_dims or key_input_dims, value_dims, bias=bias
            )
        self.num_kv_heads = num_kv_heads
        self.causal = causal
        self.window = window
        self.rope = rope

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Attend.

        Args:
            queries: ``[B, Tq, query_input_dims]``.
            keys: ``[B, Tk, key_input_dims]``.
            values: ``[B, Tk, value_input_dims]``.
            mask: Broadcasts to ``[B, H, Tq, Tk]``; bool (True: visible) or additive.

        Returns:
            ``[B, Tq, value_output_dims]``.
        """
        q = heads(self.query_proj(queries), self.num_heads)
        k = heads(self.key_proj(keys), self.num_kv_heads)
        v = heads(self.value_proj(values), self.num_kv_heads)
        if self.rope is not None:
            q = self.rope(q, offset=k.shape[2] - q.shape[2])
            k = self.rope(k)
        out = flash_attention(
            q, k, v, causal=self.causal, window=self.window, mask=mask
        )
        out = cast(mx.array, out).transpose(0, 2, 1, 3).flatten(-2, -1)
        return self.out_proj(out)


def heads(x: mx.array, H: int) -> mx.array:
    """``[B, T, H * D]`` as a view ``[B, H, T, D]``."""
    return mx.unflatten(x, -1, (H, -1)).transpose(0, 2, 1, 3)
