"""The kernels as MLX operations: what each launch is given, and how they chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple, TypeVar

import mlx.core as mx

from mlx_flash import splitting, tiles
from mlx_flash.launch import Kernel, KernelCall, Scratch, run
from mlx_flash.options import Options

HEADERS = ("common", "tile", "mask", "softmax")


class LaneMapError(RuntimeError):
    """The GPU spreads a simdgroup matrix over its lanes in an unknown way."""


@dataclass(frozen=True)
class Variant:
    """What changes the text of a kernel. Lengths never do.

    Attributes:
        dtype: Of q, k, v.
        D: Head dim of q and k.
        DV: Head dim of v.
        low: The band is bounded below (a window).
        high: The band is bounded above (causal).
        segments: There are segment ids.
        mask: Dtype of the array mask, if there is one.
        softcap: Scores are capped.
        sinks: There are sinks.
        gpu: Whose tiles they have, a key of ``tiles.TABLES``.
    """

    dtype: mx.Dtype
    D: int
    DV: int
    low: bool = False
    high: bool = False
    segments: bool = False
    mask: mx.Dtype | None = None
    softcap: bool = False
    sinks: bool = False
    gpu: str = "metal"

    def tile(self, kernel: str) -> tiles.Tile:
        """The tile of one of its kernels."""
        tile = tiles.tile(kernel, max(self.D, self.DV), self.dtype.size, self.gpu)
        if self.gpu != "metal" and (self.mask or self.softcap or self.segments):
            # these take registers, of which a threadgroup of CUDA has 65536; a launch
            # that wants more does not run, and MLX may not say so
            tile = tile.with_at_most(256)
        return tile


@dataclass(frozen=True)
class Problem:
    """The inputs of one attention: the arrays and numbers of ``attention_forward``."""

    q: mx.array
    k: mx.array
    v: mx.array
    options: Options
    mask: mx.array | None = None
    q_segments: mx.array | None = None
    k_segments: mx.array | None = None
    sinks: mx.array | None = None
    gpu: str = "metal"

    @cached_property
    def variant(self) -> Variant:
        """Its kernels."""
        return Variant(
            self.q.dtype,
            self.q.shape[3],
            self.v.shape[3],
            self.options.low is not None,
            self.options.high is not None,
            self.q_segments is not None,
            None if self.mask is None else self.mask.dtype,
            self.options.softcap is not None,
            self.sinks is not None,
            self.gpu,
        )

    def queries(self, rows: slice) -> Problem:
        """The part of the problem that some query rows are."""
        if rows.stop - rows.start == self.q.shape[2]:
            return self
        return replace(
            self,
            q=part(self.q, rows, axis=2),
            options=self.options.shifted(rows.start),
            mask=part(self.mask, rows, axis=2),
            q_segments=part(self.q_segments, rows, axis=1),
        )

    def keys(self, rows: slice) -> Problem:
        """The part of the problem that some keys are."""
        if rows.stop - rows.start == self.k.shape[2]:
            return self
        return replace(
            self,
            k=part(self.k, rows, axis=2),
            v=part(self.v, rows, axis=2),
            options=self.options.shifted(-rows.start),
            mask=part(self.mask, rows, axis=3),
            k_segments=part(self.k_segments, rows, axis=1),
        )


Array = TypeVar("Array", mx.array, mx.array | None)


def part(x: Array, rows: slice, axis: int) -> Array:
    """Rows of an array along an axis, all of it where it has one element there."""
    if x is None or x.shape[axis] in (1, rows.stop - rows.start):
        return x
    return x[(slice(None),) * axis + (rows,)]


def attention_forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    options: Options,
    mask: mx.array | None = None,
    q_segments: mx.array | None = None,
    k_segments: mx.array | None = None,
    sinks: mx.array | None = None,
    backend: str,
    precise: bool = False,
) -> tuple[mx.array, mx.array]:
    """Output and log-sum-exp; the contract of ``reference.attention_forward``."""
    check_head_dims(q, v, backend)
    gpu = gpu_of(backend, precise and q.dtype == mx.float32)
    if gpu == "metal":
        check_lane_map(backend)
    problem = Problem(q, k, v, options, mask, q_segments, k_segments, sinks, gpu)

    def launch(rows: slice) -> list[mx.array]:
        of_rows = problem.queries(rows)
        ids = block_ids(of_rows, "attention_forward", backend)
        return run(forward_call(of_rows, ids), backend)

    pieces = pieces_of(problem, "attention_forward", backend, own="q")
    out, lse = joined(map(launch, pieces), axes=(1, 2))
    return out.transpose(0, 2, 1, 3), lse


def attention_backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    out: mx.array,
    lse: mx.array,
    dout: mx.array,
    dlse: mx.array,
    *,
    options: Options,
    mask: mx.array | None = None,
    q_segments: mx.array | None = None,
    k_segments: mx.array | None = None,
    sinks: mx.array | None = None,
    backend: str,
    precise: bool = False,
) -> dict[str, mx.array]:
    """Gradients by name; the contract of ``reference.attention_backward``."""
    gpu = gpu_of(backend, precise and q.dtype == mx.float32)
    problem = Problem(q, k, v, options, mask, q_segments, k_segments, sinks, gpu)
    delta, lse2 = run(delta_call(out, dout, lse, dlse, gpu), backend)

    def dq_of(rows: slice) -> list[mx.array]:
        of_rows = problem.queries(rows)
        row_inputs = (part(x, rows, axis=2) for x in (dout, lse2, delta))
        ids = block_ids(of_rows, "attention_dq", backend)
        return run(dq_call(of_rows, ids, *row_inputs), backend)

    def dkv_of(kernel: str) -> list[mx.array]:
        def launch(rows: slice) -> list[mx.array]:
            of_rows = problem.keys(rows)
            ids = block_ids(of_rows, kernel, backend)
            return run(dkv_call(of_rows, ids, dout, lse2, delta, kernel), backend)

        pieces = pieces_of(problem, kernel, backend, own="k")
        return joined(map(launch, pieces), axes=(1, 1))

    (dq,) = joined(
        map(dq_of, pieces_of(problem, "attention_dq", backend, own="q")), (1,)
    )
    D, DV = q.shape[3], v.shape[3]
    if tiles.fuses_dk_and_dv(max(D, DV), q.itemsize, gpu):
        dk, dv = dkv_of("attention_dkv")
    else:
        (dk,), (dv,) = dkv_of("attention_dk"), dkv_of("attention_dv")
    gradients = {
        "q": dq.transpose(0, 2, 1, 3),
        "k": dk.transpose(0, 2, 1, 3),
        "v": dv.transpose(0, 2, 1, 3),
    }
    if mask is not None and mask.dtype != mx.bool_:
        gradients["mask"] = mask_gradient(problem, mask, dout, lse2, delta, backend)
    if sinks is not None:
        p = mx.exp(sinks.astype(mx.float32)[:, None] - lse)
        # a row that passes no gradient (delta = 0) may hold any lse
        dz = mx.where(delta == 0.0, 0.0, -p * delta).sum(axis=(0, 2))  # (15)
        gradients["sinks"] = dz.astype(sinks.dtype)
    return gradients


def mask_gradient(
    problem: Problem,
    mask: mx.array,
    dout: mx.array,
    lse2: mx.array,
    delta: mx.array,
    backend: str,
) -> mx.array:
    """Gradient of an additive mask, in its shape."""
    sums = sums_of(mask)

    def launch(rows: slice) -> list[mx.array]:
        of_rows, row_inputs = problem.keys(rows), [dout, lse2, delta]
        if not sums.q:
            of_rows = problem.queries(rows)
            row_inputs = [part(x, rows, axis=2) for x in row_inputs]
        ids = block_ids(of_rows, "attention_dq", backend)
        return run(dmask_call(of_rows, ids, *row_inputs, sums=sums), backend)

    if sums.q:
        pieces, axis = pieces_of(problem, "attention_dq", backend, own="k"), 3
    else:
        pieces, axis = pieces_of(problem, "attention_dq", backend, own="q"), 2
    (dmask,) = joined(map(launch, pieces), (axis,))
    summed = [axis for axis in (2, 3) if mask.shape[axis] == 1]
    if summed:
        dmask = dmask.sum(axis=summed, keepdims=True)
    return dmask.astype(mask.dtype)


def joined(pieces: Iterator[list[mx.array]], axes: tuple[int, ...]) -> list[mx.array]:
    """The outputs of several launches as those of one."""
    first, *others = pieces
    if not others:
        return first
    outputs = zip(first, *others, strict=True)
    return [
        mx.concatenate(list(x), axis=axis)
        for x, axis in zip(outputs, axes, strict=False)
    ]


def pieces_of(problem: Problem, kernel: str, backend: str, own: str) -> list[slice]:
    """The rows of each launch of a kernel that owns queries ("q") or keys ("k")."""
    (B, H, Tq, D), (_, _, Tk, DV) = problem.q.shape, problem.v.shape
    own_rows, other_rows, options = Tq, Tk, problem.options
    if own == "k":
        own_rows, other_rows, options = Tk, Tq, options.transposed()
    return splitting.pieces(
        own_rows,
        other_rows,
        options.low,
        options.high,
        problem.variant.tile(kernel).rows,
        B * H * (D + DV),
        backend,
    )


def gpu_of(backend: str, precise: bool) -> str:
    """The tile table of the kernels that a back end runs."""
    if backend != "cuda":
        return "metal"
    return "cuda_precise" if precise else "cuda"


def block_ids(
    problem: Problem, kernel: str, backend: str, *, tile: tiles.Tile | None = None
) -> list[mx.array]:
    """What ``segment_blocks`` tells a kernel; nothing where there are no segments.

    ``tile``, here and below: another one than the variant's.
    """
    call = segment_blocks_call(problem, kernel, tile=tile)
    return [] if call is None else run(call, backend)


def segment_blocks_call(
    problem: Problem, kernel: str, *, tile: tiles.Tile | None = None
) -> KernelCall | None:
    """``segment_blocks`` for a kernel: lowest and highest id of each block, flat."""
    own_ids, other_ids = problem.q_segments, problem.k_segments
    if own_ids is None or other_ids is None:
        return None
    if kernel in DKV_OUTPUTS:
        own_ids, other_ids = other_ids, own_ids
    tile = tile or problem.variant.tile(kernel)
    (B, own_length), (_, other_length) = own_ids.shape, other_ids.shape
    own_blocks = tiles.blocks(own_length, tile.rows)
    other_blocks = tiles.blocks(other_length, tile.block)
    sizes = own_length, other_length, tile.rows, tile.block
    # no fewer than 8, as at_least_8 says
    own_shape, other_shape = (max(B * own_blocks, 8),), (max(B * other_blocks, 8),)
    return KernelCall(
        kernel=segment_blocks_kernel(problem.gpu),
        inputs=[flat(own_ids), flat(other_ids), constant(sizes, mx.int32)],
        shapes=[own_shape, own_shape, other_shape, other_shape],
        dtypes=[mx.int32] * 4,
        groups=(own_blocks + other_blocks, 1, B),
    )


def forward_call(
    problem: Problem, block_ids: list[mx.array], *, tile: tiles.Tile | None = None
) -> KernelCall:
    """``attention_forward``: out ``[B, Tq, H, DV]`` and lse ``[B, H, Tq]``."""
    B, H, Tq, _ = problem.q.shape
    variant = problem.variant
    tile = tile or variant.tile("attention_forward")
    inputs = [at_least_8(x) for x in (problem.q, problem.k, problem.v)]
    if problem.sinks is not None:
        inputs.append(flat(problem.sinks.astype(mx.float32)))
    return KernelCall(
        kernel=forward_kernel(variant, tile),
        inputs=[*inputs, *shared_inputs(problem, block_ids)],
        shapes=[(B, Tq, H, variant.DV), (B, H, Tq)],
        dtypes=[variant.dtype, mx.float32],
        groups=(tiles.blocks(Tq, tile.rows), H, B),
    )


def delta_call(
    out: mx.array, dout: mx.array, lse: mx.array, dlse: mx.array, gpu: str = "metal"
) -> KernelCall:
    """``attention_delta``: delta and lse in base 2, both ``[B, H, Tq]``."""
    B, H, Tq, DV = out.shape
    tile = tiles.tile("attention_delta", DV, out.itemsize, gpu)
    return KernelCall(
        kernel=delta_kernel(out.dtype, DV, gpu),
        inputs=[
            *(at_least_8(x) for x in (out, dout, lse, dlse)),
            constant((H, H, Tq, Tq), mx.int32),
        ],
        shapes=[(B, H, Tq), (B, H, Tq)],
        dtypes=[mx.float32, mx.float32],
        groups=(tiles.blocks(Tq, tile.rows), H, B),
    )


def dq_call(
    problem: Problem,
    block_ids: list[mx.array],
    dout: mx.array,
    lse2: mx.array,
    delta: mx.array,
    *,
    tile: tiles.Tile | None = None,
) -> KernelCall:
    """``attention_dq``: dq ``[B, Tq, H, D]``."""
    B, H, Tq, D = problem.q.shape
    variant = problem.variant
    tile = tile or variant.tile("attention_dq")
    return KernelCall(
        kernel=dq_kernel(variant, tile),
        inputs=[
            *gradient_inputs(problem, dout, lse2, delta),
            *shared_inputs(problem, block_ids),
        ],
        shapes=[(B, Tq, H, D)],
        dtypes=[variant.dtype],
        groups=(tiles.blocks(Tq, tile.rows), H, B),
    )


def dkv_call(
    problem: Problem,
    block_ids: list[mx.array],
    dout: mx.array,
    lse2: mx.array,
    delta: mx.array,
    kernel: str = "attention_dkv",
    *,
    tile: tiles.Tile | None = None,
) -> KernelCall:
    """``attention_dkv``: dk ``[B, Tk, HKV, D]`` and dv ``[B, Tk, HKV, DV]``.

    ``kernel`` is a row of the tile table: ``"attention_dk"`` and ``"attention_dv"`` are
    the same body with one output.
    """
    B, HKV, Tk, D = problem.k.shape
    variant = problem.variant
    tile = tile or variant.tile(kernel)
    shapes = {"dk": (B, Tk, HKV, D), "dv": (B, Tk, HKV, variant.DV)}
    return KernelCall(
        kernel=dkv_kernel(variant, kernel, tile),
        inputs=[
            *gradient_inputs(problem, dout, lse2, delta),
            *shared_inputs(problem, block_ids),
        ],
        shapes=[shapes[name] for name in DKV_OUTPUTS[kernel]],
        dtypes=[variant.dtype] * len(DKV_OUTPUTS[kernel]),
        groups=(tiles.blocks(Tk, tile.rows), HKV, B),
    )


class MaskSums(NamedTuple):
    """The axes of ``[B, H, Tq, Tk]`` that ``attention_dmask`` sums a gradient over."""

    b: bool
    h: bool
    q: bool
    k: bool


def sums_of(mask: mx.array) -> MaskSums:
    """Where the mask has one element.

    Not the keys besides the queries: one threadgroup would have to do everything.
    """
    b, h, q, k = (n == 1 for n in mask.shape)
    return MaskSums(b, h, q, k and not q)


def dmask_call(
    problem: Problem,
    block_ids: list[mx.array],
    dout: mx.array,
    lse2: mx.array,
    delta: mx.array,
    *,
    sums: MaskSums,
    tile: tiles.Tile | None = None,
) -> KernelCall:
    """``attention_dmask``: the mask's gradient.

    Where it sums over queries or keys, the rows or columns of a tile are still to be
    added up.
    """
    B, H, Tq, _ = problem.q.shape
    Tk, mask = problem.k.shape[2], problem.mask
    assert mask is not None
    variant = problem.variant
    tile = tile or variant.tile("attention_dq")
    heads = (1 if sums.b else B), (1 if sums.h else H)
    rows, columns = (tile.rows if sums.q else Tq), (tile.block if sums.k else Tk)
    dtype = mx.float32 if sums.q or sums.k else mask.dtype
    x = tiles.blocks(rows, tile.rows) * tiles.blocks(columns, tile.block)
    return KernelCall(
        kernel=dmask_kernel(variant, tile, sums, dtype),
        inputs=[
            *gradient_inputs(problem, dout, lse2, delta),
            constant((B,), mx.int32),
            *shared_inputs(problem, block_ids),
        ],
        shapes=[(*heads, rows, columns)],
        dtypes=[dtype],
        groups=(x, heads[1], heads[0]),
    )


@cache
def forward_kernel(variant: Variant, tile: tiles.Tile) -> Kernel:
    """The text of ``attention_forward``."""
    sinks = ("sinks",) if variant.sinks else ()
    return Kernel(
        name="attention_forward",
        headers=(*HEADERS, "attention_forward"),
        scratch=(
            Scratch("q_tg", ("Q_IN_TG", "BQ"), "D"),
            Scratch("k_tg", ("SLOTS", "BK"), "D"),
            Scratch("v_tg", ("SLOTS", "BK"), "DV"),
            *parts_scratch("s_parts_tg"),
        ),
        arguments=(
            *map(operand, "qkv"),
            *(sinks or ("nullptr",)),
            "out",
            "lse",
            *shared_arguments(variant),
        ),
        inputs=(*"qkv", *sinks, *shared_input_names(variant)),
        outputs=("out", "lse"),
        template=(
            *sizes_template(variant),
            *query_tile_template(tile),
            ("Q_IN_TG", tile.rows_in_tg),
            ("SOFTCAP", variant.softcap),
            ("SINKS", variant.sinks),
        ),
        more_template=mask_template(variant),
        gpu=variant.gpu,
        threads=tile.threads,
        longest_last=variant.high,
    )


@cache
def delta_kernel(dtype: mx.Dtype, DV: int, gpu: str) -> Kernel:
    """The text of ``attention_delta``."""
    tile = tiles.tile("attention_delta", DV, dtype.size, gpu)
    return Kernel(
        name="attention_delta",
        headers=(*HEADERS, "attention_delta"),
        scratch=(),
        arguments=(
            *map(operand, ("out", "dout")),
            *map(row_operand, ("lse", "dlse")),
            "delta",
            "lse2",
            SIZES,
        ),
        inputs=("out", "dout", "lse", "dlse", "sizes"),
        outputs=("delta", "lse2"),
        template=(("T", dtype), ("DV", DV), ("BQ", tile.rows)),
        gpu=gpu,
        threads=tile.threads,
    )


@cache
def segment_blocks_kernel(gpu: str) -> Kernel:
    """The text of ``segment_blocks``."""
    outputs = IDS[2:]
    return Kernel(
        name="segment_blocks",
        headers=("common", "tile", "segment_blocks"),
        scratch=(),
        arguments=(
            "own_ids",
            "other_ids",
            *outputs,
            *(f"sizes[{i}]" for i in range(4)),
        ),
        inputs=("own_ids", "other_ids", "sizes"),
        outputs=outputs,
        template=(),
        gpu=gpu,
        threads=32,
    )


@cache
def dq_kernel(variant: Variant, tile: tiles.Tile) -> Kernel:
    """The text of ``attention_dq``."""
    return Kernel(
        name="attention_dq",
        headers=(*HEADERS, "attention_dq"),
        scratch=(
            Scratch("q_tg", ("Q_IN_TG", "BQ"), "D"),
            Scratch("dout_tg", ("DOUT_IN_TG", "BQ"), "DV"),
            Scratch("k_tg", ("SLOTS", "BK"), "D"),
            Scratch("v_tg", ("SLOTS", "BK"), "DV"),
            *parts_scratch("s_parts_tg", "dp_parts_tg"),
        ),
        arguments=(*GRADIENT_ARGUMENTS, "dq", *shared_arguments(variant)),
        inputs=(*GRADIENT_INPUTS, *shared_input_names(variant)),
        outputs=("dq",),
        template=(
            *sizes_template(variant),
            *query_tile_template(tile),
            ("Q_IN_TG", tile.rows_in_tg),
            ("DOUT_IN_TG", tile.second_in_tg),
            ("SOFTCAP", variant.softcap),
        ),
        more_template=mask_template(variant),
        gpu=variant.gpu,
        threads=tile.threads,
        longest_last=variant.high,
    )


@cache
def dkv_kernel(variant: Variant, kernel: str, tile: tiles.Tile) -> Kernel:
    """The text of ``attention_dkv`` with the outputs of a row of the tile table."""
    outputs = DKV_OUTPUTS[kernel]
    return Kernel(
        name="attention_dkv",
        headers=(*HEADERS, "attention_dkv"),
        scratch=(
            Scratch("k_tg", ("K_IN_TG", "BK"), "D"),
            Scratch("v_tg", ("V_IN_TG", "BK"), "DV"),
            Scratch("q_tg", ("SLOTS", "BQ"), "D"),
            Scratch("dout_tg", ("SLOTS", "BQ"), "DV"),
            Scratch("lse_tg", ("SLOTS", "BQ")),
            Scratch("delta_tg", ("SLOTS", "BQ")),
            *parts_scratch("s_parts_tg", "dp_parts_tg"),
        ),
        arguments=(
            *GRADIENT_ARGUMENTS,
            *(name if name in outputs else "nullptr" for name in ("dk", "dv")),
            *shared_arguments(variant),
        ),
        inputs=(*GRADIENT_INPUTS, *shared_input_names(variant)),
        outputs=outputs,
        template=(
            *sizes_template(variant),
            ("BQ", tile.block),
            ("BK", tile.rows),
            ("FK", tile.fragments),
            ("DS", tile.parts),
            ("WITH_DK", "dk" in outputs),
            ("WITH_DV", "dv" in outputs),
            ("K_IN_TG", tile.rows_in_tg),
            ("V_IN_TG", tile.second_in_tg),
            ("SOFTCAP", variant.softcap),
        ),
        more_template=mask_template(variant),
        gpu=variant.gpu,
        threads=tile.threads,
    )


@cache
def dmask_kernel(
    variant: Variant, tile: tiles.Tile, sums: MaskSums, dtype: mx.Dtype
) -> Kernel:
    """The text of ``attention_dmask``."""
    return Kernel(
        name="attention_dmask",
        headers=(*HEADERS, "attention_dmask"),
        scratch=(
            Scratch("k_tg", ("SLOTS", "BK"), "D"),
            Scratch("v_tg", ("SLOTS", "BK"), "DV"),
            *parts_scratch("s_parts_tg", "dp_parts_tg"),
        ),
        arguments=(
            *GRADIENT_ARGUMENTS,
            "dmask",
            "batches[0]",
            *shared_arguments(variant),
        ),
        inputs=(*GRADIENT_INPUTS, "batches", *shared_input_names(variant)),
        outputs=("dmask",),
        template=(
            *sizes_template(variant),
            *query_tile_template(tile),
            ("SOFTCAP", variant.softcap),
            *zip(("SUM_B", "SUM_H", "SUM_Q", "SUM_K"), sums, strict=True),
            ("M_OUT", dtype),
        ),
        more_template=mask_template(variant),
        gpu=variant.gpu,
        threads=tile.threads,
    )


def parts_scratch(*names: str) -> Iterator[Scratch]:
    """Where the DS parts of a sum meet, BQ x BK floats each; one part meets nobody."""
    return (Scratch(name, ("DS", "BQ", "BK")) for name in names)


def sizes_template(variant: Variant) -> tuple[tuple[str, int | mx.Dtype], ...]:
    """The first template arguments of most kernels."""
    return ("T", variant.dtype), ("D", variant.D), ("DV", variant.DV)


def query_tile_template(tile: tiles.Tile) -> tuple[tuple[str, int], ...]:
    """The tile of a kernel that owns queries, as template arguments."""
    return (
        ("BQ", tile.rows),
        ("BK", tile.block),
        ("FQ", tile.fragments),
        ("DS", tile.parts),
    )


def mask_template(variant: Variant) -> tuple[tuple[str, bool | mx.Dtype], ...]:
    """What the type of the mask is made of."""
    band = ("LOW", variant.low), ("HIGH", variant.high)
    return band if variant.mask is None else (*band, ("M", variant.mask))


def operand(name: str) -> str:
    """Source text of a ``[B, H, T, D]`` view, whatever its strides."""
    return f"Operand<T>{{{name}, {{{strides(name, 4)}}}}}"


def row_operand(name: str) -> str:
    """Source text of a ``[B, H, T]`` view of floats."""
    return f"RowOperand{{{name}, {{{strides(name, 3)}, 0}}}}"


def strides(name: str, ndim: int) -> str:
    """Source text of the strides of an input."""
    return ", ".join(f"{name}_strides[{axis}]" for axis in range(ndim))


SIZES = "Sizes{sizes[0], sizes[1], sizes[2], sizes[3]}"
IDS = (
    "q_ids",
    "k_ids",
    "own_lowest",
    "own_highest",
    "other_lowest",
    "other_highest",
)
GRADIENT_INPUTS = ("q", "k", "v", "dout", "lse2", "delta")
GRADIENT_ARGUMENTS = (
    *map(operand, GRADIENT_INPUTS[:4]),
    *map(row_operand, GRADIENT_INPUTS[4:]),
)
DKV_OUTPUTS = {
    "attention_dkv": ("dk", "dv"),
    "attention_dk": ("dk",),
    "attention_dv": ("dv",),
}


def shared_arguments(variant: Variant) -> tuple[str, ...]:
    """Source text of the last arguments: numbers, sizes and the mask."""
    ids, ids_type = "NoSegments{}", "NoSegments"
    if variant.segments:
        ids = f"Segments{{{', '.join(IDS)}, 0, 0}}"
        ids_type = "Segments"
    array, array_type = "NoArray{}", "NoArray"
    if variant.mask is not None:
        array = f"MaskArray<M>{{mask, {{{strides('mask', 4)}}}}}"
        array_type = "MaskArray<M>"
    mask = (
        f"Mask<LOW, HIGH, {ids_type}, {array_type}>"
        f"{{sizes[4], sizes[5], {ids}, {array}}}"
    )
    return "numbers[0]", "numbers[1]", SIZES, mask


def shared_input_names(variant: Variant) -> tuple[str, ...]:
    """Names of :func:`shared_inputs`."""
    ids = IDS if variant.segments else ()
    mask = () if variant.mask is None else ("mask",)
    return "sizes", "numbers", *ids, *mask


def shared_inputs(problem: Problem, block_ids: list[mx.array]) -> list[mx.array]:
    """Numbers that change from call to call without a new compilation; the masks."""
    (B, H, Tq, _), (_, HKV, Tk, _) = problem.q.shape, problem.k.shape
    options = problem.options
    # bounds beyond the score matrix mean the same at its edge, and fit in 32 bits
    low, high = (min(max(n or 0, -Tq), Tk) for n in (options.low, options.high))
    softcap = options.softcap or 0.0
    inputs = [
        constant((H, HKV, Tq, Tk, low, high), mx.int32),
        constant((options.scale, softcap), mx.float32),
    ]
    if problem.q_segments is not None and problem.k_segments is not None:
        inputs += [flat(problem.q_segments), flat(problem.k_segments), *block_ids]
    if problem.mask is not None:
        mask = mx.broadcast_to(problem.mask, (B, H, Tq, Tk))
        inputs.append(at_least_8(mask))
    return inputs


def gradient_inputs(
    problem: Problem, dout: mx.array, lse2: mx.array, delta: mx.array
) -> Iterator[mx.array]:
    """What the kernels of the backward read, in the order of GRADIENT_INPUTS."""
    arrays = problem.q, problem.k, problem.v, dout, lse2, delta
    return map(at_least_8, arrays)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """A small array; kept, since making one costs more than a launch on CUDA."""
    return mx.array(values, dtype)


# MLX hands an array of fewer than 8 elements to Metal in another address space
# (constant), for which the kernels would have to be written a second time.
def at_least_8(x: mx.array) -> mx.array:
    """Pad the last axis of a tiny view; nobody reads the padding."""
    if x.size >= 8:
        return x
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 8 - x.shape[-1])])


def flat(x: mx.array) -> mx.array:
    """All elements in a row, without gaps; a tiny array is padded."""
    return at_least_8(mx.contiguous(x).reshape(-1))


def check_head_dims(q: mx.array, v: mx.array, backend: str) -> None:
    """Raise NotImplementedError for head dims that no kernel has."""
    D, Dv = q.shape[3], v.shape[3]
    if max(D, Dv) > tiles.LARGEST_HEAD_DIM:
        raise NotImplementedError(
            f"[flash_attention] no kernel for head dim {D} of q and k with {Dv} of v "
            f"on back end {backend!r}; kernels exist up to {tiles.LARGEST_HEAD_DIM}; "
            "use mlx_flash.use_backend('reference')"
        )


@cache
def check_lane_map(backend: str) -> None:
    """Compare the device's lane map with the one that the kernels assume, once.

    Raises:
        LaneMapError: They differ; every result would be wrong.
    """
    call = KernelCall(
        kernel=Kernel(
            name="lane_map",
            headers=("common", "tile", "lane_map"),
            scratch=(),
            arguments=("index", "held", "assumed"),
            inputs=("index",),
            outputs=("held", "assumed"),
            template=(),
            gpu="metal",
            threads=32,
        ),
        inputs=[mx.arange(64, dtype=mx.float32)],
        shapes=[(32, 2), (32, 2)],
        dtypes=[mx.float32, mx.float32],
        groups=(1, 1, 1),
    )
    held, assumed = run(call, backend)
    if not mx.array_equal(held, assumed).item():
        device = mx.device_info().get("device_name", backend)
        raise LaneMapError(
            f"[flash_attention] {device} spreads a simdgroup matrix over the lanes in "
            "an unknown way, so the kernels would be wrong on it; use "
            "mlx_flash.use_backend('reference') and report the device"
        )
