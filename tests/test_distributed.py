"""Attention on several ranks, all of them on this machine."""

import json
import re
import signal
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_flash import flash_attention, use_backend
from mlx_flash.distributed import (
    Layout,
    gather_sequence,
    ring_attention,
    shard_sequence,
)
from mlx_flash.options import Options
from mlx_flash.versions import MLX, version_numbers
from oracle import assert_bit_equal, assert_equal_up_to_rounding, assert_within_bound
from ranks import run_ranks, started_ranks
from ring_cases import (
    CASES,
    CASES_OF_KERNELS,
    SMALL,
    TOKENS,
    WEIGHTS,
    results_of,
    sum_of_squares,
)
from strategies import Problem

RING_CASES = Path(__file__).with_name("ring_cases.py")
SAME_CALL = r"all ranks must make the same call"
EAGER = r"mx.compile and mx.vmap of it are not implemented"
REFUSED = {
    "another scale": rf"ValueError: \[ring_attention\] {SAME_CALL}",
    "another length": r"ValueError: \[ring_attention\] .* that shard_sequence makes",
    "another dtype": rf"ValueError: \[gather_sequence\] {SAME_CALL}",
    "compiled": rf"NotImplementedError: \[ring_attention\] {EAGER}",
    "mapped": rf"NotImplementedError: \[ring_attention\] {EAGER}",
}
# Rank 1 ends or stops after a first call; the others make a second one.
LOSES_RANK_1 = """
import faulthandler, os, signal, sys
import mlx.core as mx
from mlx_flash.distributed import ring_attention
rank = mx.distributed.init(strict=True, backend="ring").rank()
x = mx.ones((1, 1, 8, 16))
ring_attention(x, x, x)
if rank == 1:
    os.kill(os.getpid(), int(sys.argv[1]))
faulthandler.dump_traceback_later(3, exit=True)
ring_attention(x, x, x)
"""


def gradient_of_weights():
    """What the ranks compute together, by one process."""

    def loss(w):
        return sum_of_squares(flash_attention, TOKENS, w) / TOKENS.shape[1]

    with use_backend("reference"):
        return mx.grad(loss)(WEIGHTS)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_compute_the_attention_of_the_whole_sequence(request, tmp_path, n):
    names = dict.fromkeys(["reference", request.config.getoption("--executor")])
    printed = run_ranks(n, RING_CASES, tmp_path, *names, folder=tmp_path)
    results = mx.load(str(tmp_path / "results.safetensors"))
    x = mx.arange(33.0).reshape(3, 11)
    assert_bit_equal(results["gathered"], x)
    assert_bit_equal(results["gradient"], 2 * x)
    assert_equal_up_to_rounding(results["weights"], gradient_of_weights())
    for backend_name in names:
        for name in CASES if backend_name == "reference" else CASES_OF_KERNELS:
            *arrays, _ = CASES[name].arrays()
            quantities = {
                quantity: results[f"{backend_name}/{name}/{quantity}"]
                for quantity in ("out", "dq", "dk", "dv")
            }
            assert_within_bound(quantities, *arrays, **CASES[name].options)
    for line in printed:
        refusals = json.loads(line)
        assert refusals.keys() == REFUSED.keys()
        for call, pattern in REFUSED.items():
            assert re.match(pattern, refusals[call])


# MLX 0.32.0 waits for a killed rank as for a stopped one.
LOST = (
    "connection to a peer was lost" if version_numbers(MLX) > (0, 32, 0) else "Timeout"
)


@pytest.mark.parametrize(
    ("end", "message"),
    [(signal.SIGKILL, LOST), (signal.SIGSTOP, "Timeout")],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_ends_the_others(tmp_path, end, message):
    with started_ranks(3, "-c", LOSES_RANK_1, int(end), folder=tmp_path) as ranks:
        for survivor in (ranks[0], ranks[2]):
            _, error = survivor.communicate(timeout=60)
            assert survivor.returncode == 1
            assert message in error


def test_one_rank_computes_attention_alone():
    *arrays, _ = SMALL.arrays()
    assert_within_bound(results_of(SMALL), *arrays, **SMALL.options)


def peak_memory_of_gradient(T):
    """Bytes that the gradient needs on top of its inputs."""
    *arrays, dout = Problem(H=4, HKV=2, Tq=T, Tk=T, D=16).arrays()[:4]
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with use_backend("reference"):
        mx.eval(mx.vjp(ring_attention, arrays, [dout]))
    return mx.get_peak_memory() - before


def test_peak_memory_of_the_gradient_is_linear_in_length():
    once, twice = map(peak_memory_of_gradient, (1024, 2048))
    assert twice < 2.6 * once


@pytest.mark.parametrize("shape", [(0, 2, 4, 16), (1, 0, 4, 16), (1, 2, 0, 16)])
def test_nothing_gives_nothing(shape):
    x = mx.zeros(shape, mx.float16)
    assert_bit_equal(ring_attention(x, x, x), x)


def test_ring_attention_names_what_is_wrong():
    x = mx.ones((1, 2, 4, 16))
    with pytest.raises(ValueError, match=r"\[ring_attention\] .*the same tokens; .*q"):
        ring_attention(x[:, :, 1:], x, x)
    with pytest.raises(ValueError, match=r"window=3 needs causal=True"):
        ring_attention(x, x, x, window=3)


@pytest.mark.parametrize("function", [shard_sequence, gather_sequence])
@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_none_is_refused(function, axis):
    message = rf"\[{function.__name__}\] axis must be .* got axis {axis} of x \[2, 3\]"
    with pytest.raises(ValueError, match=message):
        function(mx.ones((2, 3)), axis)


@given(T=st.integers(0, 60), n=st.integers(1, 7))
def test_every_token_has_one_rank_and_chunks_differ_by_one_at_most(T, n):
    chunks = [chunk for rank in range(n) for chunk in Layout(T, n).chunks(rank)]
    tokens = [token for chunk in chunks for token in range(chunk.start, chunk.stop)]
    assert sorted(tokens) == list(range(T))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1


@given(size=st.integers(0, 9), n=st.integers(1, 7))
def test_every_rank_sees_as_much_under_a_causal_mask(size, n):
    layout = Layout(2 * n * size, n)
    seen = [
        sum(sum(range(chunk.start, chunk.stop)) for chunk in layout.chunks(rank))
        for rank in range(n)
    ]
    assert len(set(seen)) == 1


bounds = st.none() | st.integers(-12, 12)


@given(low=bounds, high=bounds, Tq=st.integers(0, 8), Tk=st.integers(0, 8))
def test_chunks_are_left_out_only_if_they_see_nothing(low, high, Tq, Tk):
    if low is not None and high is not None:
        low, high = sorted((low, high))
    ahead = np.arange(Tk) - np.arange(Tq)[:, None]
    visible = np.ones((Tq, Tk), bool)
    if low is not None:
        visible &= ahead >= low
    if high is not None:
        visible &= ahead <= high
    assert Options(1.0, low, high).sees_any(Tq, Tk) == visible.any()
