// tile: the words that the kernels are written in, for Apple's 8x8 simdgroup matrices.
//
// Fragment   8x8 elements, spread over the 32 lanes of a simdgroup. Each lane holds two
//            neighbours of one row, at frag_row(lane) and frag_col(lane). Metal leaves
//            this map unspecified; lane_map.h compares it with the device's.
// Tiles      R x C fragments in registers. A simdgroup owns 8 * R rows; in an AccTile a
//            lane sees R row slots and 2 * C column slots, and asks for their place
//            with tile_row and tile_col: per-row numbers are plain floats per lane.
// Parts      Where one simdgroup cannot hold 8 * R rows of D columns, DS of them share
//            these rows: each holds its part of the columns, and sum_parts completes the
//            sums over D.
// Shared     Rows in threadgroup memory stand RowStride apart: an odd multiple of 16
//            bytes, which keeps fragment loads of 16-bit types free of bank conflicts.
// Edges      Rows past the end of an array, and columns from D to Width<D, DS>, read as
//            zeros and are never stored.

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

#define UNROLL _Pragma("clang loop unroll(full)")

enum : int {
  AHEAD = 0,  // blocks that are staged before their turn
  SLOTS = AHEAD + 1,
};

// What a staged tile is for: the products that read it, and whether its numbers must be
// finite, because 0 times them must be 0.
enum : int { IN_ABT = 1, IN_AB = 2, FINITE = 4 };

// Who runs: the place in the threadgroup (row group simd, its part of the columns), and
// the threadgroup's place in the grid.
struct Worker {
  int thread_index, simd, part, lane;
  int block, head, batch;
};

inline int frag_row(int lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
inline int frag_col(int lane) { return (lane >> 1 & 4) | (lane << 1 & 2); }

// Row of this worker's simdgroup in its threadgroup, when a simdgroup owns 8 * R rows.
template <int R>
inline int first_row(Worker at) {
  return at.simd * 8 * R;
}
// Rows of all simdgroups that must take the same branches, of ROWS in the threadgroup:
// those that meet at the barrier of sum_parts.
template <int R, int DS, int ROWS>
inline Range rows_together(Worker at) {
  const int first = first_row<R>(at);
  return DS == 1 ? Range{first, first + 8 * R} : Range{0, ROWS};
}
inline int tile_row(Worker at, int i) { return 8 * i + frag_row(at.lane); }
inline int tile_col(Worker at, int j) {
  return 8 * (j / 2) + frag_col(at.lane) + j % 2;
}

// Columns that a tile has for D columns of an array.
template <int D, int DS>
struct Width {
  enum : int { value = (D + 8 * DS - 1) / (8 * DS) * (8 * DS) };
};

template <typename T, int D>
struct RowStride {
  enum : int { SIZE = 16 / sizeof(T), value = D / SIZE % 2 ? D : D + SIZE };
};

inline float power_of_2(float x) { return metal::fast::exp2(x); }
inline float log_base_2(float x) { return metal::precise::log2(x); }
inline float hyperbolic_tangent(float x) { return metal::precise::tanh(x); }
inline float maximum(float a, float b) { return metal::max(a, b); }
inline int minimum(int a, int b) { return metal::min(a, b); }
inline float minus_infinity() { return -INFINITY; }

// Every thread of the threadgroup arrives before any goes on; what they wrote to
// threadgroup memory is then visible to all.
inline void threadgroup_sync() {
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}

// What this thread staged for this turn is there: here staging does not run ahead.
inline void staged_wait() {}

// threadgroup_sync; the tiles staged for this turn are then complete.
inline void staged_sync() { threadgroup_sync(); }

// Left operand of a product, in registers.
template <typename T, int R, int C>
struct RowTile {
  metal::simdgroup_matrix<T, 8, 8> frag[R][C];
};

// Left operand of a product, read from threadgroup memory each time: saves registers.
template <typename T, int R, int C>
struct SharedRowTile {
  const threadgroup T* rows_tg;  // of this simdgroup
};

template <typename T, int R, int C, bool IN_TG>
struct LeftOperand {
  typedef RowTile<T, R, C> type;
};
template <typename T, int R, int C>
struct LeftOperand<T, R, C, true> {
  typedef SharedRowTile<T, R, C> type;
};

// Accumulator of a product.
template <int R, int C>
struct AccTile {
  metal::simdgroup_matrix<float, 8, 8> frag[R][C];

  float get(int i, int j) thread { return frag[i][j / 2].thread_elements()[j % 2]; }
  void set(int i, int j, float x) thread {
    frag[i][j / 2].thread_elements()[j % 2] = x;
  }
};

template <int R, int C>
inline void fill(thread AccTile<R, C>& x, float value) {
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) {
      x.frag[r][c] = metal::make_filled_simdgroup_matrix<float, 8, 8>(value);
    }
  }
}

// x *= factor, for the row slot i only.
template <int R, int C>
inline void scale_row(thread AccTile<R, C>& x, int i, float factor) {
  UNROLL for (int j = 0; j < 2 * C; ++j) { x.set(i, j, x.get(i, j) * factor); }
}

// Round to the element type of the next product.
template <typename T, int R, int C>
inline void convert(thread RowTile<T, R, C>& to, thread AccTile<R, C>& from) {
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) {
      to.frag[r][c].thread_elements()[0] = T(from.get(r, 2 * c));
      to.frag[r][c].thread_elements()[1] = T(from.get(r, 2 * c + 1));
    }
  }
}

// Reductions over the lanes that hold one row; each of them gets the result.
inline float over_row_max(float x) {
  x = maximum(x, metal::simd_shuffle_xor(x, ushort(1)));
  return maximum(x, metal::simd_shuffle_xor(x, ushort(8)));
}
inline float over_row_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  return x + metal::simd_shuffle_xor(x, ushort(8));
}
// Over all lanes: the smallest, and whether there is one where x holds.
inline bool over_simd_any(bool x) { return metal::simd_any(x); }
inline int over_simd_min(int x) { return metal::simd_min(x); }

template <int R, int C>
inline float row_max(thread AccTile<R, C>& x, int i) {
  float m = x.get(i, 0);
  UNROLL for (int j = 1; j < 2 * C; ++j) { m = maximum(m, x.get(i, j)); }
  return over_row_max(m);
}

// This lane's part of the sum of x * y over the columns, for the row slot i.
template <typename T, int R, int C>
inline float lane_dot(thread RowTile<T, R, C>& x, thread RowTile<T, R, C>& y, int i) {
  float sum = 0.0f;
  UNROLL for (int c = 0; c < C; ++c) {
    UNROLL for (int e = 0; e < 2; ++e) {
      sum += float(x.frag[i][c].thread_elements()[e]) *
             float(y.frag[i][c].thread_elements()[e]);
    }
  }
  return sum;
}
// How many of this lane's elements in the row slot i are not 0.
template <typename T, int R, int C>
inline float lane_nonzeros(thread RowTile<T, R, C>& x, int i) {
  float n = 0.0f;
  UNROLL for (int c = 0; c < C; ++c) {
    UNROLL for (int e = 0; e < 2; ++e) {
      n += float(x.frag[i][c].thread_elements()[e]) == 0.0f ? 0.0f : 1.0f;
    }
  }
  return n;
}

// This simdgroup's fragment of column c, of one row slot, as a left operand.
template <int W, typename T, int R, int C>
inline metal::simdgroup_matrix<T, 8, 8> left_fragment(thread RowTile<T, R, C>& a, int r,
                                                      int c) {
  return a.frag[r][c];
}
template <int W, typename T, int R, int C>
inline metal::simdgroup_matrix<T, 8, 8> left_fragment(thread SharedRowTile<T, R, C>& a,
                                                      int r, int c) {
  enum : int { LD = RowStride<T, W>::value };
  metal::simdgroup_matrix<T, 8, 8> x;
  metal::simdgroup_load(x, a.rows_tg + 8 * r * LD + 8 * c, LD);
  return x;
}

// acc += a b^T for this part of the columns, the rows of b, W wide, in threadgroup memory.
template <int W, template <typename, int, int> class Left, typename T, int R, int C,
          int K>
inline void mma_abt(thread AccTile<R, K>& acc, thread Left<T, R, C>& a,
                    const threadgroup T* b_tg, Worker at) {
  enum : int { LD = RowStride<T, W>::value };
  UNROLL for (int c = 0; c < C; ++c) {
    RowTile<T, R, 1> a_column;
    UNROLL for (int r = 0; r < R; ++r) {
      a_column.frag[r][0] = left_fragment<W>(a, r, c);
    }
    UNROLL for (int k = 0; k < K; ++k) {
      metal::simdgroup_matrix<T, 8, 8> b;
      metal::simdgroup_load(b, b_tg + 8 * k * LD + 8 * (at.part * C + c), LD,
                            metal::ulong2(0), true);
      UNROLL for (int r = 0; r < R; ++r) {
        metal::simdgroup_multiply_accumulate(acc.frag[r][k], a_column.frag[r][0], b,
                                             acc.frag[r][k]);
      }
    }
  }
}

// acc += a b for this part of the columns, the rows of b, W wide, in threadgroup memory.
template <int W, typename T, int R, int K, int C>
inline void mma_ab(thread AccTile<R, C>& acc, thread RowTile<T, R, K>& a,
                   const threadgroup T* b_tg, Worker at) {
  enum : int { LD = RowStride<T, W>::value };
  UNROLL for (int k = 0; k < K; ++k) {
    UNROLL for (int c = 0; c < C; ++c) {
      metal::simdgroup_matrix<T, 8, 8> b;
      metal::simdgroup_load(b, b_tg + 8 * k * LD + 8 * (at.part * C + c), LD);
      UNROLL for (int r = 0; r < R; ++r) {
        metal::simdgroup_multiply_accumulate(acc.frag[r][c], a.frag[r][k], b,
                                             acc.frag[r][c]);
      }
    }
  }
}

// The sum of x over the DS parts, the same bits in each of them. All threads of the
// threadgroup take part; parts_tg holds 64 R C floats for each simdgroup, and may be
// written again after one more barrier.
template <int DS, int R, int C>
inline void sum_parts(thread AccTile<R, C>& x, threadgroup float* parts_tg, Worker at) {
  if (DS > 1) {
    threadgroup float* first_tg = parts_tg + at.simd * DS * 64 * R * C;
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int c = 0; c < C; ++c) {
        const int place = ((at.part * R + r) * C + c) * 64;
        metal::simdgroup_store(x.frag[r][c], first_tg + place, 8);
      }
    }
    threadgroup_sync();  // all parts are in threadgroup memory
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int c = 0; c < C; ++c) {
        metal::simdgroup_load(x.frag[r][c], first_tg + (r * C + c) * 64, 8);
        UNROLL for (int part = 1; part < DS; ++part) {
          metal::simdgroup_matrix<float, 8, 8> other;
          metal::simdgroup_load(other, first_tg + ((part * R + r) * C + c) * 64, 8);
          UNROLL for (int e = 0; e < 2; ++e) {
            x.frag[r][c].thread_elements()[e] += other.thread_elements()[e];
          }
        }
      }
    }
  }
}

// The largest number of a type.
inline float largest(float) { return 3.402823466e38f; }
inline float largest(half) { return 65504.0f; }
inline float largest(bfloat16_t) { return 3.389531390e38f; }

// The nearest finite number; a NaN becomes one of the largest.
template <typename T>
inline T finite(T x) {
  const float limit = largest(x);
  return T(metal::fmin(metal::fmax(float(x), -limit), limit));
}

// 16 bytes of a row.
template <typename T>
struct Chunk {
  enum : int { SIZE = 16 / sizeof(T) };
  T element[SIZE];
};

// Rows [row, row + ROWS) of head (b, h) to rows of W >= D columns in threadgroup memory,
// by THREADS threads, a chunk each in turn. Rows from n_rows on and columns from D on
// become zeros. Complete after the staged_wait, finish and staged_sync of their turn.
template <int ROWS, int D, int W, int THREADS, int USES, typename T>
inline void stage(threadgroup T* to_tg, Operand<T> from, int b, int h, int row,
                  int n_rows, int thread_index) {
  enum : int {
    SIZE = Chunk<T>::SIZE,
    LD = RowStride<T, W>::value,
    PER_ROW = W / SIZE,
    ALL = ROWS * PER_ROW,
    // a thread has the same column in all turns, its rows are TURN_ROWS apart
    STEADY = THREADS % PER_ROW == 0,
    TURN_ROWS = THREADS / PER_ROW,
  };
  const device T* head = from.data + offset(from.stride, b, h, row);
  int r = thread_index / PER_ROW, d = thread_index % PER_ROW * SIZE;
  const device T* source = head + r * from.stride.t + d * from.stride.d;
  const long turn_step = TURN_ROWS * from.stride.t;
  UNROLL for (int first = 0; first < ALL; first += THREADS) {
    if (first + THREADS > ALL && first + thread_index >= ALL) break;
    const int columns = row + r < n_rows ? D - d : 0;
    Chunk<T> x;
    if (columns >= SIZE && from.stride.d == 1) {
      x = *reinterpret_cast<const device Chunk<T>*>(source);
    } else {
      UNROLL for (int e = 0; e < SIZE; ++e) {
        x.element[e] = e < columns ? source[e * from.stride.d] : T(0.0f);
      }
    }
    if (USES & FINITE) {
      UNROLL for (int e = 0; e < SIZE; ++e) { x.element[e] = finite(x.element[e]); }
    }
    *reinterpret_cast<threadgroup Chunk<T>*>(to_tg + r * LD + d) = x;
    if (STEADY) {
      r += TURN_ROWS;
      source += turn_step;
    } else {
      const int next = first + THREADS + thread_index;
      r = next / PER_ROW;
      d = next % PER_ROW * SIZE;
      source = head + r * from.stride.t + d * from.stride.d;
    }
  }
}

// Tile of ROWS rows of W columns, among the SLOTS that take turns, that the block of a
// turn is staged in and that mma_abt reads.
template <int ROWS, int W, typename T>
inline threadgroup T* slot(threadgroup T* tiles_tg, int turn) {
  return tiles_tg + turn % SLOTS * ROWS * RowStride<T, W>::value;
}
// The tile that mma_ab reads: the same one.
template <int ROWS, int W, typename T>
inline threadgroup T* slot_in_ab(threadgroup T* tiles_tg, int turn) {
  return slot<ROWS, W>(tiles_tg, turn);
}

// Makes what this thread staged for a turn ready for USES: nothing is left to do.
template <int ROWS, int W, int THREADS, int USES, typename T>
inline void finish(threadgroup T* tiles_tg, int turn, int thread_index) {}

// This simdgroup's rows [row, row + 8 R) of head (b, h) in registers, from `column` on.
template <int D, typename T, int R, int C>
inline void load_rows(thread RowTile<T, R, C>& x, Operand<T> from, int b, int h,
                      int row, int n_rows, int column, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    const device T* first = from.data + offset(from.stride, b, h, t);
    UNROLL for (int c = 0; c < C; ++c) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const int d = column + tile_col(at, 2 * c + e);
        const bool exists = t < n_rows && d < D;
        x.frag[r][c].thread_elements()[e] = exists ? first[d * from.stride.d] : T(0.0f);
      }
    }
  }
}

// The same rows as a left operand, this part of the columns: in registers (rows_tg is
// not used), or in rows_tg, in rows of W columns; a threadgroup_sync must come before
// their first use.
template <int D, int W, typename T, int R, int C>
inline void load_left(thread RowTile<T, R, C>& x, threadgroup T* rows_tg,
                      Operand<T> from, int b, int h, int row, int n_rows, Worker at) {
  load_rows<D>(x, from, b, h, row, n_rows, at.part * 8 * C, at);
}
template <int D, int W, typename T, int R, int C>
inline void load_left(thread SharedRowTile<T, R, C>& x, threadgroup T* rows_tg,
                      Operand<T> from, int b, int h, int row, int n_rows, Worker at) {
  static_assert(W == 8 * C, "rows in threadgroup memory have one part");
  threadgroup T* mine_tg = rows_tg + first_row<R>(at) * RowStride<T, W>::value;
  stage<8 * R, D, W, 32, IN_ABT>(mine_tg, from, b, h, row, n_rows, at.lane);
  x.rows_tg = mine_tg;
}

// The tile's rows to an output at `to`, the head's row 0; row_step elements lie between
// rows. Rows from n_rows on and columns from D on are not stored.
template <int D, typename T, int R, int C>
inline void store_rows(device T* to, long row_step, thread AccTile<R, C>& x, int row,
                       int n_rows, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    if (t < n_rows) {
      UNROLL for (int j = 0; j < 2 * C; ++j) {
        const int d = at.part * 8 * C + tile_col(at, j);
        if (d < D) to[t * row_step + d] = T(x.get(r, j));
      }
    }
  }
}

// The tile to the place (row, col) of a row-contiguous [n_rows, n_cols] output, by the
// first part. Nothing is stored outside.
template <typename T, int R, int C>
inline void store_tile(device T* to, thread AccTile<R, C>& x, int row, int n_rows,
                       int col, int n_cols, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      const int u = col + tile_col(at, j);
      if (t < n_rows && u < n_cols && at.part == 0) {
        to[long(t) * n_cols + u] = T(x.get(r, j));
      }
    }
  }
}

// One number per row of a tile, the same in all lanes of the row.
template <int R>
struct RowValues {
  float value[R];
  float at_slot(int i, int) const thread { return value[i]; }
};

// One number per column of a tile, in threadgroup memory.
struct ColumnValues {
  const threadgroup float* column_tg;
  Worker worker;
  float at_slot(int, int j) const thread { return column_tg[tile_col(worker, j)]; }
};

template <int R>
inline void load_row_values(thread RowValues<R>& x, RowOperand from, int b, int h,
                            int row, int n_rows, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    x.value[r] = t < n_rows ? from.data[offset(from.stride, b, h, t)] : 0.0f;
  }
}

template <int R>
inline void store_row_values(device float* to, thread RowValues<R>& x, int row,
                             int n_rows, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    if (t < n_rows && tile_col(at, 0) == 0 && at.part == 0) {
      to[t] = x.value[r];
    }
  }
}

// Numbers of the rows [row, row + ROWS) to threadgroup memory, zeros from n_rows on.
template <int ROWS, int THREADS>
inline void stage_values(threadgroup float* to_tg, RowOperand from, int b, int h,
                         int row, int n_rows, Worker at) {
  for (int r = at.thread_index; r < ROWS; r += THREADS) {
    to_tg[r] = row + r < n_rows ? from.data[offset(from.stride, b, h, row + r)] : 0.0f;
  }
}
