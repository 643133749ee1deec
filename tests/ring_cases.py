"""What each rank of ``test_distributed.py`` runs: ``ring_cases.py FOLDER BACKENDS``.

Rank 0 writes the gathered results of all cases; every rank prints, as JSON, how the
calls that must fail did.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_flash import use_backend
from mlx_flash.distributed import gather_sequence, ring_attention, shard_sequence
from strategies import Problem

# Lengths that 2 n divides and that it does not, shorter than 2 n, longer than a block
# of any back end; every argument.
SMALL = Problem(B=2, H=4, HKV=2, Tq=41, Tk=41, D=16, causal=True)
CASES = {
    "causal": SMALL,
    "full": SMALL.resized(causal=False, Tq=40, Tk=40, layout="mixed"),
    "bfloat16-causal": SMALL.resized(dtype="bfloat16", Tq=67, Tk=67),
    "bfloat16-full": SMALL.resized(dtype="bfloat16", causal=False, layout="mixed"),
    "float16-scale": SMALL.resized(dtype="float16", scale=-0.25),
    "window": SMALL.resized(window=9),
    "sides": SMALL.resized(causal=False, window=(5, 12), softcap=1.5, Dv=24),
    "three": SMALL.resized(Tq=3, Tk=3),
    "long": SMALL.resized(B=1, HKV=1, Tq=1100, Tk=1100, window=700),
}
TOKENS = mx.random.normal((2, 37, 16), key=mx.random.key(1))
WEIGHTS = mx.random.normal((16, 16), key=mx.random.key(2))
# The simulator is slow; these use the kernels that other tests use.
CASES_OF_KERNELS = ("causal", "bfloat16-causal", "window")


def results_of(problem):
    """The whole out, dq, dk and dv, made of the parts of the ranks."""
    *arrays, _ = problem.arrays()
    q, k, v, dout = (shard_sequence(x, 2) for x in arrays)

    def attention(q, k, v):
        return ring_attention(q, k, v, **problem.options)

    (out,), grads = mx.vjp(attention, [q, k, v], [dout])
    names = "out", "dq", "dk", "dv"
    parts = zip(names, (out, *grads), strict=True)
    whole = {name: gather_sequence(x, 2) for name, x in parts}
    mx.eval(whole)  # on every rank
    return whole


def gradient_through_gather(x):
    """Of ``sum(gather(x) ** 2)``, which every rank computes: 2 x, gathered."""
    part = shard_sequence(x, -1)
    gradient = mx.grad(lambda part: (gather_sequence(part, -1) ** 2).sum())(part)
    return gather_sequence(gradient, -1)


def sum_of_squares(attention, x, w):
    """Of the attention over tokens ``[B, L, D]``, projected with ``[D, D]``."""
    h = (x @ w)[:, None]
    return (attention(h, h, h, causal=True) ** 2).sum()


def gradient_of_weights(x, w):
    """That of the mean over the whole sequence, as docs/distributed.md gets it."""
    part, n = shard_sequence(x, 1), mx.distributed.init().size()

    def loss(w):
        return sum_of_squares(ring_attention, part, w) * n / x.shape[1]

    return nn.average_gradients([mx.grad(loss)(w)])[0]


def refusals(rank):
    """How calls fail that every rank must refuse."""
    x = mx.ones((1, 2, 4, 16))
    longer = x[:, :, rank % 2 :]
    other = x.astype(mx.float16 if rank else mx.float32)
    calls = {
        "another scale": lambda: ring_attention(x, x, x, scale=1.0 + rank),
        "another length": lambda: ring_attention(longer, longer, longer),
        "another dtype": lambda: gather_sequence(other, 2),
        "compiled": lambda: mx.compile(ring_attention)(x, x, x),
        "mapped": lambda: mx.vmap(ring_attention)(x[None], x[None], x[None]),
    }
    found = {}
    for name, call in calls.items():
        try:
            mx.eval(call())
        except (ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(folder, *backend_names):
    rank = mx.distributed.init(strict=True, backend="ring").rank()
    x = mx.arange(33.0).reshape(3, 11)
    results = {"gathered": gather_sequence(shard_sequence(x, 1), 1)}
    results["gradient"] = gradient_through_gather(x)
    with use_backend("reference"):
        results["weights"] = gradient_of_weights(TOKENS, WEIGHTS)
    mx.eval(results)
    for backend_name in backend_names:
        names = CASES if backend_name == "reference" else CASES_OF_KERNELS
        with use_backend(backend_name):
            for name in names:
                for quantity, value in results_of(CASES[name]).items():
                    results[f"{backend_name}/{name}/{quantity}"] = value
    if rank == 0:
        mx.save_safetensors(str(Path(folder) / "results.safetensors"), results)
    print(json.dumps(refusals(rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
