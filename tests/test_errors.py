"""What is refused, and with which words; and empty inputs, which are not refused."""

import importlib.util
import math
import re

import mlx.core as mx
import pytest

from mlx_flash import flash_attention, use_backend
from strategies import EVERY_MASK, HEAD_DIMS, Problem

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
    ],
    ids=[
        *("rank of q", "rank of v", "B of q", "B of v", "heads of v", "HKV=3"),
        *("HKV=8", "HKV=0", "Tk of v", "D of k", "D=0"),
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


@pytest.mark.parametrize(
    "option",
    [
        {"window": 0},
        {"window": (3, None)},
        {"softcap": 0.0},
        {"mask": mx.zeros((5, 7))},
        {"segment_ids": mx.zeros((2, 5), mx.int32)},
        {"sinks": mx.zeros((4,))},
    ],
    ids=lambda option: next(iter(option)),
)
def test_option_without_a_kernel_raises_and_is_not_dropped(option):
    name = next(iter(option))
    words = rf"\[flash_attention\] {name} is not implemented yet; use mx\.fast"
    with pytest.raises(NotImplementedError, match=words):
        flash_attention(*zeros(Q, KV, KV), **option)


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*zeros(Q, KV, KV), 0.5)


@pytest.mark.parametrize("D", [8, 40, 72, 160, 256], ids="D{}".format)
def test_head_dim_without_a_kernel_raises_and_names_the_others(kernels, D):
    supported = ".*".join(map(str, HEAD_DIMS))
    with pytest.raises(NotImplementedError, match=rf"{D}\b(.|\n)*{supported}"):
        kernels(*zeros((1, 2, 5, D), (1, 1, 7, D), (1, 1, 7, D)))


def test_value_head_dim_without_a_kernel_raises(kernels):
    with pytest.raises(NotImplementedError, match=r"64(.|\n)*32"):
        kernels(*zeros((1, 2, 5, 64), (1, 1, 7, 64), (1, 1, 7, 32)))


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


def test_errors_are_raised_before_empty_axes_return():
    with pytest.raises(ValueError, match="the same head dim"):
        flash_attention(*zeros((0, 4, 5, 16), (0, 2, 7, 32), (0, 2, 7, 16)))
