// The arguments of attention, and functions that its two implementations share.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

// `kernels/native/attention.py` and `attention_work.py` document the fields. A row is token * group_size + head.
struct Round {
  int32_t first_token, end_token, first_key, end_key, first_written, first_block;
};

struct Item {
  int32_t kv_head, first_row, end_row, first_round, end_round;
};

struct Problem {
  const int32_t *tokens, *positions, *blocks;
  const Round* rounds;
  const Item* items;
  int64_t num_items, max_rows;
  int64_t num_kv_heads, group_size, head_dim, block_size;
  int64_t query_token_stride, query_head_stride, kv_head_stride, kv_block_stride;
  int64_t query_dtype, kv_dtype;
  int64_t window, num_threads;
  double scale, softcap;
};

// Sinks may be null.
extern "C" void radixkv_attend(const Problem* problem, const void* query, const void* key, const void* value,
                               void* output, const float* sinks);

constexpr int kKeys = 64;              // keys per block
constexpr int kPair = 2 * kLanes;      // keys whose scores are computed at once
constexpr float kInitialMax = -1e30f;  // largest score before the first key; finite, so that differences are not NaN

// Computes attention in AMX tiles, if the processor has them and the queries are bfloat16. Returns whether it did.
bool attend_in_tiles(const Problem& problem, const void* query, const void* key, const void* value, void* output,
                     const float* sinks);

// Pointers to the keys of a block and to their values, padded to whole pairs of vectors of scores.
struct KeyPointers {
  const void *keys[kKeys], *values[kKeys];
  int num_keys = 0;
};

#ifdef __AVX512BF16__
// Loads 32 numbers of a vector from `at` on as bfloat16, 0 past its end.
inline Words load_pairs(const void* vector, int64_t at, int64_t dtype, int64_t head_dim) {
  const int64_t num_numbers = head_dim - at;
  if (dtype == kBfloat16) {
    const __mmask32 mask = num_numbers >= 32 ? 0xffffffffu : (1u << num_numbers) - 1;
    return _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(vector) + at);
  }
  const Floats low = load(vector, at, dtype, first_lanes(num_numbers));
  const Floats high = load(vector, at + kLanes, dtype, num_numbers > kLanes ? first_lanes(num_numbers - kLanes) : 0);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Interleaves two vectors of 32 numbers: word i has number i of both. `first` has the words 0 to 15, `second` the others.
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

// Sets pointers to the keys [first_key, end_key) of a round and to their values. Unwritten keys point to zeros.
inline void locate(const Problem& problem, const Round& round, int64_t kv_head, const char* key, const char* value,
                   int first_key, int end_key, const float* zeros, KeyPointers& pointers) {
  pointers.num_keys = (end_key - first_key + kPair - 1) / kPair * kPair;
  for (int i = 0; i < pointers.num_keys; i++) {
    const int at = first_key + i;
    if (at >= end_key || at < round.first_written) {
      pointers.keys[i] = pointers.values[i] = zeros;
      continue;
    }
    const int64_t block = problem.blocks[round.first_block + at / problem.block_size - round.first_key / problem.block_size];
    const int64_t number = kv_head * problem.kv_head_stride + block * problem.kv_block_stride +
                           at % problem.block_size * problem.head_dim;
    pointers.keys[i] = key + number * bytes_of(problem.kv_dtype);
    pointers.values[i] = value + number * bytes_of(problem.kv_dtype);
  }
}

// softcap * tanh(x / softcap), times log2(e). `doubled` is 2 * log2(e) * x / softcap.
inline Floats capped(Floats doubled, double softcap) {
  const Floats one = broadcast(1.0f);
  const Floats tanh = one - broadcast(2.0f) / (exp2_of(min_of(doubled, broadcast(100.0f))) + one);
  return tanh * broadcast(static_cast<float>(softcap) * kLog2e);
}
