// A GEMM of rows with a weight packed in panels, and what its implementations have in common.
#pragma once

#include "buffer.h"
#include "quantized.h"
#include "vectors.h"

#include <algorithm>

// `out` is rows * weight + bias. With `other_weight`, the projection `up` of a gated MLP, it is silu(rows * weight + bias) *
// (rows * other_weight + other_bias). Biases and `other_weight` may be null. `dtype` is a `Dtype`, and `format` a `Format`.
struct Matmul {
  const void* rows;
  const void *weight, *other_weight;
  const void *bias, *other_bias;
  void* out;
  int64_t num_rows, in_features, out_features, dtype, format, num_threads;
};

extern "C" void radixkv_multiply(const Matmul* matmul);

// Computes a GEMM in AMX tiles, if the processor has them and the shape fits. Returns whether it did.
bool multiply_in_tiles(const Matmul& matmul);

inline Floats with_bias(const float* sums, const void* bias, int64_t at, int64_t dtype, Lanes lanes) {
  const Floats sum = load_floats(sums);
  return bias ? sum + load(bias, at, dtype, lanes) : sum;
}
