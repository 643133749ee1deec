#!/usr/bin/env python3
"""Sets up what is needed in .venv and runs it; needs only Python's standard library.

python3 dev.py train [arguments of examples/train_gpt.py]
python3 dev.py test [arguments of pytest]
python3 dev.py bench [arguments of benchmarks/bench_attention.py]
python3 dev.py cost [arguments of benchmarks/cost_report.py]
python3 dev.py check
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
HEADERS = ["metal/*.h", "cuda/*.h", "src/mlx_flash/simulator/include/*"]
SOURCES = ["src", "tests", "examples", "benchmarks", "dev.py", "noxfile.py"]


def set_up(extra: str) -> None:
    """Create .venv and install the project with an extra, unless that was done."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = VENV / f"installed-{extra}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    extras = extra if sys.platform == "darwin" else f"{extra},cpu"
    print(f"Setting up {VENV.name} with the extras {extras} ...", flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*install, "--editable", f"{ROOT}[{extras}]")
    stamp.write_text(wanted)


def run(*command: str | Path) -> None:
    """Run a command in the repository's root; stop with its exit status if it fails."""
    status = subprocess.run([str(word) for word in command], cwd=ROOT).returncode
    if status:
        sys.exit(status)


def train(arguments: list[str]) -> None:
    """Train the example GPT."""
    set_up("examples")
    run(PYTHON, "examples/train_gpt.py", *arguments)


def test(arguments: list[str]) -> None:
    """Run the tests in two processes."""
    set_up("test")
    run(PYTHON, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments)


def bench(arguments: list[str]) -> None:
    """Time the kernels beside MLX's own attention."""
    set_up("examples")
    run(PYTHON, "benchmarks/bench_attention.py", *arguments)


def cost(arguments: list[str]) -> None:
    """Model the cost of the kernels on Apple GPUs."""
    set_up("test")
    run(PYTHON, "benchmarks/cost_report.py", *arguments)


def check(arguments: list[str]) -> None:
    """Lint, format and type checks."""
    set_up("dev")
    run(PYTHON, "-m", "ruff", "check", *SOURCES)
    run(PYTHON, "-m", "ruff", "format", "--check", *SOURCES)
    run(PYTHON, "-m", "mypy")
    headers = [path for name in HEADERS for path in sorted(ROOT.glob(name))]
    run(VENV / "bin" / "clang-format", "--dry-run", "--Werror", *headers)


def main() -> None:
    """Dispatch on the first argument."""
    commands = {
        "train": train,
        "test": test,
        "bench": bench,
        "cost": cost,
        "check": check,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
