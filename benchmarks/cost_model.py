"""A cost model of attention kernels on Apple GPUs: counts in, modelled time out.

Every number that comes out is modelled. The coefficients are published measurements, or
were fitted to them, or are inferred where nobody has measured; which one, and whose, is
in COEFFICIENTS. The expected error is 10 % for a 16-bit forward with several resident
threadgroups, 12 % for a float32 forward, 15 to 25 % (too fast) for a float32 backward
of D >= 128, and more for whatever spills or leaves one threadgroup resident. M2 and M5
have no attention kernel among the measurements.

The unit of cost is the core-cycle, one clock of one GPU core. A product is an 8x8x8
simdgroup_multiply_accumulate: 1024 floating point operations, ideally 4 core-cycles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

# Where a coefficient comes from.
MICRO = "microbenchmark, github.com/philipturner/metal-benchmarks"
FIT = "fitted to the kernel times of github.com/philipturner/metal-flash-attention"
INFERRED = "inferred, not measured"

FAMILIES = ("M1/M2", "M3/M4")
# Core-cycles per instruction or barrier of a simdgroup, or per 256 bytes of its lanes:
# name -> (M1/M2, its source), (M3/M4, its source). "mma_bfloat" has no instruction on
# M1/M2: it is a float product there, after a conversion.
COEFFICIENTS = {
    "mma_float": ((4.5, MICRO), (3.8, FIT)),
    "mma_half": ((4.25, MICRO), (3.8, FIT)),
    "mma_bfloat": ((4.5, INFERRED), (3.8, FIT)),
    "exponential": ((1.0, MICRO), (0.0, FIT)),
    "transcendental": ((1.0, INFERRED), (0.0, INFERRED)),
    "alu": ((0.25, MICRO), (0.0, FIT)),
    "address": ((0.25, MICRO), (0.0, FIT)),
    "shuffle": ((0.5, MICRO), (0.0, INFERRED)),
    "reduction": ((3.6, MICRO), (0.0, INFERRED)),
    "threadgroup_read": ((0.46, FIT), (1.15, INFERRED)),
    "threadgroup_write": ((0.46, INFERRED), (0.6, INFERRED)),
    "device_read": ((5.6, FIT), (1.6, FIT)),
    "device_write": ((5.6, INFERRED), (1.6, INFERRED)),
    "barrier": ((5.3, FIT), (5.3, INFERRED)),
}
# Bytes per core-cycle that memory delivers to a core.
MEMORY_BYTES = {"M1/M2": (17.0, FIT), "M3/M4": (20.0, FIT)}
# Live fragment registers a lane where spilling starts; so many more double the time.
SPILL_START, SPILL_DOUBLE = 72, 24  # FIT
# Registers a lane that hold no fragment.
OTHER_REGISTERS = 22  # FIT
# One resident threadgroup cannot hide its own barriers (one measurement, on M3 Ultra).
ALONE = 1.2
# Resident simdgroups of a core below which latency shows, with the root of the lack.
ENOUGH_SIMDGROUPS = 12  # INFERRED
# Threadgroup memory of a core; nobody has published it for M3/M4.
THREADGROUP_POOL = {"M1/M2": 61440, "M3/M4": None}  # MICRO
# Threads of a core by 16-bit registers a thread: the compiler of Mesa, derived on M1.
THREADS = (
    *((104, 1024), (112, 896), (128, 832), (136, 768), (144, 704)),
    *((160, 640), (184, 576), (208, 512), (232, 448), (256, 384)),
)


@dataclass(frozen=True)
class Chip:
    """A GPU: its family, cores and clock."""

    family: str
    cores: int
    ghz: float


CHIPS = {
    "M1": Chip("M1/M2", 8, 1.278),
    "M1 Max": Chip("M1/M2", 32, 1.296),
    "M2": Chip("M1/M2", 10, 1.398),
    "M2 Max": Chip("M1/M2", 38, 1.398),
    "M3": Chip("M3/M4", 10, 1.38),
    "M3 Max": Chip("M3/M4", 40, 1.38),
    "M3 Ultra": Chip("M3/M4", 80, 1.38),
    "M4": Chip("M3/M4", 10, 1.47),
    "M4 Max": Chip("M3/M4", 40, 1.578),
}


@dataclass(frozen=True)
class Counts:
    """What a launch does: instructions of its simdgroups, bytes of all their lanes.

    The names are those of COEFFICIENTS.
    """

    mma_float: float = 0
    mma_half: float = 0
    mma_bfloat: float = 0
    exponential: float = 0
    transcendental: float = 0
    alu: float = 0
    address: float = 0
    shuffle: float = 0
    reduction: float = 0
    threadgroup_read: float = 0
    threadgroup_write: float = 0
    device_read: float = 0
    device_write: float = 0
    barrier: float = 0
    threadgroups: float = 1

    def scaled(self, factor: float) -> Counts:
        """So many such launches in one."""
        return Counts(*(factor * getattr(self, x.name) for x in fields(self)))


PER_256_BYTES = ("threadgroup_read", "threadgroup_write", "device_read", "device_write")
# The terms of a report, and the counts that each is made of.
TERMS = {
    "products": ("mma_float", "mma_half", "mma_bfloat"),
    "exp": ("exponential", "transcendental"),
    "ALU": ("alu",),
    "shuffles": ("shuffle", "reduction"),
    "threadgroup": ("threadgroup_read",),
    "staging": ("device_read", "device_write", "threadgroup_write"),
    "addresses": ("address",),
    "barriers": ("barrier",),
}


@dataclass(frozen=True)
class Work:
    """A launch, as the model sees it.

    Attributes:
        counts: What it does.
        useful: Products that the mathematics needs.
        threads: Of a threadgroup.
        threadgroup_bytes: Of threadgroup memory.
        registers: Live fragment registers a lane, of 32 bits.
    """

    counts: Counts
    useful: float
    threads: int
    threadgroup_bytes: int
    registers: float


@dataclass(frozen=True)
class Prediction:
    """What the model says. All of it is modelled.

    Attributes:
        milliseconds: Of the launch.
        utilisation: Useful products over the most that the cores could do in that time.
        cycles: Core-cycles per useful product, before the three factors.
        shares: Of each term in ``cycles``.
        memory_bound: Memory, not instructions, sets ``cycles``.
        spill: Factor for spilled registers.
        residency: Factor for few resident threadgroups and simdgroups.
        tail: Factor for the cores that idle at the end.
        resident: Threadgroups that a core holds.
    """

    milliseconds: float
    utilisation: float
    cycles: float
    shares: dict[str, float]
    memory_bound: bool
    spill: float
    residency: float
    tail: float
    resident: int


def resident_threadgroups(work: Work, family: str) -> int:
    """Threadgroups that a core holds at once."""
    halves = 2 * min(work.registers + OTHER_REGISTERS, 128)
    threads = next(threads for limit, threads in THREADS if halves <= limit)
    by_registers = max(1, threads // work.threads)
    pool = THREADGROUP_POOL[family]
    if pool is None or not work.threadgroup_bytes:
        return by_registers
    return max(1, min(pool // work.threadgroup_bytes, by_registers))


def term_cycles(counts: Counts, family: str) -> dict[str, float]:
    """Core-cycles of each term, summed over all simdgroups."""
    column = FAMILIES.index(family)

    def cycles(name: str) -> float:
        coefficient, _ = COEFFICIENTS[name][column]
        per = 256 if name in PER_256_BYTES else 1
        return coefficient * getattr(counts, name) / per

    return {term: sum(map(cycles, names)) for term, names in TERMS.items()}


def predict(work: Work, chip: Chip) -> Prediction:
    """The modelled time of a launch on a chip, and what it is made of."""
    counts, family = work.counts, chip.family
    terms = term_cycles(counts, family)
    issue = sum(terms.values())
    bandwidth, _ = MEMORY_BYTES[family]
    memory = (counts.device_read + counts.device_write) / bandwidth
    cycles = max(issue, memory)

    spill = 1 + max(0, work.registers - SPILL_START) / SPILL_DOUBLE
    resident = resident_threadgroups(work, family)
    simdgroups = resident * work.threads / 32
    residency = max(1, ENOUGH_SIMDGROUPS / simdgroups) ** 0.5
    if resident == 1:
        residency *= ALONE
    slots = chip.cores * resident
    tail = math.ceil(counts.threadgroups / slots) * slots / counts.threadgroups
    total = cycles * spill * residency
    return Prediction(
        milliseconds=total * tail / (chip.cores * chip.ghz * 1e6),
        utilisation=4 * work.useful / total if total else 0,
        cycles=cycles / work.useful if work.useful else math.nan,
        shares={term: value / issue for term, value in terms.items()},
        memory_bound=memory > issue,
        spill=spill,
        residency=residency,
        tail=tail,
        resident=resident,
    )


def counts_at(
    T: int, shorter: tuple[int, Counts], longer: tuple[int, Counts]
) -> Counts:
    """The counts at length T from those at a length L and at 2 L.

    A count of attention is a T + b T^2 where T is whole blocks: so much for each
    threadgroup, so much for each of its blocks. Two lengths give both numbers exactly.
    """
    (L, once), (twice_L, twice) = shorter, longer
    assert twice_L == 2 * L

    def value(name: str) -> float:
        x, y = getattr(once, name), getattr(twice, name)
        square = (y - 2 * x) / (2 * L * L)
        return (x / L - square * L) * T + square * T * T

    return Counts(*(value(x.name) for x in fields(Counts)))


def useful_products(products: int, pairs: float, D: int) -> float:
    """Products of 8x8x8 for so many matrix products over so many visible scores."""
    return products * pairs * D / 512


# ---- what the simulator does not count


@dataclass(frozen=True)
class Body:
    """Lane instructions that are estimated from what is counted, by these numbers.

    A kernel evaluates one exponential per score, so they say how many blocks ran.

    Attributes:
        scores: Scores of a lane in a block.
        per_score: Instructions for each of them: scale, maximum, subtract, sum, ...
        per_block: For each block and simdgroup: one for each accumulator element that
            is rescaled, and those of the loop.
        rescales: Exponentials of a block that belong to no score.
        per_chunk: For each 16 bytes that a lane stages: address of source and target,
            bounds, and what is done to the elements.
        per_product: For each product, to convert what it loads.
    """

    scores: float
    per_score: float
    per_block: float
    rescales: float = 0
    per_chunk: float = 0
    per_product: float = 0


def estimated(counts: Counts, body: Body) -> Counts:
    """The counts with the estimated instructions."""
    blocks = counts.exponential / (body.scores + body.rescales)
    per_block = body.per_score * body.scores + body.per_block
    products = counts.mma_float + counts.mma_half + counts.mma_bfloat
    chunks = counts.threadgroup_write / (16 * 32)
    return replace(
        counts,
        alu=blocks * per_block + body.per_product * products,
        address=body.per_chunk * chunks,
    )
