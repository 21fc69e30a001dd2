// y_i = Σ_{j≤i} λ^{i−j+lag} (q_i·k_j) v_j for one head of one user, chunk by chunk; q, k, v through SiLU.
//
// Inside a chunk the map A = QKᵀ ⊙ D, between chunks the state S at the clock of the chunk's first event. Rows are
// chunk slots, padded with zeros to register tiles; widths are padded to vectors.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ISA {

struct RetentionScratch {
  float *q, *k, *v, *y;           // (CHUNK, P)
  float *dsilu_q, *dsilu_k, *dsilu_v;
  float *scaled_dy, *scaled_v, *scaled_k;
  float *dq, *dk, *dv, *part;
  float *k_turned, *v_turned;     // (P, CHUNK)
  float *map, *dmap;              // (CHUNK, CHUNK)
  float *decay, *ticks;           // (CHUNK, CHUNK) D and its exponents
  float *state, *dstate, *turned;  // (P, P)
  float *to_query, *to_next;      // (2 CHUNK): λ^{i + lag}; λ^{CHUNK − j}, so that λ^{filled − j} is within

  static int64_t floats(int64_t P) { return 16 * CHUNK * P + 4 * CHUNK * CHUNK + 3 * P * P + 4 * CHUNK; }

  RetentionScratch(float* at, int64_t P) {
    float** rows[] = {&q, &k, &v, &y, &dsilu_q, &dsilu_k, &dsilu_v, &scaled_dy, &scaled_v, &scaled_k, &dq, &dk, &dv, &part,
                      &k_turned, &v_turned};
    for (float** each : rows) *each = at, at += CHUNK * P;
    float** maps[] = {&map, &dmap, &decay, &ticks};
    for (float** each : maps) *each = at, at += CHUNK * CHUNK;
    float** states[] = {&state, &dstate, &turned};
    for (float** each : states) *each = at, at += P * P;
    to_query = at, to_next = at + 2 * CHUNK;
  }
};

INLINE void fill(float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i++) x[i] = value;
}

// SiLU of the head's columns of some rows, and its derivative if wanted; zero behind the columns and the rows.
template <bool DERIVATIVE>
INLINE void activate(const float* from, int64_t stride, int64_t filled, int64_t rows, int64_t width, int64_t P,
                     float* to, float* derivative) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < P; j += W) {
      Vf x{}, slope{};
      if (i < filled && j < width) {
        const float* at = from + i * stride + j;
        x = j + W <= width ? load(at) : load_part(at, width - j);
        const Vf s = sigmoid(x);
        if (DERIVATIVE) slope = s * (1.0f + x * (1.0f - s));
        x = x * s;
      }
      store(to + i * P + j, x);
      if (DERIVATIVE) store(derivative + i * P + j, slope);
    }
}

INLINE void scale_rows(const float* from, int64_t P, int64_t rows, const float* by, float* to) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < P; j += W) store(to + i * P + j, load(from + i * P + j) * by[i]);
}

// Copy (rows × width) between strided places; what is padding in the target becomes zero.
INLINE void copy_rows(const float* from, int64_t from_stride, int64_t rows, int64_t width, float* to,
                      int64_t to_stride, int64_t to_rows, int64_t to_width) {
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < width; j++) to[i * to_stride + j] = from[i * from_stride + j];
    for (int64_t j = width; j < to_width; j++) to[i * to_stride + j] = 0.0f;
  }
  for (int64_t i = rows; i < to_rows; i++) fill(to + i * to_stride, to_width, 0.0f);
}

INLINE void prepare_decays(RetentionScratch& s, double log_decay, int64_t lag) {
  float powers[2 * CHUNK];
  for (int64_t n = 0; n < 2 * CHUNK; n++) powers[n] = (float)power_of(log_decay, (double)n);
  for (int64_t i = 0; i < CHUNK; i++) {
    for (int64_t j = 0; j < CHUNK; j++) s.decay[i * CHUNK + j] = j <= i ? powers[i - j + lag] : 0.0f;
    for (int64_t j = 0; j < CHUNK; j++) s.ticks[i * CHUNK + j] = j <= i ? (float)(i - j + lag) : 0.0f;
    s.to_query[i] = powers[i + lag];
    s.to_next[i] = powers[CHUNK - i];
  }
  fill(s.to_next + CHUNK, CHUNK, 0.0f);
}

// The map of a chunk: Q Kᵀ ⊙ D. Columns beyond the diagonal's vector are not written and never read.
INLINE void chunk_map(const RetentionScratch& s, int64_t rows, int64_t P) {
  product<Part::LOWER_OUT>(s.q, P, 1, s.k_turned, CHUNK, P, s.map, CHUNK, rows, CHUNK, 0.0f);
  for (int64_t at = 0; at < rows * CHUNK; at += CHUNK)
    for (int64_t j = at; j <= at + at / CHUNK; j += W) store(s.map + j, load(s.map + j) * load(s.decay + j));
}

// The gradient of QKᵀ from that of y; returns Σ_ij (i − j + lag) dA_ij A_ij, the inside's part of log λ's.
INLINE double chunk_map_backward(const RetentionScratch& s, int64_t rows, int64_t P) {
  product<Part::LOWER_OUT>(s.y, P, 1, s.v_turned, CHUNK, P, s.dmap, CHUNK, rows, CHUNK, 0.0f);
  double dlog = 0;
  for (int64_t at = 0; at < rows * CHUNK; at += CHUNK) {
    Vf row{};
    for (int64_t j = at; j <= at + at / CHUNK; j += W) {
      const Vf dmap = load(s.dmap + j);
      row += dmap * load(s.map + j) * load(s.ticks + j);
      store(s.dmap + j, dmap * load(s.decay + j));
    }
    dlog += total(row);
  }
  return dlog;
}

INLINE void retention_forward(const Shape& shape, const Inputs& in, const Forward& out, int64_t user, int64_t head,
                              char* scratch) {
  const int64_t K = shape.width(), P = padded(K), d = shape.dim, columns = shape.columns();
  const int64_t begin = in.offsets[user], end = in.offsets[user + 1];
  RetentionScratch s((float*)scratch, P);
  prepare_decays(s, in.retention_log[head], shape.official);
  fill(s.k, CHUNK * P, 0.0f);
  const int64_t state_at = (user * shape.heads + head) * K * K;
  bool empty = in.retention_before == nullptr;
  copy_rows(empty ? nullptr : in.retention_before + state_at, K, empty ? 0 : K, K, s.state, P, P, P);

  for (int64_t at = begin, chunk = in.first_chunk(user); at < end; at += CHUNK, chunk++) {
    const int64_t filled = least(CHUNK, end - at), rows = round_up(filled, ROWS);
    const float* first = in.projection + at * columns + 3 * d + head * K;
    activate<false>(first, columns, filled, rows, K, P, s.q, nullptr);
    activate<false>(first + d, columns, filled, rows, K, P, s.k, nullptr);
    activate<false>(first + 2 * d, columns, filled, rows, K, P, s.v, nullptr);
    transpose(s.k, P, round_up(filled, W), P, s.k_turned, CHUNK);
    if (out.saved.retention)
      __builtin_memcpy(out.saved.retention + (chunk * shape.heads + head) * P * P, s.state, sizeof(float) * P * P);

    chunk_map(s, rows, P);
    product<Part::LOWER_IN>(s.map, CHUNK, 1, s.v, P, filled, s.y, P, rows, P, 0.0f);
    if (!empty) {
      scale_rows(s.q, P, rows, s.to_query, s.q);
      product<Part::ALL>(s.q, P, 1, s.state, P, P, s.y, P, rows, P, 1.0f);
    }
    copy_rows(s.y, P, filled, K, out.saved.y + at * 3 * d + head * K, 3 * d, filled, K);

    if (at + CHUNK >= end && !out.retention_after) break;
    // S = λ^filled S + Σ_j λ^{filled − j} k_jᵀ v_j
    const float* to_next = s.to_next + CHUNK - filled;
    for (int64_t n = 0; n < P; n++)
      for (int64_t j = 0; j < CHUNK; j += W)
        store(s.k_turned + n * CHUNK + j, load(s.k_turned + n * CHUNK + j) * load(to_next + j));
    product<Part::ALL>(s.k_turned, CHUNK, 1, s.v, P, filled, s.state, P, P, P, empty ? 0.0f : to_next[0]);
    empty = false;
  }
  if (out.retention_after) copy_rows(s.state, P, K, K, out.retention_after + state_at, K, K, K);
}

INLINE float dot(const float* a, const float* b, int64_t P) {
  Vf sum{};
  for (int64_t j = 0; j < P; j += W) sum += load(a + j) * load(b + j);
  return total(sum);
}

// to += part; returns a·part
INLINE float add_and_dot(const float* a, const float* part, int64_t P, float* to) {
  Vf sum{};
  for (int64_t j = 0; j < P; j += W) {
    const Vf each = load(part + j);
    sum += load(a + j) * each;
    store(to + j, load(to + j) + each);
  }
  return total(sum);
}

// On entry the gradient of y stands where that of the head's q columns will be.
INLINE void retention_backward(const Shape& shape, const Inputs& in, const Backward& out, const Sums& sums,
                               int64_t user, int64_t head, char* scratch) {
  const int64_t K = shape.width(), P = padded(K), d = shape.dim, columns = shape.columns(), lag = shape.official;
  const int64_t begin = in.offsets[user], end = in.offsets[user + 1];
  RetentionScratch s((float*)scratch, P);
  prepare_decays(s, in.retention_log[head], lag);
  fill(s.k, CHUNK * P, 0.0f);
  fill(s.v, CHUNK * P, 0.0f);
  const int64_t state_at = (user * shape.heads + head) * K * K;
  bool last = out.grad_retention_after == nullptr;  // no gradient comes from behind
  copy_rows(last ? nullptr : out.grad_retention_after + state_at, K, last ? 0 : K, K, s.dstate, P, P, P);
  double dlog = 0;

  const int64_t chunks = (end - begin + CHUNK - 1) / CHUNK;
  for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
    const int64_t at = begin + chunk * CHUNK, filled = least(CHUNK, end - at), rows = round_up(filled, ROWS);
    const bool fresh = chunk == 0 && !in.retention_before;  // no state before the chunk
    const float* first = in.projection + at * columns + 3 * d + head * K;
    float* grad = out.grad_projection + at * columns + 3 * d + head * K;
    const float* state = out.saved.retention + ((in.first_chunk(user) + chunk) * shape.heads + head) * P * P;
    const float* to_next = s.to_next + CHUNK - filled;
    activate<true>(first, columns, filled, rows, K, P, s.q, s.dsilu_q);
    activate<true>(first + d, columns, filled, rows, K, P, s.k, s.dsilu_k);
    activate<true>(first + 2 * d, columns, filled, rows, K, P, s.v, s.dsilu_v);
    copy_rows(grad, columns, filled, K, s.y, P, rows, P);  // dy
    transpose(s.k, P, round_up(filled, W), P, s.k_turned, CHUNK);
    transpose(s.v, P, round_up(filled, W), P, s.v_turned, CHUNK);
    chunk_map(s, rows, P);
    dlog += chunk_map_backward(s, rows, P);

    // inside the chunk
    product<Part::LOWER_IN>(s.dmap, CHUNK, 1, s.k, P, filled, s.dq, P, rows, P, 0.0f);
    product<Part::UPPER_IN>(s.dmap, 1, CHUNK, s.q, P, filled, s.dk, P, rows, P, 0.0f);
    product<Part::UPPER_IN>(s.map, 1, CHUNK, s.y, P, filled, s.dv, P, rows, P, 0.0f);

    // through the state before the chunk, and the one after it
    scale_rows(s.y, P, rows, s.to_query, s.scaled_dy);
    if (!fresh) {
      transpose(state, P, P, P, s.turned, P);
      product<Part::ALL>(s.scaled_dy, P, 1, s.turned, P, P, s.part, P, rows, P, 0.0f);
      for (int64_t i = 0; i < filled; i++)
        dlog += (double)(i + lag) * add_and_dot(s.q + i * P, s.part + i * P, P, s.dq + i * P);
    }
    if (!last) {
      transpose(s.dstate, P, P, P, s.turned, P);
      scale_rows(s.v, P, rows, to_next, s.scaled_v);
      scale_rows(s.k, P, rows, to_next, s.scaled_k);
      product<Part::ALL>(s.scaled_v, P, 1, s.turned, P, P, s.part, P, rows, P, 0.0f);
      for (int64_t i = 0; i < filled; i++)
        dlog += (double)(filled - i) * add_and_dot(s.k + i * P, s.part + i * P, P, s.dk + i * P);
      product<Part::ALL>(s.scaled_k, P, 1, s.dstate, P, P, s.dv, P, rows, P, 1.0f);
      double carried = 0;
      if (!fresh)
        for (int64_t n = 0; n < P; n++) carried += dot(state + n * P, s.dstate + n * P, P);
      dlog += (double)filled * to_next[0] * carried;
    }

    for (int64_t i = 0; i < filled; i++)
      for (int64_t j = 0; j < P; j += W) {
        const Vf dq = load(s.dq + i * P + j) * load(s.dsilu_q + i * P + j);
        const Vf dk = load(s.dk + i * P + j) * load(s.dsilu_k + i * P + j);
        const Vf dv = load(s.dv + i * P + j) * load(s.dsilu_v + i * P + j);
        float* to = grad + i * columns + j;
        if (j + W <= K) {
          store(to, dq), store(to + d, dk), store(to + 2 * d, dv);
        } else if (j < K) {
          store_part(to, dq, K - j), store_part(to + d, dk, K - j), store_part(to + 2 * d, dv, K - j);
        }
      }
    if (fresh) break;
    // dS = λ^filled dS + Σ_i λ^{i + lag} q_iᵀ dy_i
    product<Part::ALL>(s.q, 1, P, s.scaled_dy, P, filled, s.dstate, P, P, P, last ? 0.0f : to_next[0]);
    last = false;
  }
  sums.retention_log[head] += dlog;
  if (out.grad_retention_before) copy_rows(s.dstate, P, K, K, out.grad_retention_before + state_at, K, K, K);
}

}  // namespace ISA
