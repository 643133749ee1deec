"""Single faults planted in the kernels, and which check finds each.

``python tests/simulator/mutants.py`` prints the table of the simulator's README.
"""

import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import kernels, launch, simulator
from mlx_flash.kernel_files import kernel_folder, read_header
from mlx_flash.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracle import assert_within_bound

CHECKS = ("strict", "race", "bounds", "uninitialised", "schedule")
# How a report of the simulator begins, and the check it comes from.
REPORTS = {
    "is not strict MSL": "strict",
    "does not compile": "compiler",
    "race:": "race",
    "bounds:": "bounds",
    "uninitialised:": "uninitialised",
    "nothing initialised": "uninitialised",
    "diverged": "divergence",
    "outside buffer": "guard zones",
    "past the end of threadgroup array": "guard zones",
    "shuffled schedule": "schedule",
}


@dataclass(frozen=True)
class Mutant:
    """One changed place of one header.

    Attributes:
        header: Stem of the header.
        line: Number of the changed line.
        before: What stands there.
        after: What the mutant has instead.
        fault: What kind of fault it is.
        dtype: Element type of the problem that shows it.
        D: Head dim of that problem; 128 keeps q and k in threadgroup memory.
    """

    header: str
    line: int
    before: str
    after: str
    fault: str
    dtype: mx.Dtype = mx.float32
    D: int = 16

    def __str__(self) -> str:
        return (
            f"{self.fault}: {self.header}.h:{self.line} {self.before} -> {self.after}"
        )

    def applied(self, folder: str, stem: str) -> str:
        """The header's text, changed if it is this mutant's."""
        text = read_header(folder, stem)
        if stem != self.header:
            return text
        lines = text.splitlines(keepends=True)  # line 0 is the #line directive
        assert lines[self.line].count(self.before) == 1, self
        lines[self.line] = lines[self.line].replace(self.before, self.after)
        return "".join(lines)


def header_lines(stem: str) -> list[tuple[int, str]]:
    """Numbered lines of a header without its comments."""
    text = (kernel_folder("metal") / f"{stem}.h").read_text()
    lines = enumerate(text.splitlines(), 1)
    return [(number, line.split("//")[0]) for number, line in lines]


HEADERS = sorted(path.stem for path in kernel_folder("metal").glob("*.h"))


def everywhere(pattern: str, after: str, fault: str, **options) -> list[Mutant]:
    """A mutant for every match of a pattern in every kernel header."""
    return [
        Mutant(stem, number, match[0], match.expand(after), fault, **options)
        for stem in HEADERS
        if stem != "lane_map"
        for number, line in header_lines(stem)
        for match in re.finditer(pattern, line)
        if line.count(match[0]) == 1
    ]


def at(stem: str, before: str, after: str, fault: str, **options) -> list[Mutant]:
    """A mutant for every line of a header that contains a text once."""
    found = [
        Mutant(stem, number, before, after, fault, **options)
        for number, line in header_lines(stem)
        if line.count(before) == 1
    ]
    assert found, f"{stem}.h has no line with {before!r}"
    return found


LOOSER = {"<": "<=", ">=": ">", "<=": "<", ">": ">="}


def off_by_one() -> list[Mutant]:
    """Every comparison with a length, one element too generous or too strict."""
    lengths = r"(n_rows|n\.Tq|n\.Tk|ROWS)"
    return [
        Mutant(
            mutant.header,
            mutant.line,
            mutant.before,
            re.sub(r"(<=|>=|<|>)", lambda m: LOOSER[m[0]], mutant.before, count=1),
            mutant.fault,
        )
        for mutant in everywhere(
            rf"(<=|>=|<|>) {lengths}\b", r"\1 \2", "bounds off by one"
        )
    ]


def all_mutants() -> list[Mutant]:
    """Every mutant."""
    return [
        *everywhere(r"(threadgroup|staged)_sync\(\);", "", "deleted barrier"),
        *everywhere(
            r"metal::threadgroup_barrier\(metal::mem_flags::mem_threadgroup\);",
            "",
            "deleted barrier",
        ),
        *everywhere(
            r"(?<=barrier\(metal::mem_flags::)mem_threadgroup",
            "mem_none",
            "barrier without memory",
        ),
        *off_by_one(),
        *everywhere(r"fill\(\w+, 0\.0f\);", "", "uninitialised accumulator"),
        *at("softmax", "m.value[i] = MASKED;", "", "uninitialised accumulator"),
        *at("softmax", "l.value[i] = 0.0f;", "", "uninitialised accumulator"),
        *at("common", "b * stride.b", "b * stride.h", "swapped strides"),
        *at("common", "t * stride.t", "t * stride.h", "swapped strides"),
        *at("tile", "r * from.stride.t + d * from.stride.d",
            "r * from.stride.d + d * from.stride.t", "swapped strides"),
        *at("tile", "first[d * from.stride.d]", "first[d * from.stride.t]",
            "swapped strides"),
        *at("tile", "chunk[e * from.stride.d]", "chunk[e]", "swapped strides"),
        *at("tile", "t * row_step + tile_col(at, j)", "t + row_step * tile_col(at, j)",
            "swapped strides"),
        *at("tile", "chunk_tg[e] = T(0.0f);", "", "dropped zero fill"),
        *at("tile", ": T(0.0f);", ": first[0];", "dropped zero fill"),
        *everywhere(r"visibility == PARTIAL", "false", "missing mask"),
        *at("mask", "k_col <= q_row", "k_col < q_row", "causal off by one"),
        *at("mask", "k_first > q_last - 1", "k_first >= q_last - 1",
            "causal off by one"),
        *at("mask", "k_first > q_last - 1", "k_first > q_last", "causal off by one"),
        *at("mask", "k_last - 1 <= q_first", "k_last - 2 <= q_first",
            "causal off by one"),
        *at("mask", "? q_last + n.Tk - n.Tq", "? q_last + n.Tk - n.Tq - 1",
            "causal off by one"),
        *at("mask", "k_first - (n.Tk - n.Tq)", "k_first - (n.Tk - n.Tq) + 8",
            "causal off by one"),
        *at("tile", "= T(from.get(r, 2 * c))", "= from.get(r, 2 * c)",
            "implicit conversion to bfloat", dtype=mx.bfloat16),
        *at("tile", "= T(x.get(r, j))", "= x.get(r, j)",
            "implicit conversion to bfloat", dtype=mx.bfloat16),
        *everywhere(r"const threadgroup T\* b_tg", "const device T* b_tg",
                    "threadgroup pointer as device", dtype=mx.float16, D=128),
        *at("tile", "inline void stage(threadgroup T* to_tg",
            "inline void stage(device T* to_tg", "threadgroup pointer as device"),
        *at("softmax", "LN_2 * (", "0.6931 * (", "double literal"),
        *at("softmax", "sum == 0.0f", "sum == 0.0", "double literal"),
        *at("softmax", "m_new == MASKED ? 0.0f : m_new", "m_new", "empty row"),
        *at("softmax", "lse < MASKED ? -MASKED : lse * LOG2_E", "lse * LOG2_E",
            "empty row"),
        *at("softmax", "l.value[i] * factor + sum", "l.value[i] + sum",
            "missing rescale"),
        *at("softmax", "scale_row(acc, i, factor);", "", "missing rescale"),
        *at("tile", "simd_shuffle_xor(x, ushort(8))", "simd_shuffle_xor(x, ushort(4))",
            "wrong lane"),
        *at("tile", "lane >> 1 & 3", "lane & 3", "wrong lane map"),
        *at("attention_dkv", "block < group * blocks", "block < (group - 1) * blocks",
            "query head left out"),
    ]  # fmt: skip


# (Tq, Tk, causal). The diagonals Tk - Tq meet the blocks in different ways; the third
# has a row that sees no key, the last a ragged block that no diagonal hides.
PROBLEMS = (
    (45, 46, True),
    (40, 46, True),
    (41, 40, True),
    (40, 48, True),
    (33, 47, False),
)


@cache
def arrays_of(Tq: int, Tk: int, dtype: mx.Dtype, D: int) -> tuple[mx.array, ...]:
    """q, k, v, dout, dlse: grouped heads, strided in every way."""
    mx.random.seed(7)

    def draw(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    arrays = (
        draw(2, Tq, 2, D).transpose(0, 2, 1, 3),
        draw(2, Tk, 1, D).transpose(0, 2, 1, 3),
        draw(2, 1, D, Tk).transpose(0, 1, 3, 2),
        draw(2, Tq, 2, D).transpose(0, 2, 1, 3),
        mx.random.normal((2, 2, Tq)),
    )
    mx.eval(arrays)
    return arrays


def run_chain(problem: tuple[int, int, bool], dtype: mx.Dtype, D: int) -> list[int]:
    """All kernels on one problem, checked; returns the matrix products of each."""
    Tq, Tk, causal = problem
    q, k, v, dout, dlse = arrays_of(Tq, Tk, dtype, D)
    options = {
        "options": Options(scale=0.3, high=Tk - Tq if causal else None),
        "backend": "simulator",
    }
    with simulator.checked(CHECKS), simulator.record() as launches:
        out, lse = kernels.attention_forward(q, k, v, **options)
        saved = q, k, v, out, lse, dout, dlse
        gradients = kernels.attention_backward(*saved, **options)
    actual = {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}
    assert_within_bound(actual, q, k, v, dout, dlse, scale=0.3, causal=causal)
    return [
        sum(n for name, n in record.counters.items() if name.startswith("mma_"))
        for record in launches
        if record.kernel != "lane_map"
    ]


@cache
def expected_work(problem: tuple[int, int, bool], dtype: mx.Dtype, D: int) -> list[int]:
    """What the unchanged kernels take."""
    return run_chain(problem, dtype, D)


@contextmanager
def planted(mutant: Mutant):
    """Run the kernels with the mutant's text inside the block."""
    launch.read_header = mutant.applied
    launch.metal_kernel.cache_clear()
    kernels.check_lane_map.cache_clear()
    try:
        yield
    finally:
        launch.read_header = read_header
        launch.metal_kernel.cache_clear()
        kernels.check_lane_map.cache_clear()


def caught_by(mutant: Mutant) -> str:
    """The check that finds the mutant, or ``"survived"``."""
    for problem in PROBLEMS:
        work = expected_work(problem, mutant.dtype, mutant.D)
        try:
            with planted(mutant):
                if run_chain(problem, mutant.dtype, mutant.D) != work:
                    return "counters"
        except simulator.SimulatorError as error:
            report = str(error)
            return next(name for words, name in REPORTS.items() if words in report)
        except AssertionError:
            return "numbers"
        except kernels.LaneMapError:
            return "lane map probe"
    return "survived"


def main() -> None:
    """Print the table as Markdown."""
    rows: dict[tuple[str, str], int] = {}
    survivors = []
    for mutant in tqdm(all_mutants(), unit="mutant"):
        check = caught_by(mutant)
        rows[mutant.fault, check] = rows.get((mutant.fault, check), 0) + 1
        if check == "survived":
            survivors.append(str(mutant))
    print("| fault | mutants | caught by |")
    print("|---|---|---|")
    for fault in dict.fromkeys(fault for fault, _ in rows):
        counts = {check: n for (name, check), n in rows.items() if name == fault}
        checks = ", ".join(f"{check} {n}" for check, n in counts.items())
        print(f"| {fault} | {sum(counts.values())} | {checks} |")
    print("\nSurvivors:", *survivors, sep="\n")


if __name__ == "__main__":
    main()
