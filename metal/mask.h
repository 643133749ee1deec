// mask: which keys a query sees. One predicate, and what it means for blocks.
//
// Band       query i sees the keys i + low <= j <= i + high, where these are bounded:
//            causal, sliding windows, and any offset between queries and keys.
// Segments   equal ids see each other. The lowest and highest id of each block say which
//            blocks cannot meet.
// Array      [B, H, Tq, Tk] through its strides: bool (true is visible) or a number that
//            is added to the score.
// Blocks     Every kernel walks the blocks of a Range that may be visible, and asks
//            block_visibility about each: others are never loaded, and only PARTIAL ones
//            pay for the predicate. A query past Tq is hidden or has zeros for q and dout.

struct NoSegments {};
struct Segments {
  const device int* q_ids;  // [B, Tq]
  const device int* k_ids;  // [B, Tk]
  // lowest and highest id of each block: [B, blocks of the kernel's own rows]
  const device int *own_lowest, *own_highest;
  const device int *other_lowest, *other_highest;  // [B, blocks that are walked]
  int lowest, highest;                             // of the own block
  // The 32 blocks of the walk from `window` on are known, one to each lane: a lane's
  // block i is 2 i if it and the own block are one segment, 2 i + 1 if they may meet
  // otherwise, and a number past the walk if they do not.
  int window, known;
};

struct NoArray {
  enum : int { EXISTS = 0 };
};
template <typename M>
struct MaskArray {
  enum : int { EXISTS = 1 };
  const device M* data;
  Strides stride;  // of B, H, Tq, Tk
};

template <bool LOW, bool HIGH, typename Ids, typename Array>
struct Mask {
  enum : int { HAS_LOW = LOW, HAS_HIGH = HIGH, HAS_ARRAY = Array::EXISTS };
  int low, high;
  Ids ids;
  Array array;
};

// Before the other questions about blocks: the ids of this batch and of the own block.
inline void select_block(thread NoSegments& ids, int own_blocks, int other_blocks,
                         Worker at) {}
inline void select_block(thread Segments& ids, int own_blocks, int other_blocks,
                         Worker at) {
  const long own = long(at.batch) * own_blocks + at.block;
  ids.lowest = ids.own_lowest[own];
  ids.highest = ids.own_highest[own];
  ids.other_lowest += long(at.batch) * other_blocks;
  ids.other_highest += long(at.batch) * other_blocks;
  ids.window = -32;
}

// The id of a query and of a key. Outside the sequence nobody sees any.
inline int q_id(NoSegments ids, Sizes n, int b, int q_row) { return 0; }
inline int k_id(NoSegments ids, Sizes n, int b, int k_col) { return 0; }
inline int q_id(Segments ids, Sizes n, int b, int q_row) {
  return q_row < n.Tq ? ids.q_ids[long(b) * n.Tq + q_row] : 0;
}
inline int k_id(Segments ids, Sizes n, int b, int k_col) {
  return k_col < n.Tk ? ids.k_ids[long(b) * n.Tk + k_col] : 0;
}

template <typename M>
inline M mask_element(MaskArray<M> mask, int b, int h, int q_row, int k_col) {
  return mask.data[offset(mask.stride, b, h, q_row) + k_col * mask.stride.d];
}

inline bool shows(bool element) { return element; }
template <typename M>
inline bool shows(M element) {
  return !(float(element) < HIDDEN);
}
inline bool array_shows(NoArray mask, int b, int h, int q_row, int k_col) {
  return true;
}
template <typename M>
inline bool array_shows(MaskArray<M> mask, int b, int h, int q_row, int k_col) {
  return shows(mask_element(mask, b, h, q_row, k_col));
}

template <typename Mask>
inline bool visible(Mask mask, Sizes n, bool same_segment, int b, int h, int q_row,
                    int k_col) {
  return q_row < n.Tq && k_col < n.Tk &&
         (!Mask::HAS_HIGH || k_col <= q_row + mask.high) &&
         (!Mask::HAS_LOW || k_col >= q_row + mask.low) && same_segment &&
         array_shows(mask.array, b, h, q_row, k_col);
}

// Keys that some query of [q_first, q_first + BQ) sees in the band, from a whole block on.
template <int BQ, int BK, typename Mask>
inline Range visible_keys(Mask mask, Sizes n, int q_first) {
  const int q_last = minimum(q_first + BQ, n.Tq);
  const int first = Mask::HAS_LOW ? q_first + mask.low : 0;
  const int last = Mask::HAS_HIGH ? q_last + mask.high : n.Tk;
  return Range{first > 0 ? first / BK * BK : 0, minimum(last, n.Tk)};
}

// Queries that see some key of [k_first, k_first + BK), from a whole block on.
template <int BQ, int BK, typename Mask>
inline Range visible_queries(Mask mask, Sizes n, int k_first) {
  const int k_last = minimum(k_first + BK, n.Tk);
  const int first = Mask::HAS_HIGH ? k_first - mask.high : 0;
  const int last = Mask::HAS_LOW ? k_last - mask.low : n.Tq;
  return Range{first > 0 ? first / BQ * BQ : 0, minimum(last, n.Tq)};
}

enum Visibility : int { INVISIBLE, PARTIAL, FULL };

// Of the keys [k_first, k_last) to the queries [q_first, q_last).
template <typename Mask>
inline Visibility block_visibility(Mask mask, Sizes n, bool one_segment, int q_first,
                                   int q_last, int k_first, int k_last) {
  if (q_first >= n.Tq || k_first >= n.Tk ||
      (Mask::HAS_HIGH && k_first > q_last - 1 + mask.high) ||
      (Mask::HAS_LOW && k_last - 1 < q_first + mask.low)) {
    return INVISIBLE;
  }
  const bool full = !Mask::HAS_ARRAY && one_segment && k_last <= n.Tk &&
                    (!Mask::HAS_HIGH || k_last - 1 <= q_first + mask.high) &&
                    (!Mask::HAS_LOW || k_first >= q_last - 1 + mask.low);
  return full ? FULL : PARTIAL;
}

// Whether some block of each kind may have an id in common, before select_block.
inline bool blocks_meet(NoSegments ids, int b, int own_blocks, int own,
                        int other_blocks, int other) {
  return true;
}
inline bool blocks_meet(Segments ids, int b, int own_blocks, int own, int other_blocks,
                        int other) {
  const long x = long(b) * own_blocks + own, y = long(b) * other_blocks + other;
  return ids.own_lowest[x] <= ids.other_highest[y] &&
         ids.other_lowest[y] <= ids.own_highest[x];
}

// The blocks that a threadgroup walks, numbered 0 <= i < count over all its heads.
struct Blocks {
  int first;     // number of the first one in its own head
  int per_head;  // may be <= 0
  int count;
};

// A block of the walk: whether all of it and of the own block is one segment.
struct Found {
  int block;
  bool one_segment;
};

// The first block from i on whose ids the own block may meet; >= count if there is none.
inline Found next_block(thread NoSegments& ids, Blocks blocks, int i, Worker at) {
  return Found{i, true};
}
inline Found next_block(thread Segments& ids, Blocks blocks, int i, Worker at) {
  const int none = 2 * blocks.count;
  while (i < blocks.count) {
    if (i >= ids.window + 32) {
      ids.window = i;
      ids.known = none;
      const int mine = i + at.lane;
      if (mine < blocks.count) {
        const int other = blocks.first + mine % blocks.per_head;
        const int lowest = ids.other_lowest[other], highest = ids.other_highest[other];
        const bool meets = lowest <= ids.highest && ids.lowest <= highest;
        const bool one = lowest == ids.highest && ids.lowest == highest;
        if (meets) ids.known = 2 * mine + (one ? 0 : 1);
      }
    }
    const int found = over_simd_min(ids.known >= 2 * i ? ids.known : none);
    if (found < none) return Found{found / 2, found % 2 == 0};
    i = ids.window + 32;
  }
  return Found{i, false};
}

// The walk: block `now` is computed in this turn (none if < 0), `next` is staged, AHEAD
// turns before its own.
struct Walk {
  int turn, now, next;
  bool one_segment, next_is_one_segment;
};
inline Walk first_turn(Found next) {
  return Walk{-AHEAD, AHEAD ? -1 : next.block, next.block, next.one_segment,
              next.one_segment};
}
inline Walk next_turn(Walk walk, Found next) {
  return Walk{walk.turn + 1, AHEAD ? walk.next : next.block, next.block,
              AHEAD ? walk.next_is_one_segment : next.one_segment, next.one_segment};
}
template <typename Ids>
inline Walk first_turn(thread Ids& ids, Blocks blocks, Worker at) {
  return first_turn(next_block(ids, blocks, 0, at));
}
template <typename Ids>
inline Walk next_turn(Walk walk, thread Ids& ids, Blocks blocks, Worker at) {
  return next_turn(walk, next_block(ids, blocks, walk.next + 1, at));
}

// Additive masks: what they add to the scores, in base 2.
template <bool TRANSPOSED, int R, int C>
inline void add_array(thread AccTile<R, C>& s, NoArray mask, Sizes n, int b, int h,
                      int q_first, int k_first, Worker at) {}
template <bool TRANSPOSED, int R, int C>
inline void add_array(thread AccTile<R, C>& s, MaskArray<bool> mask, Sizes n, int b,
                      int h, int q_first, int k_first, Worker at) {}
template <bool TRANSPOSED, int R, int C, typename M>
inline void add_array(thread AccTile<R, C>& s, MaskArray<M> mask, Sizes n, int b, int h,
                      int q_first, int k_first, Worker at) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      const int q_row = q_first + (TRANSPOSED ? tile_col(at, j) : tile_row(at, i));
      const int k_col = k_first + (TRANSPOSED ? tile_row(at, i) : tile_col(at, j));
      if (q_row < n.Tq && k_col < n.Tk) {
        const float x = float(mask_element(mask, b, h, q_row, k_col));
        if (!(x < HIDDEN)) s.set(i, j, s.get(i, j) + x * LOG2_E);
      }
    }
  }
}

// `value` where a query does not see a key. The rows of the tile are queries, or, if it
// is TRANSPOSED, keys. The ids are loaded once for each row and column.
template <bool TRANSPOSED, int R, int C, typename Mask>
inline void hide(thread AccTile<R, C>& x, float value, Mask mask, Sizes n, int b, int h,
                 int q_first, int k_first, Worker at) {
  int row_ids[R];
  UNROLL for (int i = 0; i < R; ++i) {
    const int row = tile_row(at, i);
    row_ids[i] = TRANSPOSED ? k_id(mask.ids, n, b, k_first + row)
                            : q_id(mask.ids, n, b, q_first + row);
  }
  UNROLL for (int j = 0; j < 2 * C; ++j) {
    const int column = tile_col(at, j);
    const int column_id = TRANSPOSED ? q_id(mask.ids, n, b, q_first + column)
                                     : k_id(mask.ids, n, b, k_first + column);
    UNROLL for (int i = 0; i < R; ++i) {
      const int row = tile_row(at, i);
      const int q_row = q_first + (TRANSPOSED ? column : row);
      const int k_col = k_first + (TRANSPOSED ? row : column);
      const bool same_segment = row_ids[i] == column_id;
      if (!visible(mask, n, same_segment, b, h, q_row, k_col)) x.set(i, j, value);
    }
  }
}
