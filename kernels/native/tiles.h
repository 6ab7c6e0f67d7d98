// AMX tiles: 16 lines, each of 16 words (pairs of adjacent bfloat16) or of 16 float32 sums.
//
// An instruction sums the products of the first numbers of 16 words, and those of the second numbers, each in order, and
// then adds both to the previous sum. Denormal numbers count as 0.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define RADIXKV_TILES
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

constexpr int kLines = 16, kTileWords = 16;
constexpr int64_t kTileNumbers = kLines * kTileWords;

// Returns whether tiles may be used. A process must request them from Linux first.
inline bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return is_permitted;
}

// Configures the tiles of a thread, and releases them in its destructor.
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

// Loads data that is not needed again soon, so that it occupies less of the cache.
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

// Multiplies tiles: adds to sum j of each line of `Sums` the dot product of that line of `A` with column j of `B`.
template <int Sums, int A, int B>
inline void add_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(A), "i"(B));
}
#endif
