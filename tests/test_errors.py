"""What is refused, and with which words; and empty inputs, which are not refused."""

import importlib.util
import math
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_flash import flash_attention, use_backend
from strategies import EVERY_MASK, Problem

Q, KV = (2, 4, 5, 16), (2, 2, 7, 16)


def zeros(*shapes, dtype=mx.float32):
    return [mx.zeros(shape, dtype) for shape in shapes]


def listed(name, shape):
    return re.escape(f"{name} {list(shape)} float32")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ((Q[1:], KV, KV), "must have rank 4"),
        ((Q, KV, (2, 2, 7, 16, 1)), "must have rank 4"),
        ((Q, (3, 2, 7, 16), (3, 2, 7, 16)), "the same batch size"),
        ((Q, KV, (1, 2, 7, 16)), "the same batch size"),
        ((Q, KV, (2, 4, 7, 16)), "k and v must have the same number of heads"),
        ((Q, (2, 3, 7, 16), (2, 3, 7, 16)), "must divide the heads of q"),
        ((Q, (2, 8, 7, 16), (2, 8, 7, 16)), "must divide the heads of q"),
        ((Q, (2, 0, 7, 16), (2, 0, 7, 16)), "must divide the heads of q"),
        ((Q, KV, (2, 2, 8, 16)), "the same number of keys"),
        ((Q, (2, 2, 7, 32), KV), "q and k must have the same head dim"),
        (((2, 4, 5, 0), (2, 2, 7, 0), KV), "head dim of q and k must be at least 1"),
        ((Q, KV, (2, 2, 7, 0)), "head dim of v must be at least 1"),
    ],
    ids=[
        *("rank of q", "rank of v", "B of q", "B of v", "heads of v", "HKV=3"),
        *("HKV=8", "HKV=0", "Tk of v", "D of k", "D=0", "Dv=0"),
    ],
)
def test_shapes_that_disagree_raise_and_are_named(shapes, words):
    named = ".*".join(map(listed, "qkv", shapes))
    with pytest.raises(ValueError, match=rf"\[flash_attention\].*{words}.*got {named}"):
        flash_attention(*zeros(*shapes))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["int32", "bool_", "complex64", "uint8"])
def test_other_dtypes_raise_and_are_named(dtype, place):
    arrays = zeros(Q, KV, KV)
    arrays[place] = arrays[place].astype(getattr(mx, dtype))
    named = f"{'qkv'[place]} {re.escape(str(list(arrays[place].shape)))} {dtype}"
    words = rf"must be float32, float16 or bfloat16.*got.*{named.rstrip('_')}"
    with pytest.raises(ValueError, match=rf"\[flash_attention\].*{words}"):
        flash_attention(*arrays)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_scale_that_is_not_finite_raises(scale):
    words = rf"\[flash_attention\] scale must be finite, got {scale}"
    with pytest.raises(ValueError, match=words):
        flash_attention(*zeros(Q, KV, KV), scale=scale)


@pytest.mark.parametrize("softcap", [0.0, -2.0, math.inf, math.nan])
def test_softcap_that_is_not_positive_and_finite_raises(softcap):
    words = rf"\[flash_attention\] softcap must be positive and finite.*got {softcap}"
    with pytest.raises(ValueError, match=words):
        flash_attention(*zeros(Q, KV, KV), softcap=softcap)


@pytest.mark.parametrize(
    "window",
    [0, -1, 1.5, True, "3", (1,), (1, 2, 3), (-1, 0), (0, -1), (1.5, None), ()],
    ids=repr,
)
@EVERY_MASK
def test_window_that_is_no_count_of_keys_raises(window, causal):
    words = rf"\[flash_attention\] window must be.*got {re.escape(repr(window))}"
    with pytest.raises(ValueError, match=words):
        flash_attention(*zeros(Q, KV, KV), window=window, causal=causal)


def test_integer_window_without_causal_raises_and_says_what_to_do():
    words = r"window=3 needs causal=True.*window=\(2, 0\).*causal=False"
    with pytest.raises(ValueError, match=words):
        flash_attention(*zeros(Q, KV, KV), window=3)


def test_integers_of_numpy_are_integers():
    q, k, v = zeros(Q, KV, KV)
    flash_attention(q, k, v, window=np.int64(3), causal=True)
    flash_attention(q, k, v, window=(np.int32(3), None))


@pytest.mark.parametrize(
    "shape",
    [(7, 5), (5,), (5, 6), (3, 1, 5, 7), (2, 2, 5, 7), (1, 2, 4, 5, 7), (0, 7)],
    ids=str,
)
def test_mask_that_does_not_broadcast_raises_and_is_named(shape):
    words = r"mask must broadcast to \[B, H, Tq, Tk\] = \[2, 4, 5, 7\]"
    named = f"{listed('mask', shape)}, {listed('q', Q)}"
    with pytest.raises(ValueError, match=rf"\[flash_attention\] {words}, got {named}"):
        flash_attention(*zeros(Q, KV, KV), mask=mx.zeros(shape))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64"])
def test_mask_of_another_dtype_raises_and_is_named(dtype):
    words = rf"mask must be bool.*\.astype, got mask \[5, 7\] {dtype}"
    with pytest.raises(ValueError, match=words):
        flash_attention(*zeros(Q, KV, KV), mask=mx.zeros((5, 7), getattr(mx, dtype)))


def test_mask_that_is_no_array_raises_and_names_causal():
    words = r"mask must be an array.*causal=True, got mask 'causal'"
    with pytest.raises(ValueError, match=words):
        flash_attention(*zeros(Q, KV, KV), mask="causal")


IDS = {
    "one array, Tq != Tk": (
        mx.zeros((2, 5), mx.int32),
        r"pair.*\(\[2, 5\], \[2, 7\]\)",
    ),
    "one of a pair": ((mx.zeros((2, 5), mx.int32),), r"or a pair"),
    "a list": ([[0] * 5, [0] * 7], r"or a pair"),
    "B of the queries": (
        (mx.zeros((1, 5), mx.int32), mx.zeros((2, 7), mx.int32)),
        r"shapes.*\(\[2, 5\], \[2, 7\]\), got query ids \[1, 5\] int32",
    ),
    "Tk of the keys": (
        (mx.zeros((2, 5), mx.int32), mx.zeros((2, 5), mx.int32)),
        r"shapes.*got.*key ids \[2, 5\] int32",
    ),
    "64 bits": (
        (mx.zeros((2, 5), mx.int32), mx.zeros((2, 7), mx.int64)),
        r"at most 32 bits.*astype.*key ids \[2, 7\] int64",
    ),
    "floats": (
        (mx.zeros((2, 5)), mx.zeros((2, 7), mx.int32)),
        r"integers.*got query ids \[2, 5\] float32",
    ),
}


@pytest.mark.parametrize(("ids", "words"), IDS.values(), ids=IDS)
def test_segment_ids_that_do_not_fit_raise_and_are_named(ids, words):
    with pytest.raises(ValueError, match=rf"\[flash_attention\].*{words}"):
        flash_attention(*zeros(Q, KV, KV), segment_ids=ids)


SINKS = {
    "another H": (mx.zeros((2,)), r"\[H\] = \[4\], got sinks \[2\] float32"),
    "another rank": (mx.zeros((1, 4)), r"got sinks \[1, 4\] float32"),
    "integers": (mx.zeros((4,), mx.int32), r"got sinks \[4\] int32"),
    "a number": (0.5, r"must be an array \[H\] of floats, got 0\.5"),
}


@pytest.mark.parametrize(("sinks", "words"), SINKS.values(), ids=SINKS)
def test_sinks_that_do_not_fit_raise_and_are_named(sinks, words):
    with pytest.raises(ValueError, match=rf"\[flash_attention\] sinks.*{words}"):
        flash_attention(*zeros(Q, KV, KV), sinks=sinks)


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*zeros(Q, KV, KV), 0.5)


@pytest.mark.parametrize(("D", "Dv"), [(257, 257), (64, 264), (512, 64)])
def test_head_dim_without_a_kernel_raises_and_names_the_largest(kernels, D, Dv):
    wrong = max(D, Dv)
    with pytest.raises(NotImplementedError, match=rf"{wrong}\b(.|\n)*\b256\b"):
        kernels(*zeros((1, 2, 5, D), (1, 1, 7, D), (1, 1, 7, Dv)))


def test_unknown_back_end_raises_and_names_the_known_ones():
    words = r"\[use_backend\].*'cpu'.*'metal', 'cuda', 'simulator', 'reference'"
    with pytest.raises(ValueError, match=words):
        use_backend("cpu")


def test_cuda_without_a_gpu_raises_and_names_the_alternatives(monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    words = r"\[use_backend\] 'cuda' needs an NVIDIA GPU.*'reference'"
    with pytest.raises(ValueError, match=words):
        use_backend("cuda")


def test_metal_without_a_gpu_raises_and_names_the_alternatives(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    words = r"\[use_backend\] 'metal' needs a Mac.*'reference'.*'simulator'"
    with pytest.raises(ValueError, match=words):
        use_backend("metal")


def test_simulator_without_its_package_raises_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    words = r"\[use_backend\] 'simulator' needs.*pip install"
    with pytest.raises(ValueError, match=words):
        use_backend("simulator")


EMPTY = {
    "B0": Problem(B=0, H=4, HKV=2),
    "H0": Problem(H=0, HKV=2),
    "H0-HKV0": Problem(H=0, HKV=0),
    "Tq0": Problem(H=4, HKV=2, Tq=0),
    "Tk0": Problem(H=4, HKV=2, Tk=0),
    "Tq0-Tk0": Problem(H=4, HKV=2, Tq=0, Tk=0),
}


@EVERY_MASK
@pytest.mark.parametrize("problem", EMPTY.values(), ids=EMPTY)
def test_empty_axis_gives_zeros_and_zero_gradients(
    attention, gradients, problem, causal
):
    q, k, v, dout, dlse = problem.resized(dtype="float16").arrays()
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape
    assert out.dtype == mx.float16
    assert lse.shape == q.shape[:3]
    assert lse.dtype == mx.float32
    assert mx.all(out == 0).item()
    assert mx.all(lse == -math.inf).item()
    grads = gradients(q, k, v, dout, dlse, causal=causal)
    for gradient, x in zip(grads.values(), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert gradient.dtype == x.dtype
        assert mx.all(gradient == 0).item()


@pytest.mark.parametrize("problem", EMPTY.values(), ids=EMPTY)
def test_empty_axis_with_all_features_leaves_the_sinks(attention, gradients, problem):
    features = {"window": 3, "softcap": 1.0, "mask": "float32", "mask_axes": "HQK"}
    problem = problem.resized(
        causal=True, Dv=24, segments="packed", sinks="float16", **features
    )
    q, k, v, dout, dlse = problem.arrays()
    options = problem.options
    out, lse = attention(q, k, v, **options, return_lse=True)
    assert out.shape == dout.shape
    assert mx.all(out == 0).item()
    sinks = options["sinks"].astype(mx.float32)
    assert mx.array_equal(lse, mx.broadcast_to(sinks[:, None], dlse.shape))
    grads = gradients(q, k, v, dout, dlse, **options)
    for name, x in {"q": q, "k": k, "v": v, "mask": options["mask"]}.items():
        assert grads[f"d{name}"].shape == x.shape
        assert mx.all(grads[f"d{name}"] == 0).item()
    assert grads["dsinks"].dtype == mx.float16
    expected = np.array(dlse).sum(axis=(0, 2))
    np.testing.assert_allclose(grads["dsinks"], expected, rtol=1e-3, atol=1e-3)


def test_errors_are_raised_before_empty_axes_return():
    with pytest.raises(ValueError, match="the same head dim"):
        flash_attention(*zeros((0, 4, 5, 16), (0, 2, 7, 32), (0, 2, 7, 16)))
