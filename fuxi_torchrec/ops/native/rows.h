// What a block does row by row outside of its channels: norms, and the gate of the feed-forward network.
#pragma once

#include "merge.h"

namespace ISA {

INLINE void norm_row(const float* x, int64_t d, bool official, float* to) {
  const Norm norm = measure(x, d, official, false);
  each_vector(d, [&](int64_t j, int64_t n) { store_some(to + j, (load_some(x + j, n) - norm.mean) * norm.f, n); });
}

// dx = f (g − mean(g) − x̂ mean(g x̂)), x̂ the normed row; RMSNorm takes no mean of g.
INLINE void norm_row_backward(const float* grad, const float* x, int64_t d, bool official, float* to) {
  const Norm norm = measure(x, d, official, false);
  Vf sum{}, weighted{};
  each_vector(d, [&](int64_t j, int64_t n) {
    const Vf g = load_some(grad + j, n);
    sum += g;
    weighted += g * (load_some(x + j, n) - norm.mean);  // g is zero behind the last column
  });
  const float mean = official ? total(sum) / (float)d : 0.0f;
  const float along = norm.f * norm.f * total(weighted) / (float)d;
  each_vector(d, [&](int64_t j, int64_t n) {
    const Vf centred = load_some(x + j, n) - norm.mean;
    store_some(to + j, norm.f * (load_some(grad + j, n) - mean - centred * along), n);
  });
}

// A row holds linear | gate: linear · SiLU(gate)
INLINE void swiglu_row(const float* x, int64_t h, float* to) {
  each_vector(h, [&](int64_t j, int64_t n) {
    const Vf gate = load_some(x + h + j, n);
    store_some(to + j, load_some(x + j, n) * gate * sigmoid(gate), n);
  });
}

INLINE void swiglu_row_backward(const float* grad, const float* x, int64_t h, float* to) {
  each_vector(h, [&](int64_t j, int64_t n) {
    const Vf g = load_some(grad + j, n), gate = load_some(x + h + j, n), s = sigmoid(gate);
    store_some(to + j, g * gate * s, n);
    store_some(to + h + j, g * load_some(x + j, n) * (s * (1.0f + gate * (1.0f - s))), n);
  });
}

}  // namespace ISA
