"""Problems, listed or random: hypothesis draws shapes, flags and a seed, no tensors."""

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
    """The inputs of one call: its repr is enough to build the arrays again."""

    dtype: str = "float32"
    B: int = 1
    H: int = 2
    HKV: int = 1
    Tq: int = 45
    Tk: int = 71
    D: int = 32
    causal: bool = False
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
        layouts = MIXED if self.layout == "mixed" else [self.layout] * 4
        arrays = []
        for (heads, T), layout in zip((rows, keys, keys, rows), layouts, strict=True):
            values = rng.standard_normal((self.B, heads, T, self.D), np.float32)
            x = mx.array(values).astype(getattr(mx, self.dtype))
            arrays.append(LAYOUTS[layout](x))
        dlse = rng.standard_normal((self.B, self.H, self.Tq), np.float32)
        arrays.append(mx.array(dlse))
        mx.eval(arrays)
        return arrays

    @property
    def options(self):
        """Keyword arguments of the call."""
        return {"scale": self.scale, "causal": self.causal}


lengths = st.sampled_from(BLOCK_EDGES) | st.integers(1, 100)


@st.composite
def problems(draw):
    """Any problem that every back end supports."""
    HKV = draw(st.integers(1, 2))
    return Problem(
        dtype=draw(st.sampled_from(DTYPES)),
        B=draw(st.integers(1, 2)),
        H=HKV * draw(st.integers(1, 3)),
        HKV=HKV,
        Tq=draw(lengths),
        Tk=draw(lengths),
        D=draw(st.sampled_from(HEAD_DIMS)),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, -0.25, 0.5, 1e-3, 0.0])),
        layout=draw(st.sampled_from(LAYOUTS_OF_A_PROBLEM)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
