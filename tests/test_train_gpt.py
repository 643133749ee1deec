"""The training example: its losses, its checkpoints and its command line."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_flash import use_backend
from ranks import run_ranks, started_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TEXT = bytes(range(32, 127)) * 20
TINY = (
    "--steps 10 --context 24 --batch-size 2 --accumulate 2 --learning-rate 0.01 "
    "--layers 2 --heads 4 --kv-heads 2 --dims 64 --seed 1 --eval-every 4"
)
BAD_ARGUMENTS = {
    "--data missing.txt": r"No such file or directory: 'missing.txt'",
    "--data short.txt": r"too short, got 5 bytes; a context of 24 needs 250",
    "--dims 48": r"dims 48 / heads 4 = 12, must be a multiple of 8",
    "--dims 1056 --backend simulator": r"no kernel for head dim 264",
    "--data zero.txt --pack": r"holds a zero byte, which --pack needs",
    "--heads 3": r"heads 3 must divide dims 64",
    "--kv-heads 3": r"kv-heads 3 must divide heads 4",
    "--layers 0": r"--layers: must be a whole number of at least 1, got '0'",
    "--learning-rate nan": r"--learning-rate: must be positive and finite, got 'nan'",
    "--resume": r"there is no checkpoint .* to resume from",
}


@pytest.fixture(scope="module")
def train_gpt() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_gpt")


@pytest.fixture(scope="module")
def settings(train_gpt: ModuleType):
    return train_gpt.settings_of(train_gpt.make_parser().parse_args(TINY.split()), TEXT)


def trained(train_gpt, settings, attention, folder, text=TEXT):
    run = train_gpt.new_run(settings, train_gpt.ATTENTION[attention])
    train_gpt.train(run, text, settings, folder, eval_every=4)
    return run


def interrupt_at(monkeypatch, train_gpt, last_step):
    """Make the training of ``last_step`` raise as Ctrl-C does."""
    training_batch = train_gpt.training_batch

    def batch_or_interrupt(windows, settings, step):
        if step == last_step:
            raise KeyboardInterrupt
        return training_batch(windows, settings, step)

    monkeypatch.setattr(train_gpt, "training_batch", batch_or_interrupt)


def arrays_of(run):
    return dict(tree_flatten([run.model.parameters(), run.optimizer.state]))


def assert_same_run(run, expected):
    assert run.training_losses == expected.training_losses
    assert run.validation_losses == expected.validation_losses
    arrays = arrays_of(run)
    for name, array in arrays_of(expected).items():
        assert mx.array_equal(arrays[name], array), name


def test_flash_trains_like_native(train_gpt, settings, tmp_path):
    text = train_gpt.read_text(None)
    flash = trained(train_gpt, settings, "flash", tmp_path, text)
    native = trained(train_gpt, settings, "native", tmp_path, text)
    assert len(flash.training_losses) == 10
    assert flash.training_losses == pytest.approx(native.training_losses, rel=1e-4)
    assert flash.training_losses[-1] < flash.training_losses[0] - 1.0
    expected = dict(tree_flatten(native.model.parameters()))
    for name, parameter in tree_flatten(flash.model.parameters()):
        np.testing.assert_allclose(parameter, expected[name], atol=1e-3, err_msg=name)


def test_train_gpt_through_the_simulator(train_gpt, settings, tmp_path):
    model = train_gpt.GPTConfig(layers=1, heads=2, kv_heads=1, dims=32)
    tiny = replace(settings, model=model, context=16, batch_size=1, steps=3)
    with use_backend("simulator"):
        simulated = trained(train_gpt, tiny, "flash", tmp_path)
    native = trained(train_gpt, tiny, "native", tmp_path)
    assert len(simulated.training_losses) == 3
    assert simulated.training_losses == pytest.approx(native.training_losses, rel=1e-4)


def test_batches_are_windows_decided_by_seed_and_step(train_gpt, settings):
    windows = train_gpt.every_window(np.arange(200, dtype=np.uint8), settings)
    batch = train_gpt.training_batch(windows, settings, 3)
    assert batch.shape == (2, 2, 25)
    assert mx.array_equal(batch[..., 1:], batch[..., :-1] + 1)
    assert mx.array_equal(batch, train_gpt.training_batch(windows, settings, 3))
    assert not mx.array_equal(batch, train_gpt.training_batch(windows, settings, 4))
    other = replace(settings, seed=2)
    assert not mx.array_equal(batch, train_gpt.training_batch(windows, other, 3))


def test_packing_keeps_paragraphs_whole_and_cuts_long_ones(train_gpt):
    text = b"abc\n\nde\n \nfghijklmnopqrst\n\nu\n\nv"
    rows = [bytes(row) for row in train_gpt.pack(text, context=7)]
    assert rows == [b"abc\0de\0\0", b"fghijklm", b"nopqrst\0", b"u\0v\0\0\0\0\0"]


@pytest.mark.parametrize("attention", ["flash", "native"])
def test_packed_loss_and_gradients_equal_those_of_the_documents_alone(
    train_gpt, settings, attention
):
    documents = [b"abc", b"defghijk", b"l", b"mnopqrstuvw", b"xyzabcde"]
    packed = train_gpt.pack(b"\n\n".join(documents), settings.context)
    assert packed.shape == (2, 25)  # several documents in a window
    model = train_gpt.new_run(settings, train_gpt.ATTENTION[attention]).model

    def packed_loss(model):
        return train_gpt.mean_loss(model, mx.array(packed.astype(np.int32)), True)

    def loss_of_documents(model):
        losses = []
        for document in documents:
            tokens = mx.array([[*document, 0]])  # every byte predicts the next one
            losses.append(len(document) * train_gpt.mean_loss(model, tokens, False))
        return sum(losses) / sum(map(len, documents))

    loss, gradients = nn.value_and_grad(model, packed_loss)(model)
    expected_loss, expected = nn.value_and_grad(model, loss_of_documents)(model)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = dict(tree_flatten(expected))
    for name, gradient in tree_flatten(gradients):
        size = mx.abs(expected[name]).max().item()
        np.testing.assert_allclose(
            gradient, expected[name], atol=1e-4 * size, err_msg=name
        )


def test_packed_training_lowers_the_loss(train_gpt, settings, tmp_path):
    text = b"the quick brown fox\n\njumps over\n\nthe lazy dog\n\n" * 60
    run = trained(train_gpt, replace(settings, pack=True), "flash", tmp_path, text)
    assert run.validation_losses[-1][1] < run.validation_losses[0][1] - 1.0


def test_accumulation_equals_a_larger_batch(train_gpt, settings):
    losses = []
    for accumulate, batch_size in ((4, 1), (1, 4)):
        run = train_gpt.new_run(
            replace(settings, accumulate=accumulate), train_gpt.native_attention
        )
        step = train_gpt.make_training_step(run, compiled=False)
        windows = train_gpt.every_window(np.frombuffer(TEXT, np.uint8), settings)
        tokens = windows[:4].reshape(accumulate, batch_size, 25)
        tokens = mx.array(tokens.astype(np.int32))
        losses.append([step(tokens) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "pack"])
def test_two_ranks_train_like_one_process(train_gpt, settings, tmp_path, pack):
    paragraphs = [bytes(range(32, last)) for last in range(33, 63)] * 15
    data = tmp_path / "text"
    data.write_bytes(b"\n\n".join(paragraphs))
    arguments = [*TINY.split(), "--data", data, "--out", tmp_path, "--sample-bytes", 1]
    printed = run_ranks(
        2,
        EXAMPLES / "train_gpt.py",
        *arguments,
        *(["--pack"] if pack else []),
        folder=tmp_path,
    )
    assert "loss after" in printed[0]
    assert printed[1] == ""

    two = train_gpt.new_run(settings, train_gpt.native_attention)
    text = data.read_bytes()
    settings = replace(
        settings, pack=pack, text_digest=hashlib.sha256(text).hexdigest()
    )
    train_gpt.load_checkpoint(tmp_path / train_gpt.CHECKPOINT, two, settings)
    one = trained(train_gpt, settings, "flash", tmp_path, text)
    assert len(two.training_losses) == 10
    assert two.training_losses == pytest.approx(one.training_losses, rel=1e-4)
    (*_, of_two), (*_, of_one) = two.validation_losses, one.validation_losses
    assert of_two == pytest.approx(of_one, rel=1e-4)


def test_ranks_must_divide_the_batch(train_gpt, tmp_path):
    arguments = [*TINY.split(), "--batch-size", 3, "--out", tmp_path / "run"]
    program = EXAMPLES / "train_gpt.py"
    with started_ranks(2, program, *arguments, folder=tmp_path) as processes:
        for process in processes:
            _, error = process.communicate(timeout=60)
            assert process.returncode == 2
            assert "the 2 ranks must divide the windows" in error


def test_only_matrices_decay(train_gpt, settings):
    run = train_gpt.new_run(settings, train_gpt.native_attention)
    before = dict(tree_flatten(run.model.parameters()))
    run.optimizer.update(run.model, tree_map(mx.zeros_like, run.model.parameters()))
    for name, parameter in tree_flatten(run.model.parameters()):
        unchanged = mx.array_equal(parameter, before[name]).item()
        assert unchanged == (parameter.ndim == 1), name


def test_a_resumed_run_equals_an_uninterrupted_one(
    train_gpt, settings, tmp_path, monkeypatch
):
    whole = trained(train_gpt, settings, "flash", tmp_path)

    path = tmp_path / train_gpt.CHECKPOINT
    path.unlink()
    with monkeypatch.context() as patch:
        interrupt_at(patch, train_gpt, last_step=6)
        with pytest.raises(KeyboardInterrupt):
            trained(train_gpt, settings, "flash", tmp_path)

    # Another seed gives parameters that only the checkpoint can put right.
    other = replace(settings, seed=2)
    resumed = train_gpt.new_run(other, train_gpt.ATTENTION["flash"])
    train_gpt.load_checkpoint(path, resumed, settings)
    assert len(resumed.training_losses) == 4
    train_gpt.train(resumed, TEXT, settings, tmp_path, eval_every=4)
    assert_same_run(resumed, whole)


def test_an_interrupted_save_keeps_the_previous_checkpoint(
    train_gpt, settings, tmp_path, monkeypatch
):
    path = tmp_path / train_gpt.CHECKPOINT
    run = train_gpt.new_run(settings, train_gpt.native_attention)
    run.training_losses, run.validation_losses = [3.0], [(0, 4.0), (1, 2.5)]
    train_gpt.save_checkpoint(path, run, settings)

    def save_half(name, arrays, metadata):
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    changed = train_gpt.new_run(replace(settings, seed=2), train_gpt.native_attention)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", save_half)
        with pytest.raises(OSError, match="disk full"):
            train_gpt.save_checkpoint(path, changed, settings)

    train_gpt.load_checkpoint(path, changed, settings)
    assert_same_run(changed, run)
    train_gpt.save_checkpoint(path, changed, settings)
    assert list(tmp_path.iterdir()) == [path]


def test_command_line_writes_and_prints_the_results(train_gpt, tmp_path, capsys):
    out = tmp_path / "new" / "run"
    arguments = [*TINY.split(), "--sample-bytes", "5", "--out", str(out)]
    train_gpt.main(arguments)
    printed = capsys.readouterr().out
    for line in ("sample", "loss before", "loss after", "bits per byte", "peak memory"):
        assert line in printed
    assert "tokens per second" in printed
    assert str(out / "checkpoint.safetensors") in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint.safetensors",
        "loss.png",
    ]

    # A finished run has nothing left to train: the same losses, the same sample.
    train_gpt.main([*arguments, "--resume"])
    resumed = capsys.readouterr().out
    assert resumed.partition("speed")[0] == printed.partition("speed")[0]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_ARGUMENTS.items(), ids=BAD_ARGUMENTS
)
def test_bad_arguments_end_in_one_line(
    train_gpt, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    Path("zero.txt").write_bytes(TEXT + b"\0")
    with pytest.raises(SystemExit) as stopped:
        train_gpt.main(f"{TINY} {arguments}".split())
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


def test_resume_refuses_other_settings(train_gpt, settings, tmp_path):
    path = tmp_path / train_gpt.CHECKPOINT
    run = train_gpt.new_run(settings, train_gpt.native_attention)
    run.training_losses, run.validation_losses = [3.0], [(0, 4.0), (1, 2.5)]
    train_gpt.save_checkpoint(path, run, settings)
    with pytest.raises(ValueError, match=r"written with seed 1, got 2"):
        train_gpt.load_checkpoint(path, run, replace(settings, seed=2))
