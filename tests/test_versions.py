"""Which versions of MLX are refused."""

import re
from pathlib import Path

import pytest

from mlx_flash.versions import OLDEST_MLX, check_mlx, version_numbers


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.32.4", (0, 32, 4)), ("0.33.0.dev20261201+abc", (0, 33, 0)), ("1.0", (1, 0))],
)
def test_version_numbers(version, numbers):
    assert version_numbers(version) == numbers


@pytest.mark.parametrize("version", ["0.31.2", "0.9.0", "0.31.99.dev1"])
def test_older_mlx_is_refused(version):
    with pytest.raises(ImportError, match=rf"needs MLX 0.32.0 or newer, got {version}"):
        check_mlx(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "1.0"])
def test_newer_mlx_is_accepted(version):
    check_mlx(version)


def test_package_asks_for_the_same_version():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'"mlx>=([\d.]+)"', text)
    assert version_numbers(oldest) == OLDEST_MLX
