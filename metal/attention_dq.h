// attention_dq: dq = scale ds k with ds = p (dp - delta), one pass over key blocks.
//
// Source     FlashAttention-2 Alg. 2, arXiv:2307.08691, as a kernel of its own so that
//            no sum crosses threadgroups; README.md eq. 5, 8-10.
// Inputs     q, dout [B,H,Tq,D] T    k, v [B,HKV,Tk,D] T    lse, delta [B,H,Tq] float
// Outputs    dq [B,Tq,H,D] T
// Grid       (ceil(Tq/BQ), H, B) threadgroups of BQ/(8 FQ) simdgroups; a threadgroup
//            owns BQ query rows, a simdgroup 8 FQ of them.
// Tiling     q, dout (in threadgroup memory if Q_IN_TG, DOUT_IN_TG), dq, s, dp in
//            registers. k, v: BK x D tiles, shared by the simdgroups.
// Memory     (2 SLOTS BK + (Q_IN_TG + DOUT_IN_TG) BQ) RowStride<T,D> sizeof(T) bytes of
//            threadgroup memory; two barriers a block.
// Edges      any Tq, Tk >= 1. p is 0 where a key is invisible and in a row without keys
//            (lse = -inf), for which exp(s - lse) is never evaluated.
// Precision  scores, dp, dq in float; ds is rounded to T before ds k.
// Reference  mlx_flash.reference.attention_backward

template <typename T, int D, int BQ, int BK, int FQ, bool CAUSAL, bool Q_IN_TG,
          bool DOUT_IN_TG>
inline void attention_dq(Operand<T> q, Operand<T> k, Operand<T> v, Operand<T> dout,
                         RowOperand lse, RowOperand delta, device T* dq, float scale,
                         Sizes n, threadgroup T* q_tg, threadgroup T* dout_tg,
                         threadgroup T* k_tg, threadgroup T* v_tg, Worker at) {
  static_assert(D % 8 == 0 && BK % 8 == 0 && BQ % (8 * FQ) == 0, "whole fragments");
  enum : int { FD = D / 8, FK = BK / 8, THREADS = 32 * (BQ / (8 * FQ)) };
  const int h_kv = at.head / (n.H / n.HKV);
  const int block_first = at.block * BQ;
  const int q_first = block_first + first_row<FQ>(at);
  const int q_together = block_first + first_row_together<FQ>(at);

  typename LeftOperand<T, FQ, FD, Q_IN_TG>::type q_rows;  // [8 FQ, D]
  load_left(q_rows, q_tg, q, at.batch, at.head, q_first, n.Tq, at);
  typename LeftOperand<T, FQ, FD, DOUT_IN_TG>::type dout_rows;  // [8 FQ, D]
  load_left(dout_rows, dout_tg, dout, at.batch, at.head, q_first, n.Tq, at);
  RowValues<FQ> lse_rows, delta_rows;
  load_row_values(lse_rows, lse, at.batch, at.head, q_first, n.Tq, at);
  load_row_values(delta_rows, delta, at.batch, at.head, q_first, n.Tq, at);
  AccTile<FQ, FD> acc;  // [8 FQ, D]
  fill(acc, 0.0f);

  const Range keys = visible_keys<BQ, CAUSAL>(n, block_first);
  for (int k_first = keys.first - AHEAD * BK; k_first < keys.last; k_first += BK) {
    const int next = k_first + AHEAD * BK;
    threadgroup_sync();  // everybody has finished reading the tiles that are replaced
    if (next < keys.last) {
      threadgroup T* k_next = slot<BK, D>(k_tg, next / BK);
      threadgroup T* v_next = slot<BK, D>(v_tg, next / BK);
      stage<BK, D, THREADS>(k_next, k, at.batch, h_kv, next, n.Tk, at.thread_index);
      stage<BK, D, THREADS>(v_next, v, at.batch, h_kv, next, n.Tk, at.thread_index);
    }
    staged_sync();  // both tiles of the block at k_first are complete

    const Visibility visibility = block_visibility<CAUSAL>(
        n, q_together, q_together + TOGETHER * 8 * FQ, k_first, k_first + BK);
    if (k_first < keys.first || visibility == INVISIBLE) continue;
    const threadgroup T* k_block = slot<BK, D>(k_tg, k_first / BK);
    const threadgroup T* v_block = slot<BK, D>(v_tg, k_first / BK);
    // s = q k^T, p = exp2(s - lse)
    AccTile<FQ, FK> p;  // [8 FQ, BK]
    fill(p, 0.0f);
    mma_abt(p, q_rows, k_block);
    scale_scores(p, scale);
    if (visibility == PARTIAL) mask_scores<CAUSAL>(p, n, q_first, k_first, at);
    probabilities(p, lse_rows);
    // dp = dout v^T, ds = p (dp - delta)
    AccTile<FQ, FK> ds;  // [8 FQ, BK]
    fill(ds, 0.0f);
    mma_abt(ds, dout_rows, v_block);
    score_gradients(ds, p, delta_rows);
    // dq += ds k
    RowTile<T, FQ, FK> ds_rows;
    convert(ds_rows, ds);
    mma_ab(acc, ds_rows, k_block);
  }

  UNROLL for (int i = 0; i < FQ; ++i) { scale_row(acc, i, scale); }
  store_rows(dq + output_offset(n.Tq, n.H, D, at.batch, at.head, 0), long(n.H) * D, acc,
             q_first, n.Tq, at);
}
