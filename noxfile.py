"""The fast part of the suite on several versions of MLX: ``nox``."""

import sys

import nox

MLX = ("0.32.0", "0.32.1", "0.32.2", "0.32.3", "0.32.4")


@nox.session
@nox.parametrize("mlx", MLX)
def tests(session: nox.Session, mlx: str) -> None:
    """Everything but the slow tests, the simulator's and mlx-lm's."""
    extra = "" if sys.platform == "darwin" else "[cpu]"
    project = nox.project.load_toml("pyproject.toml")["project"]
    needed = project["optional-dependencies"]["test"]
    # mlx-lm wants an MLX of its own choice; its tests are skipped without it
    needed = [name for name in needed if not name.startswith("mlx-lm")]
    session.install("-e", ".", *needed, f"mlx{extra}=={mlx}")
    fast = ("-m", "not slow", "--executor", "reference", "--ignore", "tests/simulator")
    session.run("python", "-m", "pytest", "-n", "2", *fast, *session.posargs)
