"""The versions of this library and of MLX, and the oldest MLX that it works with."""

from __future__ import annotations

import re
from importlib import metadata

import mlx.core as mx

OLDEST_MLX = (0, 32, 0)


def own_version() -> str | None:
    """The version of this library; None: it is a checkout that is not installed."""
    try:
        return metadata.version("mlx-flash-attention")
    except metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """``"0.32.4.dev1"`` as ``(0, 32, 4)``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def check_mlx(version: str) -> None:
    """Raise ImportError if this version of MLX is too old."""
    if version_numbers(version) < OLDEST_MLX:
        oldest = ".".join(map(str, OLDEST_MLX))
        raise ImportError(
            f"mlx_flash needs MLX {oldest} or newer, got {version}; "
            f"upgrade with: pip install --upgrade 'mlx>={oldest}'"
        )


MLX: str = mx.__version__  # type: ignore[attr-defined]
check_mlx(MLX)
