// Work on torch's own threads. What a thread does depends on its number and on how many there are, never on timing.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

inline Memory allocate(int64_t bytes) {
  char* memory = static_cast<char*>(std::aligned_alloc(64, std::max<int64_t>(64, (bytes + 63) / 64 * 64)));
  if (!memory) throw std::bad_alloc();
  return Memory(memory);
}

// run(thread) for each of so many threads
template <typename F>
void on_threads(int64_t threads, const F& run) {
  if (threads == 1) return run(0);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t end) {
    for (int64_t thread = first; thread < end; thread++) run(thread);
  });
}

// How many threads a pass over so many events is worth.
inline int64_t threads_for(int64_t events) {
  return std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), events / 64));
}

// run(user, unit) for the units of one thread: a contiguous part of all, of about an even share of the work.
template <typename F>
void own_units(const Shape& shape, const int64_t* offsets, int64_t thread, int64_t threads, const F& run) {
  const double width = static_cast<double>(shape.width());
  const double retention = width * (CHUNK + 2 * width), temporal = 64.0 * GROUP;
  const double positional = STRIP * (CHUNK + 2.0 * static_cast<double>(shape.kernel));
  const double all = static_cast<double>(shape.heads) * retention + static_cast<double>(shape.groups()) * temporal +
                     static_cast<double>(shape.strips()) * positional;
  const double share = all * static_cast<double>(shape.events) / static_cast<double>(threads);
  double before = 0;
  for (int64_t user = 0; user < shape.users; user++) {
    const double events = static_cast<double>(offsets[user + 1] - offsets[user]);
    for (int64_t unit = 0; unit < shape.units(); unit++) {
      const double cost =
          events * (unit < shape.heads ? retention : unit < shape.heads + shape.groups() ? temporal : positional);
      const int64_t owner = std::min<int64_t>(threads - 1, static_cast<int64_t>((before + cost / 2) / share));
      if (threads == 1 || owner == thread) run(user, unit);
      before += cost;
    }
  }
}
