// Vectors of 8 floats, for AVX2 with FMA and F16C. `vectors_avx512.h` defines the same interface for 16 floats.
#pragma once

constexpr int kLanes = 8;
constexpr int kRegisters = 16;

using Floats = __m256;
using Words = __m256i;   // 8 of 32 bits
using Halves = __m128i;  // 8 of 16 bits

struct Lanes {
  int count;  // lanes 0 to count - 1 are active
};

// Returns the first `left` lanes; all lanes if `left` is at least their number.
inline Lanes first_lanes(int64_t left) { return {left >= kLanes ? kLanes : static_cast<int>(left)}; }

inline Words mask_of(Lanes lanes) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes.count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats as_floats(Words x) { return _mm256_castsi256_ps(x); }
inline Words as_words(Floats x) { return _mm256_castps_si256(x); }

inline Words load_words(const uint32_t* from, Lanes lanes) {
  if (lanes.count == kLanes) return _mm256_loadu_si256(reinterpret_cast<const Words*>(from));
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(from), mask_of(lanes));
}

inline void store_words(uint32_t* to, Lanes lanes, Words x) {
  if (lanes.count == kLanes) return _mm256_storeu_si256(reinterpret_cast<Words*>(to), x);
  _mm256_maskstore_epi32(reinterpret_cast<int*>(to), mask_of(lanes), x);
}

// AVX2 has no masked loads and stores of 16 bits, so partial vectors are copied with memcpy.
inline Halves load_halves(const uint16_t* from, Lanes lanes) {
  if (lanes.count == kLanes) return _mm_loadu_si128(reinterpret_cast<const Halves*>(from));
  Halves halves = _mm_setzero_si128();
  memcpy(&halves, from, lanes.count * sizeof(uint16_t));
  return halves;
}

inline void store_halves(uint16_t* to, Lanes lanes, Halves x) {
  if (lanes.count == kLanes) return _mm_storeu_si128(reinterpret_cast<Halves*>(to), x);
  memcpy(to, &x, lanes.count * sizeof(uint16_t));
}

inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Floats min_of(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats max_of(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Words max_of_words(Words a, Words b) { return _mm256_max_epu32(a, b); }
inline Words shift_left(Words x, int bits) { return _mm256_slli_epi32(x, bits); }
inline Words shift_right(Words x, int bits) { return _mm256_srli_epi32(x, bits); }
inline Words sum_of_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words broadcast_words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Words and_bits(Words a, uint32_t b) { return _mm256_and_si256(a, broadcast_words(b)); }
// Returns `if_nan` in the lanes in which x is NaN, and `otherwise` in the others.
inline Words select_nan(Floats x, Words if_nan, Words otherwise) {
  return _mm256_blendv_epi8(otherwise, if_nan, as_words(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

inline float sum_of(Floats x) {
  const __m128 halves = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
}

inline float largest_of(Floats x) {
  const __m128 halves = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pairs = _mm_max_ps(halves, _mm_movehl_ps(halves, halves));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_movehdup_ps(pairs)));
}

inline uint32_t largest_of(Words x) {
  const __m128i halves = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i pairs = _mm_max_epu32(halves, _mm_shuffle_epi32(halves, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(pairs, _mm_shuffle_epi32(pairs, 0xb1))));
}

inline Words widen(Halves x) { return _mm256_cvtepu16_epi32(x); }

inline Halves narrow(Words x) {
  const Words lower = and_bits(x, 0xffff);
  return _mm_packus_epi32(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1));
}

inline Words widen_bytes(const uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Words widen_signed(const uint8_t* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Floats from_integers(Words x) { return _mm256_cvtepi32_ps(x); }

inline Floats from_float16(Halves x) { return _mm256_cvtph_ps(x); }
inline Halves to_float16(Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
inline Floats from_bfloat16(Halves x) { return as_floats(shift_left(widen(x), 16)); }

// floor(x) of a number x, as a float, and x - floor(x), from 0 to 1.
struct Split {
  Floats whole, fraction;
};

inline Split split_of(Floats x) {
  // NaN is kept: min and max return the second operand then.
  x = min_of(broadcast(254.0f), max_of(broadcast(-252.0f), x));
  const Floats whole = _mm256_floor_ps(x);
  return {whole, x - whole};
}

// Returns sum * 2^whole. Multiplies in two steps, since 2^whole itself may not be a normal float.
inline Floats times_power_of_2(Floats sum, Split split) {
  const Words exponent = _mm256_cvtps_epi32(split.whole), half = _mm256_srai_epi32(exponent, 1);
  const auto power = [](Words x) { return as_floats(shift_left(_mm256_add_epi32(x, _mm256_set1_epi32(127)), 23)); };
  return sum * power(half) * power(_mm256_sub_epi32(exponent, half));
}

// Lane i has the position first + i. Keeps the lanes of the positions (after, last], and sets others to -infinity.
inline Floats between(Floats x, int first, int after, int last) {
  const Words at = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  const Words is_inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(last)),
                                              _mm256_cmpgt_epi32(at, _mm256_set1_epi32(after)));
  return _mm256_blendv_ps(broadcast(-__builtin_inff()), x, as_floats(is_inside));
}

// Transposes 8 vectors of 8 words.
inline void transpose(Words rows[kLanes]) {
  Words t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    rows[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x31);
  }
  for (int i = 0; i < 8; i++) rows[i] = t[i];
}
