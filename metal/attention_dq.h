// attention_dq: dq = scale ds k with ds = p (dp - delta), one pass over key blocks.
//
// Source     FlashAttention-2 Alg. 2, arXiv:2307.08691, as a kernel of its own so that
//            no sum crosses threadgroups; README.md eq. 5, 8-10, 13.
// Inputs     q [B,H,Tq,D], dout [B,H,Tq,DV], k [B,HKV,Tk,D], v [B,HKV,Tk,DV] T
//            lse2, delta [B,H,Tq] float    scale, softcap float    mask: mask.h
// Outputs    dq [B,Tq,H,D] T
// Grid       (ceil(Tq/BQ), H, B) threadgroups of DS BQ/(8 FQ) simdgroups; a threadgroup
//            owns BQ query rows, DS simdgroups 8 FQ of them.
// Tiling     q, dout (in threadgroup memory if Q_IN_TG, DOUT_IN_TG), dq, s, dp in
//            registers. k, v: BK x D tiles, shared by the simdgroups.
// Memory     SLOTS BK rows of k and of v, BQ of q if Q_IN_TG, of dout if DOUT_IN_TG,
//            RowStride apart; with DS > 1 also 2 DS BQ BK floats. Two barriers a block,
//            four if DS > 1.
// Edges      any Tq, Tk >= 1. ds is 0 where a key is invisible, and in a row whose lse2
//            is NO_GRADIENT. k is finite here: rows that see a NaN have an lse of NaN,
//            the others must not meet it in ds k.
// Precision  scores, dp, dq in float; ds is rounded to T before ds k.
// Reference  mlx_flash.reference.attention_backward

template <typename T, int D, int DV, int BQ, int BK, int FQ, int DS, bool Q_IN_TG,
          bool DOUT_IN_TG, bool SOFTCAP, typename Mask>
inline void attention_dq(Operand<T> q, Operand<T> k, Operand<T> v, Operand<T> dout,
                         RowOperand lse2, RowOperand delta, device T* dq, float scale,
                         float softcap, Sizes n, Mask mask, threadgroup T* q_tg,
                         threadgroup T* dout_tg, threadgroup T* k_tg,
                         threadgroup T* v_tg, threadgroup float* s_parts_tg,
                         threadgroup float* dp_parts_tg, Worker at) {
  static_assert(BK % 8 == 0 && BQ % (8 * FQ) == 0, "whole fragments");
  enum : int {
    W = Width<D, DS>::value,
    WV = Width<DV, DS>::value,
    FD = W / (8 * DS),
    FDV = WV / (8 * DS),
    FK = BK / 8,
    THREADS = 32 * DS * (BQ / (8 * FQ)),
    K_USES = IN_ABT | IN_AB | FINITE,
  };
  const int h_kv = at.head / (n.H / n.HKV);
  const int block_first = at.block * BQ;
  const int q_first = block_first + first_row<FQ>(at);
  const Range together = rows_together<FQ, DS, BQ>(at);
  select_block(mask.ids, blocks_in(n.Tq, BQ), blocks_in(n.Tk, BK), at);

  typename LeftOperand<T, FQ, FD, Q_IN_TG>::type q_rows;  // [8 FQ, D]
  load_left<D, W>(q_rows, q_tg, q, at.batch, at.head, q_first, n.Tq, at);
  typename LeftOperand<T, FQ, FDV, DOUT_IN_TG>::type dout_rows;  // [8 FQ, DV]
  load_left<DV, WV>(dout_rows, dout_tg, dout, at.batch, at.head, q_first, n.Tq, at);
  RowValues<FQ> lse_rows, delta_rows;
  load_row_values(lse_rows, lse2, at.batch, at.head, q_first, n.Tq, at);
  load_row_values(delta_rows, delta, at.batch, at.head, q_first, n.Tq, at);
  AccTile<FQ, FD> acc;  // [8 FQ, D]
  fill(acc, 0.0f);

  const Range keys = visible_keys<BQ, BK>(mask, n, block_first);
  const int n_blocks = blocks_in(keys.last - keys.first, BK);
  const Blocks blocks = {keys.first / BK, n_blocks, n_blocks};
  Walk walk = first_turn(mask.ids, blocks, at);
  for (; walk.now < n_blocks; walk = next_turn(walk, mask.ids, blocks, at)) {
    threadgroup_sync();  // everybody has finished reading the tiles that are replaced
    if (walk.next < n_blocks) {
      const int k_next = keys.first + walk.next * BK;
      stage<BK, D, W, THREADS, K_USES>(slot<BK, W>(k_tg, walk.turn + AHEAD), k,
                                       at.batch, h_kv, k_next, n.Tk, at.thread_index);
      stage<BK, DV, WV, THREADS, IN_ABT>(slot<BK, WV>(v_tg, walk.turn + AHEAD), v,
                                         at.batch, h_kv, k_next, n.Tk, at.thread_index);
    }
    staged_wait();
    if (walk.now >= 0) {
      finish<BK, W, THREADS, K_USES>(k_tg, walk.turn, at.thread_index);
      finish<BK, WV, THREADS, IN_ABT>(v_tg, walk.turn, at.thread_index);
    }
    staged_sync();  // both tiles of the block of this turn are complete

    if (walk.now < 0) continue;
    const int k_first = keys.first + walk.now * BK;
    const Visibility visibility =
        block_visibility(mask, n, walk.one_segment, block_first + together.first,
                         block_first + together.last, k_first, k_first + BK);
    if (visibility == INVISIBLE) continue;
    // s = q k^T, p = exp2(s - lse)
    AccTile<FQ, FK> p;  // [8 FQ, BK]
    fill(p, 0.0f);
    mma_abt<W>(p, q_rows, slot<BK, W>(k_tg, walk.turn), at);
    sum_parts<DS>(p, s_parts_tg, at);
    saturate<SOFTCAP>(p, scale, softcap);
    AccTile<FQ, FK> slope;
    if (SOFTCAP) cap_slopes(slope, p);
    scale_scores(p, SOFTCAP ? softcap : scale);
    if (visibility == PARTIAL) {
      add_array<false>(p, mask.array, n, at.batch, at.head, q_first, k_first, at);
    }
    probabilities(p, lse_rows);
    if (SOFTCAP) multiply(p, slope);
    // dp = dout v^T, ds = p (dp - delta)
    AccTile<FQ, FK> ds;  // [8 FQ, BK]
    fill(ds, 0.0f);
    mma_abt<WV>(ds, dout_rows, slot<BK, WV>(v_tg, walk.turn), at);
    sum_parts<DS>(ds, dp_parts_tg, at);
    score_gradients(ds, p, delta_rows);
    if (visibility == PARTIAL) {
      hide<false>(ds, 0.0f, mask, n, at.batch, at.head, q_first, k_first, at);
    }
    // dq += ds k
    RowTile<T, FQ, FK> ds_rows;
    convert(ds_rows, ds);
    mma_ab<W>(acc, ds_rows, slot_in_ab<BK, W>(k_tg, walk.turn), at);
  }

  UNROLL for (int i = 0; i < FQ; ++i) { scale_row(acc, i, scale); }
  store_rows<D>(dq + output_offset(n.Tq, n.H, D, at.batch, at.head, 0), long(n.H) * D,
                acc, q_first, n.Tq, at);
}
