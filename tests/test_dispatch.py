"""Who computes which call: the table row by row, and that both paths agree."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flash import dispatch, scaled_dot_product_attention, use_backend
from mlx_flash.dispatch import TABLE, Call, Row, route
from mlx_flash.masks import WindowMask
from oracle import assert_equal_up_to_rounding
from strategies import Problem

METAL = Call("metal", mx.bfloat16, 64, 64, "causal", False, 1000, (0, 32, 4))
CUDA = replace(METAL, device="cuda", Tq=1024)
CPU = replace(METAL, device="cpu")

# For each row of the table: calls that it decides.
ROWS = [
    [
        replace(call, Tq=1, mask=mask, sinks=sinks, dtype=dtype)
        for call in (METAL, CUDA, CPU)
        for mask in ("none", "causal", "array", "window")
        for sinks in (False, True)
        for dtype in (mx.float32, mx.bfloat16)
    ],
    [replace(CPU, dtype=mx.float64)],
    [
        CPU,
        replace(CPU, D=512, Dv=512),
        replace(CPU, mask="array"),
        replace(CPU, mask="window", sinks=True, Tq=2),
        replace(CPU, mlx=(0, 29, 0)),
    ],
    [
        replace(METAL, D=257),
        replace(METAL, Dv=512, mask="array", mlx=(0, 30, 0)),
        replace(CUDA, D=512, Dv=512, sinks=True),
    ],
    [
        METAL,
        replace(METAL, Tq=9),
        replace(METAL, mask="none", dtype=mx.float32, D=128, Dv=128),
        replace(METAL, D=96, mlx=(0, 33, 0)),
        replace(METAL, D=80, Dv=80, dtype=mx.float16, mlx=(1, 0, 0)),
    ],
    [
        CUDA,
        replace(CUDA, Tq=128, mask="none", dtype=mx.float16),
        replace(CUDA, D=40, Dv=128),
        replace(CUDA, mlx=(0, 32, 2)),
    ],
    [
        # not fused on Metal, at least in one direction
        replace(METAL, Tq=8),
        replace(METAL, Tq=2),
        replace(METAL, mlx=(0, 32, 3)),
        replace(METAL, mask="array"),
        replace(METAL, mask="window"),
        replace(METAL, mask="causal, Tq > Tk"),
        replace(METAL, sinks=True),
        replace(METAL, D=32, Dv=32),
        replace(METAL, D=64, Dv=96),
        replace(METAL, D=256, Dv=256),
        # not cuDNN
        replace(CUDA, dtype=mx.float32),
        replace(CUDA, Tq=1023),
        replace(CUDA, D=36, Dv=36),
        replace(CUDA, D=136),
        replace(CUDA, mask="array"),
        replace(CUDA, mask="window"),
        replace(CUDA, mask="causal, Tq > Tk"),
        replace(CUDA, sinks=True),
        replace(CUDA, mlx=(0, 32, 1)),
    ],
]
DECISIONS = [
    pytest.param(call, row, id=f"row{number}-{call}")
    for number, (row, calls) in enumerate(zip(TABLE, ROWS, strict=True))
    for call in calls
]


@pytest.mark.parametrize(("call", "row"), DECISIONS)
def test_row_decides_the_call(call, row):
    assert route(call) is row


def test_last_row_matches_whatever_comes():
    assert TABLE[-1] == Row("flash", TABLE[-1].why)


@pytest.fixture
def paths(monkeypatch):
    """The paths that calls took."""
    taken = []

    def spy(name):
        function = getattr(dispatch, name)

        def call(*args, **options):
            taken.append(name)
            return function(*args, **options)

        monkeypatch.setattr(dispatch, name, call)

    spy("native_attention")
    spy("flash_attention")
    return taken


def window_array(queries, offset, window):
    rows = mx.arange(offset, offset + queries)[:, None]
    keys = mx.arange(offset + queries)[None]
    return (keys <= rows) & (keys > rows - window)


MASKS = {
    "none": lambda B, H, Tq, Tk: None,
    "causal": lambda B, H, Tq, Tk: "causal",
    "window": lambda B, H, Tq, Tk: WindowMask(Tq, Tk - Tq, 7, window_array),
    "bool": lambda B, H, Tq, Tk: window_array(Tq, Tk - Tq, 9),
    "additive": lambda B, H, Tq, Tk: mx.random.normal((B, 1, Tq, Tk), key=KEY),
    "integers": lambda B, H, Tq, Tk: mx.arange(Tk) % 3,
}
KEY = mx.random.key(3)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("path", ["flash", "mlx"])
def test_each_path_equals_mlx(monkeypatch, paths, mask, sinks, path):
    problem = Problem(H=4, HKV=2, Tq=23, Tk=40)
    q, k, v, dout, _ = problem.arrays()
    mask = MASKS[mask](problem.B, problem.H, problem.Tq, problem.Tk)
    sinks = mx.arange(4) / 3 if sinks else None
    array = mask.array() if isinstance(mask, WindowMask) else mask
    monkeypatch.setattr(dispatch, "TABLE", (Row(path, "this test"),))

    def ours(q, k, v):
        out = scaled_dot_product_attention(
            q, k, v, scale=0.3, mask=mask, sinks=sinks, stream=mx.cpu
        )
        return [out]

    def native(q, k, v):
        out = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=0.3, mask=array, sinks=sinks, stream=mx.cpu
        )
        return [out]

    # the CPU has every path: a GPU's kernels are not needed, and not asked for
    (out,), gradients = mx.vjp(ours, [q, k, v], [dout])
    (expected,), wanted = mx.vjp(native, [q, k, v], [dout])
    for x, y in zip((out, *gradients), (expected, *wanted), strict=True):
        assert_equal_up_to_rounding(x, y)
    assert paths == ["native_attention" if path == "mlx" else "flash_attention"]


def test_mask_of_a_window_that_does_not_fit_is_an_array(paths):
    q, k, v, _, _ = Problem(H=2, HKV=2, Tq=8, Tk=8).arrays()
    mask = WindowMask(8, 0, 3, window_array)
    with pytest.raises(ValueError, match=r"mask \[8, 8\]"), mx.stream(mx.cpu):
        scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:], scale=1.0, mask=mask)
    assert paths == ["flash_attention"]


def test_one_query_with_a_window_is_decoding(paths):
    q, k, v, _, _ = Problem(H=2, HKV=1, Tq=1, Tk=20).arrays()
    mask = WindowMask(1, 19, 4, window_array)
    out = scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    last = [x[:, :, -4:] for x in (k, v)]
    expected = mx.fast.scaled_dot_product_attention(q, *last, scale=1.0)
    assert_equal_up_to_rounding(out, expected)
    assert paths == ["native_attention"]


def test_window_mask_stands_for_its_array():
    mask = WindowMask(5, 2, 3, window_array)
    array = window_array(5, 2, 3)
    other = mx.arange(7) > 2
    assert (mask.shape, mask.ndim, mask.dtype) == ((5, 7), 2, mx.bool_)
    pairs = [
        (mx.where(mask, 1, 2), mx.where(array, 1, 2)),
        (mask[1:, ::2], array[1:, ::2]),
        (mask & other, array & other),
        (other & mask, array & other),
        (mask | other, array | other),
        (other | mask, array | other),
        (~mask, ~array),
        (mask.astype(mx.float32), array.astype(mx.float32)),
    ]
    for x, y in pairs:
        assert mx.array_equal(x, y).item()


def test_unknown_word_for_a_mask_raises():
    q = mx.zeros((1, 1, 4, 16))
    with pytest.raises(ValueError, match="got 'causl'"):
        scaled_dot_product_attention(q, q, q, scale=1.0, mask="causl")


def test_wrong_rank_raises_in_the_words_of_mlx():
    q = mx.zeros((1, 4, 16))
    with pytest.raises(ValueError, match="rank 4"):
        scaled_dot_product_attention(q, q, q, scale=1.0)


@pytest.mark.parametrize("stream", [mx.cpu, mx.Device(mx.cpu), mx.default_stream])
def test_cpu_stream_is_the_device_cpu(stream):
    stream = stream(mx.cpu) if callable(stream) else stream
    assert dispatch.device_kind(stream) == "cpu"
    with mx.stream(stream):
        assert dispatch.device_kind(None) == "cpu"


@pytest.mark.parametrize("gpu", ["metal", "cuda"])
def test_cpu_stream_of_a_machine_with_a_gpu_needs_no_gpu(monkeypatch, gpu):
    monkeypatch.setattr(mx, gpu, type("gpu", (), {"is_available": lambda: True}))
    q, k, v, _, _ = Problem().arrays()
    with use_backend(gpu):
        out = scaled_dot_product_attention(q, k, v, scale=1.0, stream=mx.cpu)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, stream=mx.cpu)
    assert_equal_up_to_rounding(out, expected)


def test_force_fused_reaches_mlx(monkeypatch):
    monkeypatch.setattr(dispatch, "native_attention", lambda *_, **options: options)
    q = mx.zeros((1, 1, 1, 64))
    options = scaled_dot_product_attention(q, q, q, scale=1.0, force_fused=True)
    assert options["force_fused"] is True
    assert "force_fused" not in scaled_dot_product_attention(q, q, q, scale=1.0)


def test_documented_table_is_the_table():
    text = (Path(__file__).parents[1] / "docs" / "integration.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    who = {"MLX": "mlx", "`flash_attention`": "flash"}
    documented = [(who[row[6].strip()], row[7].strip()) for row in rows[2:9]]
    assert documented == [(row.path, row.why) for row in TABLE]
