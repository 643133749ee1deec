// tile: the words of metal/tile.h, for the matrix instructions of NVIDIA GPUs.
//
// Fragment   8x8 elements, spread over the 32 lanes of a warp as the PTX manual lays
//            out accumulators: a lane holds two neighbours of row lane / 4.
// Tiles      A warp owns 8 * R rows; where it multiplies, R is even. Products use wgmma
//            where the GPU has it (sm_90a): four warps multiply together and must take
//            the same branches. Else, and for what wgmma has not, mma.sync.
// Float      FLOAT_TERMS = 1: products in TF32, 11 bits of mantissa; operands are rounded
//            to it once, on their way to registers or threadgroup memory, since the
//            instructions cut. FLOAT_TERMS = 3: each number is split into two TF32
//            parts, and the three products that matter are summed: float32 accuracy.
// Shared     A tile is cut into panels 128, 64 or 32 bytes wide. In a panel, the 16-byte
//            chunks of a row are permuted by exclusive or with the row (the swizzles
//            of wgmma); ldmatrix is free of bank conflicts on the same layout.
// Copies     asynchronous (cp.async) where 16 bytes are aligned; one group a block. The
//            thread that copied a chunk finishes it: in TF32 it rounds, and transposes
//            for mma_ab, because wgmma sums 4-byte numbers along rows only.
// Parts      none: DS is 1, a warp has registers for all columns.
// Edges      Rows past the end of an array, and columns from D to Width<D, DS>, read as
//            zeros and are never stored.

enum : int {
  TOGETHER = 4,                   // warps that must take the same branches
  ROWS_TOGETHER = 16 * TOGETHER,  // of one wgmma
  AHEAD = 1,                      // blocks that are staged before their turn
  SLOTS = AHEAD + 1,
};

// What a staged tile is for: the products that read it, and whether its numbers must be
// finite, because 0 times them must be 0.
enum : int { IN_ABT = 1, IN_AB = 2, FINITE = 4 };

// Whether products of T run in TF32.
template <typename T>
struct InTf32 {
  enum : bool { value = sizeof(T) == 4 && FLOAT_TERMS == 1 };
};

// Tiles of a streamed operand that take turns; in TF32 one of them is transposed.
template <typename T>
struct TileSlots {
  enum : int { value = SLOTS + (InTf32<T>::value ? 1 : 0) };
};

// Who runs: the place in the threadgroup, and the threadgroup's place in the grid.
struct Worker {
  int thread_index, simd, part, lane;
  int block, head, batch;
};

// Row of this worker's warp in its threadgroup, when a warp owns 8 * R rows.
template <int R>
inline int first_row(Worker at) {
  return at.simd * 8 * R;
}
// Rows of the warps that multiply together, of ROWS in the threadgroup.
template <int R, int DS, int ROWS>
inline Range rows_together(Worker at) {
  const int first = at.simd / TOGETHER * TOGETHER * 8 * R;
  return Range{first, first + TOGETHER * 8 * R};
}
inline int tile_row(Worker at, int i) { return 8 * i + at.lane / 4; }
inline int tile_col(Worker at, int j) { return 8 * (j / 2) + at.lane % 4 * 2 + j % 2; }

// Columns that a tile has for D columns of an array: pairs of fragments.
template <int D, int DS>
struct Width {
  static_assert(DS == 1, "no parts");
  enum : int { value = (D + 15) / 16 * 16 };
};

template <typename T, int D>
struct RowStride {
  enum : int { CHUNK = 16 / sizeof(T), value = D };
};

inline float power_of_2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
inline float log_base_2(float x) { return log2f(x); }
inline float hyperbolic_tangent(float x) { return tanhf(x); }
inline float maximum(float a, float b) { return fmaxf(a, b); }
inline int minimum(int a, int b) { return a < b ? a : b; }
inline float minus_infinity() { return __int_as_float(0xff800000); }

// Every thread of the threadgroup arrives before any goes on; what they wrote to
// threadgroup memory is then visible to all.
inline void threadgroup_sync() { __syncthreads(); }

// Ends the group of copies of one block; this thread's copies are then complete, except
// those of the LATER latest blocks.
template <int LATER = AHEAD>
inline void staged_wait() {
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// threadgroup_sync, also for what the products read in threadgroup memory.
inline void staged_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncthreads();
}

// Layout of a tile of ROWS x D elements in threadgroup memory.
template <typename T, int ROWS, int D>
struct TileLayout {
  enum : int {
    BYTES = D * sizeof(T),
    CHUNKS = BYTES % 128 == 0 ? 8
    : BYTES % 64 == 0         ? 4
                              : 2,  // of a panel's row
    PANEL_BYTES = ROWS * CHUNKS * 16,
  };
  // Bytes from the start of the tile to the 16-byte chunk `chunk` of a row.
  static inline int place(int row, int chunk) {
    const int swizzled = chunk % CHUNKS ^ row / (8 / CHUNKS) % CHUNKS;
    return chunk / CHUNKS * PANEL_BYTES + (row * CHUNKS + swizzled) * 16;
  }
};

inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

inline unsigned load_shared(unsigned address) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// The parts of a float: the nearest TF32 number, and what is left.
inline unsigned high_part(unsigned x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
}
inline unsigned low_part(unsigned x) {
  const float rest = __uint_as_float(x) - __uint_as_float(high_part(x));
  return high_part(__float_as_uint(rest));
}
// A number as products take it. In TF32 the instructions cut; half a unit makes that a
// rounding. What is not finite stays as it is: a NaN may have all bits set.
inline float operand_of_products(float x) {
  if (FLOAT_TERMS == 3 || !(fabsf(x) < -minus_infinity())) return x;
  return __uint_as_float(__float_as_uint(x) + (1u << 12));
}

// Two neighbours as one register.
inline unsigned pack(float a, float b, __half) {
  const __half2 x = __floats2half2_rn(a, b);
  return reinterpret_cast<const unsigned&>(x);
}
inline unsigned pack(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const unsigned&>(x);
}
template <typename T>
inline float2 unpack(unsigned x) {
  const T* pair = reinterpret_cast<const T*>(&x);
  return float2{float(pair[0]), float(pair[1])};
}

// Not 0 if one of two neighbours is an infinity or a NaN: 0 times it is a NaN.
inline unsigned not_finite(unsigned x, __half) {
  const __half2 pair = reinterpret_cast<const __half2&>(x);
  const __half2 found = __hisnan2(__hmul2(pair, __float2half2_rn(0.0f)));
  return reinterpret_cast<const unsigned&>(found);
}
inline unsigned not_finite(unsigned x, __nv_bfloat16) {
  const __nv_bfloat162 pair = reinterpret_cast<const __nv_bfloat162&>(x);
  const __nv_bfloat162 found = __hisnan2(__hmul2(pair, __float2bfloat162_rn(0.0f)));
  return reinterpret_cast<const unsigned&>(found);
}

// The largest number of a 16-bit type.
inline float largest(__half) { return 65504.0f; }
inline float largest(__nv_bfloat16) { return 3.389531390e38f; }

// The nearest finite number; a NaN becomes one of the largest.
template <typename T>
inline T finite(T x) {
  const float limit = largest(x);
  return T(fminf(fmaxf(float(x), -limit), limit));
}

// Left operand of a product. reg[r][s] is a lane's 4 bytes of the 16-byte chunk s of a
// row; a tile that was converted from float accumulators to float holds the columns of
// each fragment in the order 0 2 4 6 1 3 5 7 instead, and mma_ab reads b in that order.
template <typename T, int R, int C>
struct RowTile {
  unsigned reg[R][C * sizeof(T) / 2];
};

// Left operand of a product, read from threadgroup memory each time: saves registers.
// R / 2 tiles of ROWS_TOGETHER rows, 16 of each warp.
template <typename T, int R, int C>
struct SharedRowTile {
  const T* rows_tg;
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
  float frag[R / 2][C][4];

  inline float get(int i, int j) { return frag[i / 2][j / 2][i % 2 * 2 + j % 2]; }
  inline void set(int i, int j, float x) { frag[i / 2][j / 2][i % 2 * 2 + j % 2] = x; }
};

template <int R, int C>
inline void fill(AccTile<R, C>& x, float value) {
  UNROLL for (int i = 0; i < R; ++i) {
    UNROLL for (int j = 0; j < 2 * C; ++j) { x.set(i, j, value); }
  }
}

// x *= factor, for the row slot i only.
template <int R, int C>
inline void scale_row(AccTile<R, C>& x, int i, float factor) {
  UNROLL for (int j = 0; j < 2 * C; ++j) { x.set(i, j, x.get(i, j) * factor); }
}

// Round to the element type of the next product.
template <typename T, int R, int C>
inline void convert(RowTile<T, R, C>& to, AccTile<R, C>& from) {
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) {
      to.reg[r][c] = pack(from.get(r, 2 * c), from.get(r, 2 * c + 1), T());
    }
  }
}
template <int R, int C>
inline void convert(RowTile<float, R, C>& to, AccTile<R, C>& from) {
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      to.reg[r][j] = __float_as_uint(operand_of_products(from.get(r, j)));
    }
  }
}

// Reductions over the lanes that hold one row; each of them gets the result.
inline float over_row_max(float x) {
  x = maximum(x, __shfl_xor_sync(~0u, x, 1));
  return maximum(x, __shfl_xor_sync(~0u, x, 2));
}
inline float over_row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Over all lanes: the smallest, and whether there is one where x holds.
inline bool over_simd_any(bool x) { return __any_sync(~0u, x); }
inline int over_simd_min(int x) { return __reduce_min_sync(~0u, x); }

template <int R, int C>
inline float row_max(AccTile<R, C>& x, int i) {
  float m = x.get(i, 0);
  UNROLL for (int j = 1; j < 2 * C; ++j) { m = maximum(m, x.get(i, j)); }
  return over_row_max(m);
}

// This lane's 4 bytes s of a row, as two numbers (of float: one).
template <typename T, int R, int C>
inline float2 lane_pair(RowTile<T, R, C>& x, int i, int s) {
  return unpack<T>(x.reg[i][s]);
}
template <int R, int C>
inline float2 lane_pair(RowTile<float, R, C>& x, int i, int s) {
  return float2{__uint_as_float(x.reg[i][s]), 0.0f};
}

// This lane's part of the sum of x * y over the columns, for the row slot i.
template <typename T, int R, int C>
inline float lane_dot(RowTile<T, R, C>& x, RowTile<T, R, C>& y, int i) {
  float sum = 0.0f;
  UNROLL for (int s = 0; s < int(C * sizeof(T)) / 2; ++s) {
    const float2 a = lane_pair(x, i, s), b = lane_pair(y, i, s);
    sum += a.x * b.x + a.y * b.y;
  }
  return sum;
}
// How many of this lane's elements in the row slot i are not 0.
template <typename T, int R, int C>
inline float lane_nonzeros(RowTile<T, R, C>& x, int i) {
  float n = 0.0f;
  UNROLL for (int s = 0; s < int(C * sizeof(T)) / 2; ++s) {
    const float2 a = lane_pair(x, i, s);
    n += (a.x == 0.0f ? 0.0f : 1.0f) + (a.y == 0.0f ? 0.0f : 1.0f);
  }
  return n;
}

// Four 8x16-byte matrices from threadgroup memory; lane l gives the address of row
// l % 8 of matrix l / 8 and gets the 4 bytes l % 4 of row l / 4 of each of them.
struct FourMatrices {
  unsigned reg[4];

  inline FourMatrices(unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
                 : "r"(address)
                 : "memory");
  }
};
// The same with each matrix of 8x8 16-bit elements transposed.
struct FourTransposed {
  unsigned reg[4];

  inline FourTransposed(unsigned address) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(reg[0]), "=r"(reg[1]), "=r"(reg[2]), "=r"(reg[3])
        : "r"(address)
        : "memory");
  }
};

// Left operand of one step: 16 rows and 32 bytes along the sum.
template <typename T, int R, int C>
inline LeftRegisters left_step(RowTile<T, R, C>& a, int i, int s) {
  LeftRegisters left;
  UNROLL for (int e = 0; e < 4; ++e) {
    left.reg[e] = a.reg[2 * i + e % 2][2 * s + e / 2];
  }
  return left;
}
template <typename T, int R, int C>
inline LeftRegisters left_step(SharedRowTile<T, R, C>& a, int i, int s) {
  typedef TileLayout<T, ROWS_TOGETHER, 8 * C> Layout;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % TOGETHER;
  const FourMatrices x(shared_address(a.rows_tg + i * ROWS_TOGETHER * 8 * C) +
                       Layout::place(16 * warp + lane % 16, 2 * s + lane / 16));
  return LeftRegisters{{x.reg[0], x.reg[1], x.reg[2], x.reg[3]}};
}

// d += a b for 16 rows, 8 columns and 32 bytes along the sum.
inline void multiply(float (&d)[4], LeftRegisters a, unsigned b0, unsigned b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}
inline void multiply(float (&d)[4], LeftRegisters a, unsigned b0, unsigned b1,
                     __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}
inline void multiply_tf32(float (&d)[4], LeftRegisters a, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}

inline void multiply(float (&d)[4], LeftRegisters a, unsigned b0, unsigned b1, float) {
  if (FLOAT_TERMS == 3) {
    LeftRegisters high, low;
    UNROLL for (int e = 0; e < 4; ++e) {
      high.reg[e] = high_part(a.reg[e]);
      low.reg[e] = low_part(a.reg[e]);
    }
    // The instructions cut their sums, too: each step has its own, added with rounding.
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply_tf32(sum, low, high_part(b0), high_part(b1));
    multiply_tf32(sum, high, low_part(b0), low_part(b1));
    multiply_tf32(sum, high, high_part(b0), high_part(b1));
    UNROLL for (int e = 0; e < 4; ++e) { d[e] += sum[e]; }
  } else {
    multiply_tf32(d, a, b0, b1);
  }
}

// The left operand of all steps, as wgmma takes it.
template <typename T, int R, int C>
struct LeftSteps {
  enum : int { STEPS = C * sizeof(T) / 4 };
  LeftRegisters step[R / 2][STEPS];

  inline LeftSteps(RowTile<T, R, C>& a) {
    UNROLL for (int i = 0; i < R / 2; ++i) {
      UNROLL for (int s = 0; s < STEPS; ++s) { step[i][s] = left_step(a, i, s); }
    }
  }
};
template <typename T, int R, int C>
struct SharedLeftSteps {
  enum : int { STEPS = C * sizeof(T) / 4 };
  unsigned long step[R / 2][STEPS];

  inline SharedLeftSteps(SharedRowTile<T, R, C>& a) {
    typedef TileLayout<T, ROWS_TOGETHER, 8 * C> Layout;
    UNROLL for (int i = 0; i < R / 2; ++i) {
      const T* rows = a.rows_tg + i * ROWS_TOGETHER * 8 * C;
      const unsigned long tile = describe<Layout>(shared_address(rows));
      UNROLL for (int s = 0; s < STEPS; ++s) {
        step[i][s] = tile + Layout::place(0, 2 * s) / 16;
      }
    }
  }
};
template <typename T, int R, int C>
inline LeftSteps<T, R, C> left_steps(RowTile<T, R, C>& a) {
  return LeftSteps<T, R, C>(a);
}
template <typename T, int R, int C>
inline SharedLeftSteps<T, R, C> left_steps(SharedRowTile<T, R, C>& a) {
  return SharedLeftSteps<T, R, C>(a);
}

// acc += a b^T, the rows of b, W = 8 * C wide, in threadgroup memory.
template <int W, template <typename, int, int> class Left, typename T, int R, int C,
          int K>
inline void mma_abt(AccTile<R, K>& acc, Left<T, R, C>& a, const T* b_tg, Worker) {
  typedef TileLayout<T, 8 * K, 8 * C> Layout;
  const int lane = threadIdx.x % 32;
  const unsigned b = shared_address(b_tg);
  if constexpr (HAS_WGMMA && (sizeof(T) == 2 || InTf32<T>::value)) {
    multiply_together<T, Layout, false>(acc.frag, left_steps(a).step, b);
  } else {
    UNROLL for (int s = 0; s < int(C * sizeof(T)) / 4; ++s) {
      LeftRegisters left[R / 2];
      UNROLL for (int i = 0; i < R / 2; ++i) { left[i] = left_step(a, i, s); }
      UNROLL for (int k = 0; k < K; k += 2) {
        const int row = 8 * (k + lane / 16) + lane % 8;
        const FourMatrices right(b + Layout::place(row, 2 * s + lane / 8 % 2));
        UNROLL for (int i = 0; i < R / 2; ++i) {
          multiply(acc.frag[i][k], left[i], right.reg[0], right.reg[1], T());
          multiply(acc.frag[i][k + 1], left[i], right.reg[2], right.reg[3], T());
        }
      }
    }
  }
}

// acc += a b, the rows of b, W = 8 * C wide, in threadgroup memory.
template <int W, typename T, int R, int K, int C>
inline void mma_ab(AccTile<R, C>& acc, RowTile<T, R, K>& a, const T* b_tg, Worker) {
  typedef TileLayout<T, 8 * K, 8 * C> Layout;
  const int lane = threadIdx.x % 32;
  const unsigned b = shared_address(b_tg);
  if constexpr (HAS_WGMMA) {
    multiply_together<T, Layout, true>(acc.frag, left_steps(a).step, b);
  } else {
    UNROLL for (int s = 0; s < K / 2; ++s) {
      UNROLL for (int c = 0; c < C; c += 2) {
        const FourTransposed right(b +
                                   Layout::place(16 * s + lane % 16, c + lane / 16));
        UNROLL for (int i = 0; i < R / 2; ++i) {
          const LeftRegisters left = left_step(a, i, s);
          multiply(acc.frag[i][c], left, right.reg[0], right.reg[1], T());
          multiply(acc.frag[i][c + 1], left, right.reg[2], right.reg[3], T());
        }
      }
    }
  }
}
// In TF32 with wgmma, b is the transposed tile.
template <int W, int R, int K, int C>
inline void mma_ab(AccTile<R, C>& acc, RowTile<float, R, K>& a, const float* b_tg,
                   Worker) {
  if constexpr (HAS_WGMMA && InTf32<float>::value) {
    typedef TileLayout<float, 8 * C, 8 * K> Transposed;
    multiply_together<float, Transposed, false>(acc.frag, left_steps(a).step,
                                                shared_address(b_tg));
    return;
  }
  typedef TileLayout<float, 8 * K, 8 * C> Layout;
  enum : int { PERIOD = Layout::CHUNKS / 2 };  // fragments of a panel's row
  const int lane = threadIdx.x % 32;
  // everything that depends on the lane, so that the rest are constants
  unsigned first[PERIOD], second[PERIOD];
  UNROLL for (int c = 0; c < PERIOD; ++c) {
    const int row = lane % 4 * 2, chunk = 2 * c + lane / 16;
    const unsigned column = shared_address(b_tg) + lane / 4 % 4 * 4;
    first[c] = column + Layout::place(row, chunk);
    second[c] = column + Layout::place(row + 1, chunk);
  }
  UNROLL for (int c = 0; c < C; ++c) {
    UNROLL for (int s = 0; s < K; ++s) {
      const int place = Layout::place(8 * s, c / PERIOD * Layout::CHUNKS);
      const unsigned b0 = load_shared(first[c % PERIOD] + place);
      const unsigned b1 = load_shared(second[c % PERIOD] + place);
      UNROLL for (int i = 0; i < R / 2; ++i) {
        multiply(acc.frag[i][c], left_step(a, i, s), b0, b1, float());
      }
    }
  }
}

// The sum of x over the parts: there is one.
template <int DS, int R, int C>
inline void sum_parts(AccTile<R, C>&, float*, Worker) {}

// `bytes` bytes to threadgroup memory, asynchronously; zeros unless `exists`.
template <int BYTES>
inline void copy(unsigned to, const void* from, bool exists) {
  const int n = exists ? BYTES : 0;
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(n)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                 "n"(BYTES), "r"(n)
                 : "memory");
  }
}

// Whether every row of a view starts at a multiple of `bytes` bytes, without gaps.
template <typename T>
inline bool is_aligned(Operand<T> x, int bytes) {
  const long place = reinterpret_cast<long>(x.data);
  const long steps = (x.stride.b | x.stride.h | x.stride.t) * sizeof(T);
  return x.stride.d == 1 && ((place | steps) & (bytes - 1)) == 0;
}

// The 16-byte chunks of ROWS x D elements that a thread copies and finishes: in each turn
// one column of chunks of the rows row, row + 2, ... of GROUP rows. In TF32 they become
// GROUP chunks of the transposed tile, chunk `group` of as many rows.
template <typename T, int ROWS, int D, int THREADS>
struct Share {
  enum : int {
    CHUNK = 16 / sizeof(T),
    WIDTH = D / CHUNK,
    GROUP = InTf32<T>::value ? 4 : 1,
    ALL = ROWS / GROUP * WIDTH,
    TURNS = (ALL + THREADS - 1) / THREADS,
    PANELS = WIDTH / 8,
    // a warp has 4 groups x 8 columns, in an order without bank conflicts in either tile
    SQUARE = GROUP > 1 && WIDTH % 8 == 0 && ROWS % 16 == 0,
    // the column is the same in all turns, the rows of the next turn are this far away
    STEADY = SQUARE ? THREADS / 32 % PANELS == 0 : THREADS % WIDTH == 0,
    TURN_ROWS = THREADS / WIDTH * GROUP,
  };
  int column, group, row;
  bool exists;

  inline Share(int turn, int thread_index) {
    const int i = turn * THREADS + thread_index;
    exists = ALL % THREADS == 0 || i < ALL;
    const int first = STEADY ? thread_index : i;
    if constexpr (SQUARE) {
      const int lane = first % 32, warp = first / 32;
      column = 8 * (warp % PANELS) + lane % 8;
      group = 4 * (warp / PANELS) + (lane / 8 ^ lane % 8 / 2);
    } else {
      column = first % WIDTH;
      group = first / WIDTH;
    }
    if (STEADY) group += turn * (TURN_ROWS / GROUP);
    // the order of the columns of a RowTile<float>: 0 2 4 6 1 3 5 7
    row = GROUP == 1 ? group : group / 2 * 8 + group % 2;
  }
};

// Rows [row, row + ROWS) of head (b, h), D columns of them, to the rows from tile_row on
// of a tile of TILE_ROWS rows of W columns, by THREADS threads.
template <int ROWS, int D, int W, int THREADS, int TILE_ROWS, typename T>
inline void stage_rows(T* tile_tg, int tile_row, Operand<T> from, int b, int h, int row,
                       int n_rows, int thread_index) {
  typedef TileLayout<T, TILE_ROWS, W> Layout;
  typedef Share<T, ROWS, W, THREADS> Mine;
  char* tile = reinterpret_cast<char*>(tile_tg);
  if (D % Mine::CHUNK == 0 && is_aligned(from, 16)) {
    const long two_rows = 2 * from.stride.t,
               turn_rows = Mine::TURN_ROWS * from.stride.t;
    const T* turn_source;
    UNROLL for (int turn = 0; turn < Mine::TURNS; ++turn) {
      const Mine mine(turn, thread_index);
      if (!mine.exists) break;
      if (turn == 0 || !Mine::STEADY) {
        turn_source = from.data + offset(from.stride, b, h, row + mine.row) +
                      mine.column * Mine::CHUNK;
      } else {
        turn_source += turn_rows;
      }
      const T* source = turn_source;
      UNROLL for (int g = 0; g < Mine::GROUP; ++g) {
        const int r = mine.row + 2 * g;
        char* to = tile + Layout::place(tile_row + r, mine.column);
        const bool exists =
            row + r < n_rows && (D == W || mine.column < D / Mine::CHUNK);
        copy<16>(shared_address(to), source, exists);
        source += two_rows;
      }
    }
  } else {
    ROLLED for (int turn = 0; turn < Mine::TURNS; ++turn) {
      const Mine mine(turn, thread_index);
      if (!mine.exists) break;
      ROLLED for (int g = 0; g < Mine::GROUP; ++g) {
        const int r = mine.row + 2 * g;
        char* to = tile + Layout::place(tile_row + r, mine.column);
        const T* source = from.data + offset(from.stride, b, h, row + r);
        UNROLL for (int e = 0; e < Mine::CHUNK; ++e) {
          const int d = mine.column * Mine::CHUNK + e;
          reinterpret_cast<T*>(to)[e] =
              row + r < n_rows && d < D ? source[d * from.stride.d] : T(0.0f);
        }
      }
    }
  }
}

// The same for a number as float products take it, within the numbers of TF32.
inline float finite_operand(float x) {
  const float limit = 3.401162134e38f;
  return fminf(fmaxf(x, -limit), limit);
}

// The rows that this thread staged become what USES asks for, once its copies are
// complete. In TF32 they are rounded in place for mma_abt, rounded and transposed for
// mma_ab.
template <int ROWS, int W, int THREADS, int TILE_ROWS, int USES>
inline void finish_rows(float* tile_tg, float* transposed_tg, int tile_row,
                        int thread_index) {
  typedef TileLayout<float, TILE_ROWS, W> Layout;
  typedef TileLayout<float, W, TILE_ROWS> Transposed;
  typedef Share<float, ROWS, W, THREADS> Mine;
  enum : bool { TRANSPOSE = USES & IN_AB && InTf32<float>::value && HAS_WGMMA };
  UNROLL for (int turn = 0; turn < Mine::TURNS; ++turn) {
    const Mine mine(turn, thread_index);
    if (!mine.exists) break;
    float4* chunks[Mine::GROUP];
    float x[Mine::GROUP][4];
    UNROLL for (int g = 0; g < Mine::GROUP; ++g) {
      const int place = Layout::place(tile_row + mine.row + 2 * g, mine.column);
      chunks[g] = reinterpret_cast<float4*>(reinterpret_cast<char*>(tile_tg) + place);
      const float4 chunk = *chunks[g];
      const float numbers[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      UNROLL for (int e = 0; e < 4; ++e) {
        x[g][e] = operand_of_products(numbers[e]);
        // rounding may give an infinity
        if (USES & FINITE) x[g][e] = finite_operand(x[g][e]);
      }
    }
    if (USES & IN_ABT || !TRANSPOSE) {
      UNROLL for (int g = 0; g < Mine::GROUP; ++g) {
        *chunks[g] = float4{x[g][0], x[g][1], x[g][2], x[g][3]};
      }
    }
    if constexpr (TRANSPOSE) {
      UNROLL for (int e = 0; e < 4; ++e) {
        *reinterpret_cast<float4*>(reinterpret_cast<char*>(transposed_tg) +
                                   Transposed::place(4 * mine.column + e, mine.group)) =
            float4{x[0][e], x[1][e], x[2][e], x[3][e]};
      }
    }
  }
}
// 16-bit types: a chunk changes only if something in it is not finite, which is rare.
template <int ROWS, int W, int THREADS, int TILE_ROWS, int USES, typename T>
inline void finish_rows(T* tile_tg, T*, int tile_row, int thread_index) {
  typedef TileLayout<T, TILE_ROWS, W> Layout;
  typedef Share<T, ROWS, W, THREADS> Mine;
  UNROLL for (int turn = 0; turn < Mine::TURNS; ++turn) {
    const Mine mine(turn, thread_index);
    if (!mine.exists) break;
    uint4* chunk =
        reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile_tg) +
                                 Layout::place(tile_row + mine.row, mine.column));
    const uint4 x = *chunk;
    if (not_finite(x.x, T()) | not_finite(x.y, T()) | not_finite(x.z, T()) |
        not_finite(x.w, T())) {
      T* elements = reinterpret_cast<T*>(chunk);
      ROLLED for (int e = 0; e < Mine::CHUNK; ++e) {
        elements[e] = finite(elements[e]);
      }
    }
  }
}

// Rows [row, row + ROWS) of head (b, h) to rows of W >= D columns in threadgroup memory,
// by THREADS threads. Rows from n_rows on and columns from D on become zeros. Complete
// after the staged_wait, finish and staged_sync of their turn.
template <int ROWS, int D, int W, int THREADS, int USES, typename T>
inline void stage(T* to_tg, Operand<T> from, int b, int h, int row, int n_rows,
                  int thread_index) {
  stage_rows<ROWS, D, W, THREADS, ROWS>(to_tg, 0, from, b, h, row, n_rows,
                                        thread_index);
}

// Tile of ROWS rows of W columns, among the SLOTS that take turns, that the block of a
// turn is staged in and that mma_abt reads.
template <int ROWS, int W, typename T>
inline T* slot(T* tiles_tg, int turn) {
  return tiles_tg + turn % TileSlots<T>::value * ROWS * RowStride<T, W>::value;
}
// The tile that mma_ab reads: in TF32 with wgmma the transposed one, in the slot that is
// free until the next block is staged.
template <int ROWS, int W, typename T>
inline T* slot_in_ab(T* tiles_tg, int turn) {
  const bool transposed = InTf32<T>::value && HAS_WGMMA;
  return slot<ROWS, W>(tiles_tg, transposed ? turn + AHEAD + 1 : turn);
}

// Makes what this thread staged for a turn ready for USES; a staged_sync follows.
template <int ROWS, int W, int THREADS, int USES, typename T>
inline void finish(T* tiles_tg, int turn, int thread_index) {
  if constexpr (InTf32<T>::value || USES & FINITE) {
    finish_rows<ROWS, W, THREADS, ROWS, USES>(slot<ROWS, W>(tiles_tg, turn),
                                              slot_in_ab<ROWS, W>(tiles_tg, turn), 0,
                                              thread_index);
  }
}

// This warp's rows [row, row + 8 R) of head (b, h) in registers, from `column` on.
template <int D, typename T, int R, int C>
inline void load_rows(RowTile<T, R, C>& x, Operand<T> from, int b, int h, int row,
                      int n_rows, int column, Worker at) {
  enum : int { WORD = 4 / sizeof(T) };
  const bool aligned = D % WORD == 0 && is_aligned(from, 4);
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    const T* first = from.data + offset(from.stride, b, h, t);
    UNROLL for (int s = 0; s < int(C * sizeof(T)) / 2; ++s) {
      const int d = column + (4 * s + at.lane % 4) * WORD;
      x.reg[r][s] = 0;
      if (t < n_rows && d < D && aligned) {
        x.reg[r][s] = *reinterpret_cast<const unsigned*>(first + d);
      } else if (t < n_rows) {
        UNROLL for (int e = 0; e < WORD; ++e) {
          if (d + e < D) {
            reinterpret_cast<T*>(&x.reg[r][s])[e] = first[(d + e) * from.stride.d];
          }
        }
      }
    }
  }
}

template <typename T, int R, int C>
inline void round_rows(RowTile<T, R, C>& x) {}
template <int R, int C>
inline void round_rows(RowTile<float, R, C>& x) {
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int s = 0; s < 2 * C; ++s) {
      const float number = __uint_as_float(x.reg[r][s]);
      x.reg[r][s] = __float_as_uint(operand_of_products(number));
    }
  }
}

// The same rows as a left operand: in registers (rows_tg is not used), or in rows_tg; a
// staged_sync must come before their first use.
template <int D, int W, typename T, int R, int C>
inline void load_left(RowTile<T, R, C>& x, T* rows_tg, Operand<T> from, int b, int h,
                      int row, int n_rows, Worker at) {
  load_rows<D>(x, from, b, h, row, n_rows, 0, at);
  round_rows(x);
}
template <int D, int W, typename T, int R, int C>
inline void load_left(SharedRowTile<T, R, C>& x, T* rows_tg, Operand<T> from, int b,
                      int h, int row, int n_rows, Worker at) {
  const int first = at.simd / TOGETHER * TOGETHER * 8 * R;
  T* tile_tg = rows_tg + first * RowStride<T, W>::value;
  x.rows_tg = tile_tg;
  const int tile_row = at.simd % TOGETHER * 16;
  UNROLL for (int i = 0; i < R / 2; ++i) {
    stage_rows<16, D, W, 32, ROWS_TOGETHER>(tile_tg + i * ROWS_TOGETHER * W, tile_row,
                                            from, b, h, row + 16 * i, n_rows, at.lane);
  }
  if constexpr (InTf32<T>::value) {
    staged_wait<0>();
    UNROLL for (int i = 0; i < R / 2; ++i) {
      T* rows = tile_tg + i * ROWS_TOGETHER * W;
      finish_rows<16, W, 32, ROWS_TOGETHER, IN_ABT>(rows, rows, tile_row, at.lane);
    }
  }
}

// Two neighbours to memory, rounded to its type.
template <typename T>
inline void store_pair(T* to, float a, float b) {
  *reinterpret_cast<unsigned*>(to) = pack(a, b, T());
}
inline void store_pair(float* to, float a, float b) {
  *reinterpret_cast<float2*>(to) = float2{a, b};
}

// The tile's rows to an output at `to`, the head's row 0; row_step elements lie between
// rows. Rows from n_rows on and columns from D on are not stored.
template <int D, typename T, int R, int C>
inline void store_rows(T* to, long row_step, AccTile<R, C>& x, int row, int n_rows,
                       Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    if (t < n_rows) {
      UNROLL for (int j = 0; j < 2 * C; j += 2) {
        const int d = tile_col(at, j);
        T* pair = to + t * row_step + d;
        if (D % 2 == 0) {
          if (d < D) store_pair(pair, x.get(r, j), x.get(r, j + 1));
        } else {
          if (d < D) pair[0] = T(x.get(r, j));
          if (d + 1 < D) pair[1] = T(x.get(r, j + 1));
        }
      }
    }
  }
}

// The tile to the place (row, col) of a row-contiguous [n_rows, n_cols] output. Nothing
// is stored outside.
template <typename T, int R, int C>
inline void store_tile(T* to, AccTile<R, C>& x, int row, int n_rows, int col,
                       int n_cols, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    UNROLL for (int j = 0; j < 2 * C; ++j) {
      const int u = col + tile_col(at, j);
      if (t < n_rows && u < n_cols) to[long(t) * n_cols + u] = T(x.get(r, j));
    }
  }
}

// One number per row of a tile, the same in all lanes of the row.
template <int R>
struct RowValues {
  float value[R];
  inline float at_slot(int i, int) const { return value[i]; }
};

// One number per column of a tile, in threadgroup memory.
struct ColumnValues {
  const float* column_tg;
  Worker worker;
  inline float at_slot(int, int j) const { return column_tg[tile_col(worker, j)]; }
};

template <int R>
inline void load_row_values(RowValues<R>& x, RowOperand from, int b, int h, int row,
                            int n_rows, Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    x.value[r] = t < n_rows ? from.data[offset(from.stride, b, h, t)] : 0.0f;
  }
}

template <int R>
inline void store_row_values(float* to, RowValues<R>& x, int row, int n_rows,
                             Worker at) {
  UNROLL for (int r = 0; r < R; ++r) {
    const int t = row + tile_row(at, r);
    if (t < n_rows && tile_col(at, 0) == 0) to[t] = x.value[r];
  }
}

// Numbers of the rows [row, row + ROWS) to threadgroup memory, zeros from n_rows on.
template <int ROWS, int THREADS>
inline void stage_values(float* to_tg, RowOperand from, int b, int h, int row,
                         int n_rows, Worker at) {
  UNROLL for (int first = 0; first < ROWS; first += THREADS) {
    const int r = first + at.thread_index;
    if (r >= ROWS) break;
    const float* source = from.data + offset(from.stride, b, h, row + r);
    copy<4>(shared_address(to_tg + r), source, row + r < n_rows);
  }
}
