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

from mlx_flash import flash_attention, kernels, launch, simulator, use_backend
from mlx_flash.kernel_files import kernel_folder, read_header

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracle import assert_within_bound
from strategies import Problem

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
        problems: Names of the problems that may show it, in PROBLEMS.
    """

    header: str
    line: int
    before: str
    after: str
    fault: str
    dtype: str = "float32"
    problems: tuple[str, ...] = ()

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
            # the first is the one that most often shows a fault of the header
            problems=("segments", *BANDS, "mask")
            if mutant.header == "mask"
            else (*BANDS, "segments", "mask"),
        )
        for mutant in everywhere(
            rf"(<=|>=|<|>) {lengths}\b", r"\1 \2", "bounds off by one"
        )
    ]


def all_mutants() -> list[Mutant]:
    """Every mutant."""
    # what an additive mask may hold around HIDDEN is in the problem "mask"
    return [
        *everywhere(r"(threadgroup|staged)_sync\(\);", "", "deleted barrier",
                    problems=("causal 1", "mask of keys", "parts")),
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
        *everywhere(r"fill\(\w+, 0\.0f\);", "", "uninitialised accumulator",
                    problems=("causal 1", "mask")),
        *at("softmax", "m.value[i] = sink;", "", "uninitialised accumulator",
            problems=("head dim 128",)),
        *at("softmax", "l.value[i] = sink != MASKED", "sink != MASKED",
            "uninitialised accumulator", problems=("head dim 128",)),
        *at("common", "b * stride.b", "b * stride.h", "swapped strides"),
        *at("common", "t * stride.t", "t * stride.h", "swapped strides"),
        *at("tile", "? source[e * from.stride.d]", "? source[e]", "swapped strides"),
        *at("tile", "t * row_step + d", "t + row_step * d", "swapped strides"),
        *at("tile", "r += TURN_ROWS;", "r += 1;", "staged rows",
            problems=("head dim 128",)),
        *at("tile", "source += turn_step;", "source += from.stride.t;", "staged rows",
            problems=("head dim 128",)),
        *at("tile", "first + thread_index >= ALL", "false", "staged rows",
            problems=("causal 1", "odd head dims", "parts")),
        *at("mask", "k_col * mask.stride.d", "k_col * mask.stride.t", "swapped strides",
            problems=("mask",)),
        *at("tile", "e < columns ? source[e * from.stride.d] : T(0.0f)",
            "source[e * from.stride.d]", "dropped zero fill",
            problems=("causal 1", "odd head dims")),
        *at("tile", "row + r < n_rows ? D - d : 0", "D - d", "dropped zero fill"),
        *at("tile", "t < n_rows && d < D", "t < n_rows", "columns past D",
            problems=("odd head dims",)),
        *at("tile", "if (d < D) to[", "to[", "columns past D",
            problems=("odd head dims",)),
        *everywhere(r"visibility == PARTIAL", "false", "missing mask",
                    problems=("causal 1", "mask", "head dim 128")),
        *at("mask", "k_col <= q_row + mask.high", "k_col < q_row + mask.high",
            "band off by one"),
        *at("mask", "k_col >= q_row + mask.low", "k_col > q_row + mask.low",
            "band off by one", problems=WINDOWS),
        *at("mask", "k_first > q_last - 1", "k_first >= q_last - 1",
            "band off by one"),
        *at("mask", "k_first > q_last - 1", "k_first > q_last", "band off by one"),
        *at("mask", "k_last - 1 < q_first", "k_last - 1 <= q_first",
            "band off by one", problems=WINDOWS),
        *at("mask", "k_last - 1 < q_first", "k_last < q_first", "band off by one",
            problems=WINDOWS),
        *at("mask", "k_last - 1 <= q_first", "k_last - 2 <= q_first",
            "band off by one"),
        *at("mask", "k_first >= q_last - 1", "k_first >= q_last - 2",
            "band off by one", problems=WINDOWS),
        *at("mask", "? q_last + mask.high", "? q_last + mask.high - 1",
            "band off by one", problems=("causal 5",)),
        *at("mask", "? q_first + mask.low", "? q_first + mask.low + 1",
            "band off by one", problems=WINDOWS),
        *at("mask", "? q_first + mask.low", "? q_first + mask.low - 1",
            "band off by one", problems=WINDOWS),
        *at("mask", "? k_first - mask.high", "? k_first - mask.high + 8",
            "band off by one"),
        *at("mask", "? k_last - mask.low", "? k_last - mask.low - 1",
            "band off by one", problems=WINDOWS),
        *at("mask", "? k_last - mask.low", "? k_last - mask.low + 1",
            "band off by one", problems=WINDOWS),
        *at("mask", "row_ids[i] == column_id", "row_ids[i] <= column_id", "segments",
            problems=("segments",)),
        *at("mask", "k_ids[long(b) * n.Tk", "k_ids[long(b) * n.Tq", "segments",
            problems=("segments",)),
        *at("mask", "lowest == ids.highest && ids.lowest == highest",
            "lowest == ids.highest", "segments", problems=("packed",)),
        *at("mask", "lowest <= ids.highest", "lowest < ids.highest", "walk",
            problems=("segments",)),
        *at("mask", "ids.lowest <= highest", "ids.lowest < highest", "walk",
            problems=("segments",)),
        *at("mask", "<= ids.other_highest[y]", "< ids.other_highest[y]", "walk",
            problems=("segments",)),
        *at("mask", "ids.other_lowest[y] <=", "ids.other_lowest[y] <", "walk",
            problems=("segments",)),
        *at("mask", "if (meets) ids.known", "ids.known", "walk",
            problems=("segments",)),
        *at("mask", "none = 2 * blocks.count", "none = 2 * blocks.count - 2", "walk",
            problems=("segments",)),
        *at("mask", ">= 2 * i ?", ">= 2 * i + 2 ?", "walk", problems=("segments",)),
        *at("mask", "i = ids.window + 32", "i = ids.window + 33", "walk",
            problems=("many segments",)),
        *at("segment_blocks", "at.block - own_blocks", "at.block", "walk",
            problems=("segments",)),
        *at("segment_blocks", "minimum(first + rows, length)", "first + rows", "walk",
            problems=("segments",)),
        *at("segment_blocks", "first + at.lane; row", "first; row", "walk",
            problems=("segments",)),
        *at("segment_blocks", "minimum(not_highest, ~", "minimum(not_highest, ", "walk",
            problems=("segments",)),
        *at("mask", "walk.next + 1", "walk.next + 2", "walk"),
        *at("mask", "blocks.first + mine %", "mine %", "walk",
            problems=("segments and window",)),
        *at("common", "HIDDEN (-6e35f)", "HIDDEN (-8e35f)", "additive mask",
            problems=("mask",)),
        *at("common", "HIDDEN (-6e35f)", "HIDDEN (-5e35f)", "additive mask",
            problems=("mask",)),
        *at("mask", "x * LOG2_E);", "x);", "additive mask", problems=("mask",)),
        *at("mask", "!(x < HIDDEN)", "true", "additive mask", problems=("mask",)),
        *at("attention_dmask", "SUM_H ? n.H : 1,", "1,", "axes of the mask's gradient",
            problems=("mask of keys",)),
        *at("attention_dmask", "(SUM_B ? B : 1) *", "1 *",
            "axes of the mask's gradient", problems=("mask of keys",)),
        *at("attention_dmask", "SUM_Q ? q_blocks : 1,", "1,",
            "axes of the mask's gradient", problems=("mask of keys",)),
        *at("attention_dmask", "SUM_K ? k_blocks : 1,", "1,",
            "axes of the mask's gradient", problems=("mask of queries",)),
        *at("attention_dmask", "SUM_H ? 1 : n.H", "n.H", "axes of the mask's gradient",
            problems=("mask of batches",)),
        *at("attention_dmask", "SUM_K ? BK : n.Tk", "n.Tk",
            "axes of the mask's gradient", problems=("mask of queries",)),
        *at("attention_dmask", "add(sum, ds);", "sum = ds;",
            "axes of the mask's gradient", problems=("mask of keys",)),
        *everywhere(r"multiply\(p, slope\);", "", "softcap", problems=("softcap",)),
        *at("softmax", "1.0f - t.get(i, j) * t.get(i, j)", "1.0f - t.get(i, j)",
            "softcap", problems=("softcap",)),
        *at("softmax", "s.get(i, j) * (scale / softcap)", "s.get(i, j) * scale",
            "softcap", problems=("softcap",)),
        *everywhere(r"SOFTCAP \? softcap : scale", "scale", "softcap",
                    problems=("softcap mask",)),
        *at("softmax", "tile_col(at, 0) == 0 ? 1.0f : 0.0f", "false ? 1.0f : 0.0f",
            "sinks", problems=("sinks",)),
        *at("softmax", "&& tile_col(at, 0) == 0", "", "sinks", problems=("sinks",)),
        *at("softmax", "m.value[i] = sink;", "m.value[i] = MASKED;", "sinks",
            problems=("sinks",)),
        *at("softmax", "sink * LOG2_E", "sink", "sinks", problems=("sinks",)),
        *at("tile", "at.part * R + r", "r", "parts", problems=("parts",)),
        *at("tile", "(part * R + r) * C", "r * C", "parts", problems=("parts",)),
        *at("tile", "parts_tg + at.simd * DS * 64", "parts_tg + at.simd * 64", "parts",
            problems=("parts",)),
        *at("tile", "const int d = at.part * 8 * C +", "const int d =", "parts",
            problems=("parts",)),
        *at("tile", "at.part * 8 * C, at);", "0, at);", "parts", problems=("parts",)),
        *at("tile", "DS == 1 ? Range{first", "true ? Range{first", "parts",
            problems=("parts",)),
        *at("attention_dq", NAN_RULE, "", "NaN", problems=("garbage",)),
        *at("attention_dkv", NAN_RULE, "", "NaN", problems=("garbage",)),
        *at("softmax", "shift == NO_GRADIENT ? 0.0f : power", "power", "NaN",
            problems=("garbage",)),
        *at("attention_delta", "passes ? difference : 0.0f", "difference", "NaN",
            problems=("garbage",)),
        *at("attention_delta", "has_cotangent && ", "", "NaN", problems=("garbage",)),
        *at("tile", "= T(from.get(r, 2 * c))", "= from.get(r, 2 * c)",
            "implicit conversion to bfloat", dtype="bfloat16"),
        *at("tile", "= T(x.get(r, j))", "= x.get(r, j)",
            "implicit conversion to bfloat", dtype="bfloat16",
            problems=("causal 1", "bfloat16 mask")),
        *everywhere(r"const threadgroup T\* b_tg", "const device T* b_tg",
                    "threadgroup pointer as device", dtype="float16",
                    problems=("head dim 128",)),
        *at("tile", "inline void stage(threadgroup T* to_tg",
            "inline void stage(device T* to_tg", "threadgroup pointer as device"),
        *at("softmax", "LN_2 * (", "0.6931 * (", "double literal"),
        *at("softmax", "sum == 0.0f", "sum == 0.0", "double literal"),
        *at("softmax", "m_new == MASKED ? 0.0f : m_new", "m_new", "empty row",
            problems=("causal 3",)),
        *at("attention_delta", "&& !(lse_rows.value[0] < HIDDEN)", "", "empty row",
            problems=("causal 3",)),
        *at("softmax", "l.value[i] * factor + sum", "l.value[i] + sum",
            "missing rescale"),
        *at("softmax", "scale_row(acc, i, factor);", ";", "missing rescale"),
        *at("tile", "simd_shuffle_xor(x, ushort(8))", "simd_shuffle_xor(x, ushort(4))",
            "wrong lane"),
        *at("tile", "lane >> 1 & 3", "lane & 3", "wrong lane map"),
        *at("attention_dkv", "group * per_head}", "(group - 1) * per_head}",
            "query head left out"),
    ]  # fmt: skip


NAN_RULE = " | FINITE"
WINDOWS = ("window of 10", "window of 17", "window of 18", "sides")
BANDS = ("causal 1", "causal 2", "causal 3", "causal 4", "full")


def problem(Tq: int, Tk: int, **features) -> Problem:
    """Two batches and grouped heads, strided in every way."""
    shape = {"B": 2, "H": 2, "HKV": 1, "D": 16}
    return Problem(**shape | {"Tq": Tq, "Tk": Tk, "scale": 0.3} | features)


# The diagonals Tk - Tq meet the blocks in different ways; the third has a row that sees
# no key, "full" a ragged block that no diagonal hides.
PROBLEMS = {
    "causal 1": problem(45, 46, causal=True),
    "causal 2": problem(40, 46, causal=True),
    "causal 3": problem(41, 40, causal=True),
    "causal 4": problem(40, 48, causal=True),
    # whose last block of keys holds one key, seen by the last query only
    "causal 5": problem(48, 49, causal=True),
    "full": problem(33, 47),
    # whose ends meet the blocks and the rows of a simdgroup in different ways; more
    # queries than a threadgroup of attention_dq owns
    "window of 10": problem(80, 80, causal=True, window=10),
    "window of 17": problem(80, 80, causal=True, window=17),
    "window of 18": problem(80, 80, causal=True, window=18),
    "sides": problem(64, 80, window=(6, 15)),
    "segments": problem(40, 71, segments="packed", mask="float32", seed=5),
    "packed": problem(64, 71, segments="packed", seed=1),
    # only the last of 33 blocks of keys holds ids of the queries
    "many segments": problem(8, 528, segments="packed", B=1, seed=1),
    "segments and window": problem(40, 71, segments="packed", window=(9, 0)),
    "mask": problem(40, 46, mask="float32", mask_axes="BHQK"),
    "bfloat16 mask": problem(40, 46, mask="bfloat16", mask_axes="QK"),
    "mask of keys": problem(72, 46, mask="float32", mask_axes="K"),
    "mask of queries": problem(40, 46, mask="float32", mask_axes="Q"),
    "mask of batches": problem(40, 46, mask="float32", mask_axes="BK"),
    "softcap": problem(40, 46, softcap=1.5),
    "softcap mask": problem(40, 46, softcap=1.5, mask="float32", mask_axes="BHQK"),
    "sinks": problem(40, 46, sinks="float32"),
    "odd head dims": problem(20, 30, D=5, Dv=13),
    "head dim 128": problem(20, 30, D=128, causal=True),
    "parts": problem(40, 46, D=136, Dv=144, causal=True),
    "garbage": problem(40, 46),
}
# In "mask": what a query adds to all its scores. The first is hidden, the second not.
ADDED = {3: -6.5e35, 4: -5.5e35}
# In "garbage": keys and queries that nobody sees, and queries without cotangents.
UNSEEN_KEYS, UNSEEN_QUERIES, PADDING = (3, 40), (5, 33), (7, 39)


@cache
def arrays_of(name: str, dtype: str) -> tuple[list[mx.array], dict[str, object]]:
    """q, k, v, dout, dlse, strided in every way, and the options of a problem."""
    x = PROBLEMS[name].resized(dtype=dtype)
    q, k, v, dout, dlse = x.arrays()
    rows = [transposed(x) for x in (q, k)]
    options = x.options
    if name == "mask":
        mask = options["mask"].reshape(x.B, x.H, x.Tq, x.Tk)
        for row, value in ADDED.items():
            mask[:, :, row] = value
        options["mask"] = mask
    if name == "garbage":
        for row in PADDING:
            dout[:, :, row], dlse[:, :, row] = 0.0, 0.0
        visible = mx.ones((x.Tq, x.Tk), mx.bool_)
        for key in UNSEEN_KEYS:
            visible[:, key] = False
        for query in UNSEEN_QUERIES:
            visible[query] = False
        options["mask"] = visible
    strided = mx.contiguous(v.swapaxes(2, 3)).swapaxes(2, 3)
    arrays = [*rows, strided, transposed(dout), dlse]
    mx.eval(arrays)
    return arrays, options


def transposed(x: mx.array) -> mx.array:
    """The same values, stored as ``[B, T, H, D]``."""
    return mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def with_garbage(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """NaN where no result may show it."""
    q, k = mx.array(q), mx.array(k)
    for row in (*UNSEEN_QUERIES, *PADDING):
        q[:, :, row] = mx.nan
    for row in UNSEEN_KEYS:
        k[:, :, row] = mx.nan
    return q, k


def run_chain(name: str, dtype: str) -> list[int]:
    """All kernels on one problem, checked.

    Returns the matrix products of each and the bytes that it stages.
    """
    (q, k, v, dout, dlse), options = arrays_of(name, dtype)
    given = {"q": q, "k": k, "v": v}
    if name == "garbage":
        given["q"], given["k"] = with_garbage(q, k)
    others = dict(options)
    for argument in ("mask", "sinks"):
        x = others.get(argument)
        if x is not None and x.dtype != mx.bool_:
            given[argument] = others.pop(argument)

    def attention(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        inputs = dict(zip(given, arrays, strict=True))
        return flash_attention(**inputs, **others, return_lse=True)

    arrays = list(given.values())
    with (
        use_backend("simulator"),
        simulator.checked(CHECKS),
        simulator.record() as launches,
    ):
        out, lse = attention(*arrays)
        actual = {} if name == "garbage" else {"out": out, "lse": lse}
        assert_within_bound(actual, q, k, v, **options)
        _, gradients = mx.vjp(attention, arrays, [dout, dlse])
        mx.eval(gradients)
    actual = {f"d{name}": x for name, x in zip(given, gradients, strict=True)}
    assert_within_bound(actual, q, k, v, dout, dlse, **options)
    return [
        sum(n for name, n in record.counters.items() if name in WORK)
        for record in launches
        if record.kernel != "lane_map"
    ]


WORK = ("mma_float", "mma_half", "mma_bfloat", "threadgroup_bytes_written")


@cache
def expected_work(name: str, dtype: str) -> list[int]:
    """What the unchanged kernels take."""
    return run_chain(name, dtype)


@contextmanager
def planted(mutant: Mutant):
    """Run the kernels with the mutant's text inside the block."""
    launch.read_header = mutant.applied
    launch.compiled_kernel.cache_clear()
    if mutant.header == "tile":
        kernels.check_lane_map.cache_clear()
    try:
        yield
    finally:
        launch.read_header = read_header
        launch.compiled_kernel.cache_clear()
        if mutant.header == "tile":
            kernels.check_lane_map.cache_clear()


def caught_by(mutant: Mutant) -> str:
    """The check that finds the mutant, or ``"survived"``."""
    for name in mutant.problems or BANDS:
        work = expected_work(name, mutant.dtype)
        try:
            with planted(mutant):
                if run_chain(name, mutant.dtype) != work:
                    return "counters"
        except simulator.SimulatorError as error:
            report = str(error)
            return next(check for words, check in REPORTS.items() if words in report)
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
