// The machine: fibers, simdgroups, threadgroups, barriers. One fiber per GPU thread.
//
// A fiber runs until it meets a barrier or a simdgroup operation, then hands over to
// the next lane of its simdgroup, and when all of those wait, to the next simdgroup.
// The last lane that arrives performs the operation for all 32 and goes on running.
// When nobody can run and somebody has not returned, the threads diverged: the launch
// ends with a report instead of a hang.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "metal_types.h"

namespace simulator {

enum : unsigned {
  SIMD_WIDTH = 32,
  MAX_THREADS = 1024,
  MAX_SIMDGROUPS = MAX_THREADS / SIMD_WIDTH,
  MAX_ARRAYS = 64,  // threadgroup declarations of a kernel
  THREADGROUP_BYTES = 32768,
  GUARD_BYTES = 64,
  POISON = 0xff,  // all ones: a NaN as float, half and bfloat, -1 as an integer
};
enum : size_t { STACK_BYTES = 256 * 1024 };

// A place in the kernel's text.
struct Site {
  const char* operation;
  const char* file;
  int line;
  bool operator==(const Site& other) const {
    return line == other.line && operation == other.operation;
  }
};

struct Position {
  unsigned x, y, z;
};

struct Launch;
struct Threadgroup;

struct alignas(64) Simdgroup {
  uint32_t members;  // lanes that exist
  uint32_t alive;    // lanes that have not returned
  uint32_t ready;    // lanes that can run now
  uint32_t arrived;  // lanes that wait at the simdgroup operation `site`
  Site site;
  // What the lanes bring to an operation and take from it. Two of each, used in turn:
  // a lane may bring its next value while others still take the last result.
  alignas(64) unsigned char slot[2][SIMD_WIDTH][16];
  alignas(64) float a[2][64], b[2][64], c[2][64];
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
  unsigned operations;  // simdgroup operations so far
  bool returned;
};

struct Threadgroup {
  Launch* launch;
  Position position, size;
  unsigned threads, simdgroups;
  unsigned at_barrier;  // threads that wait at a threadgroup barrier
  unsigned char* stacks;
  Simdgroup simd[MAX_SIMDGROUPS];
  // Threadgroup memory: arrays in order of their first use, guard bytes between them.
  unsigned char* memory;
  unsigned used;           // guards included
  unsigned declared;       // guards excluded
  int offset[MAX_ARRAYS];  // -1: not met yet
  unsigned bytes[MAX_ARRAYS];
  const char* name[MAX_ARRAYS];

  Lane* lane(unsigned thread) const {
    return reinterpret_cast<Lane*>(stacks + thread * STACK_BYTES);
  }
};

struct Launch {
  void (*kernel)(void* const* buffers, const Lane& lane);
  void* const* buffers;
  Position grid, threadgroup;  // in threads
  void* main_stack_pointer;
  char* message;  // why the launch failed; empty if it did not
  size_t message_size;
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

inline Lane* self() {
  const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return reinterpret_cast<Lane*>(frame & ~(uintptr_t(STACK_BYTES) - 1));
}

// End the launch: the message is kept, the fibers are abandoned.
[[noreturn]] inline void leave(Lane* me) {
  void* abandoned;
  simulator_switch_stack(&abandoned, me->group->launch->main_stack_pointer);
  __builtin_unreachable();
}

struct Report {  // a bounded string that grows
  char* text;
  size_t size, used;
  explicit Report(Launch& launch)
      : text(launch.message), size(launch.message_size), used(strlen(text)) {}
  template <typename... Args>
  void add(const char* format, Args... args) {
    if (used >= size) return;
    const int n = snprintf(text + used, size - used, format, args...);
    used += n > 0 ? n : 0;
  }
};

inline void begin_report(Report& report, const Threadgroup& group) {
  report.add("in threadgroup (%u, %u, %u): ", group.position.x, group.position.y,
             group.position.z);
}

// Names who waits where, neighbours with the same fate in one line.
[[noreturn]] inline void report_divergence(Lane* me) {
  Threadgroup& group = *me->group;
  Report report(*group.launch);
  begin_report(report, group);
  report.add(
      "the threads diverged: not all of them reach the same barrier or "
      "simdgroup operation\n");
  for (unsigned first = 0, next; first < group.threads; first = next) {
    const Lane* a = group.lane(first);
    for (next = first + 1; next < group.threads; ++next) {
      const Lane* b = group.lane(next);
      if (a->returned != b->returned) break;
      if (!a->returned && !(a->waits_at == b->waits_at)) break;
    }
    report.add("  threads %u-%u ", first, next - 1);
    if (a->returned)
      report.add("have returned\n");
    else
      report.add("wait at %s, %s:%d\n", a->waits_at.operation, a->waits_at.file,
                 a->waits_at.line);
  }
  leave(me);
}

// Hand over to a lane that can run: the next one of this simdgroup, else the next
// simdgroup with a ready lane, else back to the launch when all have returned.
inline void hand_over(Lane* me) {
  Threadgroup& group = *me->group;
  Simdgroup* simd = me->simd;
  uint32_t ready = simd->ready;
  if (!ready) {
    const unsigned start = simd - group.simd;
    for (unsigned i = 1; i <= group.simdgroups && !ready; ++i) {
      simd = &group.simd[(start + i) % group.simdgroups];
      ready = simd->ready;
    }
    if (!ready) {
      for (unsigned t = 0; t < group.threads; ++t)
        if (!group.lane(t)->returned) report_divergence(me);
      leave(me);
    }
  }
  const uint32_t later = simd == me->simd ? ready & ~((2u << me->index) - 1u) : ready;
  const unsigned lane = __builtin_ctz(later ? later : ready);
  Lane* next = group.lane((simd - group.simd) * SIMD_WIDTH + lane);
  if (next != me) simulator_switch_stack(&me->stack_pointer, next->stack_pointer);
}

// Wait for the lanes of the simdgroup. `combine` is run once, by the last to arrive.
template <typename Combine>
inline void simdgroup_operation(Lane* me, const Site& site, Combine combine) {
  Simdgroup& simd = *me->simd;
  const uint32_t bit = 1u << me->index;
  me->waits_at = site;
  if (simd.arrived && !(simd.site == site)) report_divergence(me);
  simd.site = site;
  simd.arrived |= bit;
  ++me->operations;
  if (simd.arrived == simd.alive) {
    combine(simd);
    simd.arrived = 0;
    simd.ready = simd.alive;
    return;
  }
  simd.ready &= ~bit;
  hand_over(me);
}

inline void threadgroup_wait(const Site& site) {
  Lane* me = self();
  Threadgroup& group = *me->group;
  me->waits_at = site;
  me->simd->ready &= ~(1u << me->index);
  if (++group.at_barrier < group.threads) return hand_over(me);
  // The last one checks that all stand at the same statement, then lets them go.
  for (unsigned t = 0; t < group.threads; ++t)
    if (!(group.lane(t)->waits_at == site)) report_divergence(me);
  group.at_barrier = 0;
  for (unsigned s = 0; s < group.simdgroups; ++s)
    group.simd[s].ready = group.simd[s].alive;
}

// Storage of one `threadgroup` declaration, shared by the threads of a threadgroup.
template <typename T>
T& threadgroup_memory(int id, const char* name) {
  Lane* me = self();
  Threadgroup& group = *me->group;
  if (group.offset[id] < 0) {
    group.declared += (sizeof(T) + 15) / 16 * 16;
    if (group.declared > THREADGROUP_BYTES) {
      Report report(*group.launch);
      report.add(
          "threadgroup memory: %u bytes are declared up to %s; Metal allows %u\n",
          group.declared, name, unsigned(THREADGROUP_BYTES));
      leave(me);
    }
    group.offset[id] = group.used;
    group.bytes[id] = sizeof(T);
    group.name[id] = name;
    group.used += (sizeof(T) + 15) / 16 * 16 + GUARD_BYTES;
  }
  return *reinterpret_cast<T*>(group.memory + group.offset[id]);
}

inline void check_threadgroup_guards(Threadgroup& group) {
  for (unsigned id = 0; id < MAX_ARRAYS; ++id) {
    if (group.offset[id] < 0) continue;
    const unsigned end = group.offset[id] + group.bytes[id];
    for (unsigned i = 0; i < GUARD_BYTES; ++i) {
      if (group.memory[end + i] == POISON) continue;
      Report report(*group.launch);
      begin_report(report, group);
      report.add(
          "a write past the end of threadgroup array %s (%u bytes), at byte %u\n",
          group.name[id], group.bytes[id], group.bytes[id] + i);
      return;
    }
  }
}

// First frame of every fiber.
inline void run_lane() {
  Lane* me = self();
  Launch& launch = *me->group->launch;
  launch.kernel(launch.buffers, *me);
  Simdgroup& simd = *me->simd;
  const uint32_t bit = 1u << me->index;
  me->returned = true;
  simd.alive &= ~bit;
  simd.ready &= ~bit;
  hand_over(me);
  __builtin_unreachable();
}

inline void* fresh_stack(Lane* lane) {
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

inline void run_threadgroup(Threadgroup& group) {
  Launch& launch = *group.launch;
  group.threads = group.size.x * group.size.y * group.size.z;
  group.simdgroups = (group.threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  group.at_barrier = 0;
  memset(group.memory, POISON, THREADGROUP_BYTES + MAX_ARRAYS * GUARD_BYTES);
  for (unsigned s = 0; s < group.simdgroups; ++s) {
    Simdgroup& simd = group.simd[s];
    const unsigned lanes = group.threads - s * SIMD_WIDTH;
    simd.members = lanes >= SIMD_WIDTH ? ~0u : (1u << lanes) - 1u;
    simd.alive = simd.ready = simd.members;
    simd.arrived = 0;
  }
  for (unsigned t = 0; t < group.threads; ++t) {
    Lane* lane = group.lane(t);
    *lane = Lane{fresh_stack(lane),
                 &group.simd[t / SIMD_WIDTH],
                 &group,
                 {},
                 t % SIMD_WIDTH,
                 t,
                 0,
                 false};
  }
  simulator_switch_stack(&launch.main_stack_pointer, group.lane(0)->stack_pointer);
  if (!launch.message[0]) check_threadgroup_guards(group);
}

inline unsigned groups_along(unsigned grid, unsigned threadgroup) {
  return (grid + threadgroup - 1) / threadgroup;
}

// Runs the grid, one threadgroup after the other. 0 if nothing was found wrong.
inline int run(Launch& launch) {
  const Position per_group = launch.threadgroup;
  const size_t threads = size_t(per_group.x) * per_group.y * per_group.z;
  const size_t stack_bytes = (threads + 1) * STACK_BYTES;  // one more, to align
  void* stacks = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    Report(launch).add("no memory for the stacks of %zu threads\n", threads);
    return 1;
  }
  static_assert((STACK_BYTES & (STACK_BYTES - 1)) == 0, "found by masking");
  Threadgroup* group = new Threadgroup();
  group->launch = &launch;
  group->stacks = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(stacks) + STACK_BYTES - 1) &
      ~(uintptr_t(STACK_BYTES) - 1));
  group->memory = new unsigned char[THREADGROUP_BYTES + MAX_ARRAYS * GUARD_BYTES];
  for (int& offset : group->offset) offset = -1;

  for (unsigned z = 0; z < groups_along(launch.grid.z, per_group.z); ++z)
    for (unsigned y = 0; y < groups_along(launch.grid.y, per_group.y); ++y)
      for (unsigned x = 0; x < groups_along(launch.grid.x, per_group.x); ++x) {
        if (launch.message[0]) continue;
        group->position = {x, y, z};
        // At the edge of the grid a threadgroup shrinks to what is left.
        const unsigned left_x = launch.grid.x - x * per_group.x;
        const unsigned left_y = launch.grid.y - y * per_group.y;
        const unsigned left_z = launch.grid.z - z * per_group.z;
        group->size = {left_x < per_group.x ? left_x : per_group.x,
                       left_y < per_group.y ? left_y : per_group.y,
                       left_z < per_group.z ? left_z : per_group.z};
        run_threadgroup(*group);
      }
  delete[] group->memory;
  delete group;
  munmap(stacks, stack_bytes);
  return launch.message[0] != 0;
}

// Arguments of the kernel function: buffers by position, whatever their type.
struct PointerArgument {
  void* address;
  template <typename U>
  operator U*() const {
    return static_cast<U*>(address);
  }
};
struct ReferenceArgument {
  void* address;
  template <typename U>
  operator U&() const {
    return *static_cast<U*>(address);
  }
};

// MSL 5.2.3: attributes of a kernel function's parameters, in the types MLX gives them.
inline metal::uint3 uint3_of(Position p) { return metal::uint3(p.x, p.y, p.z); }
inline Position inside(const Lane& lane) {
  const Position size = lane.group->size;
  return {lane.thread % size.x, lane.thread / size.x % size.y,
          lane.thread / size.x / size.y};
}
inline metal::uint3 thread_position_in_threadgroup(const Lane& lane) {
  return uint3_of(inside(lane));
}
inline metal::uint3 threadgroup_position_in_grid(const Lane& lane) {
  return uint3_of(lane.group->position);
}
inline metal::uint3 dispatch_threads_per_threadgroup(const Lane& lane) {
  return uint3_of(lane.group->launch->threadgroup);
}
inline metal::uint3 thread_position_in_grid(const Lane& lane) {
  return threadgroup_position_in_grid(lane) * dispatch_threads_per_threadgroup(lane) +
         thread_position_in_threadgroup(lane);
}
inline metal::uint3 threads_per_threadgroup(const Lane& lane) {
  return uint3_of(lane.group->size);
}
inline metal::uint3 threads_per_grid(const Lane& lane) {
  return uint3_of(lane.group->launch->grid);
}
inline metal::uint3 grid_size(const Lane& lane) { return threads_per_grid(lane); }
inline metal::uint3 grid_origin(const Lane&) { return metal::uint3(0u); }
inline metal::uint3 threadgroups_per_grid(const Lane& lane) {
  const Position grid = lane.group->launch->grid,
                 size = lane.group->launch->threadgroup;
  return metal::uint3(groups_along(grid.x, size.x), groups_along(grid.y, size.y),
                      groups_along(grid.z, size.z));
}
inline unsigned thread_index_in_threadgroup(const Lane& lane) { return lane.thread; }
inline unsigned thread_index_in_simdgroup(const Lane& lane) { return lane.index; }
inline unsigned thread_index_in_quadgroup(const Lane& lane) { return lane.index % 4; }
inline unsigned simdgroup_index_in_threadgroup(const Lane& lane) {
  return lane.thread / SIMD_WIDTH;
}
inline unsigned quadgroup_index_in_threadgroup(const Lane& lane) {
  return lane.thread / 4;
}
inline unsigned simdgroups_per_threadgroup(const Lane& lane) {
  return lane.group->simdgroups;
}
inline unsigned quadgroups_per_threadgroup(const Lane& lane) {
  return (lane.group->threads + 3) / 4;
}
inline unsigned dispatch_simdgroups_per_threadgroup(const Lane& lane) {
  const Position size = lane.group->launch->threadgroup;
  return groups_along(size.x * size.y * size.z, SIMD_WIDTH);
}
inline unsigned dispatch_quadgroups_per_threadgroup(const Lane& lane) {
  const Position size = lane.group->launch->threadgroup;
  return groups_along(size.x * size.y * size.z, 4);
}
inline unsigned threads_per_simdgroup(const Lane&) { return SIMD_WIDTH; }
inline unsigned thread_execution_width(const Lane&) { return SIMD_WIDTH; }

}  // namespace simulator

// The library's one visible function.
#define SIMULATOR_ENTRY(KERNEL)                                           \
  extern "C" __attribute__((visibility("default"))) int simulator_launch( \
      void* const* buffers, const unsigned* grid, const unsigned* group,  \
      char* message, size_t message_size) {                               \
    simulator::Launch launch = {KERNEL,                                   \
                                buffers,                                  \
                                {grid[0], grid[1], grid[2]},              \
                                {group[0], group[1], group[2]},           \
                                nullptr,                                  \
                                message,                                  \
                                message_size};                            \
    return simulator::run(launch);                                        \
  }
