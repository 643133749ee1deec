// attention_forward: out = softmax(scale * q k^T + mask) v, one pass over key blocks.
//
// Source     FlashAttention-2 Alg. 1, arXiv:2307.08691; README.md eq. 1-4.
// Inputs     q [B,H,Tq,D] T    k, v [B,HKV,Tk,D] T    scale float        (any strides)
// Outputs    out [B,Tq,H,D] T  lse [B,H,Tq] float, natural log
// Grid       (ceil(Tq/BQ), H, B) threadgroups of BQ/(8 FQ) simdgroups; a threadgroup
//            owns BQ query rows, a simdgroup 8 FQ of them.
// Tiling     q (in threadgroup memory if Q_IN_TG), acc, s, p in registers. k, v: BK x D
//            tiles, shared by the simdgroups.
// Memory     (2 SLOTS BK + (Q_IN_TG ? BQ : 0)) RowStride<T,D> sizeof(T) bytes of
//            threadgroup memory; two barriers a block.
// Invariant  after a block: m = largest score so far, l = sum exp2(s - m) and
//            acc = sum exp2(s - m) v over the keys so far.
// Edges      any Tq, Tk >= 1. A row with no visible key stores out = 0 and lse = -inf.
// Precision  scores, m, l, acc in float; p is rounded to T before p v.
// Reference  mlx_flash.reference.attention_forward

template <typename T, int D, int BQ, int BK, int FQ, bool CAUSAL, bool Q_IN_TG>
inline void attention_forward(Operand<T> q, Operand<T> k, Operand<T> v, device T* out,
                              device float* lse, float scale, Sizes n,
                              threadgroup T* q_tg, threadgroup T* k_tg,
                              threadgroup T* v_tg, Worker at) {
  static_assert(D % 8 == 0 && BK % 8 == 0 && BQ % (8 * FQ) == 0, "whole fragments");
  enum : int { FD = D / 8, FK = BK / 8, THREADS = 32 * (BQ / (8 * FQ)) };
  const int h_kv = at.head / (n.H / n.HKV);
  const int block_first = at.block * BQ;
  const int q_first = block_first + first_row<FQ>(at);
  const int q_together = block_first + first_row_together<FQ>(at);

  typename LeftOperand<T, FQ, FD, Q_IN_TG>::type q_rows;  // [8 FQ, D]
  load_left(q_rows, q_tg, q, at.batch, at.head, q_first, n.Tq, at);
  AccTile<FQ, FD> acc;  // [8 FQ, D]
  fill(acc, 0.0f);
  OnlineSoftmax<FQ> softmax;
  softmax.begin();

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
    // s = q k^T
    AccTile<FQ, FK> s;  // [8 FQ, BK]
    fill(s, 0.0f);
    mma_abt(s, q_rows, k_block);
    scale_scores(s, scale);
    if (visibility == PARTIAL) mask_scores<CAUSAL>(s, n, q_first, k_first, at);
    // p = exp2(s - m), acc rescaled
    softmax.update(s, acc);
    // acc += p v
    RowTile<T, FQ, FK> p;
    convert(p, s);
    mma_ab(acc, p, v_block);
  }

  softmax.finish(acc);
  store_rows(out + output_offset(n.Tq, n.H, D, at.batch, at.head, 0), long(n.H) * D,
             acc, q_first, n.Tq, at);
  store_row_values(lse + (long(at.batch) * n.H + at.head) * n.Tq, softmax.l, q_first,
                   n.Tq, at);
}
