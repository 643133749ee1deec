"""FlashAttention for MLX, forward and backward, as Metal kernels one can read."""

from mlx_flash.attention import flash_attention
from mlx_flash.backends import backend, use_backend

__all__ = ["backend", "flash_attention", "use_backend"]
