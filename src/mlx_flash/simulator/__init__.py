"""Runs Metal kernels on the CPU: a drop-in for ``mx.fast.metal_kernel``."""

from mlx_flash.simulator.errors import SimulatorError
from mlx_flash.simulator.kernel import metal_kernel

__all__ = ["SimulatorError", "metal_kernel"]
