// softmax: the running softmax of the forward, and its recomputation in the backward.
//
// Scores are in base 2: s = scale * log2(e) * q k^T (README.md eq. 1). No infinity is
// ever an operand: a masked score is MASKED, and so is m in a row that sees no key.

// Scores in base 2 from the product q k^T.
template <int R, int C>
inline void scale_scores(thread AccTile<R, C>& s, float scale) {
  UNROLL for (int i = 0; i < R; ++i) { scale_row(s, i, scale * LOG2_E); }
}

// Running maximum and sum of each row (eq. 2). l holds this lane's part of the sum
// until finish: one reduction per row instead of one per block.
template <int R>
struct OnlineSoftmax {
  RowValues<R> m, l;

  inline void begin() thread {
    UNROLL for (int i = 0; i < R; ++i) {
      m.value[i] = MASKED;
      l.value[i] = 0.0f;
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
      scale_row(acc, i, factor);
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

// lse in base 2. For an empty row (-inf) a number so high that exp2(s - lse) is 0.
inline float lse_base_2(float lse) { return lse < MASKED ? -MASKED : lse * LOG2_E; }

// s becomes p = exp2(s - lse) (eq. 5); `lse` gives one number per row or per column.
template <int R, int C, typename Values>
inline void probabilities(thread AccTile<R, C>& s, thread Values& lse) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      s.set(i, j, power_of_2(s.get(i, j) - lse_base_2(lse.at_slot(i, j))));
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
