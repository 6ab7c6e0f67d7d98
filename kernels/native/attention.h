// What is attended to, and what the ways to do so have in common.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

// The fields are documented in `kernels/native/attention.py`. Rows are counted head by head: token * group_size + head.
struct Step {
  int32_t first_token, end_token, first_key, end_key, first_written, first_block;
};

struct Item {
  int32_t kv_head, first_row, end_row, first_step, end_step;
};

struct Problem {
  const int32_t *tokens, *positions, *blocks;
  const Step* steps;
  const Item* items;
  int64_t num_items, most_rows;
  int64_t num_kv_heads, group_size, head_dim, block_size;
  int64_t query_token_stride, query_head_stride, kv_head_stride, kv_block_stride;
  int64_t query_kind, kv_kind;
  int64_t window, num_threads;
  double scale, softcap;
};

// Sinks may be null.
extern "C" void radixkv_attend(const Problem* problem, const void* query, const void* key, const void* value,
                               void* output, const float* sinks);

constexpr int kKeys = 64;               // of a block, which rows meet at once
constexpr int kPair = 2 * kLanes;       // keys whose scores are computed at once
constexpr float kNothingSeen = -1e30f;  // finite, so that the difference of two is a number

// Attends in tiles, if the processor has them and they can hold the numbers.
bool attend_in_tiles(const Problem& problem, const void* query, const void* key, const void* value, void* output,
                     const float* sinks);

// Where keys of a block are, and their values; as many as there are vectors of scores to fill.
struct Found {
  const void *keys[kKeys], *values[kKeys];
  int num_keys = 0;
};

#ifdef __AVX512BF16__
// Loads 32 numbers of a vector from `at` on as bfloat16; those behind its end are 0.
inline Words load_pairs(const void* vector, int64_t at, int64_t kind, int64_t head_dim) {
  const int64_t left = head_dim - at;
  if (kind == kBfloat16) {
    const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(vector) + at);
  }
  const Floats low = load(vector, at, kind, first_lanes(left));
  const Floats high = load(vector, at + kLanes, kind, left > kLanes ? first_lanes(left - kLanes) : 0);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Makes words of the numbers of two vectors, the first ones' and then the others'.
struct Interleaved {
  Words first, second;

  Interleaved(Words a, Words b) {
    alignas(64) static constexpr uint16_t kPairs[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const Words low = _mm512_load_si512(kPairs), high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
    first = _mm512_permutex2var_epi16(a, low, b);
    second = _mm512_permutex2var_epi16(a, high, b);
  }
};
#endif

// Finds the keys [first_key, end_key) of a step, and their values. Keys that are not written are zeros.
inline void find(const Problem& problem, const Step& step, int64_t kv_head, const char* key, const char* value,
                 int first_key, int end_key, const float* zeros, Found& found) {
  found.num_keys = (end_key - first_key + kPair - 1) / kPair * kPair;
  for (int i = 0; i < found.num_keys; i++) {
    const int at = first_key + i;
    if (at >= end_key || at < step.first_written) {
      found.keys[i] = found.values[i] = zeros;
      continue;
    }
    const int64_t block = problem.blocks[step.first_block + at / problem.block_size - step.first_key / problem.block_size];
    const int64_t number = kv_head * problem.kv_head_stride + block * problem.kv_block_stride +
                           at % problem.block_size * problem.head_dim;
    found.keys[i] = key + number * bytes_of(problem.kv_kind);
    found.values[i] = value + number * bytes_of(problem.kv_kind);
  }
}

// softcap * tanh(x / softcap), times log2(e). `doubled` is 2 * log2(e) * x / softcap.
inline Floats capped(Floats doubled, double softcap) {
  const Floats one = all(1.0f);
  const Floats tanh = one - all(2.0f) / (exp2_of(smaller(doubled, all(100.0f))) + one);
  return tanh * all(static_cast<float>(softcap) * kLog2e);
}
