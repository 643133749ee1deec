"""Which checks are on, the lane map in use, and who records the counters."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

# Always on: divergence, limits, guard zones. The rest cost time and are asked for.
CHECKS = (
    "race",
    "bounds",
    "uninitialised",
    "divergence",
    "limits",
    "schedule",
    "fast_math",
    "strict",
)
# Those that need every load and store reported.
INSTRUMENTED = frozenset({"race", "bounds", "uninitialised"})

# Which two elements of an 8x8 fragment a lane holds: those numbered 2 * pair and
# 2 * pair + 1 in row-major order. Apple leaves the map unspecified; this is the one
# that its GPUs have shown so far.
APPLE_LANE_MAP = tuple(
    4 * ((lane >> 2 & 4) | (lane >> 1 & 3)) + ((lane >> 2 & 2) | (lane & 1))
    for lane in range(32)
)


@dataclass(frozen=True)
class LaunchRecord:
    """Exact counts of one launch.

    Attributes:
        kernel: The kernel's name.
        grid: In threads.
        threadgroup: In threads.
        counters: Count by name. Events (``mma_float``, ``shuffle``, ...) count
            simdgroup instructions; ``..._bytes_...`` count bytes of all lanes;
            ``threadgroup_bank_steps`` over ``threadgroup_accesses`` is the mean bank
            conflict degree; ``1 - lane_steps / lane_slots`` is the idle-lane fraction.
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    counters: dict[str, int]


@dataclass(frozen=True)
class Options:
    """How launches are run."""

    checks: frozenset[str] = frozenset()
    seed: int = 1
    lane_map: tuple[int, ...] = APPLE_LANE_MAP
    records: tuple[list[LaunchRecord], ...] = field(default=())

    @property
    def instrumented(self) -> bool:
        """Whether loads and stores must be reported."""
        return bool(self.records or self.checks & INSTRUMENTED)


current = Options()


@contextmanager
def changed(**changes: object) -> Iterator[None]:
    """Run with other options."""
    global current
    before = current
    current = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        current = before


def check_names(checks: str | Iterable[str]) -> frozenset[str]:
    """A set of check names from ``"all"``, one name or several.

    Raises:
        ValueError: A name is unknown.
    """
    if checks == "all":
        return frozenset(CHECKS)
    names = frozenset([checks] if isinstance(checks, str) else checks)
    unknown = names - frozenset(CHECKS)
    if unknown:
        raise ValueError(
            f"[simulator] unknown checks {sorted(unknown)}; "
            f"expected 'all' or some of {list(CHECKS)}"
        )
    return names


@contextmanager
def checked(checks: str | Iterable[str] = "all", *, seed: int = 1) -> Iterator[None]:
    """Check every kernel that the simulator runs inside the block.

    Args:
        checks: ``"all"``, a name or several names of ``CHECKS``.
        seed: Of the shuffled schedule; errors print it.

    Raises:
        ValueError: A name is unknown, or the seed is not positive.
    """
    if seed < 1:
        raise ValueError(f"[simulator] seed must be positive, got {seed}")
    with changed(checks=current.checks | check_names(checks), seed=seed):
        yield


@contextmanager
def lane_map(pairs: Sequence[int]) -> Iterator[None]:
    """Spread simdgroup matrices over the lanes in another way inside the block.

    Args:
        pairs: For each of the 32 lanes the pair of elements it holds, a permutation of
            0 to 31; see ``APPLE_LANE_MAP`` and ``permuted_lane_map``.

    Raises:
        ValueError: It is not a permutation.
    """
    if sorted(pairs) != list(range(32)):
        raise ValueError(f"[simulator] not a permutation of 0 to 31: {list(pairs)}")
    with changed(lane_map=tuple(pairs)):
        yield


def permuted_lane_map(seed: int) -> tuple[int, ...]:
    """A random lane map."""
    pairs = list(range(32))
    random.Random(seed).shuffle(pairs)
    return tuple(pairs)


@contextmanager
def record() -> Iterator[list[LaunchRecord]]:
    """Count what every launch inside the block does; yields the growing list."""
    records: list[LaunchRecord] = []
    with changed(records=(*current.records, records)):
        yield records
