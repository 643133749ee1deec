"""``patch()``: what it replaces, and that every reference comes back."""

import importlib.util
import sys
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_flash import dispatch, patch
from mlx_flash.masks import WindowMask
from oracle import assert_equal_up_to_rounding
from strategies import Problem


@pytest.fixture(autouse=True)
def native():
    """MLX's own function; a name of this module would be replaced, too."""
    function = mx.fast.scaled_dot_product_attention
    yield function
    patch().undo()
    assert mx.fast.scaled_dot_product_attention is function


@pytest.fixture
def importer(monkeypatch):
    """A module that imports the function, at the time when it is called."""

    def make(name, **names):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def calls(monkeypatch):
    """Arguments of the calls that reach this library."""
    seen = []
    attention = dispatch.scaled_dot_product_attention

    def spy(*args, **options):
        seen.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(dispatch, "scaled_dot_product_attention", spy)
    return seen


def test_call_of_mlx_reaches_this_library_only_inside(calls, native):
    q, k, v, _, _ = Problem().arrays()
    expected = native(q, k, v, scale=0.5, mask="causal")
    with patch():
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal")
    assert calls == [{"scale": 0.5, "mask": "causal"}]
    assert_equal_up_to_rounding(out, expected)
    mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5)
    assert len(calls) == 1


def test_module_of_mlx_itself_is_covered(calls):
    layer = nn.MultiHeadAttention(32, 4)
    x = mx.random.normal((2, 9, 32))
    mask = nn.MultiHeadAttention.create_additive_causal_mask(9)
    expected = layer(x, x, x, mask)
    with patch():
        out = layer(x, x, x, mask)
    assert_equal_up_to_rounding(out, expected)
    assert len(calls) == 1


def test_names_in_modules_change_and_come_back(importer, native):
    earlier = importer("earlier", attention=native, again=native, other=mx.fast.rope)
    with patch():
        replacement = mx.fast.scaled_dot_product_attention
        later = importer("later", attention=replacement)
        assert replacement is not native
        assert earlier.attention is earlier.again is replacement
        assert earlier.other is mx.fast.rope
    for module in (earlier, later):
        assert module.attention is native
    assert earlier.again is native
    assert dispatch.native_attention is native


def test_name_that_was_changed_meanwhile_is_left_alone(importer, native):
    module = importer("module", attention=native)
    with patch():
        module.attention = len
    assert module.attention is len


def test_plain_call_stays_until_undone(native):
    patched = patch()
    assert mx.fast.scaled_dot_product_attention is not native
    patched.undo()
    assert mx.fast.scaled_dot_product_attention is native
    patched.undo()
    assert mx.fast.scaled_dot_product_attention is native


def test_context_is_undone_after_an_exception(native):
    with pytest.raises(ZeroDivisionError), patch():
        _ = 1 / 0
    assert mx.fast.scaled_dot_product_attention is native


def test_patching_twice_is_patching_once(importer, native):
    module = importer("module", attention=native)
    with patch():
        replacement = module.attention
        with patch():
            assert module.attention is replacement
        assert module.attention is replacement
    assert module.attention is native


def test_undo_of_the_second_patch_restores_all(native):
    patch()
    patch().undo()
    assert mx.fast.scaled_dot_product_attention is native


def test_patch_works_without_mlx_lm(monkeypatch, native):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with patch():
        assert mx.fast.scaled_dot_product_attention is not native


@pytest.fixture(scope="module")
def base():
    return pytest.importorskip("mlx_lm.models.base")


def test_masks_of_mlx_lm_know_their_window(base):
    array = base.create_causal_mask(6, 3, 4)
    with patch():
        mask = base.create_causal_mask(6, 3, 4)
        assert isinstance(mask, WindowMask)
        assert (mask.queries, mask.offset, mask.window) == (6, 3, 4)
    assert mx.array_equal(mask.array(), array).item()
    assert isinstance(base.create_causal_mask(6, 3, 4), mx.array)


def test_masks_of_mlx_lm_that_are_no_plain_window_stay_arrays(base):
    h, padding = mx.zeros((2, 6, 8)), mx.array([0, 2])
    makers = [
        lambda: base.create_causal_mask(6, 3),
        lambda: base.create_causal_mask(6, 3, 4, left_padding=padding),
        lambda: base.create_causal_mask(6, 3, 4, padding),
        lambda: base.create_attention_mask(h, None, 4, True),
    ]
    for make in makers:
        array = make()
        with patch():
            assert mx.array_equal(make(), array).item()
            assert isinstance(make(), mx.array)
    with patch():
        assert base.create_attention_mask(h) == "causal"
        assert base.create_attention_mask(h, None, 6) == "causal"
        assert base.create_attention_mask(h[:, :1]) is None
        assert isinstance(base.create_attention_mask(h, None, 5), WindowMask)
