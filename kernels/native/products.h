// A product of rows with a weight in panels, and what its ways to multiply have in common.
#pragma once

#include "buffer.h"
#include "vectors.h"

#include <algorithm>

// Fields are told in `kernels/native/products.py`.
struct Product {
  const void* rows;
  const void *weight, *other_weight;
  const void *bias, *other_bias;
  void* out;
  int64_t num_rows, in_features, out_features, kind, num_threads;
};

constexpr int kFeatures = 2 * kLanes;  // of a panel

// Computes a product in tiles, if the processor has them and they can hold it.
bool multiply_in_tiles(const Product& product);

inline Floats with_bias(const float* sums, const void* bias, int64_t at, int64_t kind, Lanes lanes) {
  const Floats sum = load_floats(sums);
  return bias ? sum + load(bias, at, kind, lanes) : sum;
}

// Adds the bias to the sums of some panels, gates those of the other weight with them, and stores the result.
inline void finish(const Product& product, int64_t first_row, int64_t num_rows, int64_t panel, int64_t num_panels,
                   const float* sums, const float* other_sums, int64_t stride) {
  const int64_t first = panel * kFeatures, end = std::min(product.out_features, first + num_panels * kFeatures);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t f = first; f < end; f += kLanes) {
      const Lanes lanes = first_lanes(product.out_features - f);
      const int64_t at = r * stride + f - first;
      Floats number = with_bias(sums + at, product.bias, f, product.kind, lanes);
      if (product.other_weight)
        number = silu_of(number) * with_bias(other_sums + at, product.other_bias, f, product.kind, lanes);
      store(product.out, (first_row + r) * product.out_features + f, product.kind, lanes, number);
    }
}
