// GEMM of rows with a weight that was packed once. `kernels/native/gemm.py` calls it.
//
//   weight   [panel][word][two vectors of features]   a word is one number, or a pair of adjacent numbers
//   rows     [tile][word][up to kRows rows]           packed in each call, as many words at once as fit into a cache
//
// A quantized weight (quantized.h) is dequantized into words of a panel, as many at a time as fit into a core's L1 cache, or
// for a few rows into registers.
//
// An output is one sum over all words, from the first to the last, in a register, or stored in float32 between two blocks
// of words. No operation on a row depends on other rows, so its bits do not depend on the number of rows.

#include "gemm.h"
#include "threads.h"

#include <type_traits>

namespace {

constexpr int kRows = kRegisters == 32 ? 12 : 6;  // rows per tile: their sums nearly fill the registers
// Maximum rows and words that are packed at once, so that they fit into a cache.
constexpr int64_t kMaxRows = kRegisters == 32 ? 516 : 258;
constexpr int64_t kMaxWords = 448;
// Up to this many rows, dequantized words stay in registers. With kRows / 2 rows, storing them is faster.
constexpr int kFewRows = kRegisters == 32 ? 4 : 2;
constexpr int64_t kMaxDequantized = kRegisters == 32 ? 128 : 192;  // words of panels that are dequantized at once
constexpr int64_t kAheadBytes = 4096;  // distance at which a weight is prefetched
constexpr int64_t kLineBytes = 64;

// Arithmetic in float32. Weights of 16 bits stay in 16 bits, so that less memory is read.
template <int64_t kDtype, int64_t kWeightDtype = kDtype>
struct InFloat32 {
  using Row = float;  // a word of a packed row
  using Weight = std::conditional_t<kWeightDtype == kFloat32, float, uint16_t>;
  static constexpr int kNumbers = 1;  // numbers per word

  static Words load_row(const void* row, int64_t word, Lanes lanes) { return as_words(load(row, word, kDtype, lanes)); }
  static Floats load_weight(const Weight* from) { return load(from, 0, kWeightDtype, first_lanes(kLanes)); }
  static Floats add(Floats sum, float a, Floats b) { return multiply_add(broadcast(a), b, sum); }
};

#ifdef __AVX512BF16__
struct InPairs {
  using Row = uint32_t;
  using Weight = uint32_t;
  static constexpr int kNumbers = 2;

  static Words load_row(const void* row, int64_t word, Lanes lanes) {
    return load_words(static_cast<const uint32_t*>(row) + word, lanes);
  }
  static Floats load_weight(const uint32_t* from) { return as_floats(load_words(from, first_lanes(kLanes))); }
  static Floats add(Floats sum, uint32_t a, Floats b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
};
using InBfloat16 = InPairs;
using DequantizedInBfloat16 = InPairs;
#else
using InBfloat16 = InFloat32<kBfloat16>;
using DequantizedInBfloat16 = InFloat32<kBfloat16, kFloat32>;
#endif

// Whether weights are dequantized into words of this arithmetic.
template <class Arithmetic>
constexpr bool can_dequantize = sizeof(typename Arithmetic::Weight) == 4;

// The number of rows and panels that are multiplied at once. Their sums fit into the registers.
struct Tile {
  int rows, panels;
};

// With one or two rows, reading the weight is the bottleneck, and reading several panels at once is faster. This was not
// tried with AVX-512.
inline Tile tile_for(int64_t num_rows) {
  const int rows = static_cast<int>(num_rows);
  return kRegisters == 16 && num_rows <= 2 ? Tile{rows, kRows / rows} : Tile{kRows, 1};
}

// Adds words of R rows and P panels to their sums; the sums of consecutive panels are adjacent. With one panel, prefetches
// `num_ahead` words from `ahead` on: with AVX2 and float32 weights spread over the loop, because many prefetches at once
// stall (8 to 24 rows took 1.2 to 1.4 times as long); otherwise at once, which takes fewer instructions.
template <class Arithmetic, int R, int P>
__attribute__((noinline)) void add_words(const typename Arithmetic::Row* rows, const typename Arithmetic::Weight* panels,
                                         int64_t panel_stride, int64_t num_words, float* sums, int64_t stride,
                                         bool is_first, const typename Arithmetic::Weight* ahead, int64_t num_ahead) {
  constexpr int64_t kWordBytes = kFeatures * sizeof(typename Arithmetic::Weight);
  Floats sum[R][2 * P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 12
    for (int i = 0; i < 2 * P; i++)
      sum[r][i] = is_first ? broadcast(0.0f) : load_floats(sums + r * stride + i * kLanes);
  constexpr bool kIsSpread = kRegisters == 16 && sizeof(typename Arithmetic::Weight) == sizeof(float);
  const int64_t interval = kIsSpread ? num_words / std::max<int64_t>(1, num_ahead) : 1;  // words per prefetch
  int64_t num_prefetched = 0, next = 0;
#pragma GCC unroll 4
  for (int64_t w = 0; w < num_words; w++) {
    if (P == 1 && (kIsSpread ? w == next : w < num_ahead)) {
#pragma GCC unroll 2
      for (int64_t i = 0; i < kWordBytes; i += kLineBytes)
        _mm_prefetch(reinterpret_cast<const char*>(ahead) + num_prefetched * kWordBytes + i, _MM_HINT_T1);
      num_prefetched++;
      next += interval;
    }
#pragma GCC unroll 6
    for (int p = 0; p < P; p++) {
      const typename Arithmetic::Weight* weight = panels + p * panel_stride + w * kFeatures;
      const Floats first = Arithmetic::load_weight(weight), second = Arithmetic::load_weight(weight + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        sum[r][2 * p] = Arithmetic::add(sum[r][2 * p], rows[w * R + r], first);
        sum[r][2 * p + 1] = Arithmetic::add(sum[r][2 * p + 1], rows[w * R + r], second);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 12
    for (int i = 0; i < 2 * P; i++) store_floats(sums + r * stride + i * kLanes, sum[r][i]);
}

// Computes the sums of R rows of a quantized panel, whose words are dequantized into registers.
template <class Arithmetic, int R>
__attribute__((noinline)) void sum_groups(const typename Arithmetic::Row* rows, const uint8_t* groups, int64_t format,
                                          int64_t num_groups, float* sums, int64_t stride) {
  using Weight = typename Arithmetic::Weight;
  Floats sum[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = broadcast(0.0f);
  for (int64_t g = 0; g < num_groups; g++, groups += group_bytes(format), rows += kGroupWords<Weight> * R) {
    prefetch_ahead(groups, format);
    dequantize_words(groups, format, static_cast<const Weight*>(nullptr), [&](int64_t w, int v, Floats word) {
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[r][v] = Arithmetic::add(sum[r][v], rows[w * R + r], word);
    });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) store_floats(sums + r * stride + v * kLanes, sum[r][v]);
}

template <class Arithmetic, int R, class... Rest>
void sum_groups_of(int64_t num_rows, Rest... rest) {
  if constexpr (R > 1)
    if (num_rows < R) return sum_groups_of<Arithmetic, R - 1>(num_rows, rest...);
  sum_groups<Arithmetic, R>(rest...);
}

template <class Arithmetic, int R, int P, class... Rest>
void add_rows(int64_t num_rows, Rest... rest) {
  if constexpr (R > 1)
    if (num_rows < R) return add_rows<Arithmetic, R - 1, P>(num_rows, rest...);
  add_words<Arithmetic, R, P>(rest...);
}

template <class Arithmetic, class... Rest>
void add_tile(int64_t num_panels, int64_t num_rows, Rest... rest) {
  if (num_panels == 1) return add_rows<Arithmetic, kRows, 1>(num_rows, rest...);
  if constexpr (kRegisters == 16) {
    if (num_panels == kRows / 2) return add_rows<Arithmetic, 2, kRows / 2>(num_rows, rest...);
    add_rows<Arithmetic, 1, kRows>(num_rows, rest...);
  }
}

// Packs words of up to kLanes rows, interleaved by row.
template <class Arithmetic>
void pack_rows(const Matmul& matmul, int64_t first_row, int64_t num_rows, int64_t first_word, int64_t num_words,
               uint32_t* to) {
  const int64_t row_bytes = matmul.in_features * bytes_of(matmul.dtype);
  const char* rows = static_cast<const char*>(matmul.rows) + first_row * row_bytes;
  for (int64_t w = 0; w < num_words; w += kLanes) {
    Words words[kLanes];
    for (int r = 0; r < kLanes; r++)
      words[r] = r < num_rows ? Arithmetic::load_row(rows + r * row_bytes, first_word + w, first_lanes(num_words - w))
                              : as_words(broadcast(0.0f));
    transpose(words);
    const int64_t vector_words = std::min<int64_t>(kLanes, num_words - w);
    for (int64_t i = 0; i < vector_words; i++) store_words(to + (w + i) * num_rows, first_lanes(num_rows), words[i]);
  }
}

// Adds the bias to the sums of some panels, applies SwiGLU if there is another weight, and stores the result.
void finish(const Matmul& matmul, int64_t first_row, int64_t num_rows, int64_t panel, int64_t num_panels,
            const float* sums, int64_t stride) {
  const int64_t first = panel * kFeatures, end = std::min(matmul.out_features, first + num_panels * kFeatures);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t f = first; f < end; f += kLanes) {
      const Lanes lanes = first_lanes(matmul.out_features - f);
      const float* at = sums + r * stride + f - first;
      Floats number = with_bias(at, matmul.bias, f, matmul.dtype, lanes);
      if (matmul.other_weight)
        number = silu_of(number) * with_bias(at + num_rows * stride, matmul.other_bias, f, matmul.dtype, lanes);
      store(matmul.out, (first_row + r) * matmul.out_features + f, matmul.dtype, lanes, number);
    }
}

// Computes up to `kMaxRows` rows. Sums are kept in the output if it is float32 and unpadded; otherwise each panel is summed
// over all words at once.
template <class Arithmetic>
void multiply(const Matmul& matmul, int64_t first_row, int64_t num_rows) {
  using Row = typename Arithmetic::Row;
  using Weight = typename Arithmetic::Weight;
  const int64_t num_words = matmul.in_features / Arithmetic::kNumbers;
  const int64_t num_panels = (matmul.out_features + kFeatures - 1) / kFeatures;
  const bool is_quantized = matmul.format != kPlain, is_fused = is_quantized && num_rows <= kFewRows;
  const Tile tile = is_fused ? Tile{kRows, 1} : tile_for(num_rows);
  const int64_t num_tiles = (num_rows + tile.rows - 1) / tile.rows;
  const int64_t num_groups = num_panels / tile.panels + num_panels % tile.panels;  // remaining panels are groups of one
  const int num_weights = matmul.other_weight ? 2 : 1;
  const bool is_in_place = matmul.dtype == kFloat32 && matmul.out_features % kFeatures == 0 && num_weights == 1;
  constexpr int64_t kUnit = kGroup / Arithmetic::kNumbers;
  const int64_t unit = is_quantized ? kUnit : 1, num_units = num_words / unit;  // words that are not separated
  const int64_t num_blocks = is_in_place && num_tiles > 1 ? (num_words + kMaxWords - 1) / kMaxWords : 1;
  const int64_t stride = is_in_place ? matmul.out_features : tile.panels * kFeatures;
  const int64_t panel_bytes = matmul.in_features / kGroup * group_bytes(matmul.format);  // if it is quantized
  const Buffer<Row> packed(num_rows * ((num_units + num_blocks - 1) / num_blocks) * unit);
  const auto tile_start = [&](int64_t t) { return num_rows * t / num_tiles; };
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t first_word = num_units * block / num_blocks * unit;
    const int64_t words_here = num_units * (block + 1) / num_blocks * unit - first_word;
    const int64_t words_at_once = is_quantized ? std::min(words_here, kMaxDequantized / tile.panels) : words_here;
    parallel_for(num_tiles, matmul.num_threads, [&](int64_t t) {
      pack_rows<Arithmetic>(matmul, first_row + tile_start(t), tile_start(t + 1) - tile_start(t), first_word, words_here,
                            reinterpret_cast<uint32_t*>(packed + tile_start(t) * words_here));
    });
    parallel_items(num_groups, matmul.num_threads, [&](Items& items) {
      const Buffer<float> panel_sums(is_in_place ? 0 : num_weights * num_rows * stride);
      const Buffer<Weight> dequantized(is_quantized && !is_fused ? tile.panels * words_at_once * kFeatures : 0);
      for (int64_t g; items.next(g);) {
        const bool is_whole = g < num_panels / tile.panels;
        const int64_t p = is_whole ? g * tile.panels : num_panels - (num_groups - g);
        const int64_t panels_here = is_whole ? tile.panels : 1;
        float* sums = is_in_place ? static_cast<float*>(matmul.out) + first_row * stride + p * kFeatures : panel_sums;
        for (int i = 0; i < num_weights; i++) {
          const void* weight = i ? matmul.other_weight : matmul.weight;
          const uint8_t* quantized = static_cast<const uint8_t*>(weight) + p * panel_bytes;
          if constexpr (can_dequantize<Arithmetic>) {
            if (is_fused) {
              sum_groups_of<Arithmetic, kFewRows>(num_rows, static_cast<const Row*>(packed), quantized, matmul.format,
                                                  num_units, sums + i * num_rows * stride, stride);
              continue;
            }
          }
          for (int64_t word = 0, words; word < words_here; word += words) {
            words = std::min(words_at_once, words_here - word);
            const Weight* panel = static_cast<const Weight*>(weight) + (p * num_words + first_word) * kFeatures;
            if constexpr (can_dequantize<Arithmetic>) {
              if (is_quantized) {
                panel = dequantized;
                const uint8_t* groups = quantized + (first_word + word) / kUnit * group_bytes(matmul.format);
                for (int64_t index = 0; index < panels_here; index++)
                  dequantize<Weight>(groups + index * panel_bytes, matmul.format, words / kUnit,
                                     dequantized + index * words * kFeatures);
              }
            }
            for (int64_t t = 0; t < num_tiles; t++) {
              // A single tile prefetches the words that follow soon. Several tiles prefetch the next panel, a part each.
              const bool is_single = num_tiles == 1;
              const int64_t first_ahead = words * t / num_tiles, end_ahead = words * (t + 1) / num_tiles;
              const int64_t distance = is_single ? kAheadBytes / sizeof(Weight) : num_words * kFeatures;
              const int64_t rows_here = tile_start(t + 1) - tile_start(t);
              add_tile<Arithmetic>(panels_here, rows_here, packed + tile_start(t) * words_here + word * rows_here, panel,
                                   (is_quantized ? words : num_words) * kFeatures, words,
                                   sums + (i * num_rows + tile_start(t)) * stride, stride, block == 0 && word == 0,
                                   panel + distance + first_ahead * kFeatures,
                                   is_quantized ? 0 : end_ahead - first_ahead);
            }
          }
        }
        if (block == num_blocks - 1) finish(matmul, first_row, num_rows, p, panels_here, sums, stride);
      }
    });
  }
}

template <class Arithmetic>
void multiply_all(const Matmul& matmul) {
  for (int64_t row = 0; row < matmul.num_rows; row += kMaxRows)
    multiply<Arithmetic>(matmul, row, std::min(kMaxRows, matmul.num_rows - row));
}

// Packs a weight with words of 16 or 32 bits into the panels of the features from `first_feature` on.
template <class Word>
void pack_weight(const Word* weight, int64_t num_features, int64_t num_words, int64_t first_feature, Word* panels,
                 int64_t num_threads) {
  const int64_t first_vector = first_feature / kLanes, end_feature = first_feature + num_features;
  parallel_for((end_feature + kLanes - 1) / kLanes - first_vector, num_threads, [&](int64_t index) {
    const int64_t vector = first_vector + index;
    const int64_t first = std::max(first_feature, vector * kLanes), end = std::min(end_feature, (vector + 1) * kLanes);
    const Word* rows = weight + (first - first_feature) * num_words;
    Word* to = panels + first / kFeatures * num_words * kFeatures + first % kFeatures;
    for (int64_t w = 0; w < num_words; w += kLanes) {
      const Lanes lanes = first_lanes(num_words - w);
      Words words[kLanes];
      for (int64_t f = 0; f < kLanes; f++) {
        const Word* row = rows + std::min(f, end - first - 1) * num_words + w;
        if constexpr (sizeof(Word) == 2) words[f] = widen(load_halves(row, lanes));
        else words[f] = load_words(row, lanes);
      }
      transpose(words);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, num_words - w); i++) {
        Word* at = to + (w + i) * kFeatures;
        if constexpr (sizeof(Word) == 2) store_halves(at, first_lanes(end - first), narrow(words[i]));
        else store_words(at, first_lanes(end - first), words[i]);
      }
    }
  });
}

}  // namespace

// The packed layout of a weight: features per panel, and numbers per word.
extern "C" int64_t radixkv_panel_features() { return kFeatures; }
extern "C" int64_t radixkv_word_numbers(int64_t dtype) { return dtype == kBfloat16 ? InBfloat16::kNumbers : 1; }

// Packs a weight `[num_features, num_words]` into the panels of the features from `first_feature` on.
extern "C" void radixkv_pack_weight(const void* weight, int64_t num_features, int64_t num_words, int64_t word_bytes,
                                    int64_t first_feature, void* panels, int64_t num_threads) {
  if (word_bytes == 2) {
    pack_weight(static_cast<const uint16_t*>(weight), num_features, num_words, first_feature,
                static_cast<uint16_t*>(panels), num_threads);
  } else {
    pack_weight(static_cast<const uint32_t*>(weight), num_features, num_words, first_feature,
                static_cast<uint32_t*>(panels), num_threads);
  }
}

extern "C" void radixkv_multiply(const Matmul* matmul) {
  if (multiply_in_tiles(*matmul)) return;
  const bool is_quantized = matmul->format != kPlain;
  switch (matmul->dtype) {
    case kFloat32:
      return multiply_all<InFloat32<kFloat32>>(*matmul);
    case kBfloat16:
      return is_quantized ? multiply_all<DequantizedInBfloat16>(*matmul) : multiply_all<InBfloat16>(*matmul);
    default:
      return is_quantized ? multiply_all<InFloat32<kFloat16, kFloat32>>(*matmul)
                          : multiply_all<InFloat32<kFloat16>>(*matmul);
  }
}
