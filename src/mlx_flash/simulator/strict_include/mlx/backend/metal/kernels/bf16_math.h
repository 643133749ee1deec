// Stands before MLX's header of this name, which gives bfloat the math and simdgroup
// functions through names that are internal to Apple's compiler. <metal_math> and
// <metal_simdgroup> declare them for bfloat already.
#pragma once
