// MSL 2.1 and 2.2: scalar and vector types.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace simulator {

// The bits of a value as another type of its size; in constant expressions too.
template <typename To, typename From>
constexpr To bit_cast(const From& from) {
  return __builtin_bit_cast(To, from);
}

// 16-bit floats: stored as bits, computed in float, rounded to nearest even after each
// operation. `Format` gives to_bits and to_float.
struct HalfFormat {
  static constexpr uint16_t to_bits(float x) {
    uint32_t f = bit_cast<uint32_t>(x);
    const uint32_t sign = (f >> 16) & 0x8000u;
    f &= 0x7fffffffu;
    if (f > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((f >> 13) & 0x3ffu));
    if (f >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (f < 0x38800000u) {  // subnormal: let the float adder round at 2^-24
      const float shifted = bit_cast<float>(f) + 0.5f;
      return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    f += 0xc8000fffu + ((f >> 13) & 1u);
    return uint16_t(sign | (f >> 13));
  }
  static constexpr float to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    uint32_t f = 0;
    if (magnitude >= 0x7c00u) {
      f = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
    } else if (magnitude >= 0x0400u) {
      f = (magnitude << 13) + 0x38000000u;
    } else {
      f = bit_cast<uint32_t>(float(magnitude) * 0x1p-24f);
    }
    return bit_cast<float>(f | sign);
  }
};

struct BfloatFormat {
  static constexpr uint16_t to_bits(float x) {
    const uint32_t f = bit_cast<uint32_t>(x);
    if ((f & 0x7fffffffu) > 0x7f800000u) return uint16_t((f >> 16) | 0x40u);
    return uint16_t((f + 0x7fffu + ((f >> 16) & 1u)) >> 16);
  }
  static constexpr float to_float(uint16_t bits) {
    return bit_cast<float>(uint32_t(bits) << 16);
  }
};

template <bool Condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
// T where it is not deduced: a number of another type is converted.
template <typename T>
struct identity {
  typedef T type;
};
template <typename T>
struct is_plain_number {
  enum : bool { value = __is_enum(T) };
};
#define SIMULATOR_PLAIN(T)        \
  template <>                     \
  struct is_plain_number<T> {     \
    enum : bool { value = true }; \
  };
SIMULATOR_PLAIN(bool)
SIMULATOR_PLAIN(char)
SIMULATOR_PLAIN(signed char)
SIMULATOR_PLAIN(unsigned char)
SIMULATOR_PLAIN(short)
SIMULATOR_PLAIN(unsigned short)
SIMULATOR_PLAIN(int)
SIMULATOR_PLAIN(unsigned int)
SIMULATOR_PLAIN(long)
SIMULATOR_PLAIN(unsigned long)
SIMULATOR_PLAIN(long long)
SIMULATOR_PLAIN(unsigned long long)
SIMULATOR_PLAIN(float)
#undef SIMULATOR_PLAIN

}  // namespace simulator

// half converts from and to float implicitly; bfloat converts to float implicitly, but
// nothing converts to bfloat implicitly (MSL 2.1).
#define SIMULATOR_SMALL_FLOAT(NAME, FORMAT, EXPLICIT)                              \
  struct NAME {                                                                    \
    uint16_t bits;                                                                 \
    NAME() = default;                                                              \
    template <typename U, typename = typename simulator::enable_if<                \
                              simulator::is_plain_number<U>::value>::type>         \
    EXPLICIT constexpr NAME(U x) : bits(simulator::FORMAT::to_bits(float(x))) {}   \
    constexpr operator float() const { return simulator::FORMAT::to_float(bits); } \
    constexpr NAME operator-() const { return NAME(-float(*this)); }               \
    friend constexpr NAME operator+(NAME a, NAME b) {                              \
      return NAME(float(a) + float(b));                                            \
    }                                                                              \
    friend constexpr NAME operator-(NAME a, NAME b) {                              \
      return NAME(float(a) - float(b));                                            \
    }                                                                              \
    friend constexpr NAME operator*(NAME a, NAME b) {                              \
      return NAME(float(a) * float(b));                                            \
    }                                                                              \
    friend constexpr NAME operator/(NAME a, NAME b) {                              \
      return NAME(float(a) / float(b));                                            \
    }                                                                              \
    template <typename U>                                                          \
    constexpr NAME& operator+=(U b) {                                              \
      return *this = NAME(float(*this) + float(b));                                \
    }                                                                              \
    template <typename U>                                                          \
    constexpr NAME& operator-=(U b) {                                              \
      return *this = NAME(float(*this) - float(b));                                \
    }                                                                              \
    template <typename U>                                                          \
    constexpr NAME& operator*=(U b) {                                              \
      return *this = NAME(float(*this) * float(b));                                \
    }                                                                              \
    template <typename U>                                                          \
    constexpr NAME& operator/=(U b) {                                              \
      return *this = NAME(float(*this) / float(b));                                \
    }                                                                              \
  };                                                                               \
  SIMULATOR_MIXED_OPERATOR(NAME, +)                                                \
  SIMULATOR_MIXED_OPERATOR(NAME, -)                                                \
  SIMULATOR_MIXED_OPERATOR(NAME, *)                                                \
  SIMULATOR_MIXED_OPERATOR(NAME, /)

// A 16-bit float with a float gives a float, with an integer a 16-bit float.
#define SIMULATOR_MIXED_OPERATOR(NAME, OP)                                         \
  constexpr float operator OP(NAME a, float b) { return float(a) OP b; }           \
  constexpr float operator OP(float a, NAME b) { return a OP float(b); }           \
  constexpr NAME operator OP(NAME a, int b) { return NAME(float(a) OP float(b)); } \
  constexpr NAME operator OP(int a, NAME b) { return NAME(float(a) OP float(b)); }

SIMULATOR_SMALL_FLOAT(half, HalfFormat, )
SIMULATOR_SMALL_FLOAT(bfloat, BfloatFormat, explicit)
#undef SIMULATOR_SMALL_FLOAT
#undef SIMULATOR_MIXED_OPERATOR

// MSL 2.14: half and bfloat literals, 1.5h and 1.5bf.
constexpr half operator""h(long double x) { return half(float(x)); }
constexpr half operator""h(unsigned long long x) { return half(float(x)); }
constexpr bfloat operator"" bf(long double x) { return bfloat(float(x)); }

namespace metal {

template <typename T, int N>
struct vec;

#define SIMULATOR_VECTOR_ELEMENTS                                          \
  constexpr T& operator[](int i) { return reinterpret_cast<T*>(this)[i]; } \
  constexpr const T& operator[](int i) const {                             \
    return reinterpret_cast<const T*>(this)[i];                            \
  }                                                                        \
  SIMULATOR_SWIZZLES
// The parts in another order that a kernel asks for, as methods; see program.py.
#ifndef SIMULATOR_SWIZZLES
#define SIMULATOR_SWIZZLES
#endif

template <typename T>
struct vec<T, 2> {
  T x, y;
  vec() = default;
  constexpr vec(T s) : x(s), y(s) {}
  constexpr vec(T x_, T y_) : x(x_), y(y_) {}
  template <typename U>
  constexpr explicit vec(const vec<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
  SIMULATOR_VECTOR_ELEMENTS
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  constexpr vec(T s) : x(s), y(s), z(s) {}
  constexpr vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  constexpr vec(const vec<T, 2>& xy, T z_) : x(xy.x), y(xy.y), z(z_) {}
  constexpr vec(T x_, const vec<T, 2>& yz) : x(x_), y(yz.x), z(yz.y) {}
  template <typename U>
  constexpr explicit vec(const vec<U, 3>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  SIMULATOR_VECTOR_ELEMENTS
};

template <typename T>
struct vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
  constexpr vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  constexpr vec(const vec<T, 2>& xy, const vec<T, 2>& zw)
      : x(xy.x), y(xy.y), z(zw.x), w(zw.y) {}
  constexpr vec(const vec<T, 2>& xy, T z_, T w_) : x(xy.x), y(xy.y), z(z_), w(w_) {}
  constexpr vec(const vec<T, 3>& xyz, T w_) : x(xyz.x), y(xyz.y), z(xyz.z), w(w_) {}
  template <typename U>
  constexpr explicit vec(const vec<U, 4>& v)
      : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  SIMULATOR_VECTOR_ELEMENTS
};
#undef SIMULATOR_VECTOR_ELEMENTS

#define SIMULATOR_VECTOR_OPERATOR(OP)                                                  \
  template <typename T, int N>                                                         \
  vec<T, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) {                      \
    vec<T, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r[i] = a[i] OP b[i];                                   \
    return r;                                                                          \
  }                                                                                    \
  template <typename T, int N>                                                         \
  vec<T, N> operator OP(const vec<T, N>& a, typename simulator::identity<T>::type b) { \
    return a OP vec<T, N>(b);                                                          \
  }                                                                                    \
  template <typename T, int N>                                                         \
  vec<T, N> operator OP(typename simulator::identity<T>::type a, const vec<T, N>& b) { \
    return vec<T, N>(a) OP b;                                                          \
  }                                                                                    \
  template <typename T, int N, typename U>                                             \
  vec<T, N>& operator OP## = (vec<T, N> & a, const U& b) {                             \
    return a = a OP b;                                                                 \
  }
SIMULATOR_VECTOR_OPERATOR(+)
SIMULATOR_VECTOR_OPERATOR(-)
SIMULATOR_VECTOR_OPERATOR(*)
SIMULATOR_VECTOR_OPERATOR(/)
SIMULATOR_VECTOR_OPERATOR(%)
#undef SIMULATOR_VECTOR_OPERATOR

template <typename T, int N>
vec<T, N> operator-(const vec<T, N>& a) {
  return T(0) - a;
}

// Comparisons are by element.
#define SIMULATOR_VECTOR_COMPARISON(OP)                              \
  template <typename T, int N>                                       \
  vec<bool, N> operator OP(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> r;                                                  \
    for (int i = 0; i < N; ++i) r[i] = a[i] OP b[i];                 \
    return r;                                                        \
  }
SIMULATOR_VECTOR_COMPARISON(==)
SIMULATOR_VECTOR_COMPARISON(!=)
SIMULATOR_VECTOR_COMPARISON(<)
SIMULATOR_VECTOR_COMPARISON(<=)
SIMULATOR_VECTOR_COMPARISON(>)
SIMULATOR_VECTOR_COMPARISON(>=)
#undef SIMULATOR_VECTOR_COMPARISON

#define SIMULATOR_VECTOR_NAMES(T) \
  typedef vec<T, 2> T##2;         \
  typedef vec<T, 3> T##3;         \
  typedef vec<T, 4> T##4;
SIMULATOR_VECTOR_NAMES(char)
SIMULATOR_VECTOR_NAMES(uchar)
SIMULATOR_VECTOR_NAMES(short)
SIMULATOR_VECTOR_NAMES(ushort)
SIMULATOR_VECTOR_NAMES(int)
SIMULATOR_VECTOR_NAMES(uint)
SIMULATOR_VECTOR_NAMES(long)
SIMULATOR_VECTOR_NAMES(ulong)
SIMULATOR_VECTOR_NAMES(half)
SIMULATOR_VECTOR_NAMES(bfloat)
SIMULATOR_VECTOR_NAMES(float)
SIMULATOR_VECTOR_NAMES(bool)
#undef SIMULATOR_VECTOR_NAMES

}  // namespace metal
