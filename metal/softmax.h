// softmax: the running softmax of the forward, and its recomputation in the backward.
//
// Scores are in base 2: s = log2(e) * scale * q k^T (README.md eq. 1). No infinity is
// ever an operand: a masked score is MASKED, and so is m in a row that sees no key.

// With SOFTCAP, the product q k^T becomes t = tanh(x / c) of the logits x (eq. 12).
template <bool SOFTCAP, int R, int C>
inline void saturate(thread AccTile<R, C>& s, float scale, float softcap) {
  if (SOFTCAP) {
    UNROLL for (int i = 0; i < R; ++i) {
      UNROLL for (int j = 0; j < 2 * C; ++j) {
        s.set(i, j, hyperbolic_tangent(s.get(i, j) * (scale / softcap)));
      }
    }
  }
}

// The derivative of the cap, 1 - t^2 (eq. 13).
template <int R, int C>
inline void cap_slopes(thread AccTile<R, C>& slope, thread AccTile<R, C>& t) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      const float x = 1.0f - t.get(i, j) * t.get(i, j);
      slope.set(i, j, maximum(x, 0.0f));  // 0, not NaN, for a score of NaN
    }
  }
}

// Scores in base 2: factor is the scale of the product, or the cap of t.
template <int R, int C>
inline void scale_scores(thread AccTile<R, C>& s, float factor) {
  UNROLL for (int i = 0; i < R; ++i) { scale_row(s, i, factor * LOG2_E); }
}

// A sink's logit in base 2: a key without a value that every row of the head sees.
inline float sink_score(float sink) { return sink < HIDDEN ? MASKED : sink * LOG2_E; }

// Running maximum and sum of each row (eq. 2). l holds this lane's part of the sum
// until finish: one reduction per row instead of one per block.
template <int R>
struct OnlineSoftmax {
  RowValues<R> m, l;

  // `sink` is the score of the head's sink, or MASKED.
  inline void begin(float sink, Worker at) thread {
    UNROLL for (int i = 0; i < R; ++i) {
      m.value[i] = sink;
      l.value[i] = sink != MASKED && tile_col(at, 0) == 0 ? 1.0f : 0.0f;
    }
  }

  // s becomes p = exp2(s - m) for the new maximum; acc and l move to that maximum.
  template <int K, int C>
  inline void update(thread AccTile<R, K>& s, thread AccTile<R, C>& acc) thread {
    UNROLL for (int i = 0; i < R; ++i) {
      const float m_new = maximum(m.value[i], row_max(s, i));
      // as long as nothing is visible, subtract 0: exp2(MASKED) is 0, exp2(0) is not
      const float shift = m_new == MASKED ? 0.0f : m_new;
      const float factor = power_of_2(m.value[i] - shift);
      float sum = 0.0f;
      UNROLL for (int j = 0; j < 2 * K; ++j) {
        const float p = power_of_2(s.get(i, j) - shift);
        s.set(i, j, p);
        sum += p;
      }
      // mostly no maximum moves
      if (over_simd_any(factor != 1.0f)) scale_row(acc, i, factor);
      l.value[i] = l.value[i] * factor + sum;
      m.value[i] = m_new;
    }
  }

  // acc becomes the output, l the log-sum-exp in natural log (eq. 3, 4).
  template <int C>
  inline void finish(thread AccTile<R, C>& acc) thread {
    UNROLL for (int i = 0; i < R; ++i) {
      const float sum = over_row_sum(l.value[i]);
      const bool empty = sum == 0.0f;
      scale_row(acc, i, empty ? 0.0f : 1.0f / sum);
      l.value[i] = empty ? minus_infinity() : LN_2 * (m.value[i] + log_base_2(sum));
    }
  }
};

// s becomes p = exp2(s - lse) (eq. 5); `lse` in base 2 gives one number per row or per
// column, NO_GRADIENT for a row that has none, whatever its scores are.
template <int R, int C, typename Values>
inline void probabilities(thread AccTile<R, C>& s, thread Values& lse) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      const float shift = lse.at_slot(i, j);
      s.set(i, j, shift == NO_GRADIENT ? 0.0f : power_of_2(s.get(i, j) - shift));
    }
  }
}

// dp becomes ds = p (dp - delta) (eq. 9).
template <int R, int C, typename Values>
inline void score_gradients(thread AccTile<R, C>& dp, thread AccTile<R, C>& p,
                            thread Values& delta) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      dp.set(i, j, p.get(i, j) * (dp.get(i, j) - delta.at_slot(i, j)));
    }
  }
}

// x *= y, element by element.
template <int R, int C>
inline void multiply(thread AccTile<R, C>& x, thread AccTile<R, C>& y) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) { x.set(i, j, x.get(i, j) * y.get(i, j)); }
  }
}
// x += y, element by element.
template <int R, int C>
inline void add(thread AccTile<R, C>& x, thread AccTile<R, C>& y) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) { x.set(i, j, x.get(i, j) + y.get(i, j)); }
  }
}
