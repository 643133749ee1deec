"""Launches that are cut into several: the same bits, whole blocks, within the limit."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flash import kernels, splitting
from mlx_flash.options import Options
from oracle import assert_bit_equal
from strategies import MASK_AXES

SIZES = {"B": 2, "H": 2, "Q": 193, "K": 193}  # one row more than the largest tile has


@pytest.fixture
def limit(monkeypatch):
    """Set the most products of a launch; tells how many pieces there were."""
    cuts = []

    def pieces(*args):
        cuts.append(uncounted(*args))
        return cuts[-1]

    def set_limit(products):
        monkeypatch.setattr(splitting, "products_limit", lambda _: products)
        cuts.clear()
        return cuts

    uncounted = splitting.pieces
    monkeypatch.setattr(splitting, "pieces", pieces)
    return set_limit


def results(name, Tq, Tk, D=16, DV=16, **options):
    """All that an attention computes, and its backward, by name."""
    mx.random.seed(5)
    B, H = SIZES["B"], SIZES["H"]
    q, dout = mx.random.normal((B, H, Tq, D)), mx.random.normal((B, H, Tq, DV))
    k, v = mx.random.normal((B, 1, Tk, D)), mx.random.normal((B, 1, Tk, DV))
    numbers = {key: options.pop(key, None) for key in ("low", "high", "softcap")}
    options |= {"options": Options(0.3, **numbers), "backend": name}
    out, lse = kernels.attention_forward(q, k, v, **options)
    dlse = mx.random.normal(lse.shape)
    saved = q, k, v, out, lse, dout, dlse
    return {"out": out, "lse": lse} | kernels.attention_backward(*saved, **options)


def ids(T, seed):
    return mx.sort(mx.random.randint(0, 5, (SIZES["B"], T), key=mx.random.key(seed)))


def mask_of(axes, dtype=mx.float32):
    shape = [n if axis in axes else 1 for axis, n in SIZES.items()]
    mask = mx.random.normal(shape, key=mx.random.key(1))
    return mask > 0 if dtype == mx.bool_ else mask.astype(dtype)


TQ, TK = SIZES["Q"], SIZES["K"]
CASES = {
    "full": {},
    "causal": {"high": TK - TQ},
    "causal, empty rows": {"high": -40},
    "window": {"low": TK - TQ - 20, "high": TK - TQ},
    "far window": {"low": 60},
    "segments": {"q_segments": ids(TQ, 1), "k_segments": ids(TK, 2)},
    "bool mask": {"mask": mask_of("BHQK", mx.bool_)},
    "float16 mask": {"mask": mask_of("QK", mx.float16)},
    "parts": {"D": 136, "DV": 144, "low": -9, "high": 50},
} | {f"mask {axes or 'of one'}": {"mask": mask_of(axes)} for axes in MASK_AXES}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_split_attention_has_the_same_bits(kernels_name, limit, options):
    cuts = limit(1e18)
    whole = results(kernels_name, TQ, TK, **options)
    assert all(len(pieces) == 1 for pieces in cuts)
    cuts = limit(1)
    split = results(kernels_name, TQ, TK, **options)
    assert len(cuts) >= 3  # out, dq, dk and dv
    assert all(len(pieces) > 1 for pieces in cuts)
    for name, x in whole.items():
        assert_bit_equal(split[name], x)


def test_everything_at_once_split_has_the_same_bits(kernels_name, limit):
    options = {
        "low": -30,
        "high": 45,
        "softcap": 2.0,
        "q_segments": ids(TQ, 1),
        "k_segments": ids(TK, 2),
        "mask": mask_of("BQK", mx.bfloat16),
        "sinks": mx.array([0.5, -1.0]),
    }
    cuts = limit(1e18)
    whole = results(kernels_name, TQ, TK, **options)
    cuts = limit(1000)
    split = results(kernels_name, TQ, TK, **options)
    assert any(len(pieces) > 1 for pieces in cuts)
    for name, x in whole.items():
        assert_bit_equal(split[name], x)


bounds = st.none() | st.integers(-400, 400)


@given(
    n_rows=st.integers(1, 300),
    n_columns=st.integers(1, 300),
    low=bounds,
    high=bounds,
    block=st.sampled_from([16, 32, 64]),
    limit=st.integers(1, 4000),
)
def test_pieces_are_whole_blocks_within_the_limit(
    n_rows, n_columns, low, high, block, limit
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "products_limit", lambda _: limit)
        depth = 512
        pieces = splitting.pieces(n_rows, n_columns, low, high, block, depth, "any")
    covered = [row for rows in pieces for row in range(rows.start, rows.stop)]
    assert covered == list(range(n_rows))
    assert all(rows.start < rows.stop for rows in pieces)
    assert all(rows.start % block == 0 for rows in pieces)
    for rows in pieces:
        seen = sum(
            1
            for i in range(rows.start, rows.stop)
            for j in range(n_columns)
            if (low is None or j >= i + low) and (high is None or j <= i + high)
        )
        assert seen <= limit or rows.stop - rows.start <= block


def test_rows_that_see_nothing_are_no_pieces_of_their_own(limit):
    limit(1)
    assert splitting.pieces(256, 64, None, -300, 32, 512, "any") == [slice(0, 256)]
    pieces = splitting.pieces(256, 64, None, -192, 32, 512, "any")
    assert pieces == [slice(0, 224), slice(224, 256)]


@pytest.mark.parametrize(
    ("device", "row"),
    [
        ("Apple M1", "Apple M1"),
        ("Apple M1 Pro", "Apple M1 Pro"),
        ("Apple M2 Ultra", "Apple M2 Ultra"),
        ("Apple M9 Max", ""),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("", ""),
    ],
)
def test_the_longest_name_that_fits_the_device_sets_the_limit(monkeypatch, device, row):
    monkeypatch.setattr(splitting.mx, "device_info", lambda: {"device_name": device})
    splitting.products_limit.cache_clear()
    try:
        assert splitting.products_limit("metal") == splitting.LIMITS[row]
        assert splitting.products_limit("simulator") == splitting.LIMITS[""]
    finally:
        splitting.products_limit.cache_clear()
