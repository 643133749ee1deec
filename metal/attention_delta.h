// attention_delta: what the backward needs of each row: delta = rowsum(dout * out) - dlse,
// which the softmax takes from dp, and lse in base 2.
//
// Source     FlashAttention-2 Alg. 2 line 4, arXiv:2307.08691; README.md eq. 6.
// Inputs     out, dout [B,H,Tq,DV] T    lse, dlse [B,H,Tq] float    (any strides, 0
//            included)
// Outputs    delta, lse2 [B,H,Tq] float
// Grid       (ceil(Tq/BQ), H, B) threadgroups of BQ/8 simdgroups of 8 rows each.
// Edges      A row that sees no key (lse = -inf), or whose cotangents are all 0, passes no
//            gradient, whatever numbers it holds: delta = 0, lse2 = NO_GRADIENT.
// Precision  products and sum in float.
// Reference  mlx_flash.reference.attention_backward

template <typename T, int DV, int BQ>
inline void attention_delta(Operand<T> out, Operand<T> dout, RowOperand lse,
                            RowOperand dlse, device float* delta, device float* lse2,
                            Sizes n, Worker at) {
  const int q_first = at.block * BQ + first_row<1>(at);
  RowValues<1> sum, nonzeros, lse_rows, dlse_rows;
  sum.value[0] = 0.0f;
  nonzeros.value[0] = 0.0f;
  for (int column = 0; column < DV; column += 8) {
    RowTile<T, 1, 1> out_rows, dout_rows;  // [8, 8]
    load_rows<DV>(out_rows, out, at.batch, at.head, q_first, n.Tq, column, at);
    load_rows<DV>(dout_rows, dout, at.batch, at.head, q_first, n.Tq, column, at);
    sum.value[0] += lane_dot(dout_rows, out_rows, 0);
    nonzeros.value[0] += lane_nonzeros(dout_rows, 0);
  }
  load_row_values(lse_rows, lse, at.batch, at.head, q_first, n.Tq, at);
  load_row_values(dlse_rows, dlse, at.batch, at.head, q_first, n.Tq, at);
  const bool has_cotangent =
      over_row_sum(nonzeros.value[0]) != 0.0f || dlse_rows.value[0] != 0.0f;
  const float difference = over_row_sum(sum.value[0]) - dlse_rows.value[0];
  const bool passes = has_cotangent && !(lse_rows.value[0] < HIDDEN);
  sum.value[0] = passes ? difference : 0.0f;
  lse_rows.value[0] = passes ? lse_rows.value[0] * LOG2_E : NO_GRADIENT;
  store_row_values(delta + row_offset(n, at.batch, at.head), sum, q_first, n.Tq, at);
  store_row_values(lse2 + row_offset(n, at.batch, at.head), lse_rows, q_first, n.Tq,
                   at);
}
