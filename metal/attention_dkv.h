// attention_dkv: dk = scale ds^T q and dv = p^T dout, one pass over the query blocks of
// every query head that reads the keys. WITH_DK and WITH_DV say which of the two.
//
// Source     FlashAttention-2 Alg. 2, arXiv:2307.08691; README.md eq. 5, 7-9, 11, 13.
// Inputs     q [B,H,Tq,D], dout [B,H,Tq,DV], k [B,HKV,Tk,D], v [B,HKV,Tk,DV] T
//            lse2, delta [B,H,Tq] float    scale, softcap float    mask: mask.h
// Outputs    dk [B,Tk,HKV,D], dv [B,Tk,HKV,DV] T
// Grid       (ceil(Tk/BK), HKV, B) threadgroups of DS BK/(8 FK) simdgroups; a threadgroup
//            owns BK key rows, DS simdgroups 8 FK of them. Its own loop sums over the
//            query heads of the group: no atomics, one order, the same bits every time.
// Tiling     k, v (in threadgroup memory if K_IN_TG, V_IN_TG), dk, dv, s^T, dp^T in
//            registers.
//            q, dout: BQ x D tiles, with their lse2 and delta, shared by the simdgroups.
// Memory     SLOTS BQ rows of q and of dout, BK of k if K_IN_TG, of v if V_IN_TG,
//            RowStride apart; 2 SLOTS BQ floats; with DS > 1 also 2 DS BK BQ floats. Two
//            barriers a block, four if DS > 1.
// Edges      as in attention_dq; queries past Tq are zeros. q is finite here: keys
//            that see a NaN have a p of NaN, the others must not meet it in ds^T q.
// Precision  scores, dp, dk, dv in float; p and ds rounded to T before their products.
// Reference  mlx_flash.reference.attention_backward

template <typename T, int D, int DV, int BQ, int BK, int FK, int DS, bool WITH_DK,
          bool WITH_DV, bool K_IN_TG, bool V_IN_TG, bool SOFTCAP, typename Mask>
inline void attention_dkv(Operand<T> q, Operand<T> k, Operand<T> v, Operand<T> dout,
                          RowOperand lse2, RowOperand delta, device T* dk, device T* dv,
                          float scale, float softcap, Sizes n, Mask mask,
                          threadgroup T* k_tg, threadgroup T* v_tg, threadgroup T* q_tg,
                          threadgroup T* dout_tg, threadgroup float* lse_tg,
                          threadgroup float* delta_tg, threadgroup float* s_parts_tg,
                          threadgroup float* dp_parts_tg, Worker at) {
  static_assert(BQ % 8 == 0 && BK % (8 * FK) == 0, "whole fragments");
  enum : int {
    W = Width<D, DS>::value,
    WV = Width<DV, DS>::value,
    FD = W / (8 * DS),
    FDV = WV / (8 * DS),
    FQ = BQ / 8,
    THREADS = 32 * DS * (BK / (8 * FK)),
    Q_USES = IN_ABT | (WITH_DK ? IN_AB | FINITE : 0),
    DOUT_USES = (WITH_DK ? IN_ABT : 0) | (WITH_DV ? IN_AB : 0),
  };
  const int group = n.H / n.HKV;
  const int block_first = at.block * BK;
  const int k_first = block_first + first_row<FK>(at);
  const Range together = rows_together<FK, DS, BK>(at);
  select_block(mask.ids, blocks_in(n.Tk, BK), blocks_in(n.Tq, BQ), at);

  typename LeftOperand<T, FK, FD, K_IN_TG>::type k_rows;  // [8 FK, D]
  load_left<D, W>(k_rows, k_tg, k, at.batch, at.head, k_first, n.Tk, at);
  typename LeftOperand<T, FK, FDV, V_IN_TG>::type v_rows;  // [8 FK, DV]
  if (WITH_DK) load_left<DV, WV>(v_rows, v_tg, v, at.batch, at.head, k_first, n.Tk, at);
  AccTile<FK, FD> dk_acc;   // [8 FK, D]
  AccTile<FK, FDV> dv_acc;  // [8 FK, DV]
  fill(dk_acc, 0.0f);
  fill(dv_acc, 0.0f);

  // the blocks of all query heads of the group, one after the other
  const Range queries = visible_queries<BQ, BK>(mask, n, block_first);
  const int per_head = blocks_in(queries.last - queries.first, BQ);
  const Blocks blocks = {queries.first / BQ, per_head, group * per_head};
  Walk walk = first_turn(mask.ids, blocks, at);
  for (; walk.now < blocks.count; walk = next_turn(walk, mask.ids, blocks, at)) {
    threadgroup_sync();  // everybody has finished reading the tiles that are replaced
    if (walk.next < blocks.count) {
      const int turn = walk.turn + AHEAD;
      const int h = at.head * group + walk.next / per_head;
      const int q_next = queries.first + walk.next % per_head * BQ;
      stage<BQ, D, W, THREADS, Q_USES>(slot<BQ, W>(q_tg, turn), q, at.batch, h, q_next,
                                       n.Tq, at.thread_index);
      stage<BQ, DV, WV, THREADS, DOUT_USES>(slot<BQ, WV>(dout_tg, turn), dout, at.batch,
                                            h, q_next, n.Tq, at.thread_index);
      stage_values<BQ, THREADS>(lse_tg + turn % SLOTS * BQ, lse2, at.batch, h, q_next,
                                n.Tq, at);
      if (WITH_DK) {
        stage_values<BQ, THREADS>(delta_tg + turn % SLOTS * BQ, delta, at.batch, h,
                                  q_next, n.Tq, at);
      }
    }
    staged_wait();
    if (walk.now >= 0) {
      finish<BQ, W, THREADS, Q_USES>(q_tg, walk.turn, at.thread_index);
      finish<BQ, WV, THREADS, DOUT_USES>(dout_tg, walk.turn, at.thread_index);
    }
    staged_sync();  // the tiles and row numbers of the block of this turn are complete

    if (walk.now < 0) continue;
    const int h = at.head * group + walk.now / per_head;
    const int q_first = queries.first + walk.now % per_head * BQ;
    const Visibility visibility =
        block_visibility(mask, n, walk.one_segment, q_first, q_first + BQ,
                         block_first + together.first, block_first + together.last);
    if (visibility == INVISIBLE) continue;
    ColumnValues lse_columns = {lse_tg + walk.turn % SLOTS * BQ, at};
    ColumnValues delta_columns = {delta_tg + walk.turn % SLOTS * BQ, at};
    // s^T = k q^T, p^T = exp2(s^T - lse)
    AccTile<FK, FQ> p;  // [8 FK, BQ]
    fill(p, 0.0f);
    mma_abt<W>(p, k_rows, slot<BQ, W>(q_tg, walk.turn), at);
    sum_parts<DS>(p, s_parts_tg, at);
    saturate<SOFTCAP>(p, scale, softcap);
    AccTile<FK, FQ> slope;
    if (SOFTCAP && WITH_DK) cap_slopes(slope, p);
    scale_scores(p, SOFTCAP ? softcap : scale);
    if (visibility == PARTIAL) {
      add_array<true>(p, mask.array, n, at.batch, h, q_first, k_first, at);
    }
    probabilities(p, lse_columns);
    if (WITH_DV) {
      // dv += p^T dout
      if (visibility == PARTIAL) {
        hide<true>(p, 0.0f, mask, n, at.batch, h, q_first, k_first, at);
      }
      RowTile<T, FK, FQ> p_rows;
      convert(p_rows, p);
      mma_ab<WV>(dv_acc, p_rows, slot_in_ab<BQ, WV>(dout_tg, walk.turn), at);
    }
    if (WITH_DK) {
      // dp^T = v dout^T, ds^T = p^T (dp^T - delta), dk += ds^T q
      if (SOFTCAP) multiply(p, slope);
      AccTile<FK, FQ> ds;  // [8 FK, BQ]
      fill(ds, 0.0f);
      mma_abt<WV>(ds, v_rows, slot<BQ, WV>(dout_tg, walk.turn), at);
      sum_parts<DS>(ds, dp_parts_tg, at);
      score_gradients(ds, p, delta_columns);
      if (visibility == PARTIAL) {
        hide<true>(ds, 0.0f, mask, n, at.batch, h, q_first, k_first, at);
      }
      RowTile<T, FK, FQ> ds_rows;
      convert(ds_rows, ds);
      mma_ab<W>(dk_acc, ds_rows, slot_in_ab<BQ, W>(q_tg, walk.turn), at);
    }
  }

  if (WITH_DK) {
    UNROLL for (int i = 0; i < FK; ++i) { scale_row(dk_acc, i, scale); }
    store_rows<D>(dk + output_offset(n.Tk, n.HKV, D, at.batch, at.head, 0),
                  long(n.HKV) * D, dk_acc, k_first, n.Tk, at);
  }
  if (WITH_DV) {
    store_rows<DV>(dv + output_offset(n.Tk, n.HKV, DV, at.batch, at.head, 0),
                   long(n.HKV) * DV, dv_acc, k_first, n.Tk, at);
  }
}
