"""FlashAttention for MLX, forward and backward, as Metal kernels one can read."""

from mlx_flash import versions  # noqa: I001, F401  (first: it refuses an old MLX)
from mlx_flash import distributed, nn
from mlx_flash.attention import flash_attention
from mlx_flash.backends import backend, use_backend
from mlx_flash.dispatch import scaled_dot_product_attention
from mlx_flash.patching import patch
from mlx_flash.segments import segment_ids_from_cu_seqlens
from mlx_flash.tuning import tune

__all__ = [
    "backend",
    "distributed",
    "flash_attention",
    "nn",
    "patch",
    "scaled_dot_product_attention",
    "segment_ids_from_cu_seqlens",
    "tune",
    "use_backend",
]
