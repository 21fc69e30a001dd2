// The kernels of one instruction set: compiled once for each, with -DISA=avx512|avx2|plain and the flags for it.
#include "kernels.h"

#include "decode.h"
#include "merge.h"
#include "positional.h"
#include "retention.h"
#include "rows.h"
#include "simd.h"
#include "temporal.h"

namespace ISA {

static int64_t scratch(const Shape& shape) {
  const int64_t retention = RetentionScratch::floats(padded(shape.width())) * (int64_t)sizeof(float);
  const int64_t temporal = TemporalScratch::doubles(shape.scales) * (int64_t)sizeof(double);
  const int64_t positional = PositionalScratch::floats(padded(shape.kernel)) * (int64_t)sizeof(float);
  return round_up(most(retention, most(temporal, positional)), 64);
}

static void forward_unit(const Shape& shape, const Inputs& in, const Forward& out, int64_t user, int64_t unit,
                         char* memory) {
  if (unit < shape.heads) return retention_forward(shape, in, out, user, unit, memory);
  unit -= shape.heads;
  if (unit < shape.groups()) return temporal_forward(shape, in, out, user, unit, memory);
  positional_forward(shape, in, out, user, unit - shape.groups(), memory);
}

static void backward_unit(const Shape& shape, const Inputs& in, const Backward& out, const Sums& sums, int64_t user,
                          int64_t unit, char* memory) {
  if (unit < shape.heads) return retention_backward(shape, in, out, sums, user, unit, memory);
  unit -= shape.heads;
  if (unit < shape.groups()) return temporal_backward(shape, in, out, sums, user, unit, memory);
  positional_backward(shape, in, out, sums, user, unit - shape.groups(), memory);
}

static void forward_rows(const Shape& shape, const Inputs& in, const Forward& out, int64_t first, int64_t end) {
  merge_rows(shape, in, out, first, end);
}

static void backward_rows(const Shape& shape, const Inputs& in, const Backward& out, int64_t first, int64_t end) {
  merge_rows_backward(shape, in, out, first, end);
}

static void norm(const float* x, int64_t d, bool official, int64_t first, int64_t end, float* to) {
  for (int64_t row = first; row < end; row++) norm_row(x + row * d, d, official, to + row * d);
}

static void norm_backward(const float* grad, const float* x, int64_t d, bool official, int64_t first, int64_t end,
                          float* to) {
  for (int64_t row = first; row < end; row++)
    norm_row_backward(grad + row * d, x + row * d, d, official, to + row * d);
}

static void swiglu(const float* x, int64_t h, int64_t first, int64_t end, float* to) {
  for (int64_t row = first; row < end; row++) swiglu_row(x + row * 2 * h, h, to + row * h);
}

static void swiglu_backward(const float* grad, const float* x, int64_t h, int64_t first, int64_t end, float* to) {
  for (int64_t row = first; row < end; row++) swiglu_row_backward(grad + row * h, x + row * 2 * h, h, to + row * 2 * h);
}

static int64_t decode_scratch(const Shape& shape, const Decode& all, int64_t users) {
  return round_up(DecodeScratch::floats(shape, all.hidden, users) * (int64_t)sizeof(float), 64);
}

static void decode(const Shape& shape, const Decode& all, int64_t first, int64_t end, char* memory) {
  decode_users(shape, all, first, end, memory);
}

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)
extern const Kernels kernels;
const Kernels kernels = {NAME(ISA), scratch, forward_unit, forward_rows, backward_rows, backward_unit,
                         norm,      norm_backward, swiglu,    swiglu_backward, decode_scratch, decode};

}  // namespace ISA
