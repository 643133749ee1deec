// attention_dkv: dk = scale ds^T q and dv = p^T dout, one pass over the query blocks of
// every query head that reads the keys. WITH_DK and WITH_DV say which of the two.
//
// Source     FlashAttention-2 Alg. 2, arXiv:2307.08691; README.md eq. 5, 7-9, 11.
// Inputs     q, dout [B,H,Tq,D] T    k, v [B,HKV,Tk,D] T    lse, delta [B,H,Tq] float
// Outputs    dk, dv [B,Tk,HKV,D] T
// Grid       (ceil(Tk/BK), HKV, B) threadgroups of BK/(8 FK) simdgroups; a threadgroup
//            owns BK key rows, a simdgroup 8 FK of them. Its own loop sums over the
//            query heads of the group: no atomics, one order, the same bits every time.
// Tiling     k, v (in threadgroup memory if K_IN_TG, V_IN_TG), dk, dv, s^T, dp^T in
//            registers.
//            q, dout: BQ x D tiles, with their lse and delta, shared by the simdgroups.
// Memory     (2 SLOTS BQ + (K_IN_TG + V_IN_TG) BK) RowStride<T,D> sizeof(T) +
//            8 SLOTS BQ bytes of threadgroup memory; two barriers a block.
// Edges      as in attention_dq; queries past Tq are invisible.
// Precision  scores, dp, dk, dv in float; p and ds rounded to T before their products.
// Reference  mlx_flash.reference.attention_backward

template <typename T, int D, int BQ, int BK, int FK, bool CAUSAL, bool WITH_DK,
          bool WITH_DV, bool K_IN_TG, bool V_IN_TG>
inline void attention_dkv(Operand<T> q, Operand<T> k, Operand<T> v, Operand<T> dout,
                          RowOperand lse, RowOperand delta, device T* dk, device T* dv,
                          float scale, Sizes n, threadgroup T* k_tg,
                          threadgroup T* v_tg, threadgroup T* q_tg,
                          threadgroup T* dout_tg, threadgroup float* lse_tg,
                          threadgroup float* delta_tg, Worker at) {
  static_assert(D % 8 == 0 && BQ % 8 == 0 && BK % (8 * FK) == 0, "whole fragments");
  enum : int { FD = D / 8, FQ = BQ / 8, THREADS = 32 * (BK / (8 * FK)) };
  const int group = n.H / n.HKV;
  const int block_first = at.block * BK;
  const int k_first = block_first + first_row<FK>(at);
  const int k_together = block_first + first_row_together<FK>(at);

  typename LeftOperand<T, FK, FD, K_IN_TG>::type k_rows;  // [8 FK, D]
  load_left(k_rows, k_tg, k, at.batch, at.head, k_first, n.Tk, at);
  typename LeftOperand<T, FK, FD, V_IN_TG>::type v_rows;  // [8 FK, D]
  if (WITH_DK) load_left(v_rows, v_tg, v, at.batch, at.head, k_first, n.Tk, at);
  AccTile<FK, FD> dk_acc, dv_acc;  // [8 FK, D]
  fill(dk_acc, 0.0f);
  fill(dv_acc, 0.0f);

  // the blocks of all query heads of the group, one after the other
  const Range queries = visible_queries<BQ, CAUSAL>(n, block_first);
  const int blocks = (queries.last - queries.first + BQ - 1) / BQ;
  for (int block = -AHEAD; block < group * blocks; ++block) {
    const int next = block + AHEAD;
    threadgroup_sync();  // everybody has finished reading the tiles that are replaced
    if (next < group * blocks) {
      const int h = at.head * group + next / blocks;
      const int q_next = queries.first + next % blocks * BQ;
      threadgroup T* q_to = slot<BQ, D>(q_tg, next);
      threadgroup T* dout_to = slot<BQ, D>(dout_tg, next);
      threadgroup float* lse_to = lse_tg + next % SLOTS * BQ;
      threadgroup float* delta_to = delta_tg + next % SLOTS * BQ;
      stage<BQ, D, THREADS>(q_to, q, at.batch, h, q_next, n.Tq, at.thread_index);
      stage<BQ, D, THREADS>(dout_to, dout, at.batch, h, q_next, n.Tq, at.thread_index);
      stage_values<BQ, THREADS>(lse_to, lse, at.batch, h, q_next, n.Tq, at);
      if (WITH_DK) {
        stage_values<BQ, THREADS>(delta_to, delta, at.batch, h, q_next, n.Tq, at);
      }
    }
    staged_sync();  // the tiles and row numbers of the block are complete

    if (block < 0) continue;
    const int q_first = queries.first + block % blocks * BQ;
    const Visibility visibility = block_visibility<CAUSAL>(
        n, q_first, q_first + BQ, k_together, k_together + TOGETHER * 8 * FK);
    if (visibility == INVISIBLE) continue;
    const threadgroup T* q_block = slot<BQ, D>(q_tg, block);
    const threadgroup T* dout_block = slot<BQ, D>(dout_tg, block);
    ColumnValues lse_columns = {lse_tg + block % SLOTS * BQ, at};
    ColumnValues delta_columns = {delta_tg + block % SLOTS * BQ, at};
    // s^T = k q^T, p^T = exp2(s^T - lse)
    AccTile<FK, FQ> p;  // [8 FK, BQ]
    fill(p, 0.0f);
    mma_abt(p, k_rows, q_block);
    scale_scores(p, scale);
    if (visibility == PARTIAL) {
      mask_scores_transposed<CAUSAL>(p, n, q_first, k_first, at);
    }
    probabilities(p, lse_columns);
    if (WITH_DV) {
      // dv += p^T dout
      RowTile<T, FK, FQ> p_rows;
      convert(p_rows, p);
      mma_ab(dv_acc, p_rows, dout_block);
    }
    if (WITH_DK) {
      // dp^T = v dout^T, ds^T = p^T (dp^T - delta), dk += ds^T q
      AccTile<FK, FQ> ds;  // [8 FK, BQ]
      fill(ds, 0.0f);
      mma_abt(ds, v_rows, dout_block);
      score_gradients(ds, p, delta_columns);
      RowTile<T, FK, FQ> ds_rows;
      convert(ds_rows, ds);
      mma_ab(dk_acc, ds_rows, q_block);
    }
  }

  const long first = output_offset(n.Tk, n.HKV, D, at.batch, at.head, 0);
  if (WITH_DK) {
    UNROLL for (int i = 0; i < FK; ++i) { scale_row(dk_acc, i, scale); }
    store_rows(dk + first, long(n.HKV) * D, dk_acc, k_first, n.Tk, at);
  }
  if (WITH_DV) store_rows(dv + first, long(n.HKV) * D, dv_acc, k_first, n.Tk, at);
}
