// Operations on vectors of floats that all kernels use. The width of a vector depends on the processor.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Codes of dtypes. `kernels/native/library.py` has the same values.
enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

constexpr float kLog2e = 1.4426950408889634f;

inline int64_t bytes_of(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

#ifdef __AVX512F__
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif

// Rounds to bfloat16 like torch: to nearest, ties to even; denormal numbers are kept.
inline Halves to_bfloat16(Floats x) {
  const Words bits = as_words(x), odd = and_bits(shift_right(bits, 16), 1);
  const Words rounded = sum_of_words(bits, sum_of_words(odd, broadcast_words(0x7fff)));
  return narrow(shift_right(select_nan(x, broadcast_words(0x7fc00000), rounded), 16));
}

// Rounds numbers to a dtype, as storing and loading them would.
inline Floats rounded(Floats x, int64_t dtype) {
  if (dtype == kFloat32) return x;
  return dtype == kFloat16 ? from_float16(to_float16(x)) : from_bfloat16(to_bfloat16(x));
}

// Loads some lanes as floats; the others are 0, and their memory is not read.
inline Floats load(const void* numbers, int64_t at, int64_t dtype, Lanes lanes) {
  if (dtype == kFloat32) return as_floats(load_words(static_cast<const uint32_t*>(numbers) + at, lanes));
  const Halves halves = load_halves(static_cast<const uint16_t*>(numbers) + at, lanes);
  return dtype == kFloat16 ? from_float16(halves) : from_bfloat16(halves);
}

// Rounds and stores some lanes.
inline void store(void* numbers, int64_t at, int64_t dtype, Lanes lanes, Floats values) {
  if (dtype == kFloat32) {
    store_words(static_cast<uint32_t*>(numbers) + at, lanes, as_words(values));
  } else {
    store_halves(static_cast<uint16_t*>(numbers) + at, lanes, dtype == kFloat16 ? to_float16(values) : to_bfloat16(values));
  }
}

// 2^x within 2 ulp: exactly 1 for 0, 0 below -150, infinite from 128 on.
inline Floats exp2_of(Floats x) {
  const Split split = split_of(x);
  // 2^fraction = 1 + fraction * (...), for a fraction in [0, 1): the polynomial of degree 5 with the smallest relative
  // error, 8e-8.
  Floats sum = broadcast(1.8671302133394475e-3f);
  sum = multiply_add(sum, split.fraction, broadcast(9.017030018743722e-3f));
  sum = multiply_add(sum, split.fraction, broadcast(5.579991332070769e-2f));
  sum = multiply_add(sum, split.fraction, broadcast(2.401644500956921e-1f));
  sum = multiply_add(sum, split.fraction, broadcast(6.931513118094658e-1f));
  sum = multiply_add(sum, split.fraction, broadcast(1.0f));
  return times_power_of_2(sum, split);
}

// SiLU: x * sigmoid(x).
inline Floats silu_of(Floats x) {
  return x / (broadcast(1.0f) + exp2_of(min_of(x * broadcast(-kLog2e), broadcast(200.0f))));
}
