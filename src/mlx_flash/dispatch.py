"""The signature of MLX's own attention, and the table of who computes which call."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_flash.attention import flash_attention
from mlx_flash.backends import backend, use_backend
from mlx_flash.masks import WindowMask
from mlx_flash.validation import FLOATS
from mlx_flash.versions import MLX, version_numbers

native_attention = cast(Callable[..., mx.array], mx.fast.scaled_dot_product_attention)


@dataclass(frozen=True)
class Call:
    """What the table looks at. No call can tell whether a gradient will be asked for.

    Attributes:
        device: ``"cpu"``, ``"metal"`` or ``"cuda"``.
        dtype: That q, k and v promote to.
        D: Head dim of q and k.
        Dv: Head dim of v.
        mask: ``"none"``, ``"causal"``, ``"causal, Tq > Tk"``, ``"window"`` or
            ``"array"``.
        sinks: There are sinks.
        Tq: Number of queries.
        mlx: Version of MLX.
    """

    device: str
    dtype: mx.Dtype
    D: int
    Dv: int
    mask: str
    sinks: bool
    Tq: int
    mlx: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A row of the table; None: whatever the call has there.

    Attributes:
        path: ``"mlx"``: MLX's own attention; ``"flash"``: this library.
        why: The ground.
        device: Of the call.
        dtypes: One of these.
        head_dims: ``(D, Dv)`` is one of these.
        beyond: The larger of D and Dv is beyond this.
        masks: One of these.
        sinks: Whether there are any.
        queries: Tq is one of these.
        since: MLX is at least this version.
    """

    path: str
    why: str
    device: str | None = None
    dtypes: Container[mx.Dtype] | None = None
    head_dims: Container[tuple[int, int]] | None = None
    beyond: int | None = None
    masks: Container[str] | None = None
    sinks: bool | None = None
    queries: Container[int] | None = None
    since: tuple[int, ...] | None = None

    def matches(self, call: Call) -> bool:
        """Whether the row is about the call."""
        return (
            (self.device is None or call.device == self.device)
            and (self.dtypes is None or call.dtype in self.dtypes)
            and (self.head_dims is None or (call.D, call.Dv) in self.head_dims)
            and (self.beyond is None or max(call.D, call.Dv) > self.beyond)
            and (self.masks is None or call.mask in self.masks)
            and (self.sinks is None or call.sinks == self.sinks)
            and (self.queries is None or call.Tq in self.queries)
            and (self.since is None or call.mlx >= self.since)
        )


ANY_NUMBER = 2**63
HALVES = (mx.float16, mx.bfloat16)
METAL_HEAD_DIMS = {(64, 64), (72, 72), (80, 80), (96, 96), (96, 64), (128, 128)}
CUDNN_HEAD_DIMS = {(8 * a, 8 * b) for a in range(1, 17) for b in range(1, 17)}
NO_ARRAY = ("none", "causal")

# The first row that matches decides. MLX's own path is taken only where it is linear in
# memory both without and with a gradient, since a call cannot know which it will be.
# The grounds were read in MLX 0.32.4; those about Metal were not run.
TABLE = (
    Row(
        "mlx",
        "one query: decoding; one row of scores is not quadratic",
        queries=range(1, 2),
    ),
    Row("mlx", "a dtype that this library has not", dtypes=(mx.float64,)),
    Row("flash", "MLX's own path on a CPU stores all scores", device="cpu"),
    Row("mlx", "no kernel has so large a head dim", beyond=256),
    Row(
        "mlx",
        "fused forward, backward in tiles; 8 queries or fewer raise in its backward",
        device="metal",
        dtypes=FLOATS,
        head_dims=METAL_HEAD_DIMS,
        masks=NO_ARRAY,
        sinks=False,
        queries=range(9, ANY_NUMBER),
        since=(0, 32, 4),
    ),
    Row(
        "mlx",
        "cuDNN; its backward exists for multiples of 128 queries only",
        device="cuda",
        dtypes=HALVES,
        head_dims=CUDNN_HEAD_DIMS,
        masks=NO_ARRAY,
        sinks=False,
        queries=range(128, ANY_NUMBER, 128),
        since=(0, 32, 2),
    ),
    Row("flash", "everything else: MLX stores all scores, at least in the backward"),
)


def route(call: Call) -> Row:
    """The row of the table that decides a call."""
    return next(row for row in TABLE if row.matches(call))


def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | WindowMask | None = None,
    sinks: mx.array | None = None,
    force_fused: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """``mx.fast.scaled_dot_product_attention``, linear in memory for every call.

    MLX's own path where that is fused and linear in memory, forward and backward;
    :func:`mlx_flash.flash_attention` elsewhere. ``TABLE`` is the rule. The results are
    the same up to rounding, but for a query that sees no key, which gives 0 in
    ``flash_attention`` and the mean of ``v`` in MLX.

    Args:
        q: Queries ``[B, H, Tq, D]``.
        k: Keys ``[B, HKV, Tk, D]``, not tiled to ``H``.
        v: Values ``[B, HKV, Tk, Dv]``.
        scale: Multiplies the scores.
        mask: ``"causal"`` (aligned bottom right), or an array that broadcasts to
            ``[B, H, Tq, Tk]``: bool (True: visible) or additive.
        sinks: ``[H]``: the score of one more key per head, without a value.
        force_fused: Handed to MLX where the table says MLX; ``flash_attention`` is
            always fused.
        stream: Stream or device of the operation.

    Returns:
        ``[B, H, Tq, Dv]`` in the promoted dtype.

    Raises:
        ValueError: The arguments are wrong.
    """
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(
            "[scaled_dot_product_attention] mask must be None, 'causal' or an array, "
            f"got {mask!r}"
        )
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return native_attention(q, k, v, scale=scale)  # raises, in MLX's words
    Tq, Tk = q.shape[2], k.shape[2]
    if isinstance(mask, WindowMask) and not mask.fits(Tq, Tk):
        mask = mask.array()
    call = Call(
        device=device_kind(stream),
        dtype=mx.result_type(q, k, v),
        D=q.shape[3],
        Dv=v.shape[3],
        mask=mask_kind(mask, Tq, Tk),
        sinks=sinks is not None,
        Tq=Tq,
        mlx=MLX_VERSION,
    )
    if route(call).path == "mlx":
        if isinstance(mask, WindowMask):
            mask = mask.array()
        # MLX before 0.29 and 0.32.3 does not know the last two
        more: dict[str, object] = {"sinks": sinks} if sinks is not None else {}
        more |= {"force_fused": True} if force_fused else {}
        return native_attention(q, k, v, scale=scale, mask=mask, stream=stream, **more)
    window = mask.window if isinstance(mask, WindowMask) else None
    array = mask if isinstance(mask, mx.array) else None
    if array is not None and array.dtype not in (mx.bool_, *FLOATS):
        array = array.astype(call.dtype)  # MLX adds integers to the scores, too
    # The kernels need the GPU; a CPU stream of a machine that has one does not.
    on_cpu = call.device == "cpu" and backend() in ("metal", "cuda")
    with use_backend("reference") if on_cpu else nullcontext():
        out = flash_attention(
            q,
            k,
            v,
            scale=scale,
            causal=call.mask.startswith("causal") or window is not None,
            window=window,
            mask=array,
            sinks=sinks,
            stream=stream,
        )
    return cast(mx.array, out)


def mask_kind(mask: object, Tq: int, Tk: int) -> str:
    """The word of the table for a mask."""
    if mask is None:
        return "none"
    if isinstance(mask, str):
        return "causal, Tq > Tk" if Tq > Tk else "causal"
    return "window" if isinstance(mask, WindowMask) else "array"


def device_kind(stream: mx.Stream | mx.Device | None) -> str:
    """Where an operation on a stream runs: ``"cpu"``, ``"metal"`` or ``"cuda"``."""
    place = mx.default_device() if stream is None else stream
    device = getattr(place, "device", place)  # a stream has one
    if getattr(device, "type", device) == mx.cpu:  # mx.cpu itself names a device
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


MLX_VERSION = version_numbers(MLX)
