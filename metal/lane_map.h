// lane_map: which element of an 8x8 fragment each lane holds, as the device has it and
// as tile.h assumes it. The host compares the two once, before the first attention.
//
// Inputs     index [64] float, 0 to 63 in row-major order
// Outputs    held [32, 2] float: what thread_elements() shows; assumed [32, 2] float
// Grid       one simdgroup

inline void lane_map(const device float* index, device float* held,
                     device float* assumed, Worker at) {
  metal::simdgroup_matrix<float, 8, 8> fragment;
  metal::simdgroup_load(fragment, index, 8);
  for (int e = 0; e < 2; ++e) {
    held[2 * at.lane + e] = fragment.thread_elements()[e];
    assumed[2 * at.lane + e] = 8 * frag_row(at.lane) + frag_col(at.lane) + e;
  }
}
