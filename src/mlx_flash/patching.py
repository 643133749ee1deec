"""Puts this library's attention in the place of MLX's, in code that is not changed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType, TracebackType

import mlx.core as mx

from mlx_flash import dispatch
from mlx_flash.masks import WindowMask

Function = Callable[..., object]

_in_force: list[tuple[Function, Function]] = []  # (original, replacement)


class patch:
    """Make ``mx.fast.scaled_dot_product_attention`` mean that of this library.

    A plain call, which ``undo()`` takes back, or a context manager. What is replaced:

    - ``mx.fast.scaled_dot_product_attention``, and every name in an imported module
      that refers to it, so that ``from mlx.core.fast import ...`` is covered;
    - where mlx-lm is installed, its functions that make causal masks: a sliding window
      reaches the kernels as a window instead of an array ``[Tq, Tk]``.

    A function that ``mx.compile`` has traced before keeps what it was traced with.

    Patching twice is the same as once: the inner of two contexts changes nothing, and
    ``undo()`` of any of them restores every reference.

    Example::

        with mlx_flash.patch():
            mlx_lm.tuner.train(model, optimizer, train_dataset)
    """

    def __init__(self) -> None:
        self.first = not _in_force
        if self.first:
            _in_force.extend(replacements())
            for original, replacement in _in_force:
                replace_everywhere(original, replacement)

    def undo(self) -> None:
        """Restore every reference, those in modules imported since included."""
        for original, replacement in _in_force:
            replace_everywhere(replacement, original)
        _in_force.clear()

    def __enter__(self) -> patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.first:
            self.undo()


def replacements() -> list[tuple[Function, Function]]:
    """Each function that is replaced, and by what."""
    native = mx.fast.scaled_dot_product_attention

    @wraps(native)
    def attention(*args: object, **options: object) -> object:
        return dispatch.scaled_dot_product_attention(*args, **options)  # type: ignore[arg-type]

    pairs: list[tuple[Function, Function]] = [(native, attention)]
    if importlib.util.find_spec("mlx_lm") is not None:
        pairs += mask_replacements(importlib.import_module("mlx_lm.models.base"))
    return pairs


def mask_replacements(base: ModuleType) -> list[tuple[Function, Function]]:
    """The functions of ``mlx_lm.models.base`` that make masks, replaced."""
    make_array: Callable[..., mx.array] = base.create_causal_mask
    make_mask: Function = base.create_attention_mask

    @wraps(make_array)
    def create_causal_mask(
        N: int,
        offset: int = 0,
        window_size: int | None = None,
        *others: object,
        **named_others: object,
    ) -> object:
        padded = any(x is not None for x in (*others, *named_others.values()))
        if window_size is None or padded:
            return make_array(N, offset, window_size, *others, **named_others)
        return WindowMask(N, offset, window_size, make_array)

    @wraps(make_mask)
    def create_attention_mask(
        h: mx.array,
        cache: object = None,
        window_size: int | None = None,
        return_array: bool = False,
    ) -> object:
        mask = make_mask(h, cache, window_size, return_array)
        return mask.array() if return_array and isinstance(mask, WindowMask) else mask

    return [(make_array, create_causal_mask), (make_mask, create_attention_mask)]


def replace_everywhere(old: Function, new: Function) -> None:
    """Let every name of an imported module that means ``old`` mean ``new``."""
    for name, module in list(sys.modules.items()):
        # The library itself must reach MLX's own function.
        if name == "mlx_flash" or name.startswith("mlx_flash."):
            continue
        names = getattr(module, "__dict__", {})  # no lazy import is set off by this
        for key in [key for key, value in list(names.items()) if value is old]:
            names[key] = new
