// The functions of <metal_math>, which includes this in metal, metal::fast and
// metal::precise.
METAL_MATH_1(acos)
METAL_MATH_1(acosh)
METAL_MATH_1(asin)
METAL_MATH_1(asinh)
METAL_MATH_1(atan)
METAL_MATH_1(atanh)
METAL_MATH_1(abs)
METAL_MATH_1(ceil)
METAL_MATH_1(cos)
METAL_MATH_1(cosh)
METAL_MATH_1(cospi)
METAL_MATH_1(exp)
METAL_MATH_1(exp10)
METAL_MATH_1(exp2)
METAL_MATH_1(fabs)
METAL_MATH_1(floor)
METAL_MATH_1(fract)
METAL_MATH_1(log)
METAL_MATH_1(log10)
METAL_MATH_1(log2)
METAL_MATH_1(rint)
METAL_MATH_1(round)
METAL_MATH_1(rsqrt)
METAL_MATH_1(sin)
METAL_MATH_1(sinh)
METAL_MATH_1(sinpi)
METAL_MATH_1(sqrt)
METAL_MATH_1(tan)
METAL_MATH_1(tanh)
METAL_MATH_1(tanpi)
METAL_MATH_1(trunc)

METAL_MATH_2(atan2)
METAL_MATH_2(copysign)
METAL_MATH_2(divide)
METAL_MATH_2(fdim)
METAL_MATH_2(fmax)
METAL_MATH_2(fmin)
METAL_MATH_2(fmod)
METAL_MATH_2(max)
METAL_MATH_2(min)
METAL_MATH_2(nextafter)
METAL_MATH_2(pow)
METAL_MATH_2(powr)

METAL_MATH_3(clamp)
METAL_MATH_3(fma)
METAL_MATH_3(fmax3)
METAL_MATH_3(fmedian3)
METAL_MATH_3(fmin3)
METAL_MATH_3(max3)
METAL_MATH_3(median3)
METAL_MATH_3(min3)

template <typename T, metal_strict::when_float<T> = true>
T frexp(T x, thread int& exponent);
template <typename T, metal_strict::when_float<T> = true>
int ilogb(T x);
template <typename T, metal_strict::when_float<T> = true>
T ldexp(T x, int exponent);
template <typename T, metal_strict::when_float<T> = true>
T modf(T x, thread T& whole);
template <typename T, metal_strict::when_float<T> = true>
T sincos(T x, thread T& cosine);
