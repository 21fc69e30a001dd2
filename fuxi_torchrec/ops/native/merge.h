// o = [Norm(y_ret) | Norm(y_t) | Norm(y_p)] ⊙ u, row by row; each Norm over all d columns.
//
// The paper's preset norms retention twice, which is one norm: y / sqrt(ms + ε (ms + ε)), ms the mean of squares.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ISA {

// y ↦ (y − mean) · f with f = 1 / sqrt(a · variance + b); without a mean, of the squares themselves.
struct Norm {
  float mean, f, a;
};

template <typename F>
INLINE void each_vector(int64_t width, F&& apply) {
  int64_t j = 0;
  for (; j + W <= width; j += W) apply(j, (int64_t)W);
  if (j < width) apply(j, width - j);
}
INLINE Vf load_some(const float* p, int64_t n) { return n == W ? load(p) : load_part(p, n); }
INLINE void store_some(float* p, Vf v, int64_t n) {
  if (n == W)
    store(p, v);
  else
    store_part(p, v, n);
}
INLINE float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

INLINE Norm measure(const float* y, int64_t d, bool official, bool twice) {
  Norm norm{0.0f, 0.0f, 1.0f};
  if (official) {
    Vf sum{};
    each_vector(d, [&](int64_t j, int64_t n) { sum += load_some(y + j, n); });
    norm.mean = total(sum) / (float)d;
  }
  Vf squares{};
  each_vector(d, [&](int64_t j, int64_t n) {
    Vf x = load_some(y + j, n);
    if (official) {
      x -= norm.mean;
      if (n < W) {
        float part[W];
        store(part, x);
        x = load_part(part, n);
      }
    }
    squares += x * x;
  });
  const float mean_square = total(squares) / (float)d;
  if (twice) {
    norm.a = 1.0f + NORM_EPS;
    norm.f = inverse_root(mean_square + NORM_EPS * (mean_square + NORM_EPS));
  } else {
    norm.f = inverse_root(mean_square + NORM_EPS);
  }
  return norm;
}

INLINE void merge_rows(const Shape& shape, const Inputs& in, const Forward& out, int64_t first, int64_t end) {
  const int64_t d = shape.dim;
  const bool official = shape.official;
  for (int64_t row = first; row < end; row++)
    for (int64_t channel = 0; channel < 3; channel++) {
      const float* y = out.saved.y + row * 3 * d + channel * d;
      const float* u = in.projection + row * shape.columns() + channel * d;
      float* gated = out.gated + row * 3 * d + channel * d;
      const Norm norm = measure(y, d, official, !official && channel == 0);
      each_vector(d, [&](int64_t j, int64_t n) {
        Vf gate = load_some(u + j, n);
        if (official) gate *= sigmoid(gate);
        store_some(gated + j, (load_some(y + j, n) - norm.mean) * norm.f * gate, n);
      });
    }
}

// The gradient of u goes to its columns, that of y where that of the channel's own columns will be.
INLINE void merge_rows_backward(const Shape& shape, const Inputs& in, const Backward& out, int64_t first,
                                int64_t end) {
  const int64_t d = shape.dim, columns = shape.columns(), places[3] = {3 * d, 6 * d, 7 * d};
  const bool official = shape.official;
  for (int64_t row = first; row < end; row++)
    for (int64_t channel = 0; channel < 3; channel++) {
      const float* y = out.saved.y + row * 3 * d + channel * d;
      const float* u = in.projection + row * columns + channel * d;
      const float* grad = out.grad_gated + row * 3 * d + channel * d;
      float* du = out.grad_projection + row * columns + channel * d;
      float* dy = out.grad_projection + row * columns + places[channel];
      const Norm norm = measure(y, d, official, !official && channel == 0);
      Vf sum{}, weighted{};
      each_vector(d, [&](int64_t j, int64_t n) {
        const Vf g = load_some(grad + j, n), raw = load_some(u + j, n);
        const Vf normed = (load_some(y + j, n) - norm.mean) * norm.f;
        Vf gate = raw, slope = g;  // g is zero behind the last column
        if (official) {
          const Vf s = sigmoid(raw);
          gate = raw * s;
          slope = g * (s * (1.0f + raw * (1.0f - s)));
        }
        const Vf dnormed = g * gate;
        sum += dnormed;
        weighted += dnormed * normed;
        store_some(du + j, slope * normed, n);
        store_some(dy + j, dnormed, n);
      });
      const float mean = official ? total(sum) / (float)d : 0.0f;
      const float along = norm.a * total(weighted) / (float)d;
      each_vector(d, [&](int64_t j, int64_t n) {
        const Vf normed = (load_some(y + j, n) - norm.mean) * norm.f;
        store_some(dy + j, norm.f * (load_some(dy + j, n) - mean - normed * along), n);
      });
    }
}

}  // namespace ISA
