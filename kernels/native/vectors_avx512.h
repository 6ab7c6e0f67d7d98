// Vectors of 16 floats, for AVX-512 (F, BW, DQ, VL). `vectors_avx2.h` defines the same interface for 8 floats.
#pragma once

constexpr int kLanes = 16;
constexpr int kRegisters = 32;

using Floats = __m512;
using Words = __m512i;   // 16 of 32 bits
using Halves = __m256i;  // 16 of 16 bits
using Lanes = __mmask16;

// Returns a mask of the first `left` lanes; all lanes if `left` is at least their number.
inline Lanes first_lanes(int64_t left) { return left >= kLanes ? 0xffff : static_cast<Lanes>((1u << left) - 1); }

inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }

inline Words load_words(const uint32_t* from, Lanes lanes) { return _mm512_maskz_loadu_epi32(lanes, from); }
inline void store_words(uint32_t* to, Lanes lanes, Words x) { _mm512_mask_storeu_epi32(to, lanes, x); }
inline Halves load_halves(const uint16_t* from, Lanes lanes) { return _mm256_maskz_loadu_epi16(lanes, from); }
inline void store_halves(uint16_t* to, Lanes lanes, Halves x) { _mm256_mask_storeu_epi16(to, lanes, x); }

inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats min_of(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Words max_of_words(Words a, Words b) { return _mm512_max_epu32(a, b); }
inline Words shift_left(Words x, int bits) { return _mm512_slli_epi32(x, bits); }
inline Words shift_right(Words x, int bits) { return _mm512_srli_epi32(x, bits); }
inline Words sum_of_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words broadcast_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Words and_bits(Words a, uint32_t b) { return _mm512_and_si512(a, broadcast_words(b)); }
// Returns `if_nan` in the lanes in which x is NaN, and `otherwise` in the others.
inline Words select_nan(Floats x, Words if_nan, Words otherwise) {
  return _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), if_nan);
}
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline uint32_t largest_of(Words x) { return _mm512_reduce_max_epu32(x); }

inline Words widen(Halves x) { return _mm512_cvtepu16_epi32(x); }
inline Halves narrow(Words x) { return _mm512_cvtepi32_epi16(x); }  // the lower halves

inline Words widen_bytes(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Words widen_signed(const uint8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats from_integers(Words x) { return _mm512_cvtepi32_ps(x); }

inline Floats from_float16(Halves x) { return _mm512_cvtph_ps(x); }
inline Halves to_float16(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
inline Floats from_bfloat16(Halves x) { return as_floats(shift_left(widen(x), 16)); }

// A number x, and x - floor(x), from 0 to 1.
struct Split {
  Floats x, fraction;
};

inline Split split_of(Floats x) {
  return {x, _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // 0 for infinite x
}

// Returns sum * 2^floor(x).
inline Floats times_power_of_2(Floats sum, Split split) { return _mm512_scalef_ps(sum, split.x); }

// Lane i has the position first + i. Keeps the lanes of the positions (after, last], and sets others to -infinity.
inline Floats between(Floats x, int first, int after, int last) {
  const Words at = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                    _mm512_set1_epi32(first));
  const Lanes is_inside = _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(last)) &
                          _mm512_cmpgt_epi32_mask(at, _mm512_set1_epi32(after));
  return _mm512_mask_blend_ps(is_inside, broadcast(-__builtin_inff()), x);
}

// Transposes 16 vectors of 16 words.
inline void transpose(Words rows[kLanes]) {
  Words t[16];
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
