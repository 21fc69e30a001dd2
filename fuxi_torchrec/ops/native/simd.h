// Vectors of one instruction set, and the few functions on them that the kernels need.
//
// Compiled once per instruction set, each time into a namespace of its own (ISA). Nothing from the standard library is
// used here or in the kernels: an inline function compiled for AVX-512 must never be the one that a plain machine runs.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

namespace ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats a vector
constexpr int ROWS = 8;  // of a register tile
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int ROWS = 4;
#else
constexpr int W = 4;
constexpr int ROWS = 4;
#endif
constexpr int W2 = W / 2;  // doubles a vector

typedef float Vf __attribute__((vector_size(4 * W)));
typedef int32_t Vi __attribute__((vector_size(4 * W)));
typedef double Vd __attribute__((vector_size(8 * W2)));
typedef int64_t Vl __attribute__((vector_size(8 * W2)));
typedef float Vh __attribute__((vector_size(4 * W2)));  // as many floats as doubles in a vector

// Memory may be aligned to elements only: every access goes through memcpy, which becomes an unaligned instruction.
INLINE Vf load(const float* p) {
  Vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, Vf v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE Vd load(const double* p) {
  Vd v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(double* p, Vd v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE Vd load_wide(const float* p) {
  Vh v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Vd);
}
INLINE void store_narrow(float* p, Vd v) {
  const Vh narrow = __builtin_convertvector(v, Vh);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}

// The first n floats of a vector, zero behind them.
INLINE Vf load_part(const float* p, int64_t n) {
  float part[W] = {};
  for (int64_t i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}
INLINE void store_part(float* p, Vf v, int64_t n) {
  float part[W];
  store(part, v);
  for (int64_t i = 0; i < n; i++) p[i] = part[i];
}

INLINE float total(Vf v) {
  float parts[W], sum = 0;
  store(parts, v);
  for (int i = 0; i < W; i++) sum += parts[i];
  return sum;
}

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// e^x by 2^n · e^r, |r| ≤ ln 2 / 2, to about one unit in the last place. Beyond ±87 it stays finite and normal; NaN
// stays NaN.
INLINE Vf exponential(Vf x) {
  constexpr float low = -87.0f, high = 87.0f, magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  x = x < low ? low - Vf{} : x;
  x = x > high ? high - Vf{} : x;
  const Vf shifted = x * 1.44269504088896341f + magic;
  const Vf n = shifted - magic;
  Vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vi power = ((Vi)shifted << 23) + 0x3f800000;
  return p * (Vf)power;
}

INLINE Vf sigmoid(Vf x) { return 1.0f / (1.0f + exponential(-x)); }

// In float64, for exponents from −80 to 0.
INLINE Vd exponential(Vd x) {
  constexpr double magic = 6755399441055744.0;  // 1.5 · 2^52
  const Vd shifted = x * 1.4426950408889634074 + magic;
  const Vd n = shifted - magic;
  Vd r = x - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  Vd p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;  // the series: |r|^14 / 14! is below 1e-17
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  const Vl power = ((Vl)shifted << 52) + 0x3ff0000000000000;
  return p * (Vd)power;
}

constexpr double LOWEST_EXPONENT = -80.0;  // as in ops/decay.py

INLINE Vd power_of(Vd log_decay, Vd ticks) {
  const Vd exponent = log_decay * ticks;
  return exponential(exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT - Vd{} : exponent);
}
INLINE double power_of(double log_decay, double ticks) {
  double one[W2];
  store(one, power_of(log_decay - Vd{}, ticks - Vd{}));
  return one[0];
}

// --- transposes ------------------------------------------------------------------------------------------------------

// Swap the off-diagonal blocks of size H of every 2H × 2H block; with H = 1, 2, 4 .. W / 2 in turn, a transpose.
template <int H>
INLINE void swap_blocks(Vf* r) {
  Vi first, second;
  for (int j = 0; j < W; j++) {
    first[j] = (j & H) ? W + j - H : j;
    second[j] = (j & H) ? W + j : j + H;
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & H) continue;
    const Vf a = r[i], b = r[i + H];
    r[i] = __builtin_shuffle(a, b, first);
    r[i + H] = __builtin_shuffle(a, b, second);
  }
}

// to (columns × rows) = from (rows × columns) transposed; both counts multiples of W.
INLINE void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride) {
  for (int64_t i = 0; i < rows; i += W)
    for (int64_t j = 0; j < columns; j += W) {
      Vf r[W];
#pragma GCC unroll 16
      for (int n = 0; n < W; n++) r[n] = load(from + (i + n) * from_stride + j);
      swap_blocks<1>(r);
      swap_blocks<2>(r);
      if constexpr (W > 4) swap_blocks<4>(r);
      if constexpr (W > 8) swap_blocks<8>(r);
#pragma GCC unroll 16
      for (int n = 0; n < W; n++) store(to + (j + n) * to_stride + i, r[n]);
    }
}

// --- products --------------------------------------------------------------------------------------------------------

// One tile of X = scale · X + P R: ROWS rows, N vectors. P(m, l) = p[m · pm + l · pl]; a scale of 0 reads no X.
template <int N>
INLINE void product_tile(const float* p, int64_t pm, int64_t pl, const float* r, int64_t rs, int64_t length, float* x,
                         int64_t xs, float scale) {
  Vf sum[ROWS][N];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[m][n] = scale == 0.0f ? Vf{} : load(x + m * xs + n * W) * scale;
  for (int64_t l = 0; l < length; l++) {
    Vf right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = load(r + l * rs + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
      const float left = p[m * pm + l * pl];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m][n] += left * right[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(x + m * xs + n * W, sum[m][n]);
}

// What of a product is needed or not zero.
enum class Part {
  ALL,
  LOWER_OUT,  // the result's columns up to the diagonal: whole vectors
  LOWER_IN,   // P is lower triangular: row m has columns up to m
  UPPER_IN,   // P is upper triangular: row m has columns from m
};

// X (rows × columns) = scale · X + P R, rows a multiple of ROWS, columns of W; R has `length` rows.
template <Part PART>
INLINE void product(const float* p, int64_t pm, int64_t pl, const float* r, int64_t rs, int64_t length, float* x,
                    int64_t xs, int64_t rows, int64_t columns, float scale) {
  for (int64_t m = 0; m < rows; m += ROWS) {
    const int64_t from = PART == Part::UPPER_IN ? least(m, length) : 0;
    const int64_t to = PART == Part::LOWER_IN ? least(m + ROWS, length) : length;
    const int64_t end = PART == Part::LOWER_OUT ? least(round_up(m + ROWS, W), columns) : columns;
    const float* left = p + m * pm + from * pl;
    const float* right = r + from * rs;
    int64_t n = 0;
    for (; n + 2 * W <= end; n += 2 * W)
      product_tile<2>(left, pm, pl, right + n, rs, to - from, x + m * xs + n, xs, scale);
    if (n < end) product_tile<1>(left, pm, pl, right + n, rs, to - from, x + m * xs + n, xs, scale);
  }
}

// x (columns) = p R from column n on, as long as N vectors of columns are left; sums stay in registers.
template <int N>
INLINE int64_t row_strips(const float* p, const float* r, int64_t rs, int64_t length, float* x, int64_t n,
                          int64_t columns) {
  for (; n + N * W <= columns; n += N * W) {
    Vf sums[N]{};
    for (int64_t l = 0; l < length; l++)
#pragma GCC unroll 16
      for (int k = 0; k < N; k++) sums[k] += p[l] * load(r + l * rs + n + k * W);
#pragma GCC unroll 16
    for (int k = 0; k < N; k++) store(x + n + k * W, sums[k]);
  }
  return n;
}

// X (users × columns) = P R for few rows and any number of columns; P is (users × length) with row stride `ps`.
// One to three rows: what costs is to fetch R, in strips as wide as the registers allow.
INLINE void few_rows(const float* p, int64_t ps, int64_t users, const float* r, int64_t rs, int64_t length, float* x,
                     int64_t xs, int64_t columns) {
  for (int64_t user = 0; user < users; user++, p += ps, x += xs) {
    int64_t n = row_strips<W == 16 ? 16 : 8>(p, r, rs, length, x, 0, columns);
    n = row_strips<4>(p, r, rs, length, x, n, columns);
    n = row_strips<1>(p, r, rs, length, x, n, columns);
    for (; n < columns; n++) {
      float sum = 0;
      for (int64_t l = 0; l < length; l++) sum += p[l] * r[l * rs + n];
      x[n] = sum;
    }
  }
}

}  // namespace ISA
