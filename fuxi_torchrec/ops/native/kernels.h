// What the operators hand to the kernels: shapes and pointers. The kernels of one instruction set are a table.
//
// A block's channels are cut into units of work, each of one user: the retention heads, groups of temporal columns,
// strips of positional columns. Units of a user are independent of each other, so that one long history occupies
// several threads too; what they add to the gradients of parameters goes to the thread's own sums.
#pragma once

#include <stdint.h>

constexpr int64_t CHUNK = 32;  // events
constexpr int64_t PAD = 16;    // widths in scratch and saved states are multiples of it, whatever the vectors' width
constexpr int64_t GROUP = 16;  // temporal columns of the sin half, with as many of the cos half
constexpr int64_t STRIP = 64;  // positional columns
constexpr float NORM_EPS = 1e-6f;

inline constexpr int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }

// Columns of the projection: u (3d), q, k, v, temporal values, positional values; of outputs: retention, temporal,
// positional.
struct Shape {
  int64_t events, users, dim, heads, scales, kernel, positions;
  bool official;  // LayerNorm, SiLU on u, λ^{i−j+1}; else RMSNorm, twice for retention

  int64_t columns() const { return 8 * dim; }
  int64_t width() const { return dim / heads; }
  int64_t half() const { return dim / 2; }
  int64_t scale_width() const { return dim / (2 * scales); }
  int64_t groups() const { return (half() + GROUP - 1) / GROUP; }
  int64_t strips() const { return (dim + STRIP - 1) / STRIP; }
  int64_t units() const { return heads + groups() + strips(); }
  // elements of one chunk's saved state
  int64_t retention_state() const { return heads * padded(width()) * padded(width()); }
  int64_t temporal_state() const { return 4 * groups() * GROUP; }  // float64: sin half (cos, sin), cos half (cos, sin)
  int64_t positional_state() const { return strips() * padded(kernel) * STRIP; }
};

struct Inputs {
  const float* projection;     // (T, 8d)
  const int64_t* offsets;      // (B + 1)
  const float* retention_log;  // (H) log λ
  const float* key;            // (T, scales, 2)
  const float* query;          // (T, 2 scales, 2)
  const int64_t* ticks;        // (T) to the next event
  const float* temporal_log;   // (scales) log r
  const float* temporal_gain;  // (2 scales)
  const float* temporal_skip;
  const float* table;  // (positions, kernel)
  const float* positional_gain;
  const float* positional_skip;
  const int64_t* start;  // (B) or null
  // before each user's first event, or null
  const float* retention_before;   // (B, H, width, width)
  const double* temporal_before;   // (B, 2 scales, 2, scale width)
  const float* positional_before;  // (B, kernel, d)

  // Saved states are numbered so that no sum over users is needed: T / CHUNK + B of them at most.
  int64_t first_chunk(int64_t user) const { return offsets[user] / CHUNK + user; }
};

struct Saved {
  float* y;  // (T, 3d) before the norms
  float* retention;
  double* temporal;
  float* positional;
};

struct Forward {
  float* gated;  // (T, 3d)
  Saved saved;   // states may be null; y may be gated itself
  // after each user's last event, or null
  float* retention_after;
  double* temporal_after;
  float* positional_after;
};

struct Backward {
  const float* grad_gated;  // (T, 3d)
  Saved saved;
  // of the states after, or null
  const float* grad_retention_after;
  const double* grad_temporal_after;
  const float* grad_positional_after;
  float* grad_projection;  // (T, 8d)
  // of the states before, or null
  float* grad_retention_before;
  double* grad_temporal_before;
  float* grad_positional_before;
};

// A thread's own sums.
struct Sums {
  double* retention_log;  // (H)
  double* temporal_log;   // (d / 2) by column
  double* temporal_gain;  // (d)
  double* temporal_skip;
  double* positional;  // gain, skip
  float* table;        // (positions, kernel)
};

// --- decoding: one event of each user through all blocks ---------------------------------------------------------------

struct Layer {
  const float *in_proj, *out_proj, *ffn_in, *ffn_out;
  const float* lambda;                            // (H)
  const float *temporal_gain, *temporal_skip;     // (2 scales)
  const double* temporal_decay;                   // (B, scales) to the next event
  const float* table;                             // (positions, kernel)
  float positional_gain, positional_skip;
  // states before the event, and where those after it go; null if they are not wanted
  const float *retention, *positional;
  const double* temporal;
  float *retention_after, *positional_after;
  double* temporal_after;
};

struct Decode {
  const Layer* layers;
  int64_t count, hidden;    // layers, width of the feed-forward network
  const float* rows;        // (B, d) as they enter the first block
  const int64_t* position;  // (B) rows of the tables
  const bool* waiting;      // (B) whether there is an event
  const float* key;         // (B, scales, 2)
  const float* query;       // (B, 2 scales, 2)
  float* output;            // (B, d); null if only states are wanted
};

struct Kernels {
  const char* name;
  int64_t (*scratch)(const Shape&);  // bytes a thread needs
  void (*forward_unit)(const Shape&, const Inputs&, const Forward&, int64_t user, int64_t unit, char* scratch);
  void (*forward_rows)(const Shape&, const Inputs&, const Forward&, int64_t first, int64_t end);
  void (*backward_rows)(const Shape&, const Inputs&, const Backward&, int64_t first, int64_t end);
  void (*backward_unit)(const Shape&, const Inputs&, const Backward&, const Sums&, int64_t user, int64_t unit,
                        char* scratch);
  // rows first .. end − 1
  void (*norm)(const float* x, int64_t width, bool official, int64_t first, int64_t end, float* to);
  void (*norm_backward)(const float* grad, const float* x, int64_t width, bool official, int64_t first, int64_t end,
                        float* to);
  void (*swiglu)(const float* x, int64_t hidden, int64_t first, int64_t end, float* to);
  void (*swiglu_backward)(const float* grad, const float* x, int64_t hidden, int64_t first, int64_t end, float* to);
  int64_t (*decode_scratch)(const Shape&, const Decode&, int64_t users);
  void (*decode)(const Shape&, const Decode&, int64_t first, int64_t end, char* scratch);  // users first .. end − 1
};
