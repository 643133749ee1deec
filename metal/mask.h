// mask: which keys a query sees. One predicate, and what it means for blocks.
//
// Causal is aligned bottom right: query i sees the keys j <= i + Tk - Tq.
// Every kernel walks the blocks of a Range and asks block_visibility about each: blocks
// outside the range are never loaded, and only PARTIAL ones pay for the predicate. A
// query past Tq needs no mask: its q and dout are zeros, and its row is not stored.

template <bool CAUSAL>
inline bool visible(Sizes n, int q_row, int k_col) {
  return k_col < n.Tk && (!CAUSAL || k_col <= q_row + n.Tk - n.Tq);
}

struct Range {
  int first, last;  // first <= i < last, in steps of a block
};

// Keys that some query of [q_first, q_first + BQ) sees.
template <int BQ, bool CAUSAL>
inline Range visible_keys(Sizes n, int q_first) {
  const int q_last = minimum(q_first + BQ, n.Tq);
  return Range{0, CAUSAL ? q_last + n.Tk - n.Tq : n.Tk};
}

// Queries that see some key of [k_first, ...), starting at a whole block.
template <int BQ, bool CAUSAL>
inline Range visible_queries(Sizes n, int k_first) {
  const int first = CAUSAL ? k_first - (n.Tk - n.Tq) : 0;
  return Range{first > 0 ? first / BQ * BQ : 0, n.Tq};
}

enum Visibility : int { INVISIBLE, PARTIAL, FULL };

template <bool CAUSAL>
inline Visibility block_visibility(Sizes n, int q_first, int q_last, int k_first,
                                   int k_last) {
  const int diagonal = n.Tk - n.Tq;
  if (q_first >= n.Tq || k_first >= n.Tk ||
      (CAUSAL && k_first > q_last - 1 + diagonal)) {
    return INVISIBLE;
  }
  const bool full = k_last <= n.Tk && (!CAUSAL || k_last - 1 <= q_first + diagonal);
  return full ? FULL : PARTIAL;
}

// Scores that a row may not see become MASKED; rows of the tile are queries.
template <bool CAUSAL, int R, int C>
inline void mask_scores(thread AccTile<R, C>& s, Sizes n, int q_first, int k_first,
                        Worker at) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      if (!visible<CAUSAL>(n, q_first + tile_row(at, i), k_first + tile_col(at, j))) {
        s.set(i, j, MASKED);
      }
    }
  }
}

// The same for a transposed tile: rows are keys, columns are queries.
template <bool CAUSAL, int R, int C>
inline void mask_scores_transposed(thread AccTile<R, C>& s, Sizes n, int q_first,
                                   int k_first, Worker at) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      if (!visible<CAUSAL>(n, q_first + tile_col(at, j), k_first + tile_row(at, i))) {
        s.set(i, j, MASKED);
      }
    }
  }
}
