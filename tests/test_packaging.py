"""The wheel: its contents, and a kernel run from it in a clean environment."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

RUN_A_KERNEL = """
import mlx.core as mx
import mlx_flash
from mlx_flash.kernel_files import kernel_folder
assert "site-packages" in mlx_flash.__file__, mlx_flash.__file__
assert kernel_folder("metal").parent.name == "mlx_flash", kernel_folder("metal")
q = mx.random.normal((1, 2, 5, 16))
mlx_flash.use_backend("reference")
expected = mlx_flash.flash_attention(q, q, q)
if not mx.metal.is_available():
    mlx_flash.use_backend("simulator")
else:
    mlx_flash.use_backend("metal")
print(mx.allclose(mlx_flash.flash_attention(q, q, q), expected, atol=1e-5).item())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_carries_the_kernels_and_the_simulator(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for header in (*ROOT.glob("metal/*.h"), *ROOT.glob("cuda/*.h")):
            packed = archive.read(f"mlx_flash/{header.parent.name}/{header.name}")
            assert packed == header.read_bytes()
    assert "mlx_flash/py.typed" in names
    for folder in ("simulator/include", "simulator/strict/include"):
        for header in (ROOT / "src" / "mlx_flash" / folder).iterdir():
            assert f"mlx_flash/{folder}/{header.name}" in names


def test_checkout_has_no_second_copy_of_the_kernels():
    for name in ("metal", "cuda"):
        assert not (ROOT / "src" / "mlx_flash" / name).exists()


def test_kernel_runs_from_the_wheel_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    extras = "simulator" if sys.platform == "darwin" else "simulator,cpu"
    install = [python, "-m", "pip", "install", "-q", f"{wheel}[{extras}]"]
    subprocess.run(install, check=True, capture_output=True)
    result = subprocess.run(
        [python, "-c", RUN_A_KERNEL],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "True"
