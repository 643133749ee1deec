"""Examines a machine: what it has, and whether every kernel is right on it."""

from __future__ import annotations

import importlib.util
import math
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tqdm import tqdm

from mlx_flash import kernels, reference, tiles
from mlx_flash.backends import SIMULATOR_PACKAGES, backend, use_backend
from mlx_flash.dispatch import native_attention
from mlx_flash.options import Options
from mlx_flash.versions import own_version

# Largest error, relative to the largest value, that rounding may cause.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """An attention, small unless it says otherwise.

    Attributes:
        name: What is special about it.
        dtype: Of q, k and v.
        D: Head dim of q and k.
        Dv: Head dim of v.
        options: Its numbers.
        arrays: It has segments, an additive mask and sinks.
        B: Batch.
        H: Query heads.
        HKV: Key/value heads.
        Tq: Queries.
        Tk: Keys.
    """

    name: str
    dtype: mx.Dtype
    D: int
    Dv: int
    options: Options
    arrays: bool = False
    B: int = 1
    H: int = 4
    HKV: int = 2
    Tq: int = 37
    Tk: int = 70


OWN = Case.Tk - Case.Tq  # query i is aligned with key i + OWN
# Together they need every kernel, dk and dv in one pass and in two, and every dtype.
CASES = (
    Case("no mask, float32, D=64", mx.float32, 64, 64, Options(0.125)),
    Case("causal, bfloat16, D=128", mx.bfloat16, 128, 128, Options(0.1, high=OWN)),
    Case(
        "everything, float16, D=64, Dv=48",
        mx.float16,
        64,
        48,
        Options(0.2, low=OWN - 20, high=OWN + 3, softcap=2.0),
        arrays=True,
    ),
    Case("causal, float32, D=256", mx.float32, 256, 256, Options(0.1, high=OWN)),
)

Errors = dict[str, float]  # by the name of what was computed, in units of the tolerance
Check = tuple[str, Callable[[], Errors]]


def examine(name: str | None = None) -> int:
    """Print what the machine has and how the checks end.

    Args:
        name: Back end whose kernels are checked. Default: :func:`place_of_kernels`.

    Returns:
        Exit status: 0 if all is well, else 1.
    """
    where = name or place_of_kernels()
    try:
        with use_backend(where):
            pass
    except ValueError as error:
        print(error)
        return 1
    for key, value in description(where).items():
        print(f"{key:<12}{value}")
    failures = 0
    checks = list_of_checks(where)
    with tqdm(checks, unit="check", leave=False, disable=None, mininterval=0) as bar:
        for label, check in bar:
            bar.set_description(label)
            lines, failed = verdict(label, check)
            bar.write("\n".join(lines))
            failures += failed
    if where == "reference":
        print(
            "No kernel was checked: this machine has neither a GPU nor the simulator."
        )
    print(f"{failures} of {len(checks)} checks failed" if failures else "All is well.")
    return 1 if failures else 0


def place_of_kernels() -> str:
    """The GPU; without one the simulator, where it is installed; else ``reference``."""
    if backend() != "reference":
        return backend()
    packages = all(importlib.util.find_spec(name) for name in SIMULATOR_PACKAGES)
    return "simulator" if packages and cpp_compiler() else "reference"


def cpp_compiler() -> str | None:
    """The C++ compiler of the simulator, if there is one."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def description(where: str) -> dict[str, str]:
    """What the machine has."""
    compilers = {
        "metal": "Metal, of macOS",
        "cuda": "NVRTC, of MLX",
        "simulator": cpp_compiler() or "none",
    }
    device = mx.device_info()
    tuned = tiles.tuned_tiles_file()
    return {
        "mlx_flash": own_version() or f"not installed, in {Path(__file__).parent}",
        "MLX": version("mlx"),
        "Python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        "device": f"{device.get('device_name', 'unknown')} ({mx.default_device()})",
        "back end": backend(),
        "kernels on": "nothing" if where == "reference" else where,
        "compiler": compilers.get(where, "none"),
        "tiles": f"tuned, {tuned}" if tuned and tuned.exists() else "of the tables",
    }


def list_of_checks(where: str) -> list[Check]:
    """Label and function of each check."""
    checks: list[Check] = [
        (case.name, partial(reference_errors, case))
        for case in CASES
        if not case.arrays
    ]
    if where in ("metal", "simulator"):
        checks.append(("of the GPU", partial(lane_map_errors, where)))
    if where != "reference":
        checks += [(case.name, partial(kernel_errors, case, where)) for case in CASES]
    return checks


def verdict(label: str, check: Callable[[], Errors]) -> tuple[list[str], bool]:
    """Lines to print about a check, and whether it failed."""
    try:
        errors = check()
    except Exception as problem:  # whatever is wrong with the machine is the finding
        return [f"FAILED  {label}: {type(problem).__name__}: {problem}"], True
    lines = []
    for name, error in errors.items():
        word = "ok" if error <= 1 else "WRONG"
        percent = f"error {error:.0%} of the tolerance"
        lines.append(f"{word:<8}{name:<20}{label:<36}{percent}")
    return lines, not all(error <= 1 for error in errors.values())


def lane_map_errors(where: str) -> Errors:
    """Raises if a simdgroup matrix lies in the lanes as the kernels do not expect."""
    kernels.check_lane_map(where)
    return {"lane map": 0.0}


def kernel_errors(case: Case, where: str) -> Errors:
    """Errors of the kernels against the reference."""
    (q, k, v, dout, dlse), others = inputs(case)
    given: dict[str, Any] = {"options": case.options, **others}
    how: dict[str, Any] = {"backend": where, "precise": True}
    out, lse = reference.attention_forward(q, k, v, **given)
    wanted = reference.attention_backward(q, k, v, out, lse, dout, dlse, **given)
    actual_out, actual_lse = kernels.attention_forward(q, k, v, **given, **how)
    actual = kernels.attention_backward(q, k, v, out, lse, dout, dlse, **given, **how)

    names = {"q": "attention_dq", "mask": "attention_dmask", "sinks": "sinks"}
    fused = tiles.fuses_dk_and_dv(
        max(case.D, case.Dv),
        q.itemsize,
        kernels.gpu_of(where, case.dtype == mx.float32),
    )
    for name in "kv":
        names[name] = "attention_dkv" if fused else f"attention_d{name}"
    errors = {
        "attention_forward": max(
            relative_error(actual_out, out, case.dtype),
            relative_error(actual_lse, lse, case.dtype),
        )
    }
    for name, x in wanted.items():
        error = relative_error(actual[name], x, case.dtype)
        errors[names[name]] = max(errors.get(names[name], 0.0), error)
    return errors


def reference_errors(case: Case) -> Errors:
    """Errors of the reference against MLX's own attention on the CPU."""
    (q, k, v, dout, _), _ = inputs(case)
    mask = None if case.options.high is None else "causal"
    scale = case.options.scale

    def native(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [native_attention(q, k, v, scale=scale, mask=mask)]

    with mx.stream(mx.cpu):
        (wanted_out,), wanted = mx.vjp(native, [q, k, v], [dout])
        out, lse = reference.attention_forward(q, k, v, options=case.options)
        dlse = mx.zeros_like(lse)
        gradients = reference.attention_backward(
            q, k, v, out, lse, dout, dlse, options=case.options
        )
        pairs = [(out, wanted_out), *zip(gradients.values(), wanted, strict=True)]
        return {"reference": max(relative_error(x, y, case.dtype) for x, y in pairs)}


def relative_error(actual: mx.array, wanted: mx.array, dtype: mx.Dtype) -> float:
    """The largest error over the largest value, in units of the tolerance."""
    actual, wanted = actual.astype(mx.float32), wanted.astype(mx.float32)
    seen = mx.isfinite(wanted)  # lse is -inf where a query sees no key
    same = mx.array_equal(seen, mx.isfinite(actual)).item()
    error = mx.abs(mx.where(seen, actual - wanted, 0)).max()
    largest = mx.abs(mx.where(seen, wanted, 0)).max()
    if not same:
        return math.inf
    return cast(float, (error / largest).item()) / TOLERANCE[dtype]


def inputs(case: Case) -> tuple[list[mx.array], dict[str, mx.array]]:
    """q, k, v, dout, dlse, and the other arrays by name."""
    keys = iter(mx.random.split(mx.random.key(1), 7))

    def normal(*shape: int, dtype: mx.Dtype = case.dtype) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(dtype)

    B, H, HKV, Tq, Tk = case.B, case.H, case.HKV, case.Tq, case.Tk
    arrays = [
        normal(B, H, Tq, case.D),
        normal(B, HKV, Tk, case.D),
        normal(B, HKV, Tk, case.Dv),
        normal(B, H, Tq, case.Dv),
        normal(B, H, Tq, dtype=mx.float32),
    ]
    if not case.arrays:
        return arrays, {}
    return arrays, {
        "mask": normal(1, 1, Tq, Tk, dtype=mx.float32),
        "q_segments": ((mx.arange(Tq) + Tk - Tq) // 30)[None],
        "k_segments": (mx.arange(Tk) // 30)[None],
        "sinks": normal(H, dtype=mx.float32),
    }
