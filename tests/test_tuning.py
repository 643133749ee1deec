"""``mlx_flash.tune`` on a GPU that is not there; its clock says what a test wants."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flash import (
    backends,
    doctor,
    flash_attention,
    kernels,
    launch,
    splitting,
    tiles,
    tuning,
    use_backend,
)
from mlx_flash.__main__ import main
from mlx_flash.tiles import ALWAYS, ONE_PASS, TWO_PASSES, Tile
from oracle import assert_within_bound
from strategies import Problem

SHAPE = {"B": 1, "H": 2, "T": 24, "D": 16, "dtype": mx.float16}
ROW = 16, 2  # head dim and element size of this shape
CACHED = tiles.all_tuned_tiles, tiles.tile, tiles.fuses_dk_and_dv
CUDA = pytest.mark.parametrize("gpu", ["cuda"], indirect=True)
BOTH = pytest.mark.parametrize("gpu", ["metal", "cuda"], indirect=True)
make_call = tuning.Work.call


class FakeGPU:
    """Launches give what the reference gives, and take as long as ``seconds`` says."""

    def __init__(self, name):
        self.name = name
        self.now = 0.0
        self.calls = []
        self.seconds = lambda kernel, tile: 1.0
        self.results = lambda kernel, tile, work: work.wanted[kernel]

    def present(self, kernel):
        return tiles.tile(kernel, *ROW, self.name)

    def run(self, call, where):
        assert where == self.name
        for made, work, kernel, tile in self.calls:
            if made is call:
                self.now += self.seconds(kernel, tile)
                return self.results(kernel, tile, work)
        pairs = zip(call.shapes, call.dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in pairs]


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A GPU as far as the file of tuned tiles goes, and an empty cache folder."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(tiles, "gpu_name", lambda: "Fake GPU (8 cores)")
    monkeypatch.setattr(tiles, "TUNED_FOLDER", tmp_path / "tiles")
    forget()
    yield
    forget()


@pytest.fixture
def gpu(request, device, monkeypatch):
    """The kind that the test asks for, else Metal."""
    fake = FakeGPU(getattr(request, "param", "metal"))

    def call(work, kernel, tile, where):
        fake.calls.append((make_call(work, kernel, tile, where), work, kernel, tile))
        return fake.calls[-1][0]

    monkeypatch.setattr(backends, "_selected", fake.name)
    monkeypatch.setattr(tuning, "clock", lambda: fake.now)
    monkeypatch.setattr(tuning, "run", fake.run)
    monkeypatch.setattr(kernels, "run", fake.run)
    monkeypatch.setattr(kernels, "check_lane_map", lambda where: None)
    monkeypatch.setattr(tuning.Work, "call", call)
    monkeypatch.setattr(tuning, "METAL_CANDIDATES", 6)
    monkeypatch.setattr(tuning, "CUDA_CANDIDATES", 6)
    return fake


def forget():
    for function in CACHED:
        function.cache_clear()


def half_block(tile):
    return replace(tile, block=tile.block // 2)


def stored_tiles(block=16):
    tile = Tile(64, block)
    return dict.fromkeys((*ALWAYS, *ONE_PASS), tile)


@BOTH
def test_fastest_tile_is_chosen_stored_and_used(gpu, capsys):
    best = {kernel: half_block(gpu.present(kernel)) for kernel in (*ALWAYS, *ONE_PASS)}
    gpu.seconds = lambda kernel, tile: 1.0 if tile == best.get(kernel) else 1.5
    found = tuning.tune(**SHAPE)
    assert found.kernels == tuple(best)
    assert {name: found.choices[name].best.tile for name in best} == best
    assert {name: found.choices[name].best.milliseconds for name in best} == (
        dict.fromkeys(best, pytest.approx(1000))
    )
    assert f"stored in {found.path}\n" in capsys.readouterr().out
    variant = kernels.Variant(mx.float16, 16, 8, gpu=gpu.name)
    for _ in range(2):  # in this process, and in one that reads the file
        assert {name: variant.tile(name) for name in best} == best
        forget()


def test_tile_that_is_hardly_faster_is_not_chosen(gpu):
    present = {kernel: gpu.present(kernel) for kernel in (*ALWAYS, *ONE_PASS)}
    gpu.seconds = lambda kernel, tile: 1.0 + 0.015 * (tile == present.get(kernel))
    found = tuning.tune(**SHAPE)
    assert {name: found.choices[name].best.tile for name in present} == present


@BOTH
@pytest.mark.parametrize("fault", ["wrong", "nan", "raises", "with features"])
def test_tile_that_does_not_work_is_dropped_though_the_fastest(gpu, fault):
    bad = half_block(gpu.present("attention_dq"))

    def results(kernel, tile, work):
        outputs = work.wanted[kernel]
        featured = work.problem.sinks is not None
        if (kernel, tile) != ("attention_dq", bad) or (
            featured != (fault == "with features")
        ):
            return outputs
        if fault == "raises":
            raise RuntimeError("too many resources requested")
        return [x * (mx.nan if fault == "nan" else 1.5) for x in outputs]

    gpu.results = results
    gpu.seconds = lambda kernel, tile: 0.5 if tile == bad else 1.0
    found = tuning.tune(**SHAPE)
    assert found.choices["attention_dq"].best.tile == gpu.present("attention_dq")
    assert found.choices["attention_forward"].best.tile != bad
    (line,) = (x for x in tuning.report(found).splitlines() if x.startswith("dropped"))
    assert line.startswith(f"dropped: attention_dq, {tuning.tile_text(bad)}: ")
    words = {
        "raises": "RuntimeError: too many resources requested",
        "with features": "with other features: wrong",
    }
    assert words.get(fault, "wrong") in line


def test_tile_of_dq_must_serve_the_gradient_of_a_mask(gpu):
    bad = half_block(gpu.present("attention_dq"))

    def results(kernel, tile, work):
        wrong = (kernel, tile) == ("attention_dmask", bad)
        return [x * (1.5 if wrong else 1.0) for x in work.wanted[kernel]]

    gpu.results = results
    gpu.seconds = lambda kernel, tile: 0.5 if tile == bad else 1.0
    found = tuning.tune(**SHAPE)
    assert found.choices["attention_dq"].best.tile == gpu.present("attention_dq")


def test_kernel_without_a_tile_that_works_is_an_error(gpu):
    def results(kernel, tile, work):
        if kernel == "attention_dq":
            raise RuntimeError("it does not compile")
        return work.wanted[kernel]

    gpu.results = results
    with pytest.raises(RuntimeError, match="attention_dq: RuntimeError: it does not"):
        tuning.tune(**SHAPE)
    assert not tiles.tuned_tiles_file().exists()


def test_dk_and_dv_are_fused_where_that_is_faster(gpu):
    costs = {"attention_dkv": 1.0, "attention_dk": 0.45, "attention_dv": 0.5}
    gpu.seconds = lambda kernel, tile: costs.get(kernel, 9.0)
    found = tuning.tune(**SHAPE)
    assert found.kernels == (*ALWAYS, *TWO_PASSES)
    assert not tiles.fuses_dk_and_dv(*ROW, gpu.name)
    assert "attention_dkv (not used)" in tuning.report(found)
    costs["attention_dkv"] = 0.94  # 1 % faster than the other two, which stay
    assert tuning.tune(**SHAPE).kernels == (*ALWAYS, *TWO_PASSES)
    costs["attention_dkv"] = 0.9
    assert tuning.tune(**SHAPE).kernels == (*ALWAYS, *ONE_PASS)
    assert tiles.fuses_dk_and_dv(*ROW, gpu.name)


def test_report_is_a_table_with_the_own_path_of_mlx(gpu):
    best = half_block(gpu.present("attention_forward"))
    gpu.seconds = lambda kernel, tile: 0.8 if tile == best else 1.0
    title, head, forward, *_, last = tuning.report(tuning.tune(**SHAPE)).splitlines()
    for word in ("Fake GPU (8 cores)", "q [1, 2, 24, 16] float16", "causal=False"):
        assert word in title
    assert head.split("  ")[0] == "kernel"
    cells = "attention_forward", tuning.tile_text(best), "1000", "800", "20.0%", "6"
    assert all(cell in forward for cell in cells)
    assert last.startswith("forward+backward: MLX ")
    assert "mlx_flash" in last


def test_command_prints_the_report_and_takes_the_arguments_of_tune(gpu, capsys):
    numbers = {"B": 1, "H": 2, "HKV": 1, "T": 24, "D": 16, "Dv": 8, "window": 9}
    options = ["--dtype", "float32", "--causal", "--precise", "--report"]
    words = [f"--{name}={number}" for name, number in numbers.items()]
    assert main(["tune", *words, *options]) == 0
    text = capsys.readouterr().out
    assert "v [1, 1, 24, 8] float32, causal=True, window=9" in text
    assert "attention_dq" in text
    assert main(["tune", "--T", "24", "--D", "0"]) == 1
    assert "[tune] every size must be at least 1" in capsys.readouterr().out


@CUDA
def test_float32_on_cuda_has_tiles_for_each_precision(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "mlx_uses_tf32", lambda: True)
    for precise, table in ((False, "cuda"), (True, "cuda_precise")):
        tuning.tune(**SHAPE | {"dtype": mx.float32}, precise=precise)
        assert tiles.tuned_tiles(16, 4, table)
    assert set(tiles.all_tuned_tiles()) == {("cuda", 16, 4), ("cuda_precise", 16, 4)}


@pytest.mark.parametrize("name", ["simulator", "reference"])
def test_back_end_without_a_gpu_is_refused(monkeypatch, name):
    monkeypatch.setattr(backends, "_selected", name)
    with pytest.raises(ValueError, match=rf"\[tune\] .* got '{name}'; .*Mac"):
        tuning.tune(**SHAPE)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"H": 0}, ValueError, r"\[tune\] every size must be .* H=0"),
        ({"HKV": 0}, ValueError, r"\[tune\] every size must be .* HKV=0"),
        ({"H": 3, "HKV": 2}, ValueError, "must divide the heads of q"),
        ({"dtype": mx.int32}, ValueError, "float32, float16 or bfloat16"),
        ({"window": 4}, ValueError, "needs causal=True"),
        ({"D": 300}, NotImplementedError, "no kernel for head dim 300"),
        ({"T": 4096, "H": 64}, ValueError, r"\[tune\] .* smaller B, H or T"),
    ],
    ids=str,
)
def test_wrong_numbers_are_refused(gpu, monkeypatch, change, error, words):
    monkeypatch.setattr(splitting, "products_limit", lambda backend: 1e7)
    with pytest.raises(error, match=words):
        tuning.tune(**SHAPE | change)


@BOTH
@pytest.mark.parametrize("D", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_candidates_are_near_the_present_tile_and_fit(gpu, monkeypatch, D, dtype):
    monkeypatch.setattr(tuning, "METAL_CANDIDATES", 24)
    x = mx.zeros((1, 1, 8, D), dtype)
    problem = kernels.Problem(
        x,
        x,
        x,
        tuning.make_options(
            D, 8, 8, scale=None, causal=True, window=None, softcap=None
        ),
        gpu=gpu.name,
    )
    rows = mx.zeros((1, 1, 8))
    work = tuning.Work(problem, x, rows, rows, {})
    bench = tuning.Bench(gpu.name, gpu.name, work, work, work)
    row = D, dtype.size, gpu.name
    used = (*ALWAYS, *(ONE_PASS if tiles.fuses_dk_and_dv(*row) else TWO_PASSES))
    for kernel in used:
        first, *others = tuning.candidates(kernel, bench)
        assert first == tiles.tile(kernel, *row)
        assert others
        assert len({first, *others}) == 1 + len(others) <= 24
        for tile in others:
            pairs = zip(asdict(tile).values(), asdict(first).values(), strict=True)
            assert sum(a != b for a, b in pairs) <= 2
            assert tile.rows % (8 * tile.fragments) == 0
            assert tile.threads <= 1024
            if gpu.name == "cuda":
                used_bytes = launch.scratch_places(
                    work.call(kernel, tile, gpu.name).kernel
                )[1]
                assert used_bytes <= tiles.SHARED_BYTES_LIMIT
            else:
                assert tile.parts == 1 or not (tile.rows_in_tg or tile.second_in_tg)
                assert tiles.fragment_registers(kernel, tile, *row[:2]) <= 72
                assert tiles.threadgroup_bytes(kernel, tile, *row[:2]) <= 32768


def test_file_is_one_for_each_device_and_version(device, monkeypatch):
    paths = [tiles.store_tuned_tiles(*ROW, "metal", stored_tiles())]
    assert json.loads(paths[0].read_text())["device"] == "Fake GPU (8 cores)"
    for name, value in (
        ("gpu_name", lambda: "Another GPU"),
        ("own_version", lambda: "99.1"),
        ("own_version", lambda: None),
        ("MLX", "99.2"),
    ):
        monkeypatch.setattr(tiles, name, value)
        paths.append(tiles.tuned_tiles_file())
        forget()
        assert not tiles.all_tuned_tiles()
    assert len(set(paths)) == 5


def test_other_head_dims_and_tables_are_as_before(device):
    rows = (17, 2, "metal"), (16, 4, "metal"), (16, 2, "cuda")
    before = [tiles.tile("attention_dq", *row) for row in rows]
    tiles.store_tuned_tiles(*ROW, "metal", stored_tiles(block=8))
    tiles.store_tuned_tiles(64, 4, "metal", stored_tiles())
    assert [tiles.tile("attention_dq", *row) for row in rows] == before
    assert tiles.tile("attention_dq", *ROW) == Tile(64, 8)
    assert tiles.tile("attention_dq", 64, 4) == Tile(64, 16)


def test_doctor_names_the_file(device):
    path = tiles.store_tuned_tiles(*ROW, "metal", stored_tiles())
    assert doctor.description("metal")["tiles"] == f"tuned, {path}"


def test_machine_without_a_gpu_has_no_tuned_tiles(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert tiles.tuned_tiles_file() is None


def test_file_is_read_once(device, monkeypatch):
    reads = []
    read = tiles.read_tuned_tiles
    monkeypatch.setattr(
        tiles, "read_tuned_tiles", lambda path: reads.append(path) or read(path)
    )
    for D in range(1, 257):
        tiles.tile("attention_forward", D, 2)
        tiles.fuses_dk_and_dv(D, 4)
    assert len(reads) == 1


DAMAGED = {
    "empty": lambda document: "",
    "cut": lambda document: json.dumps(document)[:100],
    "list": lambda document: "[]",
    "no tiles": lambda document: json.dumps({}),
    "kernel": lambda document: json.dumps(document).replace("_dkv", "_dk"),
    "rows": lambda document: json.dumps(document).replace('"rows": 64', '"rows": "64"'),
    "missing": lambda document: json.dumps(document).replace('"parts": 1', '"x": 1'),
    "bytes": lambda document: "\xff",
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_an_error_that_names_it(device, damage):
    path = tiles.store_tuned_tiles(*ROW, "metal", stored_tiles())
    path.write_text(damage(json.loads(path.read_text())), encoding="latin-1")
    forget()
    with pytest.raises(RuntimeError, match="damaged") as caught:
        tiles.tile("attention_forward", *ROW)
    assert f"delete {path}" in str(caught.value)


def test_file_is_replaced_at_once(device, monkeypatch):
    path = tiles.store_tuned_tiles(*ROW, "metal", stored_tiles())
    before = path.read_text()

    def interrupted(self, target):
        assert Path(target).read_text() == before
        assert len(json.loads(self.read_text())["tiles"]) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiles.store_tuned_tiles(64, 2, "metal", stored_tiles())
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_flash_attention_runs_the_tuned_tiles(device, kernels_name, monkeypatch):
    """Tiles that no table has: operands in threadgroup memory, two row fragments."""
    tile = Tile(64, 16, 2, rows_in_tg=True, second_in_tg=True)
    q, k, v, dout, _ = Problem("float16", Tq=70, Tk=70, D=16).arrays()
    table = kernels.gpu_of(kernels_name, precise=False)
    used = dict.fromkeys((*ALWAYS, *TWO_PASSES), tile)
    threads = []

    def run(call, backend):
        threads.append(call.kernel.threads)
        return launch.run(call, backend)

    monkeypatch.setattr(kernels, "run", run)
    tiles.store_tuned_tiles(*ROW, table, used)
    with use_backend(kernels_name):
        (out,), grads = mx.vjp(lambda *qkv: [flash_attention(*qkv)], [q, k, v], [dout])
        mx.eval(out, grads)
    assert threads.count(tile.threads) >= len(used)
    actual = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    assert_within_bound(actual, q, k, v, dout, mx.zeros(q.shape[:3]))
