// The temporal channel of a group of columns of one user, event by event, with the state in float64 registers:
//
//   S_i = r^{ticks_i} (S_{i−1} + k_i v_i),   y_i = gain · q_i·S_i + skip · v_i.
//
// Column j of the sin half and column j of the cos half belong to the same scale: they share keys and decays.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ISA {

constexpr int N2 = (int)GROUP / W2;  // vectors of doubles a group

struct TemporalScratch {
  // per event of a chunk, by column: decay; cos and sin of the key; the sin heads' query (2), the cos heads' (2)
  double* terms;   // (CHUNK, 7, GROUP)
  double* states;  // (CHUNK, 4, GROUP): S_{i−1} + k_i v_i
  float *v, *dy, *y;  // (CHUNK, 2, GROUP)
  double *gain, *skip;  // (2, GROUP)
  double* log_decay;    // (scales, padded)
  double* decays;

  static int64_t doubles(int64_t scales) {
    return CHUNK * 11 * GROUP + CHUNK * 3 * GROUP + 4 * GROUP + 2 * round_up(scales, PAD);
  }
  TemporalScratch(double* at, int64_t scales) {
    terms = at, at += CHUNK * 7 * GROUP;
    states = at, at += CHUNK * 4 * GROUP;
    v = (float*)at, at += CHUNK * GROUP;
    dy = (float*)at, at += CHUNK * GROUP;
    y = (float*)at, at += CHUNK * GROUP;
    gain = at, skip = at + 2 * GROUP, at += 4 * GROUP;
    log_decay = at, decays = at + round_up(scales, PAD);
  }
};

// Which columns: `first` of each half, `count` of them.
struct Group {
  int64_t first, count, scale_width;
  Group(const Shape& shape, int64_t group)
      : first(group * GROUP), count(least(GROUP, shape.half() - group * GROUP)), scale_width(shape.scale_width()) {}
};

INLINE void prepare_temporal(const Shape& shape, const Inputs& in, const Group& g, TemporalScratch& s) {
  const int64_t scales = shape.scales;
  for (int64_t k = 0; k < round_up(scales, PAD); k++) s.log_decay[k] = k < scales ? in.temporal_log[k] : 0.0;
  for (int64_t j = 0; j < GROUP; j++) {
    const int64_t k = j < g.count ? (g.first + j) / g.scale_width : 0;
    const bool used = j < g.count;
    s.gain[j] = used ? in.temporal_gain[k] : 0.0f, s.gain[GROUP + j] = used ? in.temporal_gain[scales + k] : 0.0f;
    s.skip[j] = used ? in.temporal_skip[k] : 0.0f, s.skip[GROUP + j] = used ? in.temporal_skip[scales + k] : 0.0f;
  }
}

// Decays, keys and queries of a chunk's events, spread over the columns.
INLINE void temporal_terms(const Shape& shape, const Inputs& in, const Group& g, int64_t at, int64_t filled,
                           TemporalScratch& s) {
  const int64_t scales = shape.scales, first = g.first / g.scale_width;
  const int64_t end = (g.first + g.count - 1) / g.scale_width + 1;
  for (int64_t i = 0; i < filled; i++) {
    const double ticks = (double)in.ticks[at + i];
    double* terms = s.terms + i * 7 * GROUP;
    for (int64_t k = first / W2 * W2; k < end; k += W2)
      store(s.decays + k, power_of(load(s.log_decay + k), ticks - Vd{}));
    const float* key = in.key + (at + i) * 2 * scales;
    const float* query = in.query + (at + i) * 4 * scales;
    const float* other = query + 2 * scales;
    for (int64_t k = first; k < end; k++) {
      const double values[7] = {s.decays[k],      key[2 * k],   key[2 * k + 1],  query[2 * k],
                                query[2 * k + 1], other[2 * k], other[2 * k + 1]};
      const int64_t from = most(k * g.scale_width - g.first, 0);
      const int64_t to = least((k + 1) * g.scale_width - g.first, g.count);
      for (int n = 0; n < 7; n++)
        for (int64_t j = from; j < to; j++) terms[n * GROUP + j] = values[n];
    }
    if (g.count < GROUP)
      for (int n = 0; n < 7; n++)
        for (int64_t j = g.count; j < GROUP; j++) terms[n * GROUP + j] = 0;
  }
}

// Both halves' columns of a chunk, side by side: (CHUNK, 2, GROUP).
INLINE void gather_halves(const float* from, int64_t stride, int64_t half, const Group& g, int64_t filled, float* to) {
  for (int64_t i = 0; i < filled; i++)
    for (int side = 0; side < 2; side++) {
      const float* row = from + i * stride + side * half;
      float* out = to + (2 * i + side) * GROUP;
      if (g.count == GROUP) {
        __builtin_memcpy(out, row, sizeof(float) * GROUP);
      } else {
        for (int64_t j = 0; j < GROUP; j++) out[j] = j < g.count ? row[j] : 0.0f;
      }
    }
}
INLINE void scatter_halves(const float* from, int64_t half, const Group& g, int64_t filled, float* to, int64_t stride) {
  for (int64_t i = 0; i < filled; i++)
    for (int side = 0; side < 2; side++) {
      float* row = to + i * stride + side * half;
      const float* in = from + (2 * i + side) * GROUP;
      if (g.count == GROUP) {
        __builtin_memcpy(row, in, sizeof(float) * GROUP);
      } else {
        for (int64_t j = 0; j < g.count; j++) row[j] = in[j];
      }
    }
}

// A user's state (2 scales, 2, scale width) to and from the group's registers (4, GROUP).
INLINE void read_state(const Shape& shape, const Group& g, const double* user, double* state) {
  for (int64_t side = 0; side < 2; side++)
    for (int64_t part = 0; part < 2; part++)
      for (int64_t j = 0; j < GROUP; j++) {
        const int64_t k = (g.first + j) / g.scale_width, in = (g.first + j) % g.scale_width;
        state[(2 * side + part) * GROUP + j] =
            user && j < g.count ? user[((side * shape.scales + k) * 2 + part) * g.scale_width + in] : 0.0;
      }
}
INLINE void write_state(const Shape& shape, const Group& g, const double* state, double* user) {
  for (int64_t side = 0; side < 2; side++)
    for (int64_t part = 0; part < 2; part++)
      for (int64_t j = 0; j < g.count; j++) {
        const int64_t k = (g.first + j) / g.scale_width, in = (g.first + j) % g.scale_width;
        user[((side * shape.scales + k) * 2 + part) * g.scale_width + in] = state[(2 * side + part) * GROUP + j];
      }
}

// One chunk's events in turn, N vectors of columns at a time: few enough for registers, enough to hide latencies. With
// KEEP the states before the decay are stored, and no outputs made.
template <bool KEEP>
INLINE void temporal_events(const TemporalScratch& s, int64_t filled, double* carried) {
  constexpr int N = 2;
#pragma GCC unroll 1
  for (int first = 0; first < N2; first += N) {
    Vd state[4][N];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) state[c][n] = load(carried + c * GROUP + (first + n) * W2);
    for (int64_t i = 0; i < filled; i++) {
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) {
        const int64_t at = (first + n) * W2;
        const double* terms = s.terms + i * 7 * GROUP + at;
        const Vd decay = load(terms);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
          const Vd v = load_wide(s.v + (2 * i + side) * GROUP + at);
          Vd read{};
#pragma GCC unroll 2
          for (int part = 0; part < 2; part++) {
            const int c = 2 * side + part;
            state[c][n] += load(terms + (1 + part) * GROUP) * v;
            if (KEEP) store(s.states + (i * 4 + c) * GROUP + at, state[c][n]);
            state[c][n] *= decay;
            if (!KEEP) read += load(terms + (3 + c) * GROUP) * state[c][n];
          }
          if (!KEEP)
            store_narrow(s.y + (2 * i + side) * GROUP + at,
                         load(s.gain + side * GROUP + at) * read + load(s.skip + side * GROUP + at) * v);
        }
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) store(carried + c * GROUP + (first + n) * W2, state[c][n]);
  }
}

INLINE void temporal_forward(const Shape& shape, const Inputs& in, const Forward& out, int64_t user, int64_t group,
                             char* scratch) {
  const int64_t d = shape.dim, half = shape.half(), columns = shape.columns();
  const int64_t begin = in.offsets[user], end = in.offsets[user + 1];
  const Group g(shape, group);
  TemporalScratch s((double*)scratch, shape.scales);
  prepare_temporal(shape, in, g, s);
  double state[4 * GROUP];
  read_state(shape, g, in.temporal_before ? in.temporal_before + user * 2 * d : nullptr, state);
  for (int64_t at = begin, chunk = in.first_chunk(user); at < end; at += CHUNK, chunk++) {
    const int64_t filled = least(CHUNK, end - at);
    temporal_terms(shape, in, g, at, filled, s);
    gather_halves(in.projection + at * columns + 6 * d + g.first, columns, half, g, filled, s.v);
    if (out.saved.temporal)
      __builtin_memcpy(out.saved.temporal + (chunk * shape.groups() + group) * 4 * GROUP, state, sizeof state);
    temporal_events<false>(s, filled, state);
    scatter_halves(s.y, half, g, filled, out.saved.y + at * 3 * d + d + g.first, 3 * d);
  }
  if (out.temporal_after) write_state(shape, g, state, out.temporal_after + user * 2 * d);
}

// What a group adds to the gradients of parameters, by column.
struct TemporalSums {
  double log_decay[GROUP], gain[2 * GROUP], skip[2 * GROUP];
};

// One chunk's events backwards: gradients of the values to s.y, of the state before the chunk to `carried`.
INLINE void temporal_events_backward(const TemporalScratch& s, const int64_t* ticks, int64_t filled, double* carried,
                                     TemporalSums& sums) {
#pragma GCC unroll 1
  for (int n = 0; n < N2; n++) {
    Vd grad[4], dlog = load(sums.log_decay + n * W2), dgain[2], dskip[2], gain[2], skip[2];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) grad[c] = load(carried + c * GROUP + n * W2);
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
      dgain[side] = load(sums.gain + side * GROUP + n * W2), dskip[side] = load(sums.skip + side * GROUP + n * W2);
      gain[side] = load(s.gain + side * GROUP + n * W2), skip[side] = load(s.skip + side * GROUP + n * W2);
    }
    for (int64_t i = filled - 1; i >= 0; i--) {
      const double* terms = s.terms + i * 7 * GROUP;
      const Vd decay = load(terms + n * W2);
      Vd through{};
#pragma GCC unroll 2
      for (int side = 0; side < 2; side++) {
        const Vd v = load_wide(s.v + (2 * i + side) * GROUP + n * W2);
        const Vd dy = load_wide(s.dy + (2 * i + side) * GROUP + n * W2);
        Vd dv = skip[side] * dy, read{};
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const int c = 2 * side + part;
          const Vd query = load(terms + (3 + c) * GROUP + n * W2);
          const Vd state = load(s.states + (i * 4 + c) * GROUP + n * W2);
          grad[c] = decay * (grad[c] + gain[side] * dy * query);
          through += state * grad[c];
          read += query * state;
          dv += load(terms + (1 + part) * GROUP + n * W2) * grad[c];
        }
        dgain[side] += dy * decay * read;
        dskip[side] += dy * v;
        store_narrow(s.y + (2 * i + side) * GROUP + n * W2, dv);
      }
      dlog += through * (double)ticks[i];
    }
    store(sums.log_decay + n * W2, dlog);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) store(carried + c * GROUP + n * W2, grad[c]);
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++)
      store(sums.gain + side * GROUP + n * W2, dgain[side]), store(sums.skip + side * GROUP + n * W2, dskip[side]);
  }
}

// On entry the gradient of y stands where that of the values will be.
INLINE void temporal_backward(const Shape& shape, const Inputs& in, const Backward& out, const Sums& sums,
                              int64_t user, int64_t group, char* scratch) {
  const int64_t d = shape.dim, half = shape.half(), columns = shape.columns();
  const int64_t begin = in.offsets[user], end = in.offsets[user + 1];
  const Group g(shape, group);
  TemporalScratch s((double*)scratch, shape.scales);
  prepare_temporal(shape, in, g, s);
  double grad[4 * GROUP], state[4 * GROUP];
  TemporalSums own = {};
  read_state(shape, g, out.grad_temporal_after ? out.grad_temporal_after + user * 2 * d : nullptr, grad);
  for (int64_t chunk = (end - begin + CHUNK - 1) / CHUNK - 1; chunk >= 0; chunk--) {
    const int64_t at = begin + chunk * CHUNK, filled = least(CHUNK, end - at);
    float* rows = out.grad_projection + at * columns + 6 * d + g.first;
    temporal_terms(shape, in, g, at, filled, s);
    gather_halves(in.projection + at * columns + 6 * d + g.first, columns, half, g, filled, s.v);
    gather_halves(rows, columns, half, g, filled, s.dy);
    const double* saved = out.saved.temporal + ((in.first_chunk(user) + chunk) * shape.groups() + group) * 4 * GROUP;
    __builtin_memcpy(state, saved, sizeof state);
    temporal_events<true>(s, filled, state);
    temporal_events_backward(s, in.ticks + at, filled, grad, own);
    scatter_halves(s.y, half, g, filled, rows, columns);
  }
  for (int64_t j = 0; j < g.count; j++) {
    sums.temporal_log[g.first + j] += own.log_decay[j];
    for (int64_t side = 0; side < 2; side++) {
      sums.temporal_gain[side * half + g.first + j] += own.gain[side * GROUP + j];
      sums.temporal_skip[side * half + g.first + j] += own.skip[side * GROUP + j];
    }
  }
  if (out.grad_temporal_before) write_state(shape, g, grad, out.grad_temporal_before + user * 2 * d);
}

}  // namespace ISA
