"""Where files of this machine and user are kept between runs; all may be deleted."""

from __future__ import annotations

from pathlib import Path

import platformdirs

CACHE_FOLDER = Path(platformdirs.user_cache_dir("mlx_flash", appauthor=False))
