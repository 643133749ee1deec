"""A byte-level GPT in mlx.nn: the model alone, neither its training nor its attention.

The attention is a function ``(q, k, v) -> out`` that is handed to the model. It must be
causal: ``q`` is ``[B, H, T, D]``, ``k`` and ``v`` are ``[B, HKV, T, D]`` with ``HKV``
dividing ``H``, and ``out`` has the shape of ``q``. Of packed sequences it is also given
``segment_ids``, ``[B, T]``: only equal ids may see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

Attention = Callable[..., mx.array]

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Args:
        layers: Number of blocks.
        heads: Query heads per block, ``H``.
        kv_heads: Key/value heads per block, ``HKV``; divides ``heads``.
        dims: Width of the model; the head dim is ``dims // heads``.

    Raises:
        ValueError: The sizes do not fit together.
    """

    layers: int
    heads: int
    kv_heads: int
    dims: int

    def __post_init__(self) -> None:
        if self.dims % self.heads:
            raise ValueError(f"heads {self.heads} must divide dims {self.dims}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv-heads {self.kv_heads} must divide heads {self.heads}")
        if self.head_dim % 8:
            raise ValueError(
                f"the head dim, dims {self.dims} / heads {self.heads} = "
                f"{self.head_dim}, must be a multiple of 8"
            )

    @property
    def head_dim(self) -> int:
        """Dimension ``D`` of one head."""
        return self.dims // self.heads


class SelfAttention(nn.Module):
    """Projections and rotary positions around the attention function."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        kv_dims = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention = attention
        self.rope = nn.RoPE(config.head_dim)
        self.query = nn.Linear(config.dims, config.dims, bias=False)
        self.key = nn.Linear(config.dims, kv_dims, bias=False)
        self.value = nn.Linear(config.dims, kv_dims, bias=False)
        self.project = nn.Linear(config.dims, config.dims, bias=False)

    def __call__(self, x: mx.array, **segments: mx.array) -> mx.array:
        """``[B, T, dims] -> [B, T, dims]``."""
        q = self.rope(self.split_heads(self.query(x)))  # [B, H, T, D]
        k = self.rope(self.split_heads(self.key(x)))  # [B, HKV, T, D]
        v = self.split_heads(self.value(x))  # [B, HKV, T, D]
        out = self.attention(q, k, v, **segments)  # [B, H, T, D]
        return self.project(out.swapaxes(1, 2).flatten(2))  # [B, T, dims]

    def split_heads(self, x: mx.array) -> mx.array:
        """``[B, T, heads * D]`` as ``[B, heads, T, D]``."""
        return mx.unflatten(x, -1, (-1, self.head_dim)).swapaxes(1, 2)


class MLP(nn.Module):
    """Two linear layers with a squared ReLU between them."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.expand = nn.Linear(dims, 4 * dims, bias=False)
        self.project = nn.Linear(4 * dims, dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """``[B, T, dims] -> [B, T, dims]``."""
        hidden = nn.relu2(self.expand(x))  # [B, T, 4 * dims]
        return self.project(hidden)  # [B, T, dims]


class Block(nn.Module):
    """Attention and MLP, each normalized before and added to its input after."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dims)
        self.attention = SelfAttention(config, attention)
        self.mlp_norm = nn.RMSNorm(config.dims)
        self.mlp = MLP(config.dims)

    def __call__(self, x: mx.array, **segments: mx.array) -> mx.array:
        """``[B, T, dims] -> [B, T, dims]``."""
        x = x + self.attention(self.attention_norm(x), **segments)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Logits of the next byte after every byte; the first and last matrix are one.

    Args:
        config: Sizes of the model.
        attention: Causal attention ``(q, k, v) -> out``.
    """

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dims)
        self.blocks = [Block(config, attention) for _ in range(config.layers)]
        self.norm = nn.RMSNorm(config.dims)

    def __call__(self, tokens: mx.array, **segments: mx.array) -> mx.array:
        """``[B, T] -> [B, T, VOCABULARY]``; ``segment_ids`` for packed sequences."""
        x = self.embedding(tokens)  # [B, T, dims]
        for block in self.blocks:
            x = block(x, **segments)
        return self.embedding.as_linear(self.norm(x))  # [B, T, VOCABULARY]
