"""Times the simulator: forward of one attention, in ms and per simulated 8x8x8 product.

python benchmarks/bench_simulator.py [--repeats N]

The kernels are compiled before the timing starts. One line a case: the median and the
20th and 80th percentile of the wall time, and the median over the number of products.
"""

import argparse
import statistics
import time

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import flash_attention, use_backend

B, H, T, D = 1, 2, 256, 64
PRODUCTS = 2 * B * H * T * T * D // 512  # q k^T and p v, without a mask


def wall_times(dtype: mx.Dtype, repeats: int) -> list[float]:
    """Seconds of each forward."""
    q, k, v = (mx.random.normal((B, H, T, D)).astype(dtype) for _ in range(3))
    mx.eval(q, k, v, flash_attention(q, k, v))
    times = []
    for _ in tqdm(range(repeats), desc=str(dtype), leave=False):
        start = time.perf_counter()
        mx.eval(flash_attention(q, k, v))
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="forwards per case")
    repeats = parser.parse_args().repeats
    use_backend("simulator")
    print(f"forward B={B} H={H} T={T} D={D}, no mask, {PRODUCTS} products")
    print(f"{'dtype':>10} {'p50 ms':>8} {'p20 ms':>8} {'p80 ms':>8} {'us/product':>11}")
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        times = sorted(wall_times(dtype, repeats))
        p50 = statistics.median(times)
        p20, p80 = times[len(times) // 5], times[-1 - len(times) // 5]
        name = str(dtype).removeprefix("mlx.core.")
        print(
            f"{name:>10} {1e3 * p50:8.1f} {1e3 * p20:8.1f} {1e3 * p80:8.1f} "
            f"{1e6 * p50 / PRODUCTS:11.3f}"
        )


if __name__ == "__main__":
    main()
