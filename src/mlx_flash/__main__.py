"""``python -m mlx_flash doctor``."""

from __future__ import annotations

import argparse
import sys

from mlx_flash.backends import NAMES
from mlx_flash.doctor import examine


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mlx_flash")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="tell what this machine has and check every kernel on it",
        description="Tells what this machine has and checks every kernel against the "
        "reference on small inputs. Exit status: 0 if all is well, 1 if not.",
    )
    doctor.add_argument(
        "--backend",
        choices=NAMES,
        help="where the kernels run; default: the GPU, else the simulator if it is "
        "installed, else no kernel is checked",
    )
    return examine(parser.parse_args(arguments).backend)


if __name__ == "__main__":
    sys.exit(main())
