"""Every kernel instance that the library can produce, as calls on small arrays."""

from collections.abc import Iterator

import mlx.core as mx

from mlx_flash import kernels, tiles
from mlx_flash.launch import KernelCall

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def calls(
    D: int,
    dtype: mx.Dtype,
    causal: bool,
    *,
    B: int = 1,
    H: int = 2,
    T: int = 9,
    gpu: str = "metal",
) -> Iterator[KernelCall]:
    """The calls of one attention and its backward."""
    x = mx.zeros((B, H, T, D), dtype)
    rows = mx.zeros((B, H, T))
    yield kernels.forward_call(x, x, x, 1.0, causal, gpu)
    yield kernels.delta_call(x, x, rows, gpu)
    gradient = (x, x, x, x, rows, rows, 1.0, causal, gpu)
    yield kernels.dq_call(*gradient)
    if tiles.fuses_dk_and_dv(D, x.itemsize, gpu):
        yield kernels.dkv_call(*gradient)
    else:
        yield kernels.dkv_call(*gradient, with_dv=False)
        yield kernels.dkv_call(*gradient, with_dk=False)


def instances() -> list[KernelCall]:
    """All template instances, once each."""
    return [
        call
        for D in tiles.HEAD_DIMS
        for dtype in DTYPES
        for causal in (False, True)
        for call in calls(D, dtype, causal)
        if causal or call.name != "attention_delta"
    ]


def name_of(call: KernelCall) -> str:
    """A readable test id."""
    values = (str(value).removeprefix("mlx.core.") for _, value in call.template)
    return "-".join((call.name, *values))
