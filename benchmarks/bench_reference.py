"""Times the back end without kernels against MLX's own attention, forward and backward.

python benchmarks/bench_reference.py [--repeats N]

Every measurement is a process of its own, so that one's memory is not another's peak.
"""

import argparse
import statistics
import subprocess
import sys
import time

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import flash_attention, use_backend

B, H, T, D = 1, 4, 4096, 64


def native(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """MLX's own attention."""
    return mx.fast.scaled_dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask="causal"
    )


def flash(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """This library's, on the back end ``reference``."""
    with use_backend("reference"):
        return flash_attention(q, k, v, causal=True)


ATTENTION = {"native": native, "flash": flash}


def measure(name: str) -> tuple[float, float]:
    """Seconds and MiB above the inputs of one forward and backward."""
    mx.random.seed(0)
    q, k, v, dout = (mx.random.normal((B, H, T, D)) for _ in range(4))
    mx.eval(q, k, v, dout)
    inputs = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    mx.eval(mx.vjp(ATTENTION[name], [q, k, v], [dout]))
    seconds = time.perf_counter() - start
    return seconds, (mx.get_peak_memory() - inputs) / 2**20


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="processes per row")
    parser.add_argument("--only", choices=ATTENTION, help="measure once and print")
    arguments = parser.parse_args()
    if arguments.only:
        print(*measure(arguments.only))
        return
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ATTENTION}
    for _ in tqdm(range(arguments.repeats)):
        for name, row in rows.items():
            command = [sys.executable, __file__, "--only", name]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, mebibytes = map(float, result.stdout.split())
            row.append((seconds, mebibytes))
    print("| | time, median | memory above the inputs |\n|---|---|---|")
    for name, row in rows.items():
        seconds = statistics.median(seconds for seconds, _ in row)
        print(f"| {name} | {seconds:.1f} s | {max(m for _, m in row):.0f} MiB |")


if __name__ == "__main__":
    main()
