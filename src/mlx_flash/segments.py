"""Packed sequences: from offsets to the ids that ``flash_attention`` takes."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from mlx_flash.validation import INTEGERS, describe


def segment_ids_from_cu_seqlens(
    cu_seqlens: mx.array, total_length: int | None = None
) -> mx.array:
    """Segment ids of sequences that lie one after the other in one row.

    Args:
        cu_seqlens: ``[n + 1]`` integers: sequence ``s`` is the tokens from
            ``cu_seqlens[s]`` up to, not including, ``cu_seqlens[s + 1]``. Sequences of
            length 0 are allowed.
        total_length: Number of tokens ``T``. Default: the last offset, which is then
            read from the array; give it inside ``mx.compile``.

    Returns:
        ``[1, T]`` int32, for ``segment_ids`` of :func:`mlx_flash.flash_attention`.
        Tokens past the last offset (padding) get an id that no sequence has.

    Raises:
        ValueError: ``cu_seqlens`` is not a 1-D array of at least one integer, or
            ``total_length`` is negative.

    Example::

        segment_ids_from_cu_seqlens(mx.array([0, 2, 5]), 6)  # [[0, 0, 1, 1, 1, 2]]
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.size == 0 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            "[segment_ids_from_cu_seqlens] cu_seqlens must be a 1-D array of at least "
            f"one integer offset, got {describe(cu_seqlens=cu_seqlens)}"
        )
    T = cast(int, cu_seqlens[-1].item()) if total_length is None else total_length
    if T < 0:
        raise ValueError(
            f"[segment_ids_from_cu_seqlens] total_length must not be negative, got {T}"
        )
    # A token's id is the number of sequences that start at it or before, less one.
    starts = mx.zeros((T + 1,), mx.int32).at[mx.minimum(cu_seqlens, T)].add(1)
    return mx.cumsum(starts)[None, :T] - 1
