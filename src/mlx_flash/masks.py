"""A mask that knows its window, and becomes an array only where one is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class WindowMask:
    """A causal mask with a window, in the place of the bool array that mlx-lm makes.

    ``scaled_dot_product_attention`` of this library reads the window. Whoever treats
    it as an array gets the array, made when it is needed.

    Attributes:
        queries: Number of queries.
        offset: Keys before the first query's own.
        window: A query sees so many keys, its own included.
        make: ``(queries, offset, window) -> bool array``.
    """

    queries: int
    offset: int
    window: int
    make: Callable[..., mx.array]

    def array(self) -> mx.array:
        """The bool array ``[queries, offset + queries]``; True: visible."""
        return self.make(self.queries, self.offset, self.window)

    def fits(self, Tq: int, Tk: int) -> bool:
        """Whether these are the queries and keys that the mask is about."""
        return self.queries == Tq and self.offset + self.queries == Tk

    def __mlx_array__(self) -> mx.array:
        """What operations of MLX see."""
        return self.array()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # protocols that an array may have and this has not
            raise AttributeError(name)
        return getattr(self.array(), name)

    def __getitem__(self, index: object) -> mx.array:
        return self.array()[index]

    def __and__(self, other: mx.array) -> mx.array:
        return self.array() & other

    __rand__ = __and__

    def __or__(self, other: mx.array) -> mx.array:
        return self.array() | other

    __ror__ = __or__

    def __invert__(self) -> mx.array:
        return ~self.array()
