// One event of each of a few users through all blocks: outputs, states after it, or both.
//
// Nothing is carried from event to event here: a channel reads the state before the event, and may write the one after.
#pragma once

#include "retention.h"
#include "rows.h"

namespace ISA {

constexpr int64_t MANY = 4;       // users from which tiles pay, their rows padded
constexpr int64_t PANEL = 2 * W;  // columns of weights that a tile multiplies by

struct DecodeScratch {
  int64_t rows;  // users, padded
  float *x, *normed, *projection, *y, *z, *hidden, *ffn, *panel;

  static int64_t pad_users(int64_t users) { return users < MANY ? users : round_up(users, ROWS); }
  static int64_t floats(const Shape& shape, int64_t hidden, int64_t users) {
    const int64_t panel = pad_users(users) > ROWS ? PANEL * most(3 * padded(shape.dim), padded(hidden)) : 0;
    return pad_users(users) * (padded(shape.dim) * 14 + padded(2 * hidden) + padded(hidden)) + panel + PAD;
  }
  DecodeScratch(const Shape& shape, int64_t hidden_width, int64_t users, float* at) {
    rows = pad_users(users);
    const int64_t D = padded(shape.dim);
    x = at, at += rows * D;
    normed = at, at += rows * D;
    z = at, at += rows * D;
    projection = at, at += rows * D * 8;
    y = at, at += rows * D * 3;
    ffn = at, at += rows * padded(2 * hidden_width);
    hidden = at, at += rows * padded(hidden_width);
    panel = at;
  }
};

// X = P W for the users' rows; W (length × columns) may be part of a wider matrix. Weights are read once: where they
// serve several tiles of users, a panel of their columns is copied first, and stays near.
INLINE void rows_times(const float* p, int64_t ps, int64_t users, const DecodeScratch& m, const float* w, int64_t ws,
                       int64_t length, float* x, int64_t xs, int64_t columns) {
  const int64_t whole = users < MANY ? 0 : columns / W * W;
  if (m.rows <= ROWS) {
    if (whole) product<Part::ALL>(p, ps, 1, w, ws, length, x, xs, m.rows, whole, 0.0f);
  } else {
    for (int64_t n = 0; n < whole; n += PANEL) {
      const int64_t width = least(PANEL, whole - n);
      copy_rows(w + n, ws, length, width, m.panel, PANEL, length, width);
      product<Part::ALL>(p, ps, 1, m.panel, PANEL, length, x + n, xs, m.rows, width, 0.0f);
    }
  }
  if (whole < columns) few_rows(p, ps, users, w + whole, ws, length, x + whole, xs, columns - whole);
}

INLINE float inner(const float* a, const float* b, int64_t width) {
  Vf sum{};
  each_vector(width, [&](int64_t j, int64_t n) { sum += load_some(a + j, n) * load_some(b + j, n); });
  return total(sum);
}

INLINE void silu_row(float* x, int64_t width) {
  each_vector(width, [&](int64_t j, int64_t n) {
    const Vf v = load_some(x + j, n);
    store_some(x + j, v * sigmoid(v), n);
  });
}

// y = λ^lag (q S + (q·k) v); S after = λ (S + kᵀ v). q, k, v are activated here.
INLINE void decode_retention(const Shape& s, const Layer& layer, int64_t user, float* qkv, float* y) {
  const int64_t K = s.width(), d = s.dim;
  silu_row(qkv, 3 * d);
  for (int64_t head = 0; head < s.heads; head++) {
    const float *q = qkv + head * K, *k = q + d, *v = k + d, lambda = layer.lambda[head];
    const int64_t at = (user * s.heads + head) * K * K;
    const float* state = layer.retention + at;
    if (y) {
      const float own = inner(q, k, K);
      few_rows(q, 0, 1, state, K, K, y + head * K, 0, K);
      const float scale = s.official ? lambda : 1.0f;
      for (int64_t n = 0; n < K; n++) y[head * K + n] = (y[head * K + n] + own * v[n]) * scale;
    }
    if (layer.retention_after)
      for (int64_t n = 0; n < K; n++)
        for (int64_t m = 0; m < K; m++)
          layer.retention_after[at + n * K + m] = (state[n * K + m] + k[n] * v[m]) * lambda;
  }
}

// y = gain · r^ticks q·(S + k v) + skip · v; S after = r^ticks (S + k v), in float64.
INLINE void decode_temporal(const Shape& s, const Layer& layer, const Decode& all, int64_t user, const float* v,
                            float* y) {
  const int64_t width = s.scale_width();
  for (int64_t g = 0; g < 2 * s.scales; g++) {
    const int64_t k = g % s.scales, at = (user * 2 * s.scales + g) * 2 * width;
    const double decay = layer.temporal_decay[user * s.scales + k];
    const float* key = all.key + (user * s.scales + k) * 2;
    const float* query = all.query + (user * 2 * s.scales + g) * 2;
    const double key_cos = key[0], key_sin = key[1], query_cos = query[0], query_sin = query[1];
    const double gain = layer.temporal_gain[g], skip = layer.temporal_skip[g];
    const double *cosine = layer.temporal + at, *sine = cosine + width;
    for (int64_t j = 0; j < width; j++) {
      const double value = v[g * width + j];
      const double c = (cosine[j] + key_cos * value) * decay, d = (sine[j] + key_sin * value) * decay;
      if (y) y[g * width + j] = (float)(gain * (query_cos * c + query_sin * d) + skip * value);
      if (layer.temporal_after) layer.temporal_after[at + j] = c, layer.temporal_after[at + width + j] = d;
    }
  }
}

// y = gain · (κ S + (κ·κ) v) + skip · v; S after = S + κᵀ v.
INLINE void decode_positional(const Shape& s, const Layer& layer, const Decode& all, int64_t user, const float* v,
                              float* y) {
  const int64_t d = s.dim, at = user * s.kernel * d;
  const float* kernel = layer.table + all.position[user] * s.kernel;
  const float* state = layer.positional + at;
  if (y) {
    const float own = inner(kernel, kernel, s.kernel);
    few_rows(kernel, 0, 1, state, d, s.kernel, y, 0, d);
    const float gain = layer.positional_gain, skip = layer.positional_skip;
    for (int64_t j = 0; j < d; j++) y[j] = gain * (y[j] + own * v[j]) + skip * v[j];
  }
  if (layer.positional_after)
    for (int64_t n = 0; n < s.kernel; n++)
      for (int64_t j = 0; j < d; j++) layer.positional_after[at + n * d + j] = state[n * d + j] + kernel[n] * v[j];
}

// The gate over the normed channels, in place of them.
INLINE void gate_row(const Shape& s, const float* u, float* y) {
  for (int64_t channel = 0; channel < 3; channel++, y += s.dim, u += s.dim) {
    const Norm norm = measure(y, s.dim, s.official, !s.official && channel == 0);
    each_vector(s.dim, [&](int64_t j, int64_t n) {
      Vf gate = load_some(u + j, n);
      if (s.official) gate *= sigmoid(gate);
      store_some(y + j, (load_some(y + j, n) - norm.mean) * norm.f * gate, n);
    });
  }
}

INLINE void decode_users(const Shape& s, const Decode& all, int64_t first, int64_t end, char* memory) {
  const int64_t d = s.dim, users = end - first, h = all.hidden, columns = s.columns();
  DecodeScratch m(s, h, users, (float*)memory);
  // what lies behind the users in a tile is computed and thrown away: it must be numbers
  fill((float*)memory, DecodeScratch::floats(s, h, users), 0.0f);
  copy_rows(all.rows + first * d, d, users, d, m.x, d, users, d);
  for (int64_t l = 0; l < all.count; l++) {
    const Layer& layer = all.layers[l];
    const bool output = all.output || l + 1 < all.count;  // the last block's may not be wanted
    const int64_t from = output ? 0 : 3 * d;              // then nor are its gates
    for (int64_t n = 0; n < users; n++) norm_row(m.x + n * d, d, s.official, m.normed + n * d);
    rows_times(m.normed, d, users, m, layer.in_proj + from, columns, d, m.projection + from, columns,
               columns - from);
    for (int64_t n = 0; n < users; n++) {
      float *own = m.projection + n * columns, *y = output ? m.y + n * 3 * d : nullptr;
      // without an event nothing is written: zero columns
      if (!all.waiting[first + n]) fill(own + 3 * d, 5 * d, 0.0f);
      decode_retention(s, layer, first + n, own + 3 * d, y);
      decode_temporal(s, layer, all, first + n, own + 6 * d, y ? y + d : nullptr);
      decode_positional(s, layer, all, first + n, own + 7 * d, y ? y + 2 * d : nullptr);
      if (y) gate_row(s, own, y);
    }
    if (!output) return;
    rows_times(m.y, 3 * d, users, m, layer.out_proj, d, 3 * d, m.z, d, d);
    for (int64_t n = 0; n < users; n++) {
      for (int64_t j = 0; j < d; j++) m.z[n * d + j] += m.x[n * d + j];
      norm_row(m.z + n * d, d, false, m.normed + n * d);
    }
    rows_times(m.normed, d, users, m, layer.ffn_in, 2 * h, d, m.ffn, 2 * h, 2 * h);
    for (int64_t n = 0; n < users; n++) swiglu_row(m.ffn + n * 2 * h, h, m.hidden + n * h);
    rows_times(m.hidden, h, users, m, layer.ffn_out, d, h, m.x, d, d);
    for (int64_t n = 0; n < users * d; n++) m.x[n] += m.z[n];
  }
  for (int64_t n = 0; n < users; n++)
    for (int64_t j = 0; j < d; j++) all.output[(first + n) * d + j] = all.waiting[first + n] ? m.x[n * d + j] : 0.0f;
}

}  // namespace ISA
