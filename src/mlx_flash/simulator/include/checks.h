// What a checked build watches: races, bounds, reads of memory nobody wrote, and counts.
//
// The kernel is compiled with -fsanitize=thread, which calls a function for every load and
// store; those functions are defined here instead of linking the sanitizer. The simdgroup
// loads and stores of the shim report themselves. A finding names the place as @{address}
// where it is a machine address; the host turns it into a line of the kernel.
//
// Two accesses race if they touch a byte from different threads, one of them writes, and
// nothing orders them: a threadgroup barrier whose flags name the memory, or within one
// simdgroup a simdgroup barrier. Nothing orders different threadgroups.
#pragma once
#include <dlfcn.h>
#include <stdlib.h>

#include "runtime.h"

namespace simulator {

enum Check : unsigned { RACE = 1, BOUNDS = 2, UNINITIALISED = 4 };

// Counters, in the order in which the host receives them: the events, then these.
#define SIMULATOR_TOTALS(X)                                                           \
  X(DEVICE_BYTES_READ)                                                                \
  X(DEVICE_BYTES_WRITTEN)                                                             \
  X(CONSTANT_BYTES_READ)                                                              \
  X(THREADGROUP_BYTES_READ)                                                           \
  X(THREADGROUP_BYTES_WRITTEN)                                                        \
  X(THREADGROUP_ACCESSES)   /* of a simdgroup: one instruction of its 32 lanes */     \
  X(THREADGROUP_BANK_STEPS) /* the most words that one of 32 banks serves, summed */  \
  X(LANE_STEPS)             /* accesses and events of single lanes */                 \
  X(LANE_SLOTS)             /* 32 times those of the busiest lane between barriers */ \
  X(THREADGROUP_MEMORY)     /* bytes declared */                                      \
  X(THREADGROUPS)
enum Total : int {
  BEFORE_TOTALS = N_EVENTS - 1,
#define SIMULATOR_TOTAL(NAME) NAME,
  SIMULATOR_TOTALS(SIMULATOR_TOTAL) N_COUNTERS
#undef SIMULATOR_TOTAL
};

// Who touched a byte, where in the text, and after which barriers.
struct Touch {
  const char* file;  // null: `line` is a machine address
  uintptr_t line;
  uint32_t group;  // threadgroup + 1; 0: nobody yet
  uint32_t thread;
  uint32_t barriers, simd_barriers;
  bool atomic;
};

// The last writer of a byte and enough of its readers: the last one, the last other thread
// of that one's simdgroup, and the last reader of another simdgroup.
struct ByteHistory {
  Touch write, read, read_beside, read_elsewhere;
};

// A lane's access to threadgroup memory, kept until the lanes of the simdgroup meet.
struct Access {
  uintptr_t place;
  uint32_t offset, bytes;
};

struct AccessLog {
  Access* entries;
  unsigned used, room, taken;
  uint32_t events[N_EVENTS];
  uint32_t steps;
};

struct Observer {
  Launch* launch;
  uint64_t* counters;
  uint32_t group;  // of the running threadgroup, + 1
  ByteHistory* arena;
  ByteHistory** outputs;  // per buffer, null for inputs
  AccessLog logs[MAX_THREADS];
};

SIMULATOR_FUNCTION Observer* make_observer(Launch& launch) {
  Observer* observer = static_cast<Observer*>(calloc(1, sizeof(Observer)));
  observer->launch = &launch;
  observer->counters = launch.counters;
  observer->arena = static_cast<ByteHistory*>(calloc(ARENA_BYTES, sizeof(ByteHistory)));
  observer->outputs =
      static_cast<ByteHistory**>(calloc(launch.n_buffers, sizeof(ByteHistory*)));
  for (unsigned i = 0; i < launch.n_buffers; ++i) {
    const Buffer& buffer = launch.buffers[i];
    if (buffer.kind == OUTPUT)
      observer->outputs[i] = static_cast<ByteHistory*>(
          calloc(buffer.bytes ? buffer.bytes : 1, sizeof(ByteHistory)));
  }
  return observer;
}

SIMULATOR_FUNCTION void delete_observer(Observer* observer) {
  for (unsigned i = 0; i < observer->launch->n_buffers; ++i) free(observer->outputs[i]);
  for (AccessLog& log : observer->logs) free(log.entries);
  free(observer->outputs);
  free(observer->arena);
  free(observer);
}

SIMULATOR_FUNCTION void observe_start(Threadgroup& group) {
  Observer& observer = *group.observer;
  // history of an earlier threadgroup is told apart by its number, not cleared
  ++observer.group;
  ++observer.counters[THREADGROUPS];
  for (AccessLog& log : observer.logs) {
    log.used = log.taken = log.steps = 0;
    memset(log.events, 0, sizeof(log.events));
  }
}

SIMULATOR_FUNCTION void add_location(Report& report, const char* file, uintptr_t line) {
  if (file)
    report.add("%s:%zu", file, size_t(line));
  else
    report.add("@{%zx}", size_t(line));
}

// What was touched: an array and the offset in it.
struct Target {
  const char* name;
  const char* kind;
  long offset;
  size_t bytes;          // of the array
  ByteHistory* history;  // of the byte; null where only bounds matter
  bool is_threadgroup, is_constant;
  bool initialised;  // it starts with values
};

// Whether two touches of a byte may happen in either order.
SIMULATOR_FUNCTION bool unordered(const Touch& a, const Touch& b) {
  if (!a.group || (a.atomic && b.atomic)) return false;
  if (a.group != b.group) return true;
  if (a.thread == b.thread || a.barriers != b.barriers) return false;
  return a.thread / SIMD_WIDTH != b.thread / SIMD_WIDTH ||
         a.simd_barriers == b.simd_barriers;
}

[[noreturn]] SIMULATOR_FUNCTION void report_race(Lane* me, const Target& target,
                                                 const Touch& now, bool writes,
                                                 const Touch& before, bool wrote) {
  Report report(*me->group->launch);
  report.add_place(*me->group);
  report.add("race: thread %u %s %s %s at byte %ld (", me->thread,
             writes ? "writes" : "reads", target.kind, target.name, target.offset);
  add_location(report, now.file, now.line);
  report.add("), which thread %u%s %s (", before.thread,
             before.group == now.group ? "" : " of another threadgroup",
             wrote ? "wrote" : "read");
  add_location(report, before.file, before.line);
  if (before.group != now.group)
    report.add("); threadgroups run in any order: let one of them own the element\n");
  else if (before.thread / SIMD_WIDTH == now.thread / SIMD_WIDTH)
    report.add(
        "); put a simdgroup_barrier or threadgroup_barrier for this memory "
        "between the two\n");
  else
    report.add("); put a threadgroup_barrier for this memory between the two\n");
  leave(me);
}

// Find the array that an address belongs to. False for a thread's own memory and for
// constants of the library.
SIMULATOR_FUNCTION bool find_target(const Threadgroup& group,
                                    const unsigned char* address, Target& target) {
  const size_t stacks = (size_t(group.threads) + 1) * STACK_BYTES;
  if (size_t(address - group.stacks) < stacks) return false;
  const Launch& launch = *group.launch;
  const Observer& observer = *group.observer;
  const size_t in_arena = address - group.memory;
  if (in_arena < ARENA_BYTES) {
    // the last array that starts at or before it, or the first
    int id = 0;
    for (unsigned i = 0; i < MAX_ARRAYS; ++i)
      if (group.offset[i] >= 0 && group.offset[i] <= long(in_arena) &&
          (group.offset[id] < 0 || group.offset[i] >= group.offset[id]))
        id = i;
    target = {group.name[id],
              "threadgroup array",
              long(in_arena) - group.offset[id],
              group.bytes[id],
              &observer.arena[in_arena],
              true,
              false,
              false};
    return true;
  }
  const Buffer* nearest = nullptr;
  long nearest_distance = 0;
  for (unsigned i = 0; i < launch.n_buffers; ++i) {
    const Buffer& buffer = launch.buffers[i];
    const long offset = address - buffer.address;
    if (offset >= 0 && offset < long(buffer.bytes)) {
      ByteHistory* history =
          observer.outputs[i] ? observer.outputs[i] + offset : nullptr;
      const bool is_constant = buffer.kind == CONSTANT;
      target = {buffer.name, "buffer", offset,      buffer.bytes,
                history,     false,    is_constant, buffer.initialised != 0};
      return true;
    }
    const long distance = offset < 0 ? -offset : offset - long(buffer.bytes);
    if (!nearest || distance < nearest_distance) {
      nearest = &buffer;
      nearest_distance = distance;
    }
  }
  Dl_info info;
  if (dladdr(address, &info) && info.dli_fbase) return false;
  if (!nearest) return false;
  const long offset = address - nearest->address;
  target = {nearest->name, "buffer", offset, nearest->bytes,
            nullptr,       false,    false,  false};
  return true;
}

SIMULATOR_FUNCTION void check_byte(Lane* me, const Target& target, ByteHistory& byte,
                                   const Touch& now, bool writes) {
  const unsigned checks = me->group->launch->checks;
  if (checks & RACE) {
    if (unordered(byte.write, now) &&
        !(target.is_threadgroup && byte.write.group != now.group))
      report_race(me, target, now, writes, byte.write, true);
    if (writes) {
      const Touch* reads[] = {&byte.read, &byte.read_beside, &byte.read_elsewhere};
      for (const Touch* read : reads)
        if (unordered(*read, now) &&
            !(target.is_threadgroup && read->group != now.group))
          report_race(me, target, now, writes, *read, false);
    }
  }
  const bool written =
      target.is_threadgroup ? byte.write.group == now.group : byte.write.group != 0;
  if (!writes && !written && (checks & UNINITIALISED) && !target.initialised) {
    Report report(*me->group->launch);
    report.add_place(*me->group);
    report.add("uninitialised: thread %u reads %s %s at byte %ld (", me->thread,
               target.kind, target.name, target.offset);
    add_location(report, now.file, now.line);
    report.add("), which nothing has written%s; write it first\n",
               target.is_threadgroup ? " in this threadgroup" : "");
    leave(me);
  }
  if (writes) {
    byte.write = now;
  } else if (byte.read.thread == now.thread && byte.read.group == now.group) {
    byte.read = now;
  } else {
    const bool beside = byte.read.group == now.group &&
                        byte.read.thread / SIMD_WIDTH == now.thread / SIMD_WIDTH;
    (beside ? byte.read_beside : byte.read_elsewhere) = byte.read;
    byte.read = now;
  }
}

SIMULATOR_FUNCTION void log_access(AccessLog& log, const Access& access) {
  if (log.used == log.room) {
    log.room = log.room ? 2 * log.room : 256;
    log.entries =
        static_cast<Access*>(realloc(log.entries, log.room * sizeof(*log.entries)));
  }
  log.entries[log.used++] = access;
}

SIMULATOR_FUNCTION void observe(Lane* me, const void* pointer, size_t bytes,
                                bool writes, const char* file, uintptr_t line,
                                bool atomic) {
  Threadgroup& group = *me->group;
  Observer& observer = *group.observer;
  const unsigned char* address = static_cast<const unsigned char*>(pointer);
  Target target;
  if (!find_target(group, address, target)) return;
  if (target.offset < 0 || target.offset + bytes > target.bytes) {
    // reported whatever the checks: the access itself may end the process
    Report report(*group.launch);
    report.add_place(group);
    report.add("bounds: thread %u %s %zu bytes at byte %ld of %s %s, which has %zu (",
               me->thread, writes ? "writes" : "reads", bytes, target.offset,
               target.kind, target.name, target.bytes);
    add_location(report, file, line);
    report.add("); compare the index with the length first\n");
    leave(me);
  }
  AccessLog& log = observer.logs[me->thread];
  ++log.steps;
  uint64_t* counters = observer.counters;
  if (target.is_threadgroup) {
    counters[writes ? THREADGROUP_BYTES_WRITTEN : THREADGROUP_BYTES_READ] += bytes;
    log_access(log, {line ^ reinterpret_cast<uintptr_t>(file),
                     uint32_t(address - group.memory), uint32_t(bytes)});
  } else if (target.is_constant) {
    counters[CONSTANT_BYTES_READ] += bytes;
  } else {
    counters[writes ? DEVICE_BYTES_WRITTEN : DEVICE_BYTES_READ] += bytes;
  }
  if (!target.history) return;
  const bool shared = target.is_threadgroup;
  const Touch now = {file,
                     line,
                     observer.group,
                     me->thread,
                     shared ? group.barriers : group.device_barriers,
                     shared ? me->simd->barriers : me->simd->device_barriers,
                     atomic};
  for (size_t i = 0; i < bytes; ++i)
    check_byte(me, target, target.history[i], now, writes);
}

SIMULATOR_FUNCTION void observe_access(Lane* me, const void* address, size_t bytes,
                                       bool writes, const Site& site) {
  observe(me, address, bytes, writes, site.file, uintptr_t(site.line), false);
}
SIMULATOR_FUNCTION void observe_atomic(Lane* me, const void* address, size_t bytes,
                                       bool writes, const Site& site) {
  observe(me, address, bytes, writes, site.file, uintptr_t(site.line), true);
}

SIMULATOR_FUNCTION void observe_event(Lane* me, Event event) {
  AccessLog& log = me->group->observer->logs[me->thread];
  ++log.events[event];
  ++log.steps;
}

// The most distinct words that one of 32 banks of 4 bytes serves for an instruction.
SIMULATOR_FUNCTION unsigned bank_steps(const uint32_t* words, unsigned n) {
  unsigned most = 0;
  for (unsigned bank = 0; bank < 32; ++bank) {
    unsigned distinct = 0;
    for (unsigned i = 0; i < n; ++i) {
      if (words[i] % 32 != bank) continue;
      bool seen = false;
      for (unsigned j = 0; j < i && !seen; ++j) seen = words[j] == words[i];
      distinct += !seen;
    }
    if (distinct > most) most = distinct;
  }
  return most;
}

// The lanes of a simdgroup meet: what they did since the last time becomes instructions of
// the simdgroup. Accesses of several lanes at one place of the text are one instruction.
SIMULATOR_FUNCTION void observe_segment(Simdgroup& simd, Threadgroup& group) {
  Observer& observer = *group.observer;
  AccessLog* logs = observer.logs + (&simd - group.simd) * SIMD_WIDTH;
  uint64_t* counters = observer.counters;
  for (int event = 0; event < N_EVENTS; ++event) {
    uint32_t most = 0;
    for (unsigned i = 0; i < SIMD_WIDTH; ++i) {
      if (logs[i].events[event] > most) most = logs[i].events[event];
      logs[i].events[event] = 0;
    }
    counters[event] += most;
  }
  uint32_t most = 0;
  for (unsigned i = 0; i < SIMD_WIDTH; ++i) {
    counters[LANE_STEPS] += logs[i].steps;
    if (logs[i].steps > most) most = logs[i].steps;
    logs[i].steps = 0;
  }
  counters[LANE_SLOTS] += uint64_t(SIMD_WIDTH) * most;
  if (group.declared > counters[THREADGROUP_MEMORY])
    counters[THREADGROUP_MEMORY] = group.declared;
  for (unsigned first = 0; first < SIMD_WIDTH; ++first) {
    AccessLog& leader = logs[first];
    for (; leader.taken < leader.used; ++leader.taken) {
      const uintptr_t place = leader.entries[leader.taken].place;
      uint32_t words[SIMD_WIDTH * 4];
      unsigned n = 0;
      for (unsigned i = first; i < SIMD_WIDTH; ++i) {
        AccessLog& log = logs[i];
        if (log.taken >= log.used || log.entries[log.taken].place != place) continue;
        const Access& access = log.entries[log.taken];
        const uint32_t last = (access.offset + access.bytes - 1) / 4;
        for (uint32_t word = access.offset / 4; word <= last && n < SIMD_WIDTH * 4;
             ++word)
          words[n++] = word;
        if (i != first) ++log.taken;
      }
      ++counters[THREADGROUP_ACCESSES];
      counters[THREADGROUP_BANK_STEPS] += bank_steps(words, n);
    }
    leader.taken = leader.used = 0;
  }
}

}  // namespace simulator

// The sanitizer's interface: what the compiler calls for every load and store.
#define SIMULATOR_HOOK extern "C" __attribute__((no_sanitize("thread"), noinline)) void
#define SIMULATOR_ACCESS_HOOK(NAME, BYTES, WRITES)                               \
  SIMULATOR_HOOK NAME(void* address) {                                           \
    simulator::observe(simulator::self(), address, BYTES, WRITES, nullptr,       \
                       reinterpret_cast<uintptr_t>(__builtin_return_address(0)), \
                       false);                                                   \
  }
#define SIMULATOR_ACCESS_HOOKS(BYTES)                               \
  SIMULATOR_ACCESS_HOOK(__tsan_read##BYTES, BYTES, false)           \
  SIMULATOR_ACCESS_HOOK(__tsan_write##BYTES, BYTES, true)           \
  SIMULATOR_ACCESS_HOOK(__tsan_unaligned_read##BYTES, BYTES, false) \
  SIMULATOR_ACCESS_HOOK(__tsan_unaligned_write##BYTES, BYTES, true) \
  SIMULATOR_ACCESS_HOOK(__tsan_volatile_read##BYTES, BYTES, false)  \
  SIMULATOR_ACCESS_HOOK(__tsan_volatile_write##BYTES, BYTES, true)
SIMULATOR_ACCESS_HOOKS(1)
SIMULATOR_ACCESS_HOOKS(2)
SIMULATOR_ACCESS_HOOKS(4)
SIMULATOR_ACCESS_HOOKS(8)
SIMULATOR_ACCESS_HOOKS(16)
SIMULATOR_HOOK __tsan_read_range(void* address, size_t bytes) {
  simulator::observe(simulator::self(), address, bytes, false, nullptr,
                     reinterpret_cast<uintptr_t>(__builtin_return_address(0)), false);
}
SIMULATOR_HOOK __tsan_write_range(void* address, size_t bytes) {
  simulator::observe(simulator::self(), address, bytes, true, nullptr,
                     reinterpret_cast<uintptr_t>(__builtin_return_address(0)), false);
}
SIMULATOR_HOOK __tsan_init() {}
SIMULATOR_HOOK __tsan_func_entry(void*) {}
SIMULATOR_HOOK __tsan_func_exit() {}

// For the host: the names of the counters, and where the library lies in memory.
#define SIMULATOR_COUNTER_NAME(NAME) #NAME ","
extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
const char* simulator_counter_names() {
  return SIMULATOR_EVENTS(SIMULATOR_COUNTER_NAME)
      SIMULATOR_TOTALS(SIMULATOR_COUNTER_NAME);
}
extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void*
simulator_library_base() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&simulator_counter_names), &info);
  return info.dli_fbase;
}
