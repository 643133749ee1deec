"""``python -m mlx_flash doctor`` and ``python -m mlx_flash tune``."""

from __future__ import annotations

import argparse
import sys

import mlx.core as mx

from mlx_flash.backends import NAMES
from mlx_flash.doctor import examine
from mlx_flash.tuning import report, tune


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mlx_flash")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
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
    tuner = commands.add_parser(
        "tune",
        argument_default=argparse.SUPPRESS,  # the defaults are those of tune()
        help="find the fastest tiles of the kernels on this GPU and store them",
        description="Times candidate tiles of every kernel for a head dim on this GPU "
        "and stores the fastest, which flash_attention uses from then on. Arguments "
        "and defaults are those of mlx_flash.tune. Exit status: 0, or 1 if nothing "
        "was stored.",
    )
    numbers = {
        "B": "batch",
        "H": "query heads",
        "HKV": "key/value heads",
        "T": "queries, and keys",
        "D": "head dim of q and k",
        "Dv": "head dim of v",
        "window": "keys that a query sees, with --causal",
    }
    for name, meaning in numbers.items():
        tuner.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    tuner.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    tuner.add_argument("--causal", action="store_true")
    tuner.add_argument(
        "--precise", action="store_true", help="float32 on CUDA without TF32"
    )
    tuner.add_argument(
        "--report", action="store_true", help="print what was chosen and why"
    )
    options = vars(parser.parse_args(arguments))
    if options.pop("command") == "doctor":
        return examine(options["backend"])
    with_report = options.pop("report", False)
    if "dtype" in options:
        options["dtype"] = getattr(mx, options["dtype"])
    try:
        tuning = tune(**options)
    except (ValueError, NotImplementedError) as problem:
        print(problem)
        return 1
    if with_report:
        print(report(tuning))
    return 0


if __name__ == "__main__":
    sys.exit(main())
