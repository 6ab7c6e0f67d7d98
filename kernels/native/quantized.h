// Weights quantized in groups: 32 adjacent input features of an output feature share a scale, and in 4 bits a minimum.
//
//   panel   [group of 32 input features]: scales, minima (kQ4 only), codes
//     scales, minima   float16 [features of a panel]
//     codes            kQ8: int8 [32][features]                    weight = scale * code
//                      kQ4: [16 pairs of input features][features], the first one of a pair in the lower 4 bits
//                                                                  weight = scale * code + minimum
//
// A kernel dequantizes a part of a panel into a buffer, in the layout of a weight that is not quantized, and multiplies it
// from the buffer. The bits of a row are therefore those of a matmul with the dequantized weight.
#pragma once

#include "vectors.h"

// The values of `Format` in `kernels/native/gemm.py`.
enum Format : int64_t { kPlain = 0, kQ8 = 1, kQ4 = 2 };

constexpr int64_t kGroup = 32;  // input features
constexpr int64_t kAheadGroups = 8;  // distance at which groups are prefetched

inline int64_t group_bytes(int64_t format, int64_t num_features) {
  return format == kQ8 ? num_features * (2 + kGroup) : num_features * (2 + 2 + kGroup / 2);
}

// Pointers to the scales, minima and codes of one vector of features of a group.
struct Group {
  const uint16_t *scales, *minima;
  const uint8_t* codes;
};

inline Group group_at(const uint8_t* group, int64_t format, int64_t num_features, int64_t first_feature) {
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(group) + first_feature;
  const int64_t header = (format == kQ8 ? 2 : 4) * num_features;
  return {scales, scales + num_features, group + header + first_feature};
}

inline Floats dequantized(Words codes, Floats scale) { return from_integers(codes) * scale; }

// Prefetches the group that is `kAheadGroups` after this one.
inline void prefetch_ahead(const uint8_t* group, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(group) + kAheadGroups * num_bytes + i, _MM_HINT_T0);
}

// Calls `store(i, first, second)` with the weights of input features 2 i and 2 i + 1, for each pair of a group.
template <class Store>
inline void dequantize_pairs(const Group& group, int64_t format, int64_t num_features, const Store& store) {
  const Floats scale = from_float16(load_halves(group.scales, first_lanes(kLanes)));
  if (format == kQ8) {
    for (int64_t i = 0; i < kGroup / 2; i++) {
      const uint8_t* codes = group.codes + 2 * i * num_features;
      store(i, dequantized(widened_signed(codes), scale), dequantized(widened_signed(codes + num_features), scale));
    }
  } else {
    const Floats minimum = from_float16(load_halves(group.minima, first_lanes(kLanes)));
    for (int64_t i = 0; i < kGroup / 2; i++) {
      const Words codes = widened_bytes(group.codes + i * num_features);
      store(i, multiply_add(from_integers(common_bits(codes, 15)), scale, minimum),
            multiply_add(from_integers(shifted_down(codes, 4)), scale, minimum));
    }
  }
}

// Dequantizes groups of a panel into words: one number per word, in float32.
inline void dequantize(const uint8_t* groups, int64_t format, int64_t num_groups, int64_t num_features, float* words) {
  const int64_t num_bytes = group_bytes(format, num_features);
  for (int64_t g = 0; g < num_groups; g++, groups += num_bytes) {
    prefetch_ahead(groups, num_bytes);
    for (int64_t f = 0; f < num_features; f += kLanes) {
      float* to = words + g * kGroup * num_features + f;
      dequantize_pairs(group_at(groups, format, num_features, f), format, num_features,
                       [&](int64_t i, Floats first, Floats second) {
                         store_floats(to + 2 * i * num_features, first);
                         store_floats(to + (2 * i + 1) * num_features, second);
                       });
    }
  }
}

#ifdef __AVX512BF16__
// Dequantizes groups of a panel into words: two adjacent numbers per word, rounded to bfloat16.
inline void dequantize(const uint8_t* groups, int64_t format, int64_t num_groups, int64_t num_features,
                       uint32_t* words) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const int64_t num_bytes = group_bytes(format, num_features);
  for (int64_t g = 0; g < num_groups; g++, groups += num_bytes) {
    prefetch_ahead(groups, num_bytes);
    for (int64_t f = 0; f < num_features; f += kLanes) {
      uint32_t* to = words + g * kGroup / 2 * num_features + f;
      dequantize_pairs(group_at(groups, format, num_features, f), format, num_features,
                       [&](int64_t i, Floats first, Floats second) {
                         const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
                         store_words(to + i * num_features, 0xffff, _mm512_permutexvar_epi16(order, both));
                       });
    }
  }
}
#endif
