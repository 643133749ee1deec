// wgmma: products of four warps (a warpgroup) with a tile in threadgroup memory.
//
// Source     PTX ISA, "Asynchronous warpgroup level matrix instructions"; sm_90a only.
// Left       16 rows a warp, 32 bytes along the sum: in four registers, laid out as for
//            mma.sync, or in threadgroup memory, 64 rows of the four warps.
// Right      described by its address and two steps; the layouts are those of TileLayout
//            in tile.h. Rows along the sum (TRANSPOSED, 16-bit types only) or along the
//            result's columns.
// Order      fence, products, commit and wait: one call of multiply_together.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
enum : bool { HAS_WGMMA = true };
#else
enum : bool { HAS_WGMMA = false };
#endif

// A tile at an address, for wgmma; the part from a place on is at this + place / 16.
template <typename Layout>
inline unsigned long describe(unsigned address) {
  enum : int { SWIZZLE = Layout::CHUNKS == 8 ? 1 : Layout::CHUNKS == 4 ? 2 : 3 };
  const unsigned long steps = static_cast<unsigned long>(SWIZZLE) << 62 |
                              static_cast<unsigned long>(Layout::CHUNKS * 8) << 32 |
                              static_cast<unsigned long>(Layout::PANEL_BYTES / 16)
                                  << 16;
  return steps | address / 16;
}

// Left operand of one step, in registers.
struct LeftRegisters {
  unsigned reg[4];
};

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
#define FRAGMENTS_16 FRAGMENT(0), FRAGMENT(1)
#define FRAGMENTS_32 FRAGMENTS_16, FRAGMENT(2), FRAGMENT(3)
#define FRAGMENTS_64 FRAGMENTS_32, FRAGMENT(4), FRAGMENT(5), FRAGMENT(6), FRAGMENT(7)

// d += a b for COLUMNS columns and one step along the sum. LEFT, RIGHT and TRANSPOSE are
// the texts of the instruction's operands; the left one is in registers or described.
#define WGMMA(ELEMENT, COLUMNS, SHAPE_AND_TYPES, LEFT, LEFT_TYPE, LEFT_OPERANDS,      \
              RIGHT, TRANSPOSE)                                                       \
  template <int TRANSPOSED>                                                           \
  inline void wgmma_##COLUMNS(float (*d)[4], LEFT_TYPE a, unsigned long b, ELEMENT) { \
    asm volatile(                                                                     \
        "{.reg .pred p; setp.ne.b32 p, 1, 0; "                                        \
        "wgmma.mma_async.sync.aligned.m64n" #COLUMNS SHAPE_AND_TYPES                  \
        " {" OPERANDS_##COLUMNS "}, " LEFT ", " RIGHT ", p, 1, 1" TRANSPOSE ";}"      \
        : FRAGMENTS_##COLUMNS                                                         \
        : LEFT_OPERANDS, "l"(b), "n"(TRANSPOSED));                                    \
  }
#define WGMMA_REGISTERS(ELEMENT, COLUMNS, SHAPE_AND_TYPES, LEFT, RIGHT, TRANSPOSE) \
  WGMMA(ELEMENT, COLUMNS, SHAPE_AND_TYPES, LEFT, LeftRegisters, REGISTERS, RIGHT,  \
        TRANSPOSE)
#define WGMMA_SHARED(ELEMENT, COLUMNS, SHAPE_AND_TYPES, LEFT, RIGHT, TRANSPOSE) \
  WGMMA(ELEMENT, COLUMNS, SHAPE_AND_TYPES, LEFT, unsigned long, "l"(a), RIGHT,  \
        TRANSPOSE)
#define REGISTERS "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3])

#define OPERANDS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define OPERANDS_32                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define OPERANDS_64                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, "         \
  "%8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"

WGMMA_REGISTERS(__half, 16, "k16.f32.f16.f16", "{%8, %9, %10, %11}", "%12", ", %13")
WGMMA_SHARED(__half, 16, "k16.f32.f16.f16", "%8", "%9", ", 0, %10")
WGMMA_REGISTERS(__nv_bfloat16, 16, "k16.f32.bf16.bf16", "{%8, %9, %10, %11}", "%12",
                ", %13")
WGMMA_SHARED(__nv_bfloat16, 16, "k16.f32.bf16.bf16", "%8", "%9", ", 0, %10")
WGMMA_REGISTERS(float, 16, "k8.f32.tf32.tf32", "{%8, %9, %10, %11}", "%12", "")
WGMMA_SHARED(float, 16, "k8.f32.tf32.tf32", "%8", "%9", "")
WGMMA_REGISTERS(__half, 32, "k16.f32.f16.f16", "{%16, %17, %18, %19}", "%20", ", %21")
WGMMA_SHARED(__half, 32, "k16.f32.f16.f16", "%16", "%17", ", 0, %18")
WGMMA_REGISTERS(__nv_bfloat16, 32, "k16.f32.bf16.bf16", "{%16, %17, %18, %19}", "%20",
                ", %21")
WGMMA_SHARED(__nv_bfloat16, 32, "k16.f32.bf16.bf16", "%16", "%17", ", 0, %18")
WGMMA_REGISTERS(float, 32, "k8.f32.tf32.tf32", "{%16, %17, %18, %19}", "%20", "")
WGMMA_SHARED(float, 32, "k8.f32.tf32.tf32", "%16", "%17", "")
WGMMA_REGISTERS(__half, 64, "k16.f32.f16.f16", "{%32, %33, %34, %35}", "%36", ", %37")
WGMMA_SHARED(__half, 64, "k16.f32.f16.f16", "%32", "%33", ", 0, %34")
WGMMA_REGISTERS(__nv_bfloat16, 64, "k16.f32.bf16.bf16", "{%32, %33, %34, %35}", "%36",
                ", %37")
WGMMA_SHARED(__nv_bfloat16, 64, "k16.f32.bf16.bf16", "%32", "%33", ", 0, %34")
WGMMA_REGISTERS(float, 64, "k8.f32.tf32.tf32", "{%32, %33, %34, %35}", "%36", "")
WGMMA_SHARED(float, 64, "k8.f32.tf32.tf32", "%32", "%33", "")

// d += a b for all columns from fragment FIRST on, of step s along the sum.
template <typename T, typename Layout, bool TRANSPOSED, int C, int FIRST = 0,
          typename Left>
inline void multiply_columns(float (*d)[4], Left a, unsigned long b, int s) {
  enum : int { PIECE = C - FIRST >= 8 ? 8 : C - FIRST >= 4 ? 4 : 2 };
  const int place =
      TRANSPOSED ? Layout::place(16 * s, FIRST) : Layout::place(8 * FIRST, 2 * s);
  const unsigned long right = b + place / 16;
  if constexpr (PIECE == 8) wgmma_64<TRANSPOSED>(d + FIRST, a, right, T());
  if constexpr (PIECE == 4) wgmma_32<TRANSPOSED>(d + FIRST, a, right, T());
  if constexpr (PIECE == 2) wgmma_16<TRANSPOSED>(d + FIRST, a, right, T());
  if constexpr (FIRST + PIECE < C) {
    multiply_columns<T, Layout, TRANSPOSED, C, FIRST + PIECE>(d, a, b, s);
  }
}

// d += a b for ROWS times 16 rows a warp and STEPS steps along the sum.
template <typename T, typename Layout, bool TRANSPOSED, int ROWS, int C, int STEPS,
          typename Left>
inline void multiply_together(float (&d)[ROWS][C][4], const Left (&a)[ROWS][STEPS],
                              unsigned b) {
  const unsigned long right = describe<Layout>(b);
  UNROLL for (int i = 0; i < ROWS; ++i) { pin<C>(d[i]); }
  wgmma_begin();
  UNROLL for (int s = 0; s < STEPS; ++s) {
    UNROLL for (int i = 0; i < ROWS; ++i) {
      multiply_columns<T, Layout, TRANSPOSED, C>(d[i], a[i][s], right, s);
    }
  }
  wgmma_end();
  UNROLL for (int i = 0; i < ROWS; ++i) { pin<C>(d[i]); }
}
