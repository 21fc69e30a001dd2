// Operators of decoding: a query, and an append of one event, of each of a few users, through all blocks.
#include <cmath>

#include "operators.h"

namespace {

using List = std::vector<Tensor>;

constexpr size_t PARAMETERS = 11, CHANNELS = 3;  // of a layer

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float logsigmoid(float x) { return std::fmin(0.0f, x) - std::log1p(std::exp(-std::fabs(x))); }

int64_t floor_modulus(int64_t t, int64_t period) {
  const int64_t rest = t % period;
  return rest < 0 ? rest + period : rest;
}

// Everything that a step needs, and keeps alive.
struct Step {
  Held held;
  Shape shape{};
  Decode all{};
  std::vector<Layer> layers;
  std::vector<float> lambda, gain, skip, key, query;
  std::vector<double> decay;
  std::vector<int64_t> position;
  std::unique_ptr<bool[]> waiting;

  Step(const Tensor& count, const Tensor& pending_time, const Tensor& pending, const List& memory,
       const Tensor& next_time, const List& parameters, const std::vector<int64_t>& periods, bool official,
       bool phases) {
    const size_t L = parameters.size() / PARAMETERS;
    STD_TORCH_CHECK(L > 0 && parameters.size() == L * PARAMETERS, "parameters must be 11 a layer");
    STD_TORCH_CHECK(memory.size() == L * CHANNELS, "memory must be 3 tensors a layer");
    STD_TORCH_CHECK(pending.dim() == 2 && pending.size(1) > 0, "pending must be (B, d)");
    const Tensor &decays = parameters[4], &table = parameters[8], &ffn_out = parameters[3];
    STD_TORCH_CHECK(decays.dim() == 1 && table.dim() == 2 && ffn_out.dim() == 2, "parameters are of the wrong shape");
    const int64_t B = pending.size(0), d = pending.size(1), scales = static_cast<int64_t>(periods.size());
    shape = {B, B, d, decays.size(0), scales, table.size(1), table.size(0), official};
    STD_TORCH_CHECK(shape.heads > 0 && d % shape.heads == 0, "heads must divide the width");
    STD_TORCH_CHECK(scales > 0 && d % (2 * scales) == 0, "2 x scales must divide the width");
    STD_TORCH_CHECK(shape.kernel > 0 && shape.positions > 0 && ffn_out.size(0) > 0, "widths must not be 0");
    all.hidden = ffn_out.size(0);
    all.count = static_cast<int64_t>(L);
    all.rows = held.get<float>(pending, "pending", {B, d});
    const int64_t* from = held.get<int64_t>(pending_time, "pending_time", {B});
    const int64_t* to = held.get<int64_t>(next_time, "next_time", {B});
    read_times(held.get<int64_t>(count, "count", {B}), from, to, periods, phases);
    layers.resize(L);
    lambda.resize(L * shape.heads);
    gain.resize(L * 2 * scales);
    skip.resize(L * 2 * scales);
    decay.resize(L * B * scales);
    for (size_t l = 0; l < L; l++)
      read_layer(l, &parameters[l * PARAMETERS], &memory[l * CHANNELS], from, to, periods);
    all.layers = layers.data();
  }

  void read_times(const int64_t* count, const int64_t* from, const int64_t* to, const std::vector<int64_t>& periods,
                  bool phases) {
    const int64_t B = shape.users, scales = shape.scales;
    key.assign(B * scales * 2, std::sqrt(0.5f));
    query.assign(B * scales * 4, std::sqrt(0.5f));
    position.resize(B);
    waiting = std::make_unique<bool[]>(B);
    for (int64_t user = 0; user < B; user++) {
      waiting[user] = count[user] > 0;
      position[user] = std::clamp<int64_t>(count[user] - 1, 0, shape.positions - 1);
      for (int64_t k = 0; phases && k < scales; k++) {
        STD_TORCH_CHECK(periods[k] > 0, "periods must be positive");
        const double theta = 2 * M_PI / static_cast<double>(periods[k]);
        const float own = static_cast<float>(static_cast<double>(floor_modulus(from[user], periods[k])) * theta);
        const float next = static_cast<float>(static_cast<double>(floor_modulus(to[user], periods[k])) * theta);
        float *sine = &query[(user * 2 * scales + k) * 2], *cosine = sine + 2 * scales;
        key[(user * scales + k) * 2] = std::cos(own), key[(user * scales + k) * 2 + 1] = std::sin(own);
        sine[0] = std::sin(next), sine[1] = -std::cos(next);
        cosine[0] = std::cos(next), cosine[1] = std::sin(next);
      }
    }
    all.key = key.data(), all.query = query.data(), all.position = position.data(), all.waiting = waiting.get();
  }

  void read_layer(size_t l, const Tensor* p, const Tensor* memory, const int64_t* from, const int64_t* to,
                  const std::vector<int64_t>& periods) {
    const int64_t B = shape.users, d = shape.dim, h = all.hidden, scales = shape.scales, K = shape.width();
    Layer& layer = layers[l];
    layer.in_proj = held.get<float>(p[0], "in_proj", {d, 8 * d});
    layer.out_proj = held.get<float>(p[1], "out_proj", {3 * d, d});
    layer.ffn_in = held.get<float>(p[2], "ffn_in", {d, 2 * h});
    layer.ffn_out = held.get<float>(p[3], "ffn_out", {h, d});
    const float* retention = held.get<float>(p[4], "retention decay", {shape.heads});
    const float* temporal = held.get<float>(p[5], "temporal decay", {scales});
    const bool mixed = p[6].numel() > 0;  // else gain 1, skip 0
    const float* alpha = mixed ? held.get<float>(p[6], "temporal alpha", {2 * scales}) : nullptr;
    const float* beta = mixed ? held.get<float>(p[7], "temporal beta", {2 * scales}) : nullptr;
    layer.table = held.get<float>(p[8], "table", {shape.positions, shape.kernel});
    layer.positional_gain = *held.get<float>(p[9], "positional alpha", {}) * (2.0f / static_cast<float>(shape.kernel));
    layer.positional_skip = *held.get<float>(p[10], "positional beta", {});
    layer.retention = held.get<float>(memory[0], "retention state", {B, shape.heads, K, K});
    layer.temporal = held.get<double>(memory[1], "temporal state", {B, 2 * scales, 2, shape.scale_width()});
    layer.positional = held.get<float>(memory[2], "positional state", {B, shape.kernel, d});

    float total = 0;
    for (int64_t a = 0; a < shape.heads; a++) {  // λ = exp(−exp(−Σ softplus(w)))
      total += softplus(retention[a]);
      lambda[l * shape.heads + a] = std::exp(-std::exp(-total));
    }
    for (int64_t g = 0; g < 2 * scales; g++) {
      gain[l * 2 * scales + g] = mixed ? alpha[g] : 1.0f;
      skip[l * 2 * scales + g] = mixed ? beta[g] : 0.0f;
    }
    for (int64_t k = 0; k < scales; k++) {  // log r = θ logsigmoid(w)
      const float theta = static_cast<float>(2 * M_PI / static_cast<double>(periods[k]));
      const double log = static_cast<double>(theta * logsigmoid(temporal[k]));
      for (int64_t user = 0; user < B; user++) {
        const double ticks = static_cast<double>(std::max<int64_t>(0, to[user] - from[user]));
        const double exponent = log * ticks;
        decay[(l * B + user) * scales + k] = std::exp(exponent < -80.0 ? -80.0 : exponent);  // NaN stays
      }
    }
    layer.lambda = &lambda[l * shape.heads];
    layer.temporal_gain = &gain[l * 2 * scales], layer.temporal_skip = &skip[l * 2 * scales];
    layer.temporal_decay = decay.data() + l * B * scales;
  }

  void run() {
    if (!shape.users) return;
    const Kernels& kernels = *chosen_kernels();
    const int64_t threads =
        std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), shape.users / 4));
    on_threads(threads, [&](int64_t thread) {
      // so many at a time that their rows stay near
      const int64_t end = shape.users * (thread + 1) / threads;
      for (int64_t first = shape.users * thread / threads; first < end; first += TOGETHER) {
        const int64_t users = std::min(TOGETHER, end - first);
        const Memory memory = allocate(kernels.decode_scratch(shape, all, users));
        kernels.decode(shape, all, first, first + users, memory.get());
      }
    });
  }
  static constexpr int64_t TOGETHER = 64;
};

Tensor query(Tensor count, Tensor pending_time, Tensor pending, List memory, Tensor next_time, List parameters,
             std::vector<int64_t> periods, bool official, bool phases) {
  Step step(count, pending_time, pending, memory, next_time, parameters, periods, official, phases);
  Tensor output = made(pending, {step.shape.users, step.shape.dim}, &step.all.output);
  if (step.shape.users) step.run();
  return output;
}

List append(Tensor count, Tensor pending_time, Tensor pending, List memory, Tensor next_time, List parameters,
            std::vector<int64_t> periods, bool official, bool phases) {
  Step step(count, pending_time, pending, memory, next_time, parameters, periods, official, phases);
  const Shape& s = step.shape;
  List after;
  for (Layer& layer : step.layers) {
    after.push_back(made(pending, {s.users, s.heads, s.width(), s.width()}, &layer.retention_after));
    after.push_back(made(pending, {s.users, 2 * s.scales, 2, s.scale_width()}, &layer.temporal_after));
    after.push_back(made(pending, {s.users, s.kernel, s.dim}, &layer.positional_after));
  }
  step.run();
  return after;
}

}  // namespace

#define STEP_ARGUMENTS                                                                                         \
  "(Tensor count, Tensor pending_time, Tensor pending, Tensor[] memory, Tensor next_time, Tensor[] parameters, " \
  "int[] periods, bool official, bool phases)"

STABLE_TORCH_LIBRARY_FRAGMENT(fuxi_torchrec, m) {
  m.def("query" STEP_ARGUMENTS " -> Tensor");
  m.def("append" STEP_ARGUMENTS " -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(fuxi_torchrec, CPU, m) {
  m.impl("query", TORCH_BOX(query));
  m.impl("append", TORCH_BOX(append));
}
