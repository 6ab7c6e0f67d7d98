// Weights quantized in groups: 32 adjacent input features of an output feature share a scale, and in 4 bits a minimum.
//
//   panel   [group of 32 input features]: scales, minima (kQ4 only), codes
//     scales, minima   float16 [features of a panel]
//     codes            kQ8: int8 [32][features]                    weight = scale * code
//                      kQ4: [16 pairs of input features][features], the first one of a pair in the lower 4 bits
//                                                                  weight = scale * code + minimum
//
// A kernel dequantizes a group into the words of a weight that is not quantized, and multiplies them from registers or
// from a buffer. The bits of a row are therefore those of a matmul with the dequantized weight.
#pragma once

#include "vectors.h"

#include <type_traits>

// The values of `Format` in `kernels/native/gemm.py`.
enum Format : int64_t { kPlain = 0, kQ8 = 1, kQ4 = 2 };

constexpr int64_t kGroup = 32;  // input features
constexpr int kFeatures = 2 * kLanes;  // features per panel
constexpr int64_t kAheadGroups = 8;  // distance at which groups are prefetched

inline int64_t group_bytes(int64_t format) { return kFeatures * (format == kQ8 ? 2 + kGroup : 2 + 2 + kGroup / 2); }

inline Floats dequantized(Words codes, Floats scale) { return from_integers(codes) * scale; }

inline Floats float16_at(const uint16_t* halves) { return from_float16(load_halves(halves, first_lanes(kLanes))); }

// Prefetches the group that is `kAheadGroups` after this one.
inline void prefetch_ahead(const uint8_t* group, int64_t format) {
  const int64_t num_bytes = group_bytes(format);
  for (int64_t i = 0; i < num_bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(group) + kAheadGroups * num_bytes + i, _MM_HINT_T0);
}

// Calls `use(i, v, first, second)` with the weights of input features 2 i and 2 i + 1 of vector v of the features of a
// panel, for each pair of a group.
template <class Use>
inline void dequantize_pairs(const uint8_t* group, int64_t format, const Use& use) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(group);
  const Floats scales[2] = {float16_at(halves), float16_at(halves + kLanes)};
  if (format == kQ8) {
    const uint8_t* codes = group + 2 * kFeatures;
    for (int64_t i = 0; i < kGroup / 2; i++, codes += 2 * kFeatures)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const uint8_t* feature_codes = codes + v * kLanes;
        use(i, v, dequantized(widen_signed(feature_codes), scales[v]),
            dequantized(widen_signed(feature_codes + kFeatures), scales[v]));
      }
  } else {
    const Floats minima[2] = {float16_at(halves + kFeatures), float16_at(halves + kFeatures + kLanes)};
    const uint8_t* bytes = group + 4 * kFeatures;
    for (int64_t i = 0; i < kGroup / 2; i++, bytes += kFeatures)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const Words codes = widen_bytes(bytes + v * kLanes);
        use(i, v, multiply_add(from_integers(and_bits(codes, 15)), scales[v], minima[v]),
            multiply_add(from_integers(shift_right(codes, 4)), scales[v], minima[v]));
      }
  }
}

// Words of a group: one or two numbers per word.
template <class Word>
constexpr int64_t kGroupWords = std::is_same_v<Word, float> ? kGroup : kGroup / 2;

// Calls `use(w, v, word)` with word w of vector v of the features of a panel, for each word of a group: one number, in
// float32. The third parameter only selects the type of the words.
template <class Use>
inline void dequantize_words(const uint8_t* group, int64_t format, const float*, const Use& use) {
  dequantize_pairs(group, format, [&](int64_t i, int v, Floats first, Floats second) {
    use(2 * i, v, first);
    use(2 * i + 1, v, second);
  });
}

#ifdef __AVX512BF16__
// The same with two adjacent numbers per word, rounded to bfloat16, halves away from 0. (`vcvtne2ps2bf16`, which rounds
// halves to even, needs a permutation after it: a decoded token took 1.4 times as long.)
template <class Use>
inline void dequantize_words(const uint8_t* group, int64_t format, const uint32_t*, const Use& use) {
  const Words half = broadcast_words(0x8000);
  dequantize_pairs(group, format, [&](int64_t i, int v, Floats first, Floats second) {
    const Words low = shift_right(sum_of_words(as_words(first), half), 16), high = sum_of_words(as_words(second), half);
    use(i, v, as_floats(_mm512_mask_blend_epi16(0xaaaaaaaa, low, high)));
  });
}
#endif

// Dequantizes groups of a panel into words.
template <class Word>
inline void dequantize(const uint8_t* groups, int64_t format, int64_t num_groups, Word* words) {
  const int64_t num_bytes = group_bytes(format);
  for (int64_t g = 0; g < num_groups; g++, groups += num_bytes) {
    prefetch_ahead(groups, format);
    float* to = reinterpret_cast<float*>(words) + g * kGroupWords<Word> * kFeatures;
    dequantize_words(groups, format, words, [&](int64_t w, int v, Floats word) {
      store_floats(to + w * kFeatures + v * kLanes, word);
    });
  }
}
