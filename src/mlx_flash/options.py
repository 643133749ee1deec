"""The numbers that define an attention."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Options:
    """The numbers that define an attention, besides its arrays.

    Attributes:
        scale: Multiplies q k^T.
        low: Query i sees only keys j >= i + low. None: no such bound.
        high: Query i sees only keys j <= i + high. None: no such bound.
        softcap: c in c * tanh(x / c). None: no cap.
    """

    scale: float
    low: int | None = None
    high: int | None = None
    softcap: float | None = None

    def shifted(self, start: int) -> Options:
        """The same attention where what was query ``start`` is query 0."""
        if not start:
            return self
        low = None if self.low is None else self.low + start
        high = None if self.high is None else self.high + start
        return replace(self, low=low, high=high)

    def transposed(self) -> Options:
        """The same attention seen from the keys: key j sees the queries i."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return replace(self, low=low, high=high)

    def sees_any(self, Tq: int, Tk: int) -> bool:
        """Whether any of ``Tq`` queries sees any of ``Tk`` keys."""
        if not Tq * Tk:
            return False
        # the differences j - i reach from 1 - Tq to Tk - 1
        low, high = self.low, self.high
        return (low is None or low < Tk) and (high is None or high > -Tq)
