"""Times candidate tiles of each kernel on this machine's GPU and keeps the fastest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import doctor, kernels, reference, tiles
from mlx_flash.attention import flash_attention, mlx_uses_tf32
from mlx_flash.backends import backend
from mlx_flash.dispatch import native_attention
from mlx_flash.kernels import Problem
from mlx_flash.launch import KernelCall, run, scratch_places
from mlx_flash.tiles import ALWAYS, ONE_PASS, TWO_PASSES, Tile
from mlx_flash.validation import check_dtypes, check_shapes, describe, make_options
from mlx_flash.versions import MLX

Window = int | tuple[int | None, int | None] | None

# What a candidate may have, by the attributes of Tile.
METAL_SIZES: dict[str, tuple[Any, ...]] = {
    "rows": (16, 32, 64, 128),
    "block": (8, 16, 32, 64),
    "fragments": (1, 2),
    "rows_in_tg": (False, True),
    "second_in_tg": (False, True),
    "parts": (1, 2, 4),
}
CUDA_SIZES: dict[str, tuple[Any, ...]] = {
    "rows": (64, 128, 192),  # of whole groups of four warps
    "block": (16, 32, 64, 128),
    "fragments": (2,),
    "rows_in_tg": (False, True),
    "second_in_tg": (False, True),
    "parts": (1,),
}
# Candidates of a kernel: NVRTC compiles each for seconds.
METAL_CANDIDATES, CUDA_CANDIDATES = 24, 7
# Whose tile the candidates are near to where a table has none: of the same products.
LIKE = {
    "attention_dk": "attention_dq",
    "attention_dv": "attention_forward",
    "attention_dkv": "attention_dk",
}
TIE = 1.02  # times whose ratio is smaller do not differ
REPEATS = 7
MILLISECONDS = 20.0  # of a measurement: short launches are repeated in it
LAUNCHES = 50  # but no more often


@dataclass(frozen=True)
class Trial:
    """What became of a candidate.

    Attributes:
        tile: The candidate.
        milliseconds: Of one launch; infinite if it was dropped.
        fault: Why it was dropped; empty if it was not.
    """

    tile: Tile
    milliseconds: float = math.inf
    fault: str = ""


@dataclass(frozen=True)
class Choice:
    """The tile of a kernel.

    Attributes:
        present: The tile so far.
        best: The fastest, or the present one if that is as fast.
        trials: All candidates.
    """

    present: Trial
    best: Trial
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune` found.

    Attributes:
        title: Device and shape.
        path: The file that has the tiles.
        choices: By kernel, all that were tried.
        kernels: Those that are used from here on.
        attention: Milliseconds of a whole attention, by direction (``"forward"``,
            ``"forward+backward"``) and implementation (``"MLX"``, ``"mlx_flash"``).
    """

    title: str
    path: Path
    choices: dict[str, Choice]
    kernels: tuple[str, ...]
    attention: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Work:
    """What the kernels are launched on, and what they must give.

    Attributes:
        problem: The inputs of the forward.
        dout: Cotangent of the output.
        lse2: As ``attention_delta`` gives it.
        delta: Likewise.
        wanted: The outputs of each kernel by the reference, not yet evaluated.
    """

    problem: Problem
    dout: mx.array
    lse2: mx.array
    delta: mx.array
    wanted: dict[str, list[mx.array]]

    def call(self, kernel: str, tile: Tile, where: str) -> KernelCall:
        """A launch of a kernel with a tile."""
        ids = kernels.block_ids(self.problem, kernel, where, tile=tile)
        if kernel == "attention_forward":
            return kernels.forward_call(self.problem, ids, tile=tile)
        rows = self.dout, self.lse2, self.delta
        if kernel == "attention_dmask":
            assert self.problem.mask is not None
            sums = kernels.sums_of(self.problem.mask)
            return kernels.dmask_call(self.problem, ids, *rows, sums=sums, tile=tile)
        if kernel == "attention_dq":
            return kernels.dq_call(self.problem, ids, *rows, tile=tile)
        return kernels.dkv_call(self.problem, ids, *rows, kernel, tile=tile)


@dataclass(frozen=True)
class Bench:
    """Where candidates are tried, and on what.

    Attributes:
        where: The back end.
        gpu: Its table of tiles.
        timed: The shape that is tuned for.
        small: The same texts of kernels on a few ragged blocks, to check the results.
        featured: Texts that need more registers, likewise: a tile serves all calls.
    """

    where: str
    gpu: str
    timed: Work
    small: Work
    featured: Work

    @property
    def row(self) -> tuple[int, int, str]:
        """Largest head dim, element size and table: what tiles are stored for."""
        variant = self.timed.problem.variant
        return max(variant.D, variant.DV), variant.dtype.size, self.gpu


def tune(
    *,
    B: int = 1,
    H: int = 16,
    HKV: int | None = None,
    T: int = 4096,
    D: int = 128,
    Dv: int | None = None,
    dtype: mx.Dtype = mx.bfloat16,
    causal: bool = False,
    window: Window = None,
    precise: bool = False,
) -> Tuning:
    """Find the fastest tiles for a head dim on this GPU, and use them from here on.

    Each kernel is timed with its present tile and with others near to it. A tile that
    gives wrong results or does not run is dropped; the present one wins ties. The tiles
    are stored in a file of the user's cache folder, whose path is printed: every call
    with this ``max(D, Dv)`` and element size uses them, whatever its lengths and
    features, in this process and later ones on the same device with the same versions
    of MLX and of this library. Takes minutes, mostly for compiling kernels.

    Args:
        B: Batch.
        H: Query heads.
        HKV: Key/value heads; divides ``H``. Default: ``H``.
        T: Number of queries and of keys.
        D: Head dimension of q and k.
        Dv: Head dimension of v. Default: ``D``.
        dtype: Of q, k and v: float32, float16 or bfloat16.
        causal: As in :func:`mlx_flash.flash_attention`.
        window: Likewise.
        precise: Likewise; float32 on CUDA has tiles of its own with it.

    Returns:
        What was tried and chosen, and the times of MLX's own attention beside it;
        :func:`report` puts it into words.

    Raises:
        ValueError: The kernels do not run on a GPU here, the numbers are wrong, or a
            launch is too long for the device.
        NotImplementedError: No kernel has these head dims.
        RuntimeError: No tile of a kernel works, or the file of tuned tiles is damaged.
    """
    HKV, Dv = H if HKV is None else HKV, D if Dv is None else Dv
    sizes = {"B": B, "H": H, "HKV": HKV, "T": T, "D": D, "Dv": Dv}
    if min(sizes.values()) < 1:
        words = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"[tune] every size must be at least 1, got {words}")
    where = backend()
    if where not in ("metal", "cuda"):
        raise ValueError(
            "[tune] times kernels on a GPU, and the back end in use has no times that "
            f"say anything about one, got {where!r}; run it on a Mac or with an NVIDIA "
            "GPU, on the back end 'metal' or 'cuda'"
        )
    exact = precise or not mlx_uses_tf32()
    gpu = kernels.gpu_of(where, exact and dtype == mx.float32)
    timed = doctor.Case(
        "timed",
        dtype,
        D,
        Dv,
        make_options(D, T, T, scale=None, causal=causal, window=window, softcap=None),
        B=B,
        H=H,
        HKV=HKV,
        Tq=T,
        Tk=T,
    )
    bench = bench_of(timed, causal, window, where, gpu)
    choices = dict(choices_of(bench))
    names = fastest_kernels(choices, tiles.fuses_dk_and_dv(*bench.row))
    path = tiles.store_tuned_tiles(
        *bench.row, {name: choices[name].best.tile for name in names}
    )
    problem, dout = bench.timed.problem, bench.timed.dout
    flash = partial(flash_attention, causal=causal, window=window, precise=precise)
    arrays = describe(q=problem.q, k=problem.k, v=problem.v)
    title = (
        f"{tiles.gpu_name()}, MLX {MLX}, tiles of {gpu!r}: "
        f"{arrays}, causal={causal}, window={window}"
    )
    times = attention_times(problem, dout, flash)
    print(f"The tiles are stored in {path}")
    return Tuning(title, path, choices, names, times)


def bench_of(
    timed: doctor.Case, causal: bool, window: Window, where: str, gpu: str
) -> Bench:
    """The works for a shape.

    Raises:
        ValueError: Its numbers are wrong, or a launch is too long for the device.
        NotImplementedError: No kernel has these head dims.
    """
    (q, k, v, _, _), _ = doctor.inputs(timed)
    check_shapes(q, k, v)
    check_dtypes(q, k, v)
    kernels.check_head_dims(q, v, where)
    if gpu == "metal":
        kernels.check_lane_map(where)
    whole = Problem(q, k, v, timed.options, gpu=gpu)
    if len(kernels.pieces_of(whole, "attention_forward", where, own="q")) > 1:
        raise ValueError(
            "[tune] a launch of this size is cut into several on this device, got "
            f"{describe(q=q, k=k, v=v)}; tune with a smaller B, H or T: tiles do not "
            "depend on them"
        )
    # two blocks and more of every candidate in both directions, ragged at the end
    small = replace(timed, B=1, H=4, HKV=2, Tq=401, Tk=450)
    numbers = partial(make_options, small.D, small.Tq, small.Tk, scale=None)
    small = replace(small, options=numbers(causal=causal, window=window, softcap=None))
    softcap = 2.0 if gpu == "metal" else None  # see work_of
    featured = replace(
        small, options=numbers(causal=True, window=99, softcap=softcap), arrays=True
    )
    cpu = mx.Device(mx.cpu)  # where products of float32 are not in TF32
    return Bench(
        where,
        gpu,
        work_of(timed, where, gpu, mx.default_device()),
        work_of(small, where, gpu, cpu),
        work_of(featured, where, gpu, cpu),
    )


def work_of(case: doctor.Case, where: str, gpu: str, device: mx.Device) -> Work:
    """The launches of a case; the reference runs on a device."""
    (q, k, v, dout, dlse), others = doctor.inputs(case)
    if gpu != "metal":
        # on CUDA a mask, or a softcap, makes large threadgroups smaller (Variant.tile),
        # which would hide that a large one does not run
        others.pop("mask", None)
    arrays = q, k, v
    with mx.stream(device):
        out, lse = reference.attention_forward(*arrays, options=case.options, **others)
        gradients = reference.attention_backward(
            *arrays, out, lse, dout, dlse, options=case.options, **others
        )
        out_rows, dq, dk, dv = (
            x.transpose(0, 2, 1, 3)  # as the kernels lay them out
            for x in (out, *(gradients[name] for name in "qkv"))
        )
    delta, lse2 = run(kernels.delta_call(out, dout, lse, dlse, gpu), where)
    mx.eval(arrays, dout, delta, lse2)
    wanted = {
        "attention_forward": [out_rows, lse],
        "attention_dq": [dq],
        "attention_dkv": [dk, dv],
        "attention_dk": [dk],
        "attention_dv": [dv],
    }
    if "mask" in gradients:
        wanted["attention_dmask"] = [gradients["mask"]]
    problem = Problem(*arrays, options=case.options, **others, gpu=gpu)
    return Work(problem, dout, lse2, delta, wanted)


def choices_of(bench: Bench) -> Iterator[tuple[str, Choice]]:
    """Try the candidates of every kernel that has any."""
    tried = {
        kernel: candidates(kernel, bench)
        for kernel in (*ALWAYS, *ONE_PASS, *TWO_PASSES)
    }
    total = sum(map(len, tried.values()))
    with tqdm(total=total, unit="tile", disable=None) as bar:
        for kernel, of_kernel in tried.items():
            bar.set_description(kernel)
            if of_kernel:
                yield kernel, choice_of(kernel, of_kernel, bench, bar.update)


def candidates(kernel: str, bench: Bench) -> list[Tile]:
    """The present tile, then those that differ from it the least, if they fit."""
    present = first_tile(kernel, bench)
    sizes, most = CUDA_SIZES, CUDA_CANDIDATES
    if bench.gpu == "metal":
        sizes, most = METAL_SIZES, METAL_CANDIDATES
    if kernel in ("attention_forward", "attention_dv"):  # one row operand
        sizes = sizes | {"second_in_tg": (False,)}

    def distance(tile: Tile) -> tuple[int, float]:
        """Attributes that differ, and how often they double; flags count as 1 and 2."""
        pairs = zip(asdict(tile).values(), asdict(present).values(), strict=True)
        changed = [(a, b) for a, b in pairs if a != b]
        return len(changed), sum(abs(math.log2((a + 1) / (b + 1))) for a, b in changed)

    every = (
        Tile(**dict(zip(sizes, numbers, strict=True)))
        for numbers in product(*sizes.values())
    )
    near = sorted((tile for tile in every if distance(tile)[0] in (1, 2)), key=distance)
    fitting = (tile for tile in (present, *near) if fits(kernel, tile, bench))
    return [tile for tile, _ in zip(fitting, range(most), strict=False)]


def first_tile(kernel: str, bench: Bench) -> Tile:
    """The present tile, or that of a kernel like it where there is none."""
    try:
        return tiles.tile(kernel, *bench.row)
    except KeyError:
        return first_tile(LIKE[kernel], bench)


def fits(kernel: str, tile: Tile, bench: Bench) -> bool:
    """Whether a tile fulfils what the kernels assert, and the limits of the GPU."""
    D, element_bytes, gpu = bench.row
    if tile.rows % (8 * tile.fragments) or tile.threads > tiles.THREADS_LIMIT:
        return False
    if gpu != "metal":
        kernel_of_tile = bench.small.call(kernel, tile, bench.where).kernel
        return scratch_places(kernel_of_tile)[1] <= tiles.SHARED_BYTES_LIMIT
    registers = tiles.fragment_registers(kernel, tile, D, element_bytes)
    size = tiles.threadgroup_bytes(kernel, tile, D, element_bytes)
    in_tg = tile.rows_in_tg or tile.second_in_tg
    return (
        registers <= tiles.REGISTERS_LIMIT
        and size <= tiles.THREADGROUP_BYTES_LIMIT
        and not (in_tg and tile.parts > 1)
    )


def choice_of(
    kernel: str, tried: list[Tile], bench: Bench, done: Callable[[], object]
) -> Choice:
    """Check the candidates, time those that are right, choose one."""
    trials = {}
    for tile in tried:
        trials[tile] = Trial(tile, fault=fault(kernel, tile, bench.small, bench))
        done()
    right = [tile for tile, trial in trials.items() if not trial.fault]
    calls = [
        partial(run, bench.timed.call(kernel, tile, bench.where), bench.where)
        for tile in right
    ]
    for tile, milliseconds in zip(right, medians(calls), strict=True):
        trials[tile] = Trial(tile, milliseconds)
    present = trials[tried[0]]
    for trial in in_order([trials[tile] for tile in right], present):
        found = fault_with_features(kernel, trial.tile, bench)
        if not found:
            return Choice(present, trial, tuple(trials.values()))
        trials[trial.tile] = Trial(trial.tile, fault=f"with other features: {found}")
    present = trials[tried[0]]
    return Choice(present, present, tuple(trials.values()))


def in_order(trials: list[Trial], present: Trial) -> list[Trial]:
    """The fastest first, but for a present one that is as fast."""
    trials = sorted(trials, key=lambda trial: trial.milliseconds)
    if trials and present.milliseconds <= TIE * trials[0].milliseconds:
        trials = [present, *(trial for trial in trials if trial is not present)]
    return trials


def fault_with_features(kernel: str, tile: Tile, bench: Bench) -> str:
    """What is wrong with a tile in calls with other features."""
    found = fault(kernel, tile, bench.featured, bench)
    if kernel == "attention_dq" and "attention_dmask" in bench.featured.wanted:
        found = found or fault("attention_dmask", tile, bench.featured, bench)
    return found


def fault(kernel: str, tile: Tile, work: Work, bench: Bench) -> str:
    """What is wrong with a tile; empty if nothing is."""
    dtype = work.problem.q.dtype
    # TF32 has the mantissa of float16
    rounding = mx.float16 if bench.gpu == "cuda" and dtype == mx.float32 else dtype
    call = work.call(kernel, tile, bench.where)
    mx.eval(call.inputs)
    try:
        # on CUDA, a launch that fails may leave its stream unusable: each has its own
        with mx.stream(mx.new_stream(mx.default_device())):
            outputs = run(call, bench.where)
            mx.eval(outputs)
        error = max(
            doctor.relative_error(x, y, rounding)
            for x, y in zip(outputs, work.wanted[kernel], strict=True)
        )
    except Exception as problem:  # whatever is wrong with the tile is the finding
        return f"{type(problem).__name__}: {problem}"
    return "" if error <= 1 else f"wrong, {error:.3g} times the tolerance"


def fastest_kernels(choices: dict[str, Choice], fused: bool) -> tuple[str, ...]:
    """The kernels to use: dk and dv as at present, unless the other way is faster.

    Raises:
        RuntimeError: No tile of a kernel works.
    """

    def milliseconds(names: tuple[str, ...]) -> float:
        return sum(
            choices[name].best.milliseconds if name in choices else math.inf
            for name in names
        )

    present, other = (ONE_PASS, TWO_PASSES) if fused else (TWO_PASSES, ONE_PASS)
    kept = milliseconds(present) <= TIE * milliseconds(other)
    names = (*ALWAYS, *(present if kept else other))
    if math.isinf(milliseconds(names)):
        faults = {name: choices[name].best.fault for name in names if name in choices}
        words = "; ".join(f"{name}: {why}" for name, why in faults.items() if why)
        raise RuntimeError(f"[tune] no tile works: {words}")
    return names


def attention_times(
    problem: Problem, dout: mx.array, flash: Callable[..., object]
) -> dict[str, dict[str, float]]:
    """Milliseconds of MLX's own attention and of this library's."""
    arrays, options = [problem.q, problem.k, problem.v], problem.options
    T = problem.q.shape[2]
    mask: str | mx.array | None = "causal"
    if options.low is not None or options.high != 0:
        every = slice(0, T)
        mask = reference.visibility(every, every, options, None, None, None)
    native = partial(native_attention, scale=options.scale, mask=mask)
    implementations = {"MLX": native, "mlx_flash": flash}

    def gradients(attention: Callable[..., object]) -> object:
        return mx.vjp(lambda *qkv: [attention(*qkv)], arrays, [dout])

    directions: dict[str, Callable[..., object]] = {
        "forward": lambda attention: attention(*arrays),
        "forward+backward": gradients,
    }
    found = {}
    for direction, function in directions.items():
        calls = [partial(function, attention) for attention in implementations.values()]
        found[direction] = dict(zip(implementations, medians(calls), strict=True))
    return found


def medians(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds of each call; the measurements of all take turns."""
    launches = []
    for call in calls:
        milliseconds(call, 1)  # warms up
        once = max(milliseconds(call, 1), 1e-3)
        launches.append(min(math.ceil(MILLISECONDS / once), LAUNCHES))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, n, of_call in zip(calls, launches, times, strict=True):
            of_call.append(milliseconds(call, n))
    return [statistics.median(of_call) for of_call in times]


def milliseconds(call: Callable[[], object], launches: int) -> float:
    """Of one call, of several that are evaluated together."""
    mx.synchronize()
    start = clock()
    mx.eval([call() for _ in range(launches)])
    mx.synchronize()
    return (clock() - start) * 1e3 / launches


def clock() -> float:
    """Seconds."""
    return time.perf_counter()


def report(tuning: Tuning) -> str:
    """What was chosen and why, and the times of MLX's own attention in the same run.

    Args:
        tuning: What :func:`tune` returned.

    Returns:
        Lines of text.
    """
    choices = tuning.choices
    rows = [
        ["kernel", "present tile", "ms", "best tile", "ms", "saved", "tried", "out"]
    ]
    for kernel, choice in choices.items():
        present, best = choice.present, choice.best
        saved = 1 - best.milliseconds / present.milliseconds
        rows.append(
            [
                kernel + ("" if kernel in tuning.kernels else " (not used)"),
                tile_text(present.tile),
                time_text(present),
                tile_text(best.tile),
                time_text(best),
                "-" if present.fault else f"{saved:.1%}",
                str(len(choice.trials)),
                str(sum(bool(trial.fault) for trial in choice.trials)),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [tuning.title]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [
        f"dropped: {kernel}, {tile_text(trial.tile)}: {trial.fault.splitlines()[0]}"
        for kernel, choice in choices.items()
        for trial in choice.trials
        if trial.fault
    ]
    for direction, times in tuning.attention.items():
        words = ", ".join(f"{name} {time:.4g} ms" for name, time in times.items())
        lines.append(f"{direction}: {words}")
    return "\n".join(lines)


def time_text(trial: Trial) -> str:
    """Milliseconds, if there are any."""
    return "-" if trial.fault else f"{trial.milliseconds:.4g}"


def tile_text(tile: Tile) -> str:
    """``128 x 64``, rows and block, and what is not the default."""
    words = [f"{tile.rows} x {tile.block}"]
    for name, value in asdict(tile).items():
        if name not in ("rows", "block") and value != getattr(Tile, name):
            words.append(name if value is True else f"{name}={value}")
    return ", ".join(words)
