// XXH3 with 128 bits and without a seed, for inputs of more than 240 bytes. The results are those of the xxhash library.
//
// The algorithm is Yann Collet's (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): eight accumulators of 64 bits
// over stripes of 64 bytes, scrambled after every 16 stripes. The last 64 bytes are added at the end.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace xxh3 {

constexpr int64_t kStripe = 64, kStripesPerBlock = 16, kSecretBytes = 192, kDigestBytes = 16;

constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                 0x27D4EB2F165667C5};

// The library's default secret.
alignas(64) constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline __m256i load(const uint8_t* bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)); }

// Four accumulators of 64 bits. Two instances process a stripe.
struct Sums {
  __m256i sums;

  void add(__m256i data, const uint8_t* secret) {
    const __m256i mixed = _mm256_xor_si256(data, load(secret));
    const __m256i products = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    sums = _mm256_add_epi64(sums, _mm256_add_epi64(products, swapped));
  }

  void scramble(const uint8_t* secret) {
    const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), load(secret));
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32[0]));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    sums = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
  }
};

inline uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  memcpy(&word, bytes, sizeof(word));
  return word;
}

inline uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t merged(const uint64_t* sums, const uint8_t* secret, uint64_t start) {
  for (int i = 0; i < 8; i += 2)
    start += folded_product(sums[i] ^ word_at(secret + 8 * i), sums[i + 1] ^ word_at(secret + 8 * i + 8));
  start = (start ^ (start >> 37)) * 0x165667919E3779F9;
  return start ^ (start >> 32);
}

class Checksum {
 public:
  // Adds a whole stripe that is already in registers.
  void add_stripe(__m256i first, __m256i second) {
    add(first, second, kSecret + 8 * stripe_);
    if (++stripe_ == kStripesPerBlock) {
      first_.scramble(kSecret + kSecretBytes - kStripe);
      second_.scramble(kSecret + kSecretBytes - kStripe + 32);
      stripe_ = 0;
    }
  }

  // Adds the last 64 bytes of the input, and stores the checksum with the most significant byte first.
  void finish(const uint8_t* last, uint64_t num_bytes, uint8_t* digest) {
    add(load(last), load(last + 32), kSecret + kSecretBytes - kStripe - 7);
    uint64_t sums[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), first_.sums);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4), second_.sums);
    const uint64_t low = merged(sums, kSecret + 11, num_bytes * kPrime64[0]);
    const uint64_t high = merged(sums, kSecret + kSecretBytes - kStripe - 11, ~(num_bytes * kPrime64[1]));
    const uint64_t ordered[] = {__builtin_bswap64(high), __builtin_bswap64(low)};
    memcpy(digest, ordered, sizeof(ordered));
  }

 private:
  void add(__m256i first, __m256i second, const uint8_t* secret) {
    first_.add(first, secret);
    second_.add(second, secret + 32);
  }

  Sums first_ = {_mm256_setr_epi64x(kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2])};
  Sums second_ = {_mm256_setr_epi64x(kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0])};
  int64_t stripe_ = 0;
};

}  // namespace xxh3
