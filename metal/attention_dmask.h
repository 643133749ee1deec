// attention_dmask: the gradient of an additive mask, ds = p (dp - delta), summed over the
// axes along which the mask has one element.
//
// Source     README.md eq. 5, 8, 9, 14.
// Inputs     q [B,H,Tq,D], dout [B,H,Tq,DV], k [B,HKV,Tk,D], v [B,HKV,Tk,DV] T
//            lse2, delta [B,H,Tq] float    scale, softcap float    mask: mask.h
// Outputs    dmask [MB,MH,MQ,MK] M, where MB is B, or 1 if SUM_B; MH is H, or 1 if SUM_H;
//            MQ is Tq, or BQ rows still to be added if SUM_Q; MK likewise; not both.
// Grid       (blocks of MQ * blocks of MK, MH, MB) threadgroups of DS BQ/(8 FQ)
//            simdgroups; a threadgroup owns BQ x BK elements, DS simdgroups 8 FQ rows of
//            them, and sums over the rest in one order: no atomics.
// Tiling     q, dout, s, dp, the sum in registers. k, v: BK x D tiles.
// Memory     SLOTS BK rows of k and of v, RowStride apart; with DS > 1 also 2 DS BQ BK
//            floats. Two barriers a block, four if DS > 1.
// Edges      as in attention_dq.
// Precision  everything in float.
// Reference  mlx_flash.reference.attention_backward

// A tile of scores of one head.
struct TilePlace {
  int b, h, q_block, k_block;
};

// The tiles that a threadgroup adds up, in one order: batches, heads, query blocks, key
// blocks. Its own place, along an axis that is not summed over.
struct SummedTiles {
  int n_h, n_q, n_k;
  int count;
  TilePlace own;

  inline TilePlace place(int i) const thread {
    return TilePlace{own.b + i / (n_k * n_q * n_h), own.h + i / (n_k * n_q) % n_h,
                     own.q_block + i / n_k % n_q, own.k_block + i % n_k};
  }
};

// The first tile from i on that may be visible; >= count if there is none.
template <int BQ, int BK, typename Mask>
inline int next_tile(SummedTiles tiles, Mask mask, Sizes n, int i) {
  for (; i < tiles.count; ++i) {
    const TilePlace place = tiles.place(i);
    const int q_first = place.q_block * BQ, k_first = place.k_block * BK;
    if (block_visibility(mask, n, true, q_first, q_first + BQ, k_first, k_first + BK) !=
            INVISIBLE &&
        blocks_meet(mask.ids, place.b, blocks_in(n.Tq, BQ), place.q_block,
                    blocks_in(n.Tk, BK), place.k_block)) {
      break;
    }
  }
  return i;
}

template <typename T, int D, int DV, int BQ, int BK, int FQ, int DS, bool SOFTCAP,
          bool SUM_B, bool SUM_H, bool SUM_Q, bool SUM_K, typename M, typename Mask>
inline void attention_dmask(Operand<T> q, Operand<T> k, Operand<T> v, Operand<T> dout,
                            RowOperand lse2, RowOperand delta, device M* dmask, int B,
                            float scale, float softcap, Sizes n, Mask mask,
                            threadgroup T* k_tg, threadgroup T* v_tg,
                            threadgroup float* s_parts_tg,
                            threadgroup float* dp_parts_tg, Worker at) {
  static_assert(BK % 8 == 0 && BQ % (8 * FQ) == 0, "whole fragments");
  enum : int {
    W = Width<D, DS>::value,
    WV = Width<DV, DS>::value,
    FD = W / (8 * DS),
    FDV = WV / (8 * DS),
    FK = BK / 8,
    THREADS = 32 * DS * (BQ / (8 * FQ)),
  };
  const int q_blocks = blocks_in(n.Tq, BQ), k_blocks = blocks_in(n.Tk, BK);
  const int per_row = SUM_K ? 1 : k_blocks;  // threadgroups
  const int own_q = at.block / per_row, own_k = at.block % per_row;
  SummedTiles tiles = {SUM_H ? n.H : 1,
                       SUM_Q ? q_blocks : 1,
                       SUM_K ? k_blocks : 1,
                       0,
                       {at.batch, at.head, own_q, own_k}};
  tiles.count = (SUM_B ? B : 1) * tiles.n_h * tiles.n_q * tiles.n_k;

  AccTile<FQ, FK> sum;  // [8 FQ, BK]
  fill(sum, 0.0f);
  Walk walk = first_turn(Found{next_tile<BQ, BK>(tiles, mask, n, 0), false});
  for (; walk.now < tiles.count;
       walk = next_turn(
           walk, Found{next_tile<BQ, BK>(tiles, mask, n, walk.next + 1), false})) {
    threadgroup_sync();  // everybody has finished reading the tiles that are replaced
    if (walk.next < tiles.count) {
      const TilePlace next = tiles.place(walk.next);
      const int h_kv = next.h / (n.H / n.HKV);
      const int k_next = next.k_block * BK;
      stage<BK, D, W, THREADS, IN_ABT>(slot<BK, W>(k_tg, walk.turn + AHEAD), k, next.b,
                                       h_kv, k_next, n.Tk, at.thread_index);
      stage<BK, DV, WV, THREADS, IN_ABT>(slot<BK, WV>(v_tg, walk.turn + AHEAD), v,
                                         next.b, h_kv, k_next, n.Tk, at.thread_index);
    }
    staged_wait();
    if (walk.now >= 0) {
      finish<BK, W, THREADS, IN_ABT>(k_tg, walk.turn, at.thread_index);
      finish<BK, WV, THREADS, IN_ABT>(v_tg, walk.turn, at.thread_index);
    }
    staged_sync();  // both tiles of the block of this turn are complete

    if (walk.now < 0) continue;
    const TilePlace now = tiles.place(walk.now);
    const int b = now.b, h = now.h;
    const int block_first = now.q_block * BQ, k_first = now.k_block * BK;
    const int q_first = block_first + first_row<FQ>(at);
    const Range together = rows_together<FQ, DS, BQ>(at);
    const Visibility visibility =
        block_visibility(mask, n, true, block_first + together.first,
                         block_first + together.last, k_first, k_first + BK);
    if (visibility == INVISIBLE) continue;
    // s = q k^T, p = exp2(s - lse)
    RowTile<T, FQ, FD> q_rows;  // [8 FQ, D]
    load_left<D, W>(q_rows, k_tg, q, b, h, q_first, n.Tq, at);
    AccTile<FQ, FK> p;  // [8 FQ, BK]
    fill(p, 0.0f);
    mma_abt<W>(p, q_rows, slot<BK, W>(k_tg, walk.turn), at);
    sum_parts<DS>(p, s_parts_tg, at);
    saturate<SOFTCAP>(p, scale, softcap);
    scale_scores(p, SOFTCAP ? softcap : scale);
    add_array<false>(p, mask.array, n, b, h, q_first, k_first, at);
    RowValues<FQ> lse_rows, delta_rows;
    load_row_values(lse_rows, lse2, b, h, q_first, n.Tq, at);
    load_row_values(delta_rows, delta, b, h, q_first, n.Tq, at);
    probabilities(p, lse_rows);
    // dp = dout v^T, ds = p (dp - delta)
    RowTile<T, FQ, FDV> dout_rows;  // [8 FQ, DV]
    load_left<DV, WV>(dout_rows, k_tg, dout, b, h, q_first, n.Tq, at);
    AccTile<FQ, FK> ds;  // [8 FQ, BK]
    fill(ds, 0.0f);
    mma_abt<WV>(ds, dout_rows, slot<BK, WV>(v_tg, walk.turn), at);
    sum_parts<DS>(ds, dp_parts_tg, at);
    score_gradients(ds, p, delta_rows);
    hide<false>(ds, 0.0f, mask, n, b, h, q_first, k_first, at);
    add(sum, ds);
  }

  const int n_rows = SUM_Q ? BQ : n.Tq, n_cols = SUM_K ? BK : n.Tk;
  const long head = long(at.batch) * (SUM_H ? 1 : n.H) + at.head;
  store_tile(dmask + head * n_rows * n_cols, sum, own_q * BQ + first_row<FQ>(at),
             n_rows, own_k * BK, n_cols, at);
}
