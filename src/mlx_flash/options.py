"""What all back ends are told about one attention, besides its arrays."""

from __future__ import annotations

from dataclasses import dataclass


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
