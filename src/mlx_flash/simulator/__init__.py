"""Runs and checks Metal kernels on the CPU: a drop-in for ``mx.fast.metal_kernel``.

See README.md in this folder.
"""

from mlx_flash.simulator.checks import (
    APPLE_LANE_MAP,
    CHECKS,
    LaunchRecord,
    checked,
    lane_map,
    permuted_lane_map,
    record,
)
from mlx_flash.simulator.errors import SimulatorError
from mlx_flash.simulator.kernel import metal_kernel
from mlx_flash.simulator.library import library_kernel

__all__ = [
    "APPLE_LANE_MAP",
    "CHECKS",
    "LaunchRecord",
    "SimulatorError",
    "checked",
    "lane_map",
    "library_kernel",
    "metal_kernel",
    "permuted_lane_map",
    "record",
]
