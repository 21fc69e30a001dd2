// Operators over rows: norms and SwiGLU, forward and backward.
#include "operators.h"

namespace {

// run(first, end) over the rows of each thread
template <typename F>
void over_rows(int64_t rows, const F& run) {
  const int64_t threads = threads_for(rows);
  on_threads(threads, [&](int64_t thread) { run(rows * thread / threads, rows * (thread + 1) / threads); });
}

void check_rows(const Tensor& x, int64_t parts) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && x.size(1) % parts == 0, "x must be rows of ", parts, " equal parts");
}

Tensor norm(Tensor x, bool official) {
  check_rows(x, 1);
  Held held;
  const int64_t T = x.size(0), d = x.size(1);
  const float* from = held.get<float>(x, "x", {T, d});
  float* to;
  Tensor result = made(x, {T, d}, &to);
  over_rows(T, [&](int64_t first, int64_t end) { chosen_kernels()->norm(from, d, official, first, end, to); });
  return result;
}

Tensor norm_backward(Tensor grad, Tensor x, bool official) {
  check_rows(x, 1);
  Held held;
  const int64_t T = x.size(0), d = x.size(1);
  const float* from = held.get<float>(x, "x", {T, d});
  const float* by = held.get<float>(grad, "grad", {T, d});
  float* to;
  Tensor result = made(x, {T, d}, &to);
  over_rows(T, [&](int64_t first, int64_t end) {
    chosen_kernels()->norm_backward(by, from, d, official, first, end, to);
  });
  return result;
}

Tensor swiglu(Tensor x) {
  check_rows(x, 2);
  Held held;
  const int64_t T = x.size(0), h = x.size(1) / 2;
  const float* from = held.get<float>(x, "x", {T, 2 * h});
  float* to;
  Tensor result = made(x, {T, h}, &to);
  over_rows(T, [&](int64_t first, int64_t end) { chosen_kernels()->swiglu(from, h, first, end, to); });
  return result;
}

Tensor swiglu_backward(Tensor grad, Tensor x) {
  check_rows(x, 2);
  Held held;
  const int64_t T = x.size(0), h = x.size(1) / 2;
  const float* from = held.get<float>(x, "x", {T, 2 * h});
  const float* by = held.get<float>(grad, "grad", {T, h});
  float* to;
  Tensor result = made(x, {T, 2 * h}, &to);
  over_rows(T, [&](int64_t first, int64_t end) { chosen_kernels()->swiglu_backward(by, from, h, first, end, to); });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fuxi_torchrec, m) {
  m.def("norm(Tensor x, bool official) -> Tensor");
  m.def("norm_backward(Tensor grad, Tensor x, bool official) -> Tensor");
  m.def("swiglu(Tensor x) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fuxi_torchrec, CPU, m) {
  m.impl("norm", TORCH_BOX(norm));
  m.impl("norm_backward", TORCH_BOX(norm_backward));
  m.impl("swiglu", TORCH_BOX(swiglu));
  m.impl("swiglu_backward", TORCH_BOX(swiglu_backward));
}
