"""The four kernels as MLX operations: builds each call, chains them."""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx

from mlx_flash import tiles
from mlx_flash.launch import KernelCall, run

HEADERS = ("common", "tile", "mask", "softmax")


class LaneMapError(RuntimeError):
    """The GPU spreads a simdgroup matrix over its lanes in an unknown way."""


def attention_forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    causal: bool,
    backend: str,
    precise: bool = False,
) -> tuple[mx.array, mx.array]:
    """Output and log-sum-exp; the contract of ``reference.attention_forward``."""
    check_head_dims(q, v, backend)
    gpu = gpu_of(backend)
    if gpu == "metal":
        check_lane_map(backend)
    out, lse = run(forward_call(q, k, v, scale, causal, gpu), backend, precise)
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
    scale: float,
    causal: bool,
    backend: str,
    precise: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """Gradients of q, k, v; the contract of ``reference.attention_backward``."""
    gpu = gpu_of(backend)
    (delta,) = run(delta_call(out, dout, dlse, gpu), backend, precise)
    arguments = q, k, v, dout, lse, delta, scale, causal, gpu
    (dq,) = run(dq_call(*arguments), backend, precise)
    if tiles.fuses_dk_and_dv(q.shape[3], q.itemsize, gpu):
        dk, dv = run(dkv_call(*arguments), backend, precise)
    else:
        (dk,) = run(dkv_call(*arguments, with_dv=False), backend, precise)
        (dv,) = run(dkv_call(*arguments, with_dk=False), backend, precise)
    return (
        dq.transpose(0, 2, 1, 3),
        dk.transpose(0, 2, 1, 3),
        dv.transpose(0, 2, 1, 3),
    )


def gpu_of(backend: str) -> str:
    """The kind of GPU whose kernels a back end runs."""
    return "cuda" if backend == "cuda" else "metal"


def forward_call(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    causal: bool,
    gpu: str = "metal",
) -> KernelCall:
    """``attention_forward``: out ``[B, Tq, H, D]`` and lse ``[B, H, Tq]``."""
    B, H, Tq, D = q.shape
    tile = tiles.tile("attention_forward", D, q.itemsize, gpu)
    return KernelCall(
        name="attention_forward",
        headers=(*HEADERS, "attention_forward"),
        scratch=(
            ("T", "q_tg", ("Q_IN_TG", "BQ")),
            ("T", "k_tg", ("SLOTS", "BK")),
            ("T", "v_tg", ("SLOTS", "BK")),
        ),
        arguments=(
            *map(operand, "qkv"),
            "out",
            "lse",
            "scale[0]",
            SIZES,
        ),
        inputs={"q": q, "k": k, "v": v, **constants(q, k, scale)},
        template=(
            ("T", q.dtype),
            ("D", D),
            ("BQ", tile.rows),
            ("BK", tile.block),
            ("FQ", tile.fragments),
            ("CAUSAL", causal),
            ("Q_IN_TG", tile.rows_in_tg),
        ),
        outputs=(("out", (B, Tq, H, D), q.dtype), ("lse", (B, H, Tq), mx.float32)),
        groups=(blocks(Tq, tile.rows), H, B),
        threads=tile.threads,
        longest_last=causal,
    )


def delta_call(
    out: mx.array, dout: mx.array, dlse: mx.array, gpu: str = "metal"
) -> KernelCall:
    """``attention_delta``: delta ``[B, H, Tq]``."""
    B, H, Tq, D = out.shape
    tile = tiles.tile("attention_delta", D, out.itemsize, gpu)
    return KernelCall(
        name="attention_delta",
        headers=(*HEADERS, "attention_delta"),
        scratch=(),
        arguments=(
            operand("out"),
            operand("dout"),
            row_operand("dlse"),
            "delta",
            SIZES,
        ),
        inputs={
            "out": out,
            "dout": dout,
            "dlse": at_least_8(dlse),
            "sizes": constant((H, H, Tq, Tq), mx.int32),
        },
        template=(("T", out.dtype), ("D", D), ("BQ", tile.rows)),
        outputs=(("delta", (B, H, Tq), mx.float32),),
        groups=(blocks(Tq, tile.rows), H, B),
        threads=tile.threads,
    )


def dq_call(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    dout: mx.array,
    lse: mx.array,
    delta: mx.array,
    scale: float,
    causal: bool,
    gpu: str = "metal",
) -> KernelCall:
    """``attention_dq``: dq ``[B, Tq, H, D]``."""
    B, H, Tq, D = q.shape
    tile = tiles.tile("attention_dq", D, q.itemsize, gpu)
    return KernelCall(
        name="attention_dq",
        headers=(*HEADERS, "attention_dq"),
        scratch=(
            ("T", "q_tg", ("Q_IN_TG", "BQ")),
            ("T", "dout_tg", ("DOUT_IN_TG", "BQ")),
            ("T", "k_tg", ("SLOTS", "BK")),
            ("T", "v_tg", ("SLOTS", "BK")),
        ),
        arguments=(*GRADIENT_ARGUMENTS, "dq", "scale[0]", SIZES),
        inputs=gradient_inputs(q, k, v, dout, lse, delta, scale),
        template=(
            ("T", q.dtype),
            ("D", D),
            ("BQ", tile.rows),
            ("BK", tile.block),
            ("FQ", tile.fragments),
            ("CAUSAL", causal),
            ("Q_IN_TG", tile.rows_in_tg),
            ("DOUT_IN_TG", tile.second_in_tg),
        ),
        outputs=(("dq", (B, Tq, H, D), q.dtype),),
        groups=(blocks(Tq, tile.rows), H, B),
        threads=tile.threads,
        longest_last=causal,
    )


def dkv_call(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    dout: mx.array,
    lse: mx.array,
    delta: mx.array,
    scale: float,
    causal: bool,
    gpu: str = "metal",
    *,
    with_dk: bool = True,
    with_dv: bool = True,
) -> KernelCall:
    """``attention_dkv``: dk and dv ``[B, Tk, HKV, D]``, or one of them."""
    B, HKV, Tk, D = k.shape
    row = {(True, True): "dkv", (True, False): "dk", (False, True): "dv"}
    tile = tiles.tile(f"attention_{row[with_dk, with_dv]}", D, q.itemsize, gpu)
    outputs = {"dk": with_dk, "dv": with_dv}
    return KernelCall(
        name="attention_dkv",
        headers=(*HEADERS, "attention_dkv"),
        scratch=(
            ("T", "k_tg", ("K_IN_TG", "BK")),
            ("T", "v_tg", ("V_IN_TG", "BK")),
            ("T", "q_tg", ("SLOTS", "BQ")),
            ("T", "dout_tg", ("SLOTS", "BQ")),
            ("float", "lse_tg", ("SLOTS", "BQ")),
            ("float", "delta_tg", ("SLOTS", "BQ")),
        ),
        arguments=(
            *GRADIENT_ARGUMENTS,
            *(name if wanted else "nullptr" for name, wanted in outputs.items()),
            "scale[0]",
            SIZES,
        ),
        inputs=gradient_inputs(q, k, v, dout, lse, delta, scale),
        template=(
            ("T", q.dtype),
            ("D", D),
            ("BQ", tile.block),
            ("BK", tile.rows),
            ("FK", tile.fragments),
            ("CAUSAL", causal),
            ("WITH_DK", with_dk),
            ("WITH_DV", with_dv),
            ("K_IN_TG", tile.rows_in_tg),
            ("V_IN_TG", tile.second_in_tg),
        ),
        outputs=tuple(
            (name, (B, Tk, HKV, D), k.dtype)
            for name, wanted in outputs.items()
            if wanted
        ),
        groups=(blocks(Tk, tile.rows), HKV, B),
        threads=tile.threads,
    )


def operand(name: str) -> str:
    """Source text of a ``[B, H, T, D]`` view, whatever its strides."""
    strides = ", ".join(f"{name}_strides[{axis}]" for axis in range(4))
    return f"Operand<T>{{{name}, {{{strides}}}}}"


def row_operand(name: str) -> str:
    """Source text of a ``[B, H, T]`` view of floats."""
    strides = ", ".join(f"{name}_strides[{axis}]" for axis in range(3))
    return f"RowOperand{{{name}, {{{strides}, 0}}}}"


SIZES = "Sizes{sizes[0], sizes[1], sizes[2], sizes[3]}"
GRADIENT_ARGUMENTS = (
    *map(operand, ("q", "k", "v", "dout")),
    *map(row_operand, ("lse", "delta")),
)


def constants(q: mx.array, k: mx.array, scale: float) -> dict[str, mx.array]:
    """Numbers that change from call to call without a new compilation."""
    sizes = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    return {"scale": constant((scale,), mx.float32), "sizes": constant(sizes, mx.int32)}


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """A small array; kept, since making one costs more than a launch on CUDA."""
    return mx.array(values, dtype)


def gradient_inputs(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    dout: mx.array,
    lse: mx.array,
    delta: mx.array,
    scale: float,
) -> dict[str, mx.array]:
    """What ``attention_dq`` and ``attention_dkv`` read."""
    return {
        "q": q,
        "k": k,
        "v": v,
        "dout": dout,
        "lse": at_least_8(lse),
        "delta": at_least_8(delta),
        **constants(q, k, scale),
    }


def at_least_8(x: mx.array) -> mx.array:
    """Pad the rows of a tiny ``[B, H, T]`` array; nobody reads the padding.

    MLX hands an array of fewer than 8 elements to Metal in another address space
    (constant), for which the kernels would have to be written a second time.
    """
    return x if x.size >= 8 else mx.pad(x, [(0, 0), (0, 0), (0, 8 - x.shape[2])])


def blocks(length: int, block: int) -> int:
    """Blocks that cover a length."""
    return (length + block - 1) // block


def check_head_dims(q: mx.array, v: mx.array, backend: str) -> None:
    """Raise NotImplementedError for head dims that no kernel has."""
    D, Dv = q.shape[3], v.shape[3]
    if Dv != D or D not in tiles.HEAD_DIMS:
        supported = ", ".join(map(str, tiles.HEAD_DIMS))
        raise NotImplementedError(
            f"[flash_attention] no kernel for head dim {D} of q and k with {Dv} of v "
            f"on back end {backend!r}; kernels exist for equal head dims {supported}; "
            "pad the head dim with zeros, or use the back end 'reference'"
        )


@cache
def check_lane_map(backend: str) -> None:
    """Compare the device's lane map with the one that the kernels assume, once.

    Raises:
        LaneMapError: They differ; every result would be wrong.
    """
    call = KernelCall(
        name="lane_map",
        headers=("common", "tile", "lane_map"),
        scratch=(),
        arguments=("index", "held", "assumed"),
        inputs={"index": mx.arange(64, dtype=mx.float32)},
        template=(),
        outputs=(("held", (32, 2), mx.float32), ("assumed", (32, 2), mx.float32)),
        groups=(1, 1, 1),
        threads=32,
    )
    held, assumed = run(call, backend, precise=True)
    if not mx.array_equal(held, assumed).item():
        device = mx.device_info().get("device_name", backend)
        raise LaneMapError(
            f"[flash_attention] {device} spreads a simdgroup matrix over the lanes in "
            "an unknown way, so the kernels would be wrong on it; use "
            "mlx_flash.use_backend('reference') and report the device"
        )
