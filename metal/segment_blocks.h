// segment_blocks: lowest and highest id of each block of rows, by which a kernel knows
// the blocks that cannot meet without loading them.
//
// Inputs     own_ids [B, own_length], other_ids [B, other_length] int: the ids of the rows
//            that the kernel's threadgroups own and of those that they walk
// Outputs    own_lowest, own_highest [B, ceil(own_length / own_rows)] int; the same of
//            the others
// Grid       (own blocks + other blocks, 1, B) threadgroups of one simdgroup: a block each

inline void segment_blocks(const device int* own_ids, const device int* other_ids,
                           device int* own_lowest, device int* own_highest,
                           device int* other_lowest, device int* other_highest,
                           int own_length, int other_length, int own_rows,
                           int other_rows, Worker at) {
  const int own_blocks = blocks_in(own_length, own_rows);
  const bool own = at.block < own_blocks;
  const int length = own ? own_length : other_length;
  const int rows = own ? own_rows : other_rows;
  const int block = own ? at.block : at.block - own_blocks;
  const device int* ids = (own ? own_ids : other_ids) + long(at.batch) * length;
  const int first = block * rows, last = minimum(first + rows, length);
  // ~ turns the order of integers round: ~highest is the least of ~id
  int lowest = ids[first], not_highest = ~lowest;
  for (int row = first + at.lane; row < last; row += 32) {
    lowest = minimum(lowest, ids[row]);
    not_highest = minimum(not_highest, ~ids[row]);
  }
  lowest = over_simd_min(lowest);
  not_highest = over_simd_min(not_highest);
  if (at.lane == 0) {
    const long place = long(at.batch) * blocks_in(length, rows) + block;
    (own ? own_lowest : other_lowest)[place] = lowest;
    (own ? own_highest : other_highest)[place] = ~not_highest;
  }
}
