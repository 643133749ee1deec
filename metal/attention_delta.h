// attention_delta: delta = rowsum(dout * out) - dlse, what the softmax takes from dp.
//
// Source     FlashAttention-2 Alg. 2 line 4, arXiv:2307.08691; README.md eq. 6.
// Inputs     out, dout [B,H,Tq,D] T    dlse [B,H,Tq] float    (any strides, 0 included)
// Outputs    delta [B,H,Tq] float
// Grid       (ceil(Tq/BQ), H, B) threadgroups of BQ/8 simdgroups of 8 rows each.
// Precision  products and sum in float.
// Reference  mlx_flash.reference.attention_backward

template <typename T, int D, int BQ>
inline void attention_delta(Operand<T> out, Operand<T> dout, RowOperand dlse,
                            device float* delta, Sizes n, Worker at) {
  const int q_first = at.block * BQ + first_row<1>(at);
  RowTile<T, 1, D / 8> out_rows, dout_rows;  // [8, D]
  load_rows(out_rows, out, at.batch, at.head, q_first, n.Tq, at);
  load_rows(dout_rows, dout, at.batch, at.head, q_first, n.Tq, at);
  RowValues<1> x;
  load_row_values(x, dlse, at.batch, at.head, q_first, n.Tq, at);
  x.value[0] = row_dot(dout_rows, out_rows, 0) - x.value[0];
  store_row_values(delta + (long(at.batch) * n.H + at.head) * n.Tq, x, q_first, n.Tq,
                   at);
}
