"""Where the kernels run: which back ends this machine has and which one is in use."""

from __future__ import annotations

import importlib.util
from types import TracebackType

import mlx.core as mx

NAMES = ("metal", "cuda", "simulator", "reference")
SIMULATOR_PACKAGES = ("elftools", "clang")

_selected: str | None = None


def backend() -> str:
    """Name of the back end that ``flash_attention`` uses now.

    ``"metal"`` where MLX has a Metal GPU, ``"cuda"`` where it has an NVIDIA GPU, else
    ``"reference"``, unless :class:`use_backend` chose another one. Never
    ``"simulator"`` by default.
    """
    if _selected is not None:
        return _selected
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "reference"


class use_backend:
    """Choose the back end: a plain call, or a context manager that undoes it.

    Args:
        name: ``"metal"`` (the GPU of a Mac), ``"cuda"`` (an NVIDIA GPU),
            ``"simulator"`` (the Metal kernels executed on the CPU, slow, eager only) or
            ``"reference"`` (plain MLX operations with linear memory on any device).

    Raises:
        ValueError: The name is unknown, or this machine lacks what it needs.

    Example::

        mlx_flash.use_backend("reference")  # from here on
        with mlx_flash.use_backend("simulator"):  # only inside
            out = mlx_flash.flash_attention(q, k, v)
    """

    def __init__(self, name: str) -> None:
        if name not in NAMES:
            raise ValueError(
                f"[use_backend] unknown back end, got {name!r}; "
                f"expected one of {', '.join(map(repr, NAMES))}"
            )
        if name == "metal" and not mx.metal.is_available():
            raise ValueError(
                "[use_backend] 'metal' needs a Mac with MLX's Metal build, which this "
                "machine lacks; use 'reference', or 'simulator' to execute the kernels"
            )
        if name == "cuda" and not mx.cuda.is_available():
            raise ValueError(
                "[use_backend] 'cuda' needs an NVIDIA GPU and MLX's CUDA build, which "
                "this machine lacks; install with: pip install "
                "'mlx-flash-attention[cuda]', or use 'reference'"
            )
        missing = [p for p in SIMULATOR_PACKAGES if importlib.util.find_spec(p) is None]
        if name == "simulator" and missing:
            raise ValueError(
                f"[use_backend] 'simulator' needs {', '.join(missing)}; "
                "install with: pip install 'mlx-flash-attention[simulator]'"
            )
        global _selected
        self.previous = _selected
        _selected = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _selected
        _selected = self.previous
