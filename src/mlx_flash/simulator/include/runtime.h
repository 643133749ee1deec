// The machine: fibers, simdgroups, threadgroups, barriers. One fiber per GPU thread.
//
// A fiber runs until it must wait: at a barrier, at a simdgroup operation, or for the
// result of a matrix product that other lanes have not brought their operands to. It then
// hands over to the next lane of its simdgroup, and when all of those wait, to the next
// simdgroup. When nobody can run and somebody has not returned, the threads diverged: the
// launch ends with a report instead of a hang.
//
// Threadgroups are independent; several host threads take them from one counter.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "metal_types.h"

// Functions of the machine itself. In a checked build the compiler reports every load and
// store of the kernel to checks.h; the machine's own must stay out of that.
#define SIMULATOR_FUNCTION inline __attribute__((no_sanitize("thread")))

namespace simulator {

enum : unsigned {
  SIMD_WIDTH = 32,
  MAX_THREADS = 1024,
  MAX_SIMDGROUPS = MAX_THREADS / SIMD_WIDTH,
  MAX_ARRAYS = 64,    // threadgroup declarations of a kernel
  MAX_PRODUCTS = 32,  // matrix products in flight per simdgroup
  THREADGROUP_BYTES = 32768,
  GUARD_BYTES = 64,
  POISON = 0xff,  // all ones: a NaN as float, half and bfloat, -1 as an integer
};
enum : size_t {
  STACK_BYTES = 256 * 1024,
  ARENA_BYTES = THREADGROUP_BYTES + (MAX_ARRAYS + 1) * GUARD_BYTES,
};
static_assert((STACK_BYTES & (STACK_BYTES - 1)) == 0, "a fiber is found by masking");

// A place in the kernel's text.
struct Site {
  const char* operation;
  const char* file;
  int line;
  SIMULATOR_FUNCTION bool operator==(const Site& other) const {
    return line == other.line && operation == other.operation;
  }
};

struct Position {
  unsigned x, y, z;
};

struct Launch;
struct Lane;
struct Observer;
struct Threadgroup;

// The value of a simdgroup_matrix in one lane. `product` is the 1-based number of the
// matrix product that will write it, 0 once it holds its value.
struct Fragment {
  uint32_t product;
};

// A matrix product d = a b + c that collects its operands from the lanes, and is computed
// when one of them reads the result.
struct Product {
  alignas(64) float a[64], b[64], c[64];  // row-major
  Fragment* target[SIMD_WIDTH];           // null: the lane needs no result
  void (*store)(Fragment* target, const float* pair);
  uint32_t number;     // from 1; 0: none yet
  uint32_t c_product;  // c is the result of this product; 0: c is given
  uint32_t used_by;    // the last product that takes this one's result as its c
  uint32_t lanes;      // that have brought their operands
  Site site;
};

struct alignas(64) Simdgroup {
  uint32_t members;  // lanes that exist
  uint32_t alive;    // lanes that have not returned
  uint32_t ready;    // lanes that can run now
  uint32_t arrived;  // lanes that wait at the simdgroup operation `site`
  uint32_t waiting;  // lanes that wait for a product
  Site site;
  uint32_t barriers;  // simdgroup barriers that ordered threadgroup memory
  uint32_t device_barriers;
  uint32_t computed;  // products done; the next one has this number + 1
  // What the lanes bring to an operation and take from it. Two of each, used in turn:
  // a lane may bring its next value while others still take the last result.
  alignas(64) unsigned char slot[2][SIMD_WIDTH][16];
  Product products[MAX_PRODUCTS];
};

// Sits at the base of each fiber's stack, so that a fiber finds itself by masking its
// frame address.
struct Lane {
  void* stack_pointer;
  Simdgroup* simd;
  Threadgroup* group;
  Site waits_at;
  unsigned index;       // in the simdgroup
  unsigned thread;      // in the threadgroup
  unsigned fragment;    // 8 * row + column of its first element in an 8x8 fragment
  unsigned operations;  // simdgroup operations so far
  uint32_t products;    // matrix products so far
  uint32_t waits_for;   // a product
  bool returned;
};

struct Threadgroup {
  Launch* launch;
  Observer* observer;  // of a checked build
  Position position, size;
  unsigned threads, simdgroups;
  unsigned at_barrier;  // threads that wait at a threadgroup barrier
  unsigned barriers;    // threadgroup barriers that ordered threadgroup memory
  unsigned device_barriers;
  uint64_t random;  // state of the shuffled schedule; 0: the lanes run in order
  void* main_stack_pointer;
  unsigned char* stacks;
  Simdgroup simd[MAX_SIMDGROUPS];
  // Threadgroup memory: arrays in order of their first use, guard bytes between them.
  unsigned char* memory;
  unsigned used;           // guards included
  unsigned declared;       // guards excluded
  int offset[MAX_ARRAYS];  // -1: not met yet
  unsigned bytes[MAX_ARRAYS];
  const char* name[MAX_ARRAYS];

  SIMULATOR_FUNCTION Lane* lane(unsigned thread) const {
    return reinterpret_cast<Lane*>(stacks + thread * STACK_BYTES);
  }
};

enum BufferKind : int { INPUT, OUTPUT, CONSTANT };

// An array of the launch, as the host laid it out.
struct Buffer {
  unsigned char* address;
  size_t bytes;
  const char* name;
  int kind;         // a BufferKind
  int initialised;  // it starts with values, not with poison
};

struct Launch {
  void (*entry)(void* const* addresses, const Lane& lane);
  void* const* addresses;  // first elements, by buffer index
  const Buffer* buffers;
  unsigned n_buffers;
  Position grid, threadgroup;     // in threads
  const unsigned char* lane_map;  // per lane, which pair of a fragment it holds
  uint64_t seed;                  // of a shuffled schedule, or 0
  unsigned host_threads;
  uint64_t* counters;  // of a checked build
  unsigned checks;     // of a checked build, a set of Check
  char* message;       // why the launch failed; empty if it did not
  size_t message_size;
  unsigned next_group;
  int failed;
};

}  // namespace simulator

// switch_stack(save, load): push the callee-saved registers, store the stack pointer at
// *save, continue on the stack `load`.
extern "C" __attribute__((visibility("hidden"))) void simulator_switch_stack(
    void** save, void* load) __asm__("simulator_switch_stack");
#if defined(__x86_64__)
__asm__(
    ".text\n"
    "simulator_switch_stack:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
#elif defined(__aarch64__)
__asm__(
    ".text\n"
    ".p2align 2\n"
    "simulator_switch_stack:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");
#else
#error "the simulator runs on x86-64 and on 64-bit Arm"
#endif

namespace simulator {

SIMULATOR_FUNCTION Lane* self() {
  const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return reinterpret_cast<Lane*>(frame & ~(uintptr_t(STACK_BYTES) - 1));
}

// The first report of a launch: a bounded string that grows. A second one, from another
// host thread, goes nowhere.
struct Report {
  char* text;
  size_t size, used;
  SIMULATOR_FUNCTION explicit Report(Launch& launch)
      : text(launch.message), size(launch.message_size), used(0) {
    if (__atomic_exchange_n(&launch.failed, 1, __ATOMIC_SEQ_CST)) size = 0;
  }
  template <typename... Args>
  SIMULATOR_FUNCTION void add(const char* format, Args... args) {
    if (used >= size) return;
    const int n = snprintf(text + used, size - used, format, args...);
    used += n > 0 ? n : 0;
  }
  SIMULATOR_FUNCTION void add_place(const Threadgroup& group) {
    const Position p = group.position;
    add("in threadgroup (%u, %u, %u): ", p.x, p.y, p.z);
  }
};

// End the launch: the report is kept, the fibers are abandoned.
[[noreturn]] SIMULATOR_FUNCTION void leave(Lane* me) {
  void* abandoned;
  simulator_switch_stack(&abandoned, me->group->main_stack_pointer);
  __builtin_unreachable();
}

// Names who waits where, neighbours with the same fate in one line.
[[noreturn]] SIMULATOR_FUNCTION void report_divergence(Lane* me) {
  Threadgroup& group = *me->group;
  Report report(*group.launch);
  report.add_place(group);
  report.add(
      "the threads diverged: not all of them reach the same barrier or "
      "simdgroup operation; move it out of the branch\n");
  for (unsigned first = 0, next; first < group.threads; first = next) {
    const Lane* a = group.lane(first);
    for (next = first + 1; next < group.threads; ++next) {
      const Lane* b = group.lane(next);
      if (a->returned != b->returned) break;
      if (!a->returned && !(a->waits_at == b->waits_at)) break;
    }
    report.add("  threads %u-%u ", first, next - 1);
    if (a->returned) {
      report.add("have returned\n");
    } else {
      const Site& at = a->waits_at;
      report.add("wait at %s, %s:%d\n", at.operation, at.file, at.line);
    }
  }
  leave(me);
}

SIMULATOR_FUNCTION uint64_t random_number(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

// The lane that runs next: in order, the next of this simdgroup, else of the next
// simdgroup; in a shuffled schedule any lane that can.
SIMULATOR_FUNCTION Lane* next_lane(Lane* me) {
  Threadgroup& group = *me->group;
  unsigned s = me->simd - group.simd;
  unsigned first = me->index + 1;
  if (group.random) {
    const uint64_t number = random_number(group.random);
    first = number % SIMD_WIDTH;
    // stay in the simdgroup most of the time: both kinds of overlap are wanted
    if (number >> 32 & 1) s = number / SIMD_WIDTH % group.simdgroups;
  }
  for (unsigned i = 0; i <= group.simdgroups; ++i) {
    const uint32_t ready = group.simd[s].ready;
    if (ready) {
      const uint32_t later = first < SIMD_WIDTH ? ready >> first << first : 0;
      return group.lane(s * SIMD_WIDTH + __builtin_ctz(later ? later : ready));
    }
    if (++s == group.simdgroups) s = 0;
    if (!group.random) first = 0;
  }
  return nullptr;
}

// Run somebody else until this lane is ready again; back to the launch when all have
// returned.
SIMULATOR_FUNCTION void hand_over(Lane* me) {
  Lane* next = next_lane(me);
  if (!next) {
    Threadgroup& group = *me->group;
    for (unsigned t = 0; t < group.threads; ++t)
      if (!group.lane(t)->returned) report_divergence(me);
    leave(me);
  }
  if (next != me) simulator_switch_stack(&me->stack_pointer, next->stack_pointer);
}

// What is counted, once per simdgroup.
#define SIMULATOR_EVENTS(X) \
  X(MMA_FLOAT)              \
  X(MMA_HALF)               \
  X(MMA_BFLOAT)             \
  X(THREADGROUP_BARRIER)    \
  X(SIMDGROUP_BARRIER)      \
  X(SHUFFLE)                \
  X(REDUCTION)              \
  X(EXPONENTIAL)            \
  X(TRANSCENDENTAL)
enum Event : int {
#define SIMULATOR_EVENT(NAME) NAME,
  SIMULATOR_EVENTS(SIMULATOR_EVENT) N_EVENTS
#undef SIMULATOR_EVENT
};
SIMULATOR_FUNCTION Event mma_event(float) { return MMA_FLOAT; }
SIMULATOR_FUNCTION Event mma_event(half) { return MMA_HALF; }
SIMULATOR_FUNCTION Event mma_event(bfloat) { return MMA_BFLOAT; }

// What a checked build watches; checks.h defines them there.
#ifdef SIMULATOR_CHECKED
void observe_access(Lane* me, const void* address, size_t bytes, bool writes,
                    const Site& site);
void observe_atomic(Lane* me, const void* address, size_t bytes, bool writes,
                    const Site& site);
void observe_event(Lane* me, Event event);
void observe_segment(Simdgroup& simd, Threadgroup& group);
#else
SIMULATOR_FUNCTION void observe_access(Lane*, const void*, size_t, bool, const Site&) {}
SIMULATOR_FUNCTION void observe_atomic(Lane*, const void*, size_t, bool, const Site&) {}
SIMULATOR_FUNCTION void observe_event(Lane*, Event) {}
SIMULATOR_FUNCTION void observe_segment(Simdgroup&, Threadgroup&) {}
#endif

// Wait for the lanes of the simdgroup. True in the last to arrive, which performs the
// operation for all; it must call release_simdgroup then.
SIMULATOR_FUNCTION bool arrive(Lane* me, const Site& site) {
  Simdgroup& simd = *me->simd;
  me->waits_at = site;
  if (simd.arrived && !(simd.site == site)) report_divergence(me);
  simd.site = site;
  simd.arrived |= 1u << me->index;
  ++me->operations;
  if (simd.arrived == simd.alive) return true;
  simd.ready &= ~(1u << me->index);
  hand_over(me);
  // usually released by then; else the lanes that were missing have returned
  return simd.arrived && simd.arrived == simd.alive;
}
SIMULATOR_FUNCTION void release_simdgroup(Lane* me) {
  Simdgroup& simd = *me->simd;
  observe_segment(simd, *me->group);
  simd.arrived = 0;
  simd.ready = simd.alive;
}

SIMULATOR_FUNCTION void simdgroup_wait(bool orders_threadgroup_memory,
                                       bool orders_device_memory, const Site& site) {
  Lane* me = self();
  observe_event(me, SIMDGROUP_BARRIER);
  if (!arrive(me, site)) return;
  me->simd->barriers += orders_threadgroup_memory;
  me->simd->device_barriers += orders_device_memory;
  release_simdgroup(me);
}

SIMULATOR_FUNCTION void threadgroup_wait(bool orders_threadgroup_memory,
                                         bool orders_device_memory, const Site& site) {
  Lane* me = self();
  Threadgroup& group = *me->group;
  observe_event(me, THREADGROUP_BARRIER);
  me->waits_at = site;
  me->simd->ready &= ~(1u << me->index);
  if (++group.at_barrier < group.threads) return hand_over(me);
  // The last one checks that all stand at the same statement, then lets them go.
  for (unsigned t = 0; t < group.threads; ++t)
    if (!(group.lane(t)->waits_at == site)) report_divergence(me);
  group.at_barrier = 0;
  group.barriers += orders_threadgroup_memory;
  group.device_barriers += orders_device_memory;
  for (unsigned s = 0; s < group.simdgroups; ++s) {
    observe_segment(group.simd[s], group);
    group.simd[s].ready = group.simd[s].alive;
  }
}

typedef float EightFloats __attribute__((vector_size(32)));

// c = a b + c for row-major 8x8 matrices.
SIMULATOR_FUNCTION void multiply_accumulate(const float* a, const float* b, float* c) {
  EightFloats b_rows[8];
  memcpy(b_rows, b, sizeof(b_rows));
  for (int i = 0; i < 8; ++i) {
    EightFloats sum;
    memcpy(&sum, c + 8 * i, sizeof(sum));
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) sum += a[8 * i + k] * b_rows[k];
    memcpy(c + 8 * i, &sum, sizeof(sum));
  }
}

// Compute the products that all lanes have brought their operands to, in order.
SIMULATOR_FUNCTION void compute_products(Threadgroup& group, Simdgroup& simd) {
  for (;; ++simd.computed) {
    Product& product = simd.products[simd.computed % MAX_PRODUCTS];
    if (product.lanes != SIMD_WIDTH) return;
    if (product.c_product) {
      const Product& before = simd.products[(product.c_product - 1) % MAX_PRODUCTS];
      memcpy(product.c, before.c, sizeof(product.c));
    }
    multiply_accumulate(product.a, product.b, product.c);
    for (unsigned i = 0; i < SIMD_WIDTH; ++i) {
      if (Fragment* target = product.target[i]) {
        product.store(target, product.c + 2 * group.launch->lane_map[i]);
        target->product = 0;
      }
    }
    product.lanes = 0;
  }
}

// Return once product number `n` has been computed.
SIMULATOR_FUNCTION void wait_for_product(Lane* me, uint32_t n) {
  Simdgroup& simd = *me->simd;
  compute_products(*me->group, simd);
  while (simd.computed < n) {
    me->waits_at = simd.products[(n - 1) % MAX_PRODUCTS].site;
    me->waits_for = n;
    simd.waiting |= 1u << me->index;
    simd.ready &= ~(1u << me->index);
    hand_over(me);
    compute_products(*me->group, simd);
  }
}

// The last lane that brings operands to product `n` wakes those that wait for it.
SIMULATOR_FUNCTION void wake_waiting(Lane* me, uint32_t n) {
  Simdgroup& simd = *me->simd;
  for (unsigned i = 0; i < SIMD_WIDTH; ++i) {
    if (!(simd.waiting >> i & 1)) continue;
    Lane* lane = me->group->lane(me->thread - me->index + i);
    if (lane->waits_for > n) continue;
    simd.waiting &= ~(1u << i);
    simd.ready |= 1u << i;
  }
}

// Storage of one `threadgroup` declaration, shared by the threads of a threadgroup.
SIMULATOR_FUNCTION void* threadgroup_array(int id, size_t bytes, const char* name) {
  Lane* me = self();
  Threadgroup& group = *me->group;
  if (group.offset[id] < 0) {
    const unsigned padded = (bytes + 15) / 16 * 16;
    group.declared += padded;
    if (group.declared > THREADGROUP_BYTES) {
      Report report(*group.launch);
      report.add(
          "threadgroup memory: %u bytes are declared up to %s; Metal allows %u\n",
          group.declared, name, unsigned(THREADGROUP_BYTES));
      leave(me);
    }
    group.offset[id] = group.used;
    group.bytes[id] = bytes;
    group.name[id] = name;
    group.used += padded + GUARD_BYTES;
  }
  return group.memory + group.offset[id];
}
template <typename T>
SIMULATOR_FUNCTION T& threadgroup_memory(int id, const char* name) {
  return *static_cast<T*>(threadgroup_array(id, sizeof(T), name));
}

SIMULATOR_FUNCTION void check_threadgroup_guards(Threadgroup& group) {
  for (unsigned id = 0; id < MAX_ARRAYS; ++id) {
    if (group.offset[id] < 0) continue;
    const unsigned end = group.offset[id] + group.bytes[id];
    for (unsigned i = 0; i < GUARD_BYTES; ++i) {
      if (group.memory[end + i] == POISON) continue;
      Report report(*group.launch);
      report.add_place(group);
      report.add(
          "a write past the end of threadgroup array %s (%u bytes), at byte %u\n",
          group.name[id], group.bytes[id], group.bytes[id] + i);
      return;
    }
  }
}

// First frame of every fiber.
SIMULATOR_FUNCTION void run_lane() {
  Lane* me = self();
  Launch& launch = *me->group->launch;
  launch.entry(launch.addresses, *me);
  Simdgroup& simd = *me->simd;
  compute_products(*me->group, simd);
  const uint32_t bit = 1u << me->index;
  me->returned = true;
  simd.alive &= ~bit;
  simd.ready &= ~bit;
  // lanes that wait at a simdgroup operation go on without this one
  if (simd.arrived && simd.arrived == simd.alive)
    simd.ready |= simd.arrived & (0u - simd.arrived);
  if (!simd.alive) {
    observe_segment(simd, *me->group);
    if (simd.products[simd.computed % MAX_PRODUCTS].lanes) {
      me->returned = false;
      me->waits_at = simd.products[simd.computed % MAX_PRODUCTS].site;
      report_divergence(me);
    }
  }
  hand_over(me);
  __builtin_unreachable();
}

SIMULATOR_FUNCTION void* fresh_stack(Lane* lane) {
  void** top =
      reinterpret_cast<void**>(reinterpret_cast<unsigned char*>(lane) + STACK_BYTES);
#if defined(__x86_64__)
  top -= 2;  // keeps the stack 16-byte aligned at the call that never was
  *top = reinterpret_cast<void*>(&run_lane);
  top -= 6;
  memset(top, 0, 6 * sizeof(void*));
#else
  top -= 20;
  memset(top, 0, 20 * sizeof(void*));
  top[11] = reinterpret_cast<void*>(&run_lane);  // x30, the return address
#endif
  return top;
}

SIMULATOR_FUNCTION void run_threadgroup(Threadgroup& group) {
  const Launch& launch = *group.launch;
  group.threads = group.size.x * group.size.y * group.size.z;
  group.simdgroups = (group.threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  group.at_barrier = 0;
  memset(group.memory, POISON, ARENA_BYTES);
  for (unsigned s = 0; s < group.simdgroups; ++s) {
    Simdgroup& simd = group.simd[s];
    const unsigned lanes = group.threads - s * SIMD_WIDTH;
    simd.members = lanes >= SIMD_WIDTH ? ~0u : (1u << lanes) - 1u;
    simd.alive = simd.ready = simd.members;
    simd.arrived = simd.waiting = simd.computed = 0;
    simd.barriers = simd.device_barriers = 0;
    for (Product& product : simd.products)
      product.lanes = product.number = product.used_by = 0;
  }
  for (unsigned t = 0; t < group.threads; ++t) {
    Lane* lane = group.lane(t);
    const unsigned pair = launch.lane_map[t % SIMD_WIDTH];
    *lane = Lane{fresh_stack(lane),
                 &group.simd[t / SIMD_WIDTH],
                 &group,
                 {},
                 t % SIMD_WIDTH,
                 t,
                 2 * pair,
                 0,
                 0,
                 0,
                 false};
  }
  simulator_switch_stack(&group.main_stack_pointer, group.lane(0)->stack_pointer);
  if (!launch.failed) check_threadgroup_guards(group);
}

SIMULATOR_FUNCTION unsigned groups_along(unsigned grid, unsigned threadgroup) {
  return (grid + threadgroup - 1) / threadgroup;
}
SIMULATOR_FUNCTION unsigned left(unsigned grid, unsigned size, unsigned position) {
  const unsigned rest = grid - position * size;
  return rest < size ? rest : size;
}

#ifdef SIMULATOR_CHECKED
Observer* make_observer(Launch& launch);
void observe_start(Threadgroup& group);
void delete_observer(Observer* observer);
#else
SIMULATOR_FUNCTION Observer* make_observer(Launch&) { return nullptr; }
SIMULATOR_FUNCTION void observe_start(Threadgroup&) {}
SIMULATOR_FUNCTION void delete_observer(Observer*) {}
#endif

// Takes threadgroups from the launch until none is left or one failed.
SIMULATOR_FUNCTION void* run_threadgroups(void* argument) {
  Launch& launch = *static_cast<Launch*>(argument);
  const Position grid = launch.grid, size = launch.threadgroup;
  const unsigned nx = groups_along(grid.x, size.x), ny = groups_along(grid.y, size.y);
  const unsigned n_groups = nx * ny * groups_along(grid.z, size.z);
  const size_t stack_bytes = (size_t(size.x) * size.y * size.z + 1) * STACK_BYTES;
  void* stacks = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    Report(launch).add("needs %zu bytes of stacks, more than there are\n", stack_bytes);
    return nullptr;
  }
  Threadgroup* group = new Threadgroup();
  group->launch = &launch;
  group->observer = make_observer(launch);
  const uintptr_t base = reinterpret_cast<uintptr_t>(stacks) + STACK_BYTES - 1;
  group->stacks =
      reinterpret_cast<unsigned char*>(base & ~(uintptr_t(STACK_BYTES) - 1));
  group->memory = new unsigned char[ARENA_BYTES];
  group->used = GUARD_BYTES;
  group->random = launch.seed;
  for (int& offset : group->offset) offset = -1;
  // a shuffled schedule also takes the threadgroups in another order
  const unsigned start = launch.seed % n_groups;
  while (!launch.failed) {
    const unsigned n = __atomic_fetch_add(&launch.next_group, 1, __ATOMIC_RELAXED);
    if (n >= n_groups) break;
    const unsigned id = launch.seed ? n_groups - 1 - (n + start) % n_groups : n;
    const unsigned x = id % nx, y = id / nx % ny, z = id / nx / ny;
    group->position = {x, y, z};
    // At the edge of the grid a threadgroup shrinks to what is left.
    group->size = {left(grid.x, size.x, x), left(grid.y, size.y, y),
                   left(grid.z, size.z, z)};
    observe_start(*group);
    run_threadgroup(*group);
  }
  delete_observer(group->observer);
  delete[] group->memory;
  delete group;
  munmap(stacks, stack_bytes);
  return nullptr;
}

// Runs the grid. 0 if nothing was found wrong.
SIMULATOR_FUNCTION int run(Launch& launch) {
  enum : unsigned { MAX_HOST_THREADS = 64 };
  pthread_t helpers[MAX_HOST_THREADS];
  unsigned n_helpers = 0;
  while (n_helpers + 1 < launch.host_threads && n_helpers < MAX_HOST_THREADS &&
         !pthread_create(&helpers[n_helpers], nullptr, run_threadgroups, &launch)) {
    ++n_helpers;
  }
  run_threadgroups(&launch);
  while (n_helpers) pthread_join(helpers[--n_helpers], nullptr);
  return launch.failed;
}

// Arguments of the kernel function: buffers by position, whatever their type.
struct PointerArgument {
  void* address;
  template <typename U>
  SIMULATOR_FUNCTION operator U*() const {
    return static_cast<U*>(address);
  }
};
struct ReferenceArgument {
  void* address;
  template <typename U>
  SIMULATOR_FUNCTION operator U&() const {
    return *static_cast<U*>(address);
  }
};

// A position in the number of dimensions and the integer type that the kernel declares.
struct PositionArgument {
  metal::uint3 position;
  SIMULATOR_FUNCTION operator unsigned() const { return position.x; }
  SIMULATOR_FUNCTION operator unsigned short() const { return position.x; }
  SIMULATOR_FUNCTION operator metal::uint2() const {
    return metal::uint2(position.x, position.y);
  }
  SIMULATOR_FUNCTION operator metal::ushort2() const {
    return metal::ushort2(position.x, position.y);
  }
  SIMULATOR_FUNCTION operator metal::uint3() const { return position; }
  SIMULATOR_FUNCTION operator metal::ushort3() const {
    return metal::ushort3(position);
  }
};
SIMULATOR_FUNCTION PositionArgument argument(const metal::uint3& position) {
  return {position};
}
SIMULATOR_FUNCTION unsigned argument(unsigned index) { return index; }

// MSL 5.2.3: attributes of a kernel function's parameters.
SIMULATOR_FUNCTION metal::uint3 uint3_of(Position p) {
  return metal::uint3(p.x, p.y, p.z);
}
SIMULATOR_FUNCTION metal::uint3 thread_position_in_threadgroup(const Lane& lane) {
  const Position size = lane.group->size;
  return metal::uint3(lane.thread % size.x, lane.thread / size.x % size.y,
                      lane.thread / size.x / size.y);
}
SIMULATOR_FUNCTION metal::uint3 threadgroup_position_in_grid(const Lane& lane) {
  return uint3_of(lane.group->position);
}
SIMULATOR_FUNCTION metal::uint3 dispatch_threads_per_threadgroup(const Lane& lane) {
  return uint3_of(lane.group->launch->threadgroup);
}
SIMULATOR_FUNCTION metal::uint3 thread_position_in_grid(const Lane& lane) {
  const Position group = lane.group->position, size = lane.group->launch->threadgroup;
  const metal::uint3 inside = thread_position_in_threadgroup(lane);
  return metal::uint3(group.x * size.x + inside.x, group.y * size.y + inside.y,
                      group.z * size.z + inside.z);
}
SIMULATOR_FUNCTION metal::uint3 threads_per_threadgroup(const Lane& lane) {
  return uint3_of(lane.group->size);
}
SIMULATOR_FUNCTION metal::uint3 threads_per_grid(const Lane& lane) {
  return uint3_of(lane.group->launch->grid);
}
SIMULATOR_FUNCTION metal::uint3 grid_size(const Lane& lane) {
  return threads_per_grid(lane);
}
SIMULATOR_FUNCTION metal::uint3 grid_origin(const Lane&) { return metal::uint3(0u); }
SIMULATOR_FUNCTION metal::uint3 threadgroups_per_grid(const Lane& lane) {
  const Position grid = lane.group->launch->grid,
                 size = lane.group->launch->threadgroup;
  return metal::uint3(groups_along(grid.x, size.x), groups_along(grid.y, size.y),
                      groups_along(grid.z, size.z));
}
SIMULATOR_FUNCTION unsigned thread_index_in_threadgroup(const Lane& lane) {
  return lane.thread;
}
SIMULATOR_FUNCTION unsigned thread_index_in_simdgroup(const Lane& lane) {
  return lane.index;
}
SIMULATOR_FUNCTION unsigned thread_index_in_quadgroup(const Lane& lane) {
  return lane.index % 4;
}
SIMULATOR_FUNCTION unsigned simdgroup_index_in_threadgroup(const Lane& lane) {
  return lane.thread / SIMD_WIDTH;
}
SIMULATOR_FUNCTION unsigned quadgroup_index_in_threadgroup(const Lane& lane) {
  return lane.thread / 4;
}
SIMULATOR_FUNCTION unsigned simdgroups_per_threadgroup(const Lane& lane) {
  return lane.group->simdgroups;
}
SIMULATOR_FUNCTION unsigned quadgroups_per_threadgroup(const Lane& lane) {
  return (lane.group->threads + 3) / 4;
}
SIMULATOR_FUNCTION unsigned dispatch_simdgroups_per_threadgroup(const Lane& lane) {
  const Position size = lane.group->launch->threadgroup;
  return groups_along(size.x * size.y * size.z, SIMD_WIDTH);
}
SIMULATOR_FUNCTION unsigned dispatch_quadgroups_per_threadgroup(const Lane& lane) {
  const Position size = lane.group->launch->threadgroup;
  return groups_along(size.x * size.y * size.z, 4);
}
SIMULATOR_FUNCTION unsigned threads_per_simdgroup(const Lane&) { return SIMD_WIDTH; }
SIMULATOR_FUNCTION unsigned thread_execution_width(const Lane&) { return SIMD_WIDTH; }

}  // namespace simulator

// The library's one visible function.
#define SIMULATOR_ENTRY(KERNEL)                                                \
  extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) int \
  simulator_launch(simulator::Launch* launch) {                                \
    launch->entry = KERNEL;                                                    \
    return simulator::run(*launch);                                            \
  }
