// The operators, on torch's stable ABI: one library serves several versions of torch. Here: which instruction set runs,
// and the fused block.
#include "operators.h"

#define DECLARE(isa)              \
  namespace isa {                 \
  extern const Kernels kernels;   \
  }
DECLARE(plain)
#ifdef HAS_X86
DECLARE(avx2)
DECLARE(avx512)
#endif

namespace {

// --- instruction sets ------------------------------------------------------------------------------------------------

// The best first.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found;
#ifdef HAS_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back(&avx512::kernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2::kernels);
#endif
  found.push_back(&plain::kernels);
  return found;
}

const Kernels* chosen = supported().front();

// Use an instruction set by its name, the best for "", and give the names of all that this machine has.
std::string instruction_sets(std::string wanted) {
  std::string names;
  for (const Kernels* kernels : supported()) {
    names += (names.empty() ? "" : " ") + std::string(kernels->name);
    if (wanted == kernels->name) chosen = kernels;
  }
  if (wanted.empty()) chosen = supported().front();
  STD_TORCH_CHECK(wanted.empty() || wanted == chosen->name, "no instruction set ", wanted, " here, only ", names);
  return names;
}

// MKL takes its AVX-512 kernels on Intel's CPUs alone.
bool prefers_onednn() {
#ifdef HAS_X86
  return supported().front() == &avx512::kernels && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

#ifndef SOURCES
#define SOURCES ""
#endif
std::string sources() { return SOURCES; }

// --- the fused block -------------------------------------------------------------------------------------------------

// What forward and backward are both given, in the schema's order.
struct Arguments {
  Tensor projection, offsets, retention_log, key, query, ticks, temporal_log, temporal_gain, temporal_skip, table,
      positional_gain, positional_skip;
  Maybe start, retention_before, temporal_before, positional_before;
  bool official;
};

Shape shape_of(const Arguments& a) {
  STD_TORCH_CHECK(a.projection.dim() == 2 && a.projection.size(1) % 16 == 0, "projection must be (T, 8d), d even");
  STD_TORCH_CHECK(a.offsets.dim() == 1 && a.offsets.size(0) > 0, "offsets must be (B + 1)");
  STD_TORCH_CHECK(a.table.dim() == 2 && a.table.size(0) > 0, "table must be (positions, width)");
  STD_TORCH_CHECK(a.retention_log.dim() == 1 && a.temporal_log.dim() == 1, "decays must be vectors");
  Shape shape{a.projection.size(0),   a.offsets.size(0) - 1, a.projection.size(1) / 8, a.retention_log.size(0),
              a.temporal_log.size(0), a.table.size(1),       a.table.size(0),          a.official};
  STD_TORCH_CHECK(shape.heads > 0 && shape.dim % shape.heads == 0, "heads must divide the width");
  STD_TORCH_CHECK(shape.scales > 0 && shape.dim % (2 * shape.scales) == 0, "2 x scales must divide the width");
  STD_TORCH_CHECK(shape.dim > 0 && shape.kernel > 0, "widths must not be 0");
  return shape;
}

Inputs inputs_of(const Arguments& a, const Shape& s, Held& held) {
  const int64_t T = s.events, B = s.users, V = s.scale_width(), K = s.width();
  Inputs in{};
  in.projection = held.get<float>(a.projection, "projection", {T, 8 * s.dim});
  in.offsets = held.get<int64_t>(a.offsets, "offsets", {B + 1});
  in.retention_log = held.get<float>(a.retention_log, "retention_log", {s.heads});
  in.key = held.get<float>(a.key, "key", {T, s.scales, 2});
  in.query = held.get<float>(a.query, "query", {T, 2 * s.scales, 2});
  in.ticks = held.get<int64_t>(a.ticks, "ticks", {T});
  in.temporal_log = held.get<float>(a.temporal_log, "temporal_log", {s.scales});
  in.temporal_gain = held.get<float>(a.temporal_gain, "temporal_gain", {2 * s.scales});
  in.temporal_skip = held.get<float>(a.temporal_skip, "temporal_skip", {2 * s.scales});
  in.table = held.get<float>(a.table, "table", {s.positions, s.kernel});
  in.positional_gain = held.get<float>(a.positional_gain, "positional_gain", {});
  in.positional_skip = held.get<float>(a.positional_skip, "positional_skip", {});
  in.start = held.get<int64_t>(a.start, "start", {B});
  in.retention_before = held.get<float>(a.retention_before, "retention_before", {B, s.heads, K, K});
  in.temporal_before = held.get<double>(a.temporal_before, "temporal_before", {B, 2 * s.scales, 2, V});
  in.positional_before = held.get<float>(a.positional_before, "positional_before", {B, s.kernel, s.dim});
  bool sound = in.offsets[0] == 0 && in.offsets[B] == T;
  for (int64_t user = 0; user < B; user++) {
    sound = sound && in.offsets[user] <= in.offsets[user + 1];
    STD_TORCH_CHECK(!in.start || in.start[user] >= 0, "start must not be negative");
  }
  STD_TORCH_CHECK(sound, "offsets must rise from 0 to the number of rows");
  return in;
}

// States between chunks that the backward pass needs: (retention, temporal, positional).
std::vector<int64_t> kept(const Shape& s, bool keep, int64_t size) {
  return {keep ? s.events / CHUNK + s.users : 0, size};
}

// Zero where no chunk's state is: outputs are then the same every time.
template <typename T>
void clear_unused(const Shape& s, const Inputs& in, T* states, int64_t size) {
  for (int64_t user = 0, next = 0; user <= s.users; user++) {
    const bool behind = user == s.users;
    const int64_t first = behind ? s.events / CHUNK + s.users : in.first_chunk(user);
    std::fill_n(states + next * size, (first - next) * size, T(0));
    if (!behind) next = first + (in.offsets[user + 1] - in.offsets[user] + CHUNK - 1) / CHUNK;
  }
}

using Eight = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Eight block(Tensor projection, Tensor offsets, Tensor retention_log, Tensor key, Tensor query, Tensor ticks,
            Tensor temporal_log, Tensor temporal_gain, Tensor temporal_skip, Tensor table, Tensor positional_gain,
            Tensor positional_skip, Maybe start, Maybe retention_before, Maybe temporal_before,
            Maybe positional_before, bool official, bool with_state, bool keep) {
  const Arguments a{projection,      offsets, retention_log,    key,             query,
                    ticks,           temporal_log, temporal_gain, temporal_skip, table,
                    positional_gain, positional_skip, start, retention_before, temporal_before,
                    positional_before, official};
  const Shape s = shape_of(a);
  Held held;
  const Inputs in = inputs_of(a, s, held);
  const int64_t T = s.events, B = with_state ? s.users : 0;
  Forward out{};
  Saved& saved = out.saved;
  Tensor gated = made(projection, {T, 3 * s.dim}, &out.gated);
  Tensor y = made(projection, {keep ? T : 0, 3 * s.dim}, &saved.y);
  Tensor retention_states = made(projection, kept(s, keep, s.retention_state()), &saved.retention);
  Tensor temporal_states = made(projection, kept(s, keep, s.temporal_state()), &saved.temporal);
  Tensor positional_states = made(projection, kept(s, keep, s.positional_state()), &saved.positional);
  Tensor retention_after = made(projection, {B, s.heads, s.width(), s.width()}, &out.retention_after);
  Tensor temporal_after = made(projection, {B, 2 * s.scales, 2, s.scale_width()}, &out.temporal_after);
  Tensor positional_after = made(projection, {B, s.kernel, s.dim}, &out.positional_after);
  if (keep) {
    clear_unused(s, in, saved.retention, s.retention_state());
    clear_unused(s, in, saved.temporal, s.temporal_state());
    clear_unused(s, in, saved.positional, s.positional_state());
  } else {
    saved = {out.gated, nullptr, nullptr, nullptr};
  }
  if (!with_state) out.retention_after = nullptr, out.temporal_after = nullptr, out.positional_after = nullptr;

  const Kernels& kernels = *chosen;
  const int64_t threads = threads_for(T), scratch = kernels.scratch(s);
  const Memory memory = allocate(threads * scratch);
  on_threads(threads, [&](int64_t thread) {
    own_units(s, in.offsets, thread, threads, [&](int64_t user, int64_t unit) {
      kernels.forward_unit(s, in, out, user, unit, memory.get() + thread * scratch);
    });
  });
  on_threads(threads, [&](int64_t thread) {
    kernels.forward_rows(s, in, out, T * thread / threads, T * (thread + 1) / threads);
  });
  return {gated,           y, retention_states, temporal_states, positional_states, retention_after, temporal_after,
          positional_after};
}

// Every thread's sums in one piece of memory: doubles first, the table's gradients behind them; the first thread's
// table is the output itself.
struct AllSums {
  const Shape& s;
  int64_t doubles, table;
  Memory memory;
  float* first_table;

  AllSums(const Shape& shape, int64_t threads, float* output)
      : s(shape),
        doubles(s.heads + s.half() + 2 * s.dim + 2),
        table(s.positions * s.kernel),
        memory(allocate(threads * doubles * 8 + (threads - 1) * table * 4)),
        first_table(output) {
    std::fill_n(reinterpret_cast<double*>(memory.get()), threads * doubles, 0.0);
    std::fill_n(tables(threads), (threads - 1) * table, 0.0f);
    std::fill_n(output, table, 0.0f);
  }
  float* tables(int64_t threads) { return reinterpret_cast<float*>(memory.get() + threads * doubles * 8); }

  Sums of(int64_t thread, int64_t threads) {
    double* at = reinterpret_cast<double*>(memory.get()) + thread * doubles;
    Sums sums;
    sums.retention_log = at, at += s.heads;
    sums.temporal_log = at, at += s.half();
    sums.temporal_gain = at, at += s.dim;
    sums.temporal_skip = at, at += s.dim;
    sums.positional = at;
    sums.table = thread ? tables(threads) + (thread - 1) * table : first_table;
    return sums;
  }

  // all into the first thread's
  Sums added(int64_t threads) {
    double* own = reinterpret_cast<double*>(memory.get());
    for (int64_t thread = 1; thread < threads; thread++) {
      for (int64_t n = 0; n < doubles; n++) own[n] += own[thread * doubles + n];
      const float* other = tables(threads) + (thread - 1) * table;
      for (int64_t n = 0; n < table; n++) first_table[n] += other[n];
    }
    return of(0, threads);
  }
};

using Eleven =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Eleven block_backward(Tensor grad_gated, Maybe grad_retention_after, Maybe grad_temporal_after,
                      Maybe grad_positional_after, Tensor y, Tensor retention_states, Tensor temporal_states,
                      Tensor positional_states, Tensor projection, Tensor offsets, Tensor retention_log, Tensor key,
                      Tensor query, Tensor ticks, Tensor temporal_log, Tensor temporal_gain, Tensor temporal_skip,
                      Tensor table, Tensor positional_gain, Tensor positional_skip, Maybe start,
                      Maybe retention_before, Maybe temporal_before, Maybe positional_before, bool official) {
  const Arguments a{projection,      offsets, retention_log,    key,             query,
                    ticks,           temporal_log, temporal_gain, temporal_skip, table,
                    positional_gain, positional_skip, start, retention_before, temporal_before,
                    positional_before, official};
  const Shape s = shape_of(a);
  Held held;
  const Inputs in = inputs_of(a, s, held);
  const int64_t T = s.events, B = s.users, K = s.width(), V = s.scale_width();
  Backward out{};
  out.grad_gated = held.get<float>(grad_gated, "grad_gated", {T, 3 * s.dim});
  out.grad_retention_after = held.get<float>(grad_retention_after, "grad_retention_after", {B, s.heads, K, K});
  out.grad_temporal_after = held.get<double>(grad_temporal_after, "grad_temporal_after", {B, 2 * s.scales, 2, V});
  out.grad_positional_after = held.get<float>(grad_positional_after, "grad_positional_after", {B, s.kernel, s.dim});
  out.saved.y = const_cast<float*>(held.get<float>(y, "y", {T, 3 * s.dim}));
  out.saved.retention = const_cast<float*>(
      held.get<float>(retention_states, "retention_states", kept(s, true, s.retention_state())));
  out.saved.temporal = const_cast<double*>(
      held.get<double>(temporal_states, "temporal_states", kept(s, true, s.temporal_state())));
  out.saved.positional = const_cast<float*>(
      held.get<float>(positional_states, "positional_states", kept(s, true, s.positional_state())));

  float *dretention, *dtemporal, *dgain, *dskip, *dtable, *dpositional_gain, *dpositional_skip;
  Tensor grad_projection = made(projection, {T, 8 * s.dim}, &out.grad_projection);
  Tensor grad_retention = made(projection, {s.heads}, &dretention);
  Tensor grad_temporal = made(projection, {s.scales}, &dtemporal);
  Tensor grad_gain = made(projection, {2 * s.scales}, &dgain);
  Tensor grad_skip = made(projection, {2 * s.scales}, &dskip);
  Tensor grad_table = made(projection, {s.positions, s.kernel}, &dtable);
  Tensor grad_positional_gain = made(projection, {}, &dpositional_gain);
  Tensor grad_positional_skip = made(projection, {}, &dpositional_skip);
  const bool before = in.retention_before || in.temporal_before || in.positional_before;
  const int64_t N = before ? B : 0;
  Tensor grad_retention_before = made(projection, {N, s.heads, K, K}, &out.grad_retention_before);
  Tensor grad_temporal_before = made(projection, {N, 2 * s.scales, 2, V}, &out.grad_temporal_before);
  Tensor grad_positional_before = made(projection, {N, s.kernel, s.dim}, &out.grad_positional_before);
  if (!before)
    out.grad_retention_before = nullptr, out.grad_temporal_before = nullptr, out.grad_positional_before = nullptr;

  const Kernels& kernels = *chosen;
  const int64_t threads = threads_for(T), scratch = kernels.scratch(s);
  const Memory memory = allocate(threads * scratch);
  AllSums all(s, threads, dtable);
  on_threads(threads, [&](int64_t thread) {
    kernels.backward_rows(s, in, out, T * thread / threads, T * (thread + 1) / threads);
  });
  on_threads(threads, [&](int64_t thread) {
    const Sums sums = all.of(thread, threads);
    own_units(s, in.offsets, thread, threads, [&](int64_t user, int64_t unit) {
      kernels.backward_unit(s, in, out, sums, user, unit, memory.get() + thread * scratch);
    });
  });

  const Sums sums = all.added(threads);
  for (int64_t n = 0; n < s.heads; n++) dretention[n] = static_cast<float>(sums.retention_log[n]);
  for (int64_t k = 0; k < s.scales; k++) {
    double log = 0;
    for (int64_t j = k * V; j < (k + 1) * V; j++) log += sums.temporal_log[j];
    dtemporal[k] = static_cast<float>(log);
  }
  for (int64_t g = 0; g < 2 * s.scales; g++) {
    double gain = 0, skip = 0;
    for (int64_t j = g * V; j < (g + 1) * V; j++) gain += sums.temporal_gain[j], skip += sums.temporal_skip[j];
    dgain[g] = static_cast<float>(gain), dskip[g] = static_cast<float>(skip);
  }
  *dpositional_gain = static_cast<float>(sums.positional[0]);
  *dpositional_skip = static_cast<float>(sums.positional[1]);
  return {grad_projection,      grad_retention,       grad_temporal,        grad_gain,
          grad_skip,            grad_table,           grad_positional_gain, grad_positional_skip,
          grad_retention_before, grad_temporal_before, grad_positional_before};
}

}  // namespace

const Kernels* chosen_kernels() { return chosen; }

#define BLOCK_ARGUMENTS                                                                                               \
  "Tensor projection, Tensor offsets, Tensor retention_log, Tensor key, Tensor query, Tensor ticks, "                \
  "Tensor temporal_log, Tensor temporal_gain, Tensor temporal_skip, Tensor table, Tensor positional_gain, "          \
  "Tensor positional_skip, Tensor? start, Tensor? retention_before, Tensor? temporal_before, "                       \
  "Tensor? positional_before, bool official"

STABLE_TORCH_LIBRARY_FRAGMENT(fuxi_torchrec, m) {
  m.def("instruction_sets(str wanted) -> str");
  m.def("prefers_onednn() -> bool");
  m.def("sources() -> str");
  m.def("block(" BLOCK_ARGUMENTS ", bool with_state, bool keep) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("block_backward(Tensor grad_gated, Tensor? grad_retention_after, Tensor? grad_temporal_after, "
        "Tensor? grad_positional_after, Tensor y, Tensor retention_states, Tensor temporal_states, "
        "Tensor positional_states, " BLOCK_ARGUMENTS ") -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fuxi_torchrec, CompositeExplicitAutograd, m) {
  m.impl("instruction_sets", TORCH_BOX(instruction_sets));
  m.impl("prefers_onednn", TORCH_BOX(prefers_onednn));
  m.impl("sources", TORCH_BOX(sources));
}

STABLE_TORCH_LIBRARY_IMPL(fuxi_torchrec, CPU, m) {
  m.impl("block", TORCH_BOX(block));
  m.impl("block_backward", TORCH_BOX(block_backward));
}
