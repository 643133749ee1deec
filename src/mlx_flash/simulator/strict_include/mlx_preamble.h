// What MLX puts before the text of every custom kernel: the installed MLX's own headers.
#pragma once
#include "mlx/backend/metal/kernels/utils.h"
