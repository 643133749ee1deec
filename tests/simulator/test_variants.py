"""What compiles a kernel anew, and what does not: sizes and numbers never do."""

import mlx.core as mx
import pytest

from mlx_flash import flash_attention, launch, use_backend
from mlx_flash.simulator import kernel as simulator_kernel


def attend(B=1, H=1, T=8, D=8, mask_shape=None, segments=False, **options):
    """One attention and its backward."""
    q, k, v = mx.ones((B, H, T, D)), mx.ones((B, 1, T, D)), mx.ones((B, 1, T, D))
    if segments:
        options["segment_ids"] = mx.zeros((B, T), mx.int32)
    if mask_shape:
        options["mask"] = mx.zeros(mask_shape)
    with use_backend("simulator"):
        mx.eval(
            mx.grad(lambda *x: flash_attention(*x, **options).sum(), (0, 1, 2))(q, k, v)
        )


def compilations():
    """Kernel objects and texts so far."""
    return (
        launch.compiled_kernel.cache_info().misses,
        simulator_kernel.compiled_program.cache_info().misses,
    )


def new_compilations(problems):
    """How many there are for a series of problems after its first one."""
    first, *others = problems
    attend(**first)
    before = compilations()
    for problem in others:
        attend(**problem)
    return [after - start for after, start in zip(compilations(), before, strict=True)]


# For each length, what a call has besides it.
BY_LENGTH = {
    "full": lambda T: {},
    "causal": lambda T: {"causal": True},
    "window": lambda T: {"causal": True, "window": 1 + T // 2},
    "two-sided window": lambda T: {"window": (T // 3, T // 4)},
    "segments": lambda T: {"segments": True},
    "mask": lambda T: {"mask_shape": (T, T)},
}


@pytest.mark.parametrize("options", BY_LENGTH.values(), ids=BY_LENGTH)
def test_100_sequence_lengths_compile_each_kernel_once(options):
    problems = [{"T": T} | options(T) for T in range(2, 102)]
    assert new_compilations(problems) == [0, 0]


def test_batch_heads_and_numbers_compile_nothing():
    numbers = [
        {"B": B, "H": H, "scale": scale, "softcap": softcap}
        for B, H, scale, softcap in (
            (1, 1, 1.0, 2.0),
            (2, 3, 0.5, 30.0),
            (5, 2, 0.0, 1e-3),
        )
    ]
    assert new_compilations(numbers) == [0, 0]


def test_another_feature_or_head_dim_compiles_its_own_kernels():
    """The counting above sees what it should."""
    assert new_compilations([{"D": 11}, {"D": 11, "softcap": 3.0}]) == [3, 3]
    # attention_delta, too; dk and dv are two
    assert new_compilations([{"D": 107}, {"D": 109}]) == [5, 5]
