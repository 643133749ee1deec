"""Problems, listed or random: hypothesis draws shapes, flags and a seed, no tensors."""

import math
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)
DTYPES = ("float32", "float16", "bfloat16")
# Around multiples of the fragment size 8, where blocks of any size begin and end.
BLOCK_EDGES = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97)
GARBAGE = 1e3
# The axes of [B, H, Tq, Tk] that a mask has; the others have size 1.
MASK_AXES = (
    *("BHQK", "HQK", "BHK", "BHQ", "BQK", "QK", "HK", "HQ", "BK", "BQ", "BH"),
    *("K", "Q", "H", "B", ""),
)

EVERY_HEAD_DIM = pytest.mark.parametrize("D", HEAD_DIMS, ids="D{}".format)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EVERY_MASK = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def fused_heads(x):
    """Slice of ``[B, T, 3, H, D]``, as a fused projection of q, k and v leaves it."""
    rows = x.transpose(0, 2, 1, 3)
    other = mx.full(rows.shape, GARBAGE, x.dtype)
    return mx.stack([other, rows, other], axis=2)[:, :, 1].transpose(0, 2, 1, 3)


def longer_array(x):
    """Slice of an array that holds large numbers before and after the T rows."""
    B, H, _, D = x.shape
    before, after = (mx.full((B, H, n, D), GARBAGE, x.dtype) for n in (3, 70))
    return mx.concatenate([before, x, after], axis=2)[:, :, 3:-70]


# Each gives the values of a contiguous [B, H, T, D] array another place in memory.
LAYOUTS = {
    "contiguous": mx.contiguous,
    "transposed": lambda x: mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(
        0, 2, 1, 3
    ),
    "fused": fused_heads,
    "longer": longer_array,
    "broadcast": lambda x: mx.broadcast_to(mx.contiguous(x[:, :1]), x.shape),
    "reversed": lambda x: mx.contiguous(x[:, :, ::-1])[:, :, ::-1],
    "strided": lambda x: mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3),
}
# Another layout for each of q, k, v and dout, so that no two of them share strides.
MIXED = ("transposed", "longer", "reversed", "strided")
LAYOUTS_OF_A_PROBLEM = (*LAYOUTS, "mixed")


@dataclass(frozen=True)
class Problem:
    """The inputs of one call: its repr is enough to build the arrays again.

    Attributes:
        Dv: Head dim of v. None: D.
        mask: Dtype of the mask, "bool_" or a float. None: no mask.
        mask_axes: Those of "BHQK" that the mask has; the others have size 1.
        segments: "packed" (runs of equal ids), "scattered" (any order), None.
        sinks: Dtype of the sinks. None: no sinks.
    """

    dtype: str = "float32"
    B: int = 1
    H: int = 2
    HKV: int = 1
    Tq: int = 45
    Tk: int = 71
    D: int = 32
    Dv: int | None = None
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    mask: str | None = None
    mask_axes: str = "QK"
    segments: str | None = None
    sinks: str | None = None
    scale: float | None = None
    layout: str = "contiguous"
    seed: int = 0

    def resized(self, **changes):
        """The same problem with other fields."""
        return replace(self, **changes)

    def arrays(self):
        """The arrays q, k, v and the cotangents dout, dlse."""
        rng = np.random.default_rng(self.seed)
        rows, keys = (self.H, self.Tq), (self.HKV, self.Tk)
        Dv = self.D if self.Dv is None else self.Dv
        shapes = (*rows, self.D), (*keys, self.D), (*keys, Dv), (*rows, Dv)
        layouts = MIXED if self.layout == "mixed" else [self.layout] * 4
        arrays = []
        for (heads, T, D), layout in zip(shapes, layouts, strict=True):
            values = rng.standard_normal((self.B, heads, T, D), np.float32)
            x = mx.array(values).astype(getattr(mx, self.dtype))
            arrays.append(LAYOUTS[layout](x))
        dlse = rng.standard_normal((self.B, self.H, self.Tq), np.float32)
        arrays.append(mx.array(dlse))
        mx.eval(arrays)
        return arrays

    @property
    def options(self):
        """Keyword arguments of the call, arrays included."""
        numbers = {"window": self.window, "softcap": self.softcap}
        arrays = {
            "mask": self.mask and self.mask_array(),
            "segment_ids": self.segments and self.segment_arrays(),
            "sinks": self.sinks and self.sink_array(),
        }
        given = {name: x for name, x in (numbers | arrays).items() if x is not None}
        return {"scale": self.scale, "causal": self.causal} | given

    def mask_array(self):
        """A mask that hides a third of the keys, in one of the possible ways."""
        rng = np.random.default_rng((self.seed, 1))
        sizes = {"B": self.B, "H": self.H, "Q": self.Tq, "K": self.Tk}
        shape = [n if axis in self.mask_axes else 1 for axis, n in sizes.items()]
        visible = mx.array(rng.random(shape) < 0.67)
        values = mx.array(rng.standard_normal(shape, np.float32))
        if self.mask == "bool_":
            mask = visible
        else:
            dtype = getattr(mx, self.mask)
            lowest = -math.inf if self.mask == "float16" else mx.finfo(dtype).min
            hidden = mx.where(mx.array(rng.random(shape) < 0.5), -math.inf, lowest)
            mask = mx.where(visible, values, hidden).astype(dtype)
        if self.layout != "contiguous":
            mask = LAYOUTS["strided"](mask)
        while mask.shape[:1] == (1,) and self.seed % 2:  # half of them with fewer axes
            mask = mask[0]
        return mask

    def segment_arrays(self):
        """One array of ids if it can be, else those of the queries and of the keys."""
        rng = np.random.default_rng((self.seed, 2))
        T = max(self.Tq, self.Tk)
        if self.segments == "packed":
            ids = np.cumsum(rng.random((self.B, T)) < 0.1, axis=1)
        else:
            ids = rng.integers(-1, 2, (self.B, T))
        q_ids, k_ids = (
            mx.array(ids[:, T - n :].astype(np.int32)) for n in (self.Tq, self.Tk)
        )
        return q_ids if self.Tq == self.Tk else (q_ids, k_ids)

    def sink_array(self):
        """One number per head."""
        rng = np.random.default_rng((self.seed, 3))
        values = mx.array(2 * rng.standard_normal(self.H, np.float32))
        return values.astype(getattr(mx, self.sinks))


# Each feature alone. Two of them together are a problem with the fields of both.
FEATURES = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9},
    "sides": {"window": (5, 12)},
    "softcap": {"softcap": 1.5},
    "bool-mask": {"mask": "bool_"},
    "additive-mask": {"mask": "float32", "mask_axes": "HQK"},
    "segments": {"segments": "packed"},
    "sinks": {"sinks": "float32"},
}
EVERY_FEATURE = pytest.mark.parametrize("feature", FEATURES)


lengths = st.sampled_from(BLOCK_EDGES) | st.integers(1, 100)


head_dims = (
    st.sampled_from(HEAD_DIMS)
    | st.sampled_from((1, 2, 3, 5, 7, 8, 9, 24, 40, 56, 72, 112, 160, 192, 256))
    | st.integers(1, 256)
)
sides = st.none() | st.integers(0, 40)


@st.composite
def problems(draw):
    """Any problem that every back end supports."""
    HKV = draw(st.integers(1, 2))
    causal = draw(st.booleans())
    D = draw(head_dims)
    windows = st.tuples(sides, sides)
    if causal:
        windows |= st.integers(1, 40)
    return Problem(
        dtype=draw(st.sampled_from(DTYPES)),
        B=draw(st.integers(1, 2)),
        H=HKV * draw(st.integers(1, 3)),
        HKV=HKV,
        Tq=draw(lengths),
        Tk=draw(lengths),
        D=D,
        Dv=draw(st.none() | head_dims),
        causal=causal,
        window=draw(st.none() | windows),
        softcap=draw(st.sampled_from([None, None, 0.5, 2.0, 30.0])),
        mask=draw(st.sampled_from([None, "bool_", *DTYPES])),
        mask_axes=draw(st.sampled_from(MASK_AXES)),
        segments=draw(st.sampled_from([None, None, "packed", "scattered"])),
        sinks=draw(st.sampled_from([None, None, *DTYPES])),
        scale=draw(st.sampled_from([None, None, -0.25, 0.5, 1e-3, 0.0])),
        layout=draw(st.sampled_from(LAYOUTS_OF_A_PROBLEM)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
