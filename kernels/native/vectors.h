// Vectors of floats, in the width of the processor, and operations that all kernels use.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Dtypes. `kernels/native/library.py` has the same values.
enum Kind : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

constexpr float kLog2e = 1.4426950408889634f;

inline int64_t bytes_of(int64_t kind) { return kind == kFloat32 ? 4 : 2; }

#ifdef __AVX512F__
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif

// Rounds to bfloat16 like torch: to nearest, ties to even; denormal numbers are kept.
inline Halves to_bfloat16(Floats x) {
  const Words bits = as_words(x), odd = common_bits(shifted_down(bits, 16), 1);
  const Words rounded = added(bits, added(odd, all_words(0x7fff)));
  return narrowed(shifted_down(if_nan(x, all_words(0x7fc00000), rounded), 16));
}

// Rounds numbers to a dtype, as storing and loading them would.
inline Floats rounded(Floats x, int64_t kind) {
  if (kind == kFloat32) return x;
  return kind == kFloat16 ? from_float16(to_float16(x)) : from_bfloat16(to_bfloat16(x));
}

// Loads some lanes as floats; the others are 0, and their memory is not read.
inline Floats load(const void* numbers, int64_t at, int64_t kind, Lanes lanes) {
  if (kind == kFloat32) return as_floats(load_words(static_cast<const uint32_t*>(numbers) + at, lanes));
  const Halves halves = load_halves(static_cast<const uint16_t*>(numbers) + at, lanes);
  return kind == kFloat16 ? from_float16(halves) : from_bfloat16(halves);
}

// Rounds and stores some lanes.
inline void store(void* numbers, int64_t at, int64_t kind, Lanes lanes, Floats values) {
  if (kind == kFloat32) {
    store_words(static_cast<uint32_t*>(numbers) + at, lanes, as_words(values));
  } else {
    store_halves(static_cast<uint16_t*>(numbers) + at, lanes, kind == kFloat16 ? to_float16(values) : to_bfloat16(values));
  }
}

// 2^x within 2 ulp: exactly 1 for 0, 0 below -150, infinite from 128 on.
inline Floats exp2_of(Floats x) {
  const Parts parts = parts_of(x);
  // 2^rest = 1 + rest * (...), for rest in [0, 1): the polynomial of degree 5 with the least relative error, 8e-8.
  Floats sum = all(1.8671302133394475e-3f);
  sum = multiply_add(sum, parts.rest, all(9.017030018743722e-3f));
  sum = multiply_add(sum, parts.rest, all(5.579991332070769e-2f));
  sum = multiply_add(sum, parts.rest, all(2.401644500956921e-1f));
  sum = multiply_add(sum, parts.rest, all(6.931513118094658e-1f));
  sum = multiply_add(sum, parts.rest, all(1.0f));
  return times_power_of_2(sum, parts);
}

// SiLU: x * sigmoid(x).
inline Floats silu_of(Floats x) { return x / (all(1.0f) + exp2_of(smaller(x * all(-kLog2e), all(200.0f)))); }
