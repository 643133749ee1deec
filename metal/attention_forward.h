// attention_forward: out = softmax(scale * q k^T + mask) v, one pass over key blocks.
//
// Source     FlashAttention-2 Alg. 1, arXiv:2307.08691; README.md eq. 1-4, 12.
// Inputs     q [B,H,Tq,D], k [B,HKV,Tk,D], v [B,HKV,Tk,DV] T    sinks [H] float   (any
//            strides)    scale, softcap float    mask: mask.h
// Outputs    out [B,Tq,H,DV] T  lse [B,H,Tq] float, natural log
// Grid       (ceil(Tq/BQ), H, B) threadgroups of DS BQ/(8 FQ) simdgroups; a threadgroup
//            owns BQ query rows, DS simdgroups 8 FQ of them.
// Tiling     q (in threadgroup memory if Q_IN_TG), acc, s, p in registers. k, v: BK x D
//            tiles, shared by the simdgroups.
// Memory     SLOTS BK rows of k and of v, and BQ of q if Q_IN_TG, RowStride apart; with
//            DS > 1 also DS BQ BK floats. Two barriers a block, three if DS > 1.
// Invariant  after a block: m = largest score so far, l = sum exp2(s - m) and
//            acc = sum exp2(s - m) v over the keys so far.
// Edges      any Tq, Tk >= 1. A row with no visible key stores out = 0 and lse = -inf, or
//            the sink's logit.
// Precision  scores, m, l, acc in float; p is rounded to T before p v.
// Reference  mlx_flash.reference.attention_forward

template <typename T, int D, int DV, int BQ, int BK, int FQ, int DS, bool Q_IN_TG,
          bool SOFTCAP, bool SINKS, typename Mask>
inline void attention_forward(Operand<T> q, Operand<T> k, Operand<T> v,
                              const device float* sinks, device T* out,
                              device float* lse, float scale, float softcap, Sizes n,
                              Mask mask, threadgroup T* q_tg, threadgroup T* k_tg,
                              threadgroup T* v_tg, threadgroup float* s_parts_tg,
                              Worker at) {
  static_assert(BK % 8 == 0 && BQ % (8 * FQ) == 0, "whole fragments");
  enum : int {
    W = Width<D, DS>::value,
    WV = Width<DV, DS>::value,
    FD = W / (8 * DS),
    FDV = WV / (8 * DS),
    FK = BK / 8,
    THREADS = 32 * DS * (BQ / (8 * FQ)),
  };
  const int h_kv = at.head / (n.H / n.HKV);
  const int block_first = at.block * BQ;
  const int q_first = block_first + first_row<FQ>(at);
  const Range together = rows_together<FQ, DS, BQ>(at);
  select_block(mask.ids, blocks_in(n.Tq, BQ), blocks_in(n.Tk, BK), at);

  typename LeftOperand<T, FQ, FD, Q_IN_TG>::type q_rows;  // [8 FQ, D]
  load_left<D, W>(q_rows, q_tg, q, at.batch, at.head, q_first, n.Tq, at);
  AccTile<FQ, FDV> acc;  // [8 FQ, DV]
  fill(acc, 0.0f);
  OnlineSoftmax<FQ> softmax;
  softmax.begin(SINKS ? sink_score(sinks[at.head]) : MASKED, at);

  const Range keys = visible_keys<BQ, BK>(mask, n, block_first);
  const int n_blocks = blocks_in(keys.last - keys.first, BK);
  const Blocks blocks = {keys.first / BK, n_blocks, n_blocks};
  Walk walk = first_turn(mask.ids, blocks, at);
  for (; walk.now < n_blocks; walk = next_turn(walk, mask.ids, blocks, at)) {
    threadgroup_sync();  // everybody has finished reading the tiles that are replaced
    if (walk.next < n_blocks) {
      const int k_next = keys.first + walk.next * BK;
      stage<BK, D, W, THREADS, IN_ABT>(slot<BK, W>(k_tg, walk.turn + AHEAD), k,
                                       at.batch, h_kv, k_next, n.Tk, at.thread_index);
      stage<BK, DV, WV, THREADS, IN_AB>(slot<BK, WV>(v_tg, walk.turn + AHEAD), v,
                                        at.batch, h_kv, k_next, n.Tk, at.thread_index);
    }
    staged_wait();
    if (walk.now >= 0) {
      finish<BK, W, THREADS, IN_ABT>(k_tg, walk.turn, at.thread_index);
      finish<BK, WV, THREADS, IN_AB>(v_tg, walk.turn, at.thread_index);
    }
    staged_sync();  // both tiles of the block of this turn are complete

    if (walk.now < 0) continue;
    const int k_first = keys.first + walk.now * BK;
    const Visibility visibility =
        block_visibility(mask, n, walk.one_segment, block_first + together.first,
                         block_first + together.last, k_first, k_first + BK);
    if (visibility == INVISIBLE) continue;
    // s = q k^T
    AccTile<FQ, FK> s;  // [8 FQ, BK]
    fill(s, 0.0f);
    mma_abt<W>(s, q_rows, slot<BK, W>(k_tg, walk.turn), at);
    sum_parts<DS>(s, s_parts_tg, at);
    saturate<SOFTCAP>(s, scale, softcap);
    scale_scores(s, SOFTCAP ? softcap : scale);
    if (visibility == PARTIAL) {
      add_array<false>(s, mask.array, n, at.batch, at.head, q_first, k_first, at);
      hide<false>(s, MASKED, mask, n, at.batch, at.head, q_first, k_first, at);
    }
    // p = exp2(s - m), acc rescaled
    softmax.update(s, acc);
    // acc += p v
    RowTile<T, FQ, FK> p;
    convert(p, s);
    mma_ab<WV>(acc, p, slot_in_ab<BK, WV>(v_tg, walk.turn), at);
  }

  softmax.finish(acc);
  store_rows<DV>(out + output_offset(n.Tq, n.H, DV, at.batch, at.head, 0),
                 long(n.H) * DV, acc, q_first, n.Tq, at);
  store_row_values(lse + row_offset(n, at.batch, at.head), softmax.l, q_first, n.Tq,
                   at);
}
