// Vectors of 16 floats: what attention and rows have in common. Needs AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// How numbers are stored. `kernels/native/library.py` has the same values.
enum Kind : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

constexpr int kLanes = 16;
constexpr float kLog2e = 1.4426950408889634f;

inline int64_t bytes_of(int64_t kind) { return kind == kFloat32 ? 4 : 2; }

// A mask of the first `left` lanes; of all lanes if there are more.
inline __mmask16 first_lanes(int64_t left) {
  return left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

// Loads numbers as floats; lanes outside the mask are 0 and are not read.
inline __m512 load(const void* numbers, int64_t at, int64_t kind, __mmask16 mask) {
  if (kind == kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(numbers) + at);
  const __m256i halves = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(numbers) + at);
  if (kind == kFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Rounds to bfloat16 as torch does: to nearest, ties to even; denormal numbers stay.
inline __m256i to_bfloat16(__m512 numbers) {
  const __m512i bits = _mm512_castps_si512(numbers);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}

// Rounds and stores the lanes of the mask.
inline void store(void* numbers, int64_t at, int64_t kind, __mmask16 mask, __m512 values) {
  if (kind == kFloat32) {
    _mm512_mask_storeu_ps(static_cast<float*>(numbers) + at, mask, values);
  } else {
    const __m256i halves = kind == kFloat16 ? _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT) : to_bfloat16(values);
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(numbers) + at, mask, halves);
  }
}

// 2 to the power of numbers, within 2 units of the last place: exactly 1 for 0, 0 below -150, infinite from 128 on.
inline __m512 exp2_of(__m512 x) {
  // 2^rest = 1 + rest * (...), for rest in [0, 1): the polynomial of degree 5 with the least relative error, 8e-8.
  const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for infinite x
  __m512 sum = _mm512_set1_ps(1.8671302133394475e-3f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.017030018743722e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.579991332070769e-2f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.401644500956921e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.931513118094658e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, x);  // times 2^floor(x)
}

// Transposes 16 vectors of 16 words.
inline void transpose(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// A number times its sigmoid.
inline __m512 silu_of(__m512 x) {
  const __m512 power = exp2_of(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2e)), _mm512_set1_ps(200.0f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}
