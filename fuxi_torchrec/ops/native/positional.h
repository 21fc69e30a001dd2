// y_i = gain · Σ_{j≤i} (κ_i·κ_j) v_j + skip · v_i for a strip of columns of one user, chunk by chunk; κ_i is the row of
// event i's position in the kernel table, the last one beyond it.
#pragma once

#include "retention.h"

namespace ISA {

struct PositionalScratch {
  float *kernel, *gained;    // (CHUNK, P) κ, gain · κ
  float *dkernel, *dquery;   // (CHUNK, P)
  float* kernel_turned;           // (P, CHUNK)
  float *v, *y, *dy, *dv;         // (CHUNK, STRIP)
  float* v_turned;                // (STRIP, CHUNK)
  float *map, *dmap;              // (CHUNK, CHUNK)
  float *state, *dstate;          // (P, STRIP)
  float* turned;                  // (STRIP, P)

  static int64_t floats(int64_t P) { return 5 * CHUNK * P + 5 * CHUNK * STRIP + 2 * CHUNK * CHUNK + 3 * P * STRIP; }
  PositionalScratch(float* at, int64_t P) {
    float** kernels[] = {&kernel, &gained, &dkernel, &dquery, &kernel_turned};
    for (float** each : kernels) *each = at, at += CHUNK * P;
    float** rows[] = {&v, &y, &dy, &dv, &v_turned};
    for (float** each : rows) *each = at, at += CHUNK * STRIP;
    float** maps[] = {&map, &dmap};
    for (float** each : maps) *each = at, at += CHUNK * CHUNK;
    state = at, dstate = at + P * STRIP, turned = at + 2 * P * STRIP;
  }
};

INLINE const float* kernel_row(const Shape& shape, const Inputs& in, int64_t position) {
  return in.table + least(position, shape.positions - 1) * shape.kernel;
}

// Zero above the diagonal, as far as a tile's row is ever read.
INLINE void keep_lower(float* map, int64_t rows) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i + 1; j < round_up(i + 1, W); j++) map[i * CHUNK + j] = 0.0f;
}

// κ of a chunk's slots, gain · κ, and the lower map κκᵀ; all slots are filled, so that everything is finite.
INLINE void positional_map(const Shape& shape, const Inputs& in, int64_t position, int64_t rows, int64_t P,
                           PositionalScratch& s) {
  const float gain = in.positional_gain[0];
  for (int64_t i = 0; i < CHUNK; i++) {
    copy_rows(kernel_row(shape, in, position + i), 0, 1, shape.kernel, s.kernel + i * P, 0, 1, P);
    for (int64_t j = 0; j < P; j += W) store(s.gained + i * P + j, load(s.kernel + i * P + j) * gain);
  }
  transpose(s.kernel, P, CHUNK, P, s.kernel_turned, CHUNK);
  product<Part::LOWER_OUT>(s.kernel, P, 1, s.kernel_turned, CHUNK, P, s.map, CHUNK, rows, CHUNK, 0.0f);
  keep_lower(s.map, rows);
}

// gain · map + skip on the diagonal
INLINE void mix_map(const Inputs& in, int64_t rows, PositionalScratch& s) {
  const float gain = in.positional_gain[0], skip = in.positional_skip[0];
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j <= i; j += W) store(s.map + i * CHUNK + j, load(s.map + i * CHUNK + j) * gain);
    s.map[i * CHUNK + i] += skip;
  }
}

// A strip (P, STRIP) of one user's state (kernel, d); zero without one.
INLINE void strip_state(const Shape& shape, const float* user, int64_t column, int64_t count, int64_t P, float* to) {
  copy_rows(user ? user + column : nullptr, shape.dim, user ? shape.kernel : 0, count, to, STRIP, P, STRIP);
}

INLINE void positional_forward(const Shape& shape, const Inputs& in, const Forward& out, int64_t user, int64_t strip,
                               char* scratch) {
  const int64_t d = shape.dim, columns = shape.columns(), P = padded(shape.kernel);
  const int64_t column = strip * STRIP, count = least(STRIP, d - column), V = round_up(count, W);
  const int64_t begin = in.offsets[user], end = in.offsets[user + 1], start = in.start ? in.start[user] : 0;
  PositionalScratch s((float*)scratch, P);
  const int64_t state_at = user * shape.kernel * d;
  bool empty = in.positional_before == nullptr;
  strip_state(shape, empty ? nullptr : in.positional_before + state_at, column, count, P, s.state);
  for (int64_t at = begin, chunk = in.first_chunk(user); at < end; at += CHUNK, chunk++) {
    const int64_t filled = least(CHUNK, end - at), rows = round_up(filled, ROWS);
    positional_map(shape, in, start + at - begin, rows, P, s);
    mix_map(in, rows, s);
    copy_rows(in.projection + at * columns + 7 * d + column, columns, filled, count, s.v, STRIP, filled, V);
    if (out.saved.positional)
      __builtin_memcpy(out.saved.positional + (chunk * shape.strips() + strip) * P * STRIP, s.state,
                       sizeof(float) * P * STRIP);
    product<Part::LOWER_IN>(s.map, CHUNK, 1, s.v, STRIP, filled, s.y, STRIP, rows, V, 0.0f);
    if (!empty) product<Part::ALL>(s.gained, P, 1, s.state, STRIP, P, s.y, STRIP, rows, V, 1.0f);
    copy_rows(s.y, STRIP, filled, count, out.saved.y + at * 3 * d + 2 * d + column, 3 * d, filled, count);
    if (at + CHUNK >= end && !out.positional_after) break;
    product<Part::ALL>(s.kernel, 1, P, s.v, STRIP, filled, s.state, STRIP, P, V, empty ? 0.0f : 1.0f);
    empty = false;
  }
  if (out.positional_after)
    copy_rows(s.state, STRIP, shape.kernel, count, out.positional_after + state_at + column, d, shape.kernel, count);
}

// On entry the gradient of y stands where that of the values will be.
INLINE void positional_backward(const Shape& shape, const Inputs& in, const Backward& out, const Sums& sums,
                                int64_t user, int64_t strip, char* scratch) {
  const int64_t d = shape.dim, columns = shape.columns(), P = padded(shape.kernel);
  const int64_t column = strip * STRIP, count = least(STRIP, d - column), V = round_up(count, W), T = padded(count);
  const int64_t begin = in.offsets[user], end = in.offsets[user + 1], start = in.start ? in.start[user] : 0;
  PositionalScratch s((float*)scratch, P);
  const int64_t state_at = user * shape.kernel * d;
  const float gain = in.positional_gain[0];
  bool last = out.grad_positional_after == nullptr;  // no gradient comes from behind
  strip_state(shape, last ? nullptr : out.grad_positional_after + state_at, column, count, P, s.dstate);
  double dgain = 0, dskip = 0;
  for (int64_t chunk = (end - begin + CHUNK - 1) / CHUNK - 1; chunk >= 0; chunk--) {
    const int64_t at = begin + chunk * CHUNK, filled = least(CHUNK, end - at), rows = round_up(filled, ROWS);
    const bool fresh = chunk == 0 && !in.positional_before;
    const float* state = out.saved.positional + ((in.first_chunk(user) + chunk) * shape.strips() + strip) * P * STRIP;
    float* grad = out.grad_projection + at * columns + 7 * d + column;
    positional_map(shape, in, start + at - begin, rows, P, s);
    copy_rows(in.projection + at * columns + 7 * d + column, columns, filled, count, s.v, STRIP, CHUNK, T);
    copy_rows(grad, columns, filled, count, s.dy, STRIP, rows, T);
    transpose(s.v, STRIP, CHUNK, T, s.v_turned, CHUNK);

    // the map's gradient, and what it says about gain, skip and κ
    product<Part::LOWER_OUT>(s.dy, STRIP, 1, s.v_turned, CHUNK, T, s.dmap, CHUNK, rows, CHUNK, 0.0f);
    keep_lower(s.dmap, rows);
    for (int64_t i = 0; i < filled; i++) {
      dskip += s.dmap[i * CHUNK + i];
      dgain += dot(s.dmap + i * CHUNK, s.map + i * CHUNK, round_up(i + 1, W));
    }
    product<Part::LOWER_IN>(s.dmap, CHUNK, 1, s.gained, P, filled, s.dkernel, P, rows, P, 0.0f);
    product<Part::UPPER_IN>(s.dmap, 1, CHUNK, s.gained, P, filled, s.dkernel, P, rows, P, 1.0f);

    mix_map(in, rows, s);
    product<Part::UPPER_IN>(s.map, 1, CHUNK, s.dy, STRIP, filled, s.dv, STRIP, rows, V, 0.0f);
    if (!fresh) {  // κ_i reads S
      transpose(state, STRIP, P, T, s.turned, P);
      product<Part::ALL>(s.dy, STRIP, 1, s.turned, P, T, s.dquery, P, rows, P, 0.0f);
      for (int64_t i = 0; i < filled; i++) {
        dgain += dot(s.kernel + i * P, s.dquery + i * P, P);
        for (int64_t j = 0; j < P; j += W)
          store(s.dkernel + i * P + j, load(s.dkernel + i * P + j) + load(s.dquery + i * P + j) * gain);
      }
    }
    if (!last) {
      transpose(s.dstate, STRIP, P, T, s.turned, P);
      product<Part::ALL>(s.v, STRIP, 1, s.turned, P, T, s.dkernel, P, rows, P, 1.0f);
      product<Part::ALL>(s.kernel, P, 1, s.dstate, STRIP, P, s.dv, STRIP, rows, V, 1.0f);
    }
    for (int64_t i = 0; i < filled; i++) {
      float* row = sums.table + least(start + at - begin + i, shape.positions - 1) * shape.kernel;
      for (int64_t j = 0; j < shape.kernel; j++) row[j] += s.dkernel[i * P + j];
    }
    copy_rows(s.dv, STRIP, filled, count, grad, columns, filled, count);
    if (fresh) break;
    product<Part::ALL>(s.gained, 1, P, s.dy, STRIP, filled, s.dstate, STRIP, P, V, last ? 0.0f : 1.0f);
    last = false;
  }
  sums.positional[0] += dgain;
  sums.positional[1] += dskip;
  if (out.grad_positional_before)
    copy_rows(s.dstate, STRIP, shape.kernel, count, out.grad_positional_before + state_at + column, d, shape.kernel,
              count);
}

}  // namespace ISA
