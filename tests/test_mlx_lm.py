"""Fine-tuning and generation with mlx-lm, with and without ``patch()``.

The models are tiny, their weights random, the tokenizer and the text made here.
"""

import importlib

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_flash
from mlx_flash import attention as attention_module
from oracle import assert_equal_up_to_rounding

pytest.importorskip("mlx_lm")

from mlx_lm.tuner.datasets import CacheDataset, TextDataset
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("the", "key", "a", "query", "sees", "is", "not", "hidden", "by", "its", "mask")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
WINDOW = 8
MODELS = {
    "llama": {},
    "qwen3": {
        "max_position_embeddings": 128,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
    # windows and full layers take turns
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    # the same with sinks, and experts
    "gpt_oss": {
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    # softcap, in operations of its own: the patch must leave it as it is
    "gemma2": {},
}
WINDOWED = ("gemma3_text", "gpt_oss")


@pytest.fixture(scope="module")
def tokenizer():
    names = ["<unk>", "</s>", *WORDS]
    tokens = {word: i for i, word in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    )


def new_model(name):
    mx.random.seed(1)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs(model_type=name, **SIZES, **MODELS[name]))
    if name == "gpt_oss":
        for i, layer in enumerate(model.layers):
            layer.self_attn.sinks = mx.random.normal((4,)) + i
    return model


@pytest.fixture
def seen(monkeypatch):
    """What each attention of this library is made of: options and names of arrays."""
    calls = []
    make = attention_module.attention_function

    def spy(backend_name, options, names, *others):
        calls.append((options, names))
        return make(backend_name, options, names, *others)

    monkeypatch.setattr(attention_module, "attention_function", spy)
    return calls


class Losses(list):
    """mlx-lm's callback: it keeps the losses."""

    def on_train_loss_report(self, report):
        self.append(report["train_loss"])

    def on_val_loss_report(self, report):
        self.append(report["val_loss"])


def fine_tuned(name, tokenizer, folder, checkpoint):
    """Losses of LoRA training with mlx-lm's trainer."""
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(WORDS, n)) for n in range(20, 36, 2)]
    text = TextDataset([{"text": text} for text in texts], tokenizer)
    model = new_model(name)
    model.freeze()
    lora = {"rank": 4, "scale": 4.0, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), lora)
    losses = Losses()
    np.random.seed(3)  # the trainer draws the order of its batches here
    train(
        model,
        optimizers.Adam(1e-2),
        CacheDataset(text),
        CacheDataset(text),
        TrainingArgs(
            batch_size=2,
            iters=6,
            val_batches=1,
            steps_per_report=1,
            steps_per_eval=3,
            max_seq_length=64,
            adapter_file=folder / "adapters.safetensors",
            grad_checkpoint=checkpoint,
        ),
        training_callback=losses,
    )
    return losses


@pytest.fixture(autouse=True)
def layers_as_they_were():
    """mlx-lm's checkpointing replaces ``__call__`` of the layers' class for good."""
    with pytest.MonkeyPatch.context() as restored:
        for name in MODELS:
            block = type(new_model(name).layers[0])
            restored.setattr(block, "__call__", block.__call__)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("name", MODELS)
def test_fine_tuning_has_the_same_losses(name, checkpoint, tokenizer, tmp_path, seen):
    expected = fine_tuned(name, tokenizer, tmp_path, checkpoint)
    assert not seen
    with mlx_flash.patch():
        losses = fine_tuned(name, tokenizer, tmp_path, checkpoint)
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert bool(seen) == (name != "gemma2")
    assert all("mask" not in names for _, names in seen)
    assert all(options.high == 0 for options, _ in seen)
    assert all(("sinks" in names) == (name == "gpt_oss") for _, names in seen)
    lows = {options.low for options, _ in seen}
    if name in WINDOWED:
        assert lows == {1 - WINDOW, None}
    else:
        assert lows <= {None}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same(name):
    """The gradients of one step, for every weight, without the trainer."""
    model = new_model(name)
    tokens = mx.random.randint(0, 32, (2, 21))

    def loss(model):
        return model(tokens).astype(mx.float32).logsumexp(axis=-1).mean()

    def gradients():
        return nn.value_and_grad(model, loss)(model)

    expected = gradients()
    with mlx_flash.patch():
        actual = gradients()
    expected = dict(tree_flatten(expected))
    for path, x in tree_flatten(actual):
        assert_equal_up_to_rounding(x, expected[path])


@pytest.mark.parametrize("name", WINDOWED)
def test_generation_with_a_cache_is_the_same(name, seen):
    """A prompt longer than the window, in two parts, and single tokens after it."""
    model = new_model(name)
    tokens = mx.random.randint(0, 32, (1, 30))
    parts = [tokens[:, :9], tokens[:, 9:27], *mx.split(tokens[:, 27:], 3, axis=1)]

    def logits():
        cache = model.make_cache()
        return mx.concatenate([model(part, cache) for part in parts], axis=1)

    expected = logits()
    with mlx_flash.patch():
        actual = logits()
    assert_equal_up_to_rounding(actual, expected)
    assert all("mask" not in names for _, names in seen)
    assert {options.low for options, _ in seen} == {None, 1 - WINDOW, 0}
