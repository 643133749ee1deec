// wgmma: products of four warps (a warpgroup) with a tile in threadgroup memory.
//
// Source     PTX ISA, "Asynchronous warpgroup level matrix instructions"; sm_90a only.
// Left       16 rows a warp, 16 elements along the sum, in four registers, laid out as
//            for mma.sync m16n8k16.
// Right      described by its address and two steps; the layouts are those of TileLayout
//            in tile.h. Rows along the sum (TRANSPOSED) or along the result's columns.
// Order      fence, products, commit and wait: one call of multiply_together.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
enum : bool { HAS_WGMMA = true };
#else
enum : bool { HAS_WGMMA = false };
#endif

// 8-row groups lie group_bytes apart, panels of `chunks` 16-byte chunks panel_bytes.
inline unsigned long describe(unsigned address, int chunks, int panel_bytes,
                              int group_bytes) {
  const unsigned long swizzle = chunks == 8 ? 1 : chunks == 4 ? 2 : 3;
  return swizzle << 62 | static_cast<unsigned long>(group_bytes / 16) << 32 |
         static_cast<unsigned long>(panel_bytes / 16) << 16 | (address & 0x3ffff) / 16;
}

inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void wgmma_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// The compiler must not move a use of d across a begin or an end.
template <int FRAGMENTS>
inline void pin(float (*d)[4]) {
  UNROLL for (int c = 0; c < FRAGMENTS; ++c) {
    UNROLL for (int e = 0; e < 4; ++e) { asm volatile("" : "+f"(d[c][e])::"memory"); }
  }
}

#define FRAGMENT(c) "+f"(d[c][0]), "+f"(d[c][1]), "+f"(d[c][2]), "+f"(d[c][3])
#define FRAGMENTS_2(c) FRAGMENT(c), FRAGMENT(c + 1)
#define FRAGMENTS_4(c) FRAGMENTS_2(c), FRAGMENTS_2(c + 2)
#define FRAGMENTS_8(c) FRAGMENTS_4(c), FRAGMENTS_4(c + 4)

// d += a b for COLUMNS columns; the names are the instruction's operands.
#define WGMMA(ELEMENT, TYPE, COLUMNS, D, A, B, TRANS, FRAGMENTS)                        \
  template <int TRANSPOSED>                                                           \
  inline void wgmma_##COLUMNS(float (*d)[4], const unsigned (&a)[4], unsigned long b, \
                              ELEMENT) {                                              \
    asm volatile(                                                                     \
        "{.reg .pred p; setp.ne.b32 p, 1, 0; "                                        \
        "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE         \
        " {" D "}, {" A "}, " B ", p, 1, 1, " TRANS ";}"                              \
        : FRAGMENTS                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));       \
  }

#define OPERANDS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define OPERANDS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define OPERANDS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"

WGMMA(__half, "f16", 16, OPERANDS_16, "%8, %9, %10, %11", "%12", "%13", FRAGMENTS_2(0))
WGMMA(__half, "f16", 32, OPERANDS_32, "%16, %17, %18, %19", "%20", "%21", FRAGMENTS_4(0))
WGMMA(__half, "f16", 64, OPERANDS_64, "%32, %33, %34, %35", "%36", "%37", FRAGMENTS_8(0))
WGMMA(__nv_bfloat16, "bf16", 16, OPERANDS_16, "%8, %9, %10, %11", "%12", "%13", FRAGMENTS_2(0))
WGMMA(__nv_bfloat16, "bf16", 32, OPERANDS_32, "%16, %17, %18, %19", "%20", "%21", FRAGMENTS_4(0))
WGMMA(__nv_bfloat16, "bf16", 64, OPERANDS_64, "%32, %33, %34, %35", "%36", "%37", FRAGMENTS_8(0))

// d += a b for all columns from fragment FIRST on, of step s along the sum.
template <typename T, typename Layout, bool TRANSPOSED, int C, int FIRST = 0>
inline void multiply_columns(float (*d)[4], const unsigned (&a)[4], unsigned b, int s) {
  enum : int { PIECE = C - FIRST >= 8 ? 8 : C - FIRST >= 4 ? 4 : 2 };
  const int place =
      TRANSPOSED ? Layout::place(16 * s, FIRST) : Layout::place(8 * FIRST, 2 * s);
  const unsigned long right =
      describe(b + place, Layout::CHUNKS, Layout::PANEL_BYTES, Layout::CHUNKS * 128);
  if constexpr (PIECE == 8) wgmma_64<TRANSPOSED>(d + FIRST, a, right, T());
  if constexpr (PIECE == 4) wgmma_32<TRANSPOSED>(d + FIRST, a, right, T());
  if constexpr (PIECE == 2) wgmma_16<TRANSPOSED>(d + FIRST, a, right, T());
  if constexpr (FIRST + PIECE < C) {
    multiply_columns<T, Layout, TRANSPOSED, C, FIRST + PIECE>(d, a, b, s);
  }
}

// d += a b for STEPS steps along the sum.
template <typename T, typename Layout, bool TRANSPOSED, int C, int STEPS>
inline void multiply_together(float (*d)[4], const unsigned (&a)[STEPS][4], unsigned b) {
  pin<C>(d);
  wgmma_begin();
  UNROLL for (int s = 0; s < STEPS; ++s) {
    multiply_columns<T, Layout, TRANSPOSED, C>(d, a[s], b, s);
  }
  wgmma_end();
  pin<C>(d);
}
