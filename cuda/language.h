// language: the words of the kernels that belong to Metal's language. CUDA C++ has no
// address spaces in its types.

#define device
#define threadgroup
#define thread
#define constant

#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
