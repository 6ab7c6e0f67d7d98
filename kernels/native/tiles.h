// Tiles of bfloat16, for processors with AMX: 16 lines of 16 words, each two neighbours, or of 16 sums.
//
// A sum adds up the first numbers of 16 words and the second ones, each in order, and then both to what it was. Numbers
// too small to be normal count as 0.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define RADIXKV_TILES
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

constexpr int kLines = 16, kTileWords = 16;
constexpr int64_t kTileNumbers = kLines * kTileWords;

// Whether tiles may be used: Linux gives them to a process that asks for them.
inline bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_given = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return is_given;
}

// Tiles of a thread, as long as it lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, first = 0, unused[14] = {};
      uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t lines[16] = {kLines, kLines, kLines, kLines, kLines, kLines, kLines, kLines};
    } shape;
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
};

template <int T>
inline void load_tile(const void* from, int64_t line_stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(line_stride), "i"(T) : "memory");
}

// Loads what is not needed again soon: less of a cache is taken by it.
template <int T>
inline void load_passing_tile(const void* from, int64_t line_stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(line_stride), "i"(T) : "memory");
}

template <int T>
inline void store_tile(void* to, int64_t line_stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(line_stride), "i"(T) : "memory");
}

template <int T>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

// Adds to 16 sums of each line of `A` its products with columns of `B`, a line of which has a word for each of them.
template <int Sums, int A, int B>
inline void add_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(A), "i"(B));
}
#endif
