// common: what every kernel is told about its arrays. Shared by all back ends.
//
// Letters    B batch, H query heads, HKV key/value heads, Tq queries, Tk keys, D head
//            dim of q and k, DV of v; group = H / HKV query heads share one key/value
//            head.
// Offsets    64 bits: B * H * T * D may exceed 2^31 elements.

#define LOG2_E 1.44269504088896341f
#define LN_2 0.693147180559945309f

// Stands for a score that a row may not see. Finite, so that no arithmetic ever meets
// an infinity, and so low that exp2(MASKED - m) is 0 for every row maximum m of real
// scores. An additive mask hides a key with a number below HIDDEN, its natural logarithm.
#define MASKED (-1e36f)
#define HIDDEN (-6e35f)

// Stands for the log-sum-exp of a row that passes no gradient: exp2(s - NO_GRADIENT) is
// 0 for every score.
#define NO_GRADIENT 1e36f

struct Sizes {
  int H, HKV, Tq, Tk;
};

struct Range {
  int first, last;  // first <= i < last
};

inline int blocks_in(int length, int block) { return (length + block - 1) / block; }

// Steps between neighbours along each axis of a [B, H, T, D] view, in elements.
struct Strides {
  long b, h, t, d;
};

// A [B, H, T, D] view with any strides: transposed, sliced, broadcast, reversed.
template <typename T>
struct Operand {
  const device T* data;
  Strides stride;
};

// A [B, H, T] view.
struct RowOperand {
  const device float* data;
  Strides stride;
};

inline long row_offset(Sizes n, int b, int h) { return (long(b) * n.H + h) * n.Tq; }

inline long offset(Strides stride, int b, int h, int t) {
  return b * stride.b + h * stride.h + t * stride.t;
}

// Offset of row (b, t, h) in an output, which is stored [B, T, H, D] without gaps, so
// that merging the heads afterwards copies nothing.
inline long output_offset(int T_rows, int n_heads, int D, int b, int h, int t) {
  return ((long(b) * T_rows + t) * n_heads + h) * D;
}
