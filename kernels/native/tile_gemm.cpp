// GEMM of bfloat16 in AMX tiles, with weights packed by `gemm.cpp`: 16 words of a panel are two tiles.
//
//   rows     [step of 16 words][up to 32 rows][16 words]
//
// One or two tiles of rows, times two tiles of a panel, give up to four tiles of sums.
//
// A row adds up its words in steps of 16, from the first to the last, independently of the other lines of its tile.

#include "gemm.h"
#include "threads.h"
#include "tiles.h"

#ifdef RADIXKV_TILES
namespace {

constexpr int64_t kMaxRows = 512;               // rows for which a weight is read once
constexpr int64_t kMaxBytes = 896 << 10;        // bytes of rows that are packed at once: they fit into a core's L2 cache
constexpr int64_t kPairRows = 2 * kLines;       // rows of two tiles
constexpr int64_t kAheadBytes = 4096;           // distance at which a weight is prefetched
constexpr int64_t kPanelBytes = kFeatures * 4;  // bytes of a word of a panel, over its features
static_assert(kGroup == 2 * kTileWords, "a step has the words of a group");

int64_t whole_tiles(int64_t num_rows) { return (num_rows + kLines - 1) / kLines * kLines; }

// Packs words of some rows, padded with zeros to whole tiles.
void pack_rows(const Matmul& matmul, int64_t first_row, int64_t num_rows, int64_t first_word, int64_t num_words,
               uint32_t* to) {
  const int64_t num_lines = whole_tiles(num_rows), row_words = matmul.in_features / 2;
  const uint32_t* rows = static_cast<const uint32_t*>(matmul.rows) + first_row * row_words + first_word;
  for (int64_t r = 0; r < num_lines; r++)
    for (int64_t w = 0; w < num_words; w += kTileWords)
      store_words(to + w * num_lines + r * kTileWords, 0xffff,
                  load_words(rows + r * row_words + w, r < num_rows ? 0xffff : 0));
}

// Tiles 0 to 3 hold the sums of one or two tiles of rows of a panel.
template <bool kHasTwo>
struct TileSums {
  static constexpr int64_t kStepNumbers = kHasTwo ? 2 * kTileNumbers : kTileNumbers;
  static constexpr int64_t kBytes = kFeatures * sizeof(float);

  static void clear() {
    clear_tile<0>(), clear_tile<1>();
    if (kHasTwo) clear_tile<2>(), clear_tile<3>();
  }

  static void load(const float* sums) {
    const float* second_tile = sums + kLines * kFeatures;
    load_tile<0>(sums, kBytes), load_tile<1>(sums + kLanes, kBytes);
    if (kHasTwo) load_tile<2>(second_tile, kBytes), load_tile<3>(second_tile + kLanes, kBytes);
  }

  static void store(float* sums) {
    float* second_tile = sums + kLines * kFeatures;
    store_tile<0>(sums, kBytes), store_tile<1>(sums + kLanes, kBytes);
    if (kHasTwo) store_tile<2>(second_tile, kBytes), store_tile<3>(second_tile + kLanes, kBytes);
  }

  // Adds the products of 16 words of the rows and of the panel.
  static void add(const uint32_t* rows, const uint32_t* weight) {
    load_passing_tile<6>(weight, kPanelBytes);
    load_passing_tile<4>(rows, 64);
    add_products<0, 4, 6>();
    load_passing_tile<7>(weight + kLanes, kPanelBytes);
    add_products<1, 4, 7>();
    if (kHasTwo) {
      load_passing_tile<5>(rows + kTileNumbers, 64);
      add_products<2, 5, 6>();
      add_products<3, 5, 7>();
    }
  }
};

// Adds words of one or two tiles of rows to their sums of a panel. Prefetches `num_ahead` words of a weight.
template <bool kHasTwo>
void add_words(const uint32_t* rows, const uint32_t* panel, int64_t num_words, float* sums, bool is_first,
               const uint32_t* ahead, int64_t num_ahead) {
  using Sums = TileSums<kHasTwo>;
  if (is_first) Sums::clear();
  else Sums::load(sums);
  int64_t num_prefetched = 0;
  for (int64_t w = 0; w < num_words; w += kTileWords) {
    for (const int64_t end = num_ahead * (w + kTileWords) / num_words; num_prefetched < end; num_prefetched++)
      for (int64_t i = 0; i < kPanelBytes; i += 64)
        _mm_prefetch(reinterpret_cast<const char*>(ahead) + num_prefetched * kPanelBytes + i, _MM_HINT_T1);
    Sums::add(rows + w / kTileWords * Sums::kStepNumbers, panel + w * kFeatures);
  }
  Sums::store(sums);
}

// Computes the sums of one or two tiles of rows of a quantized panel. A group is dequantized while the tiles multiply the
// one before it.
template <bool kHasTwo>
void sum_groups(const uint32_t* rows, const uint8_t* groups, int64_t format, int64_t num_groups, float* sums) {
  using Sums = TileSums<kHasTwo>;
  alignas(64) uint32_t words[2][kTileWords * kFeatures];
  dequantize<uint32_t>(groups, format, 1, words[0]);
  Sums::clear();
  for (int64_t g = 0; g < num_groups; g++) {
    const int64_t next = g + 1;
    if (next < num_groups) dequantize<uint32_t>(groups + next * group_bytes(format), format, 1, words[next % 2]);
    Sums::add(rows + g * Sums::kStepNumbers, words[g % 2]);
  }
  Sums::store(sums);
}

// Two vectors of sums of a row, with the bias.
struct BiasedSums {
  Floats low, high;

  BiasedSums(const float* sums, const void* bias, int64_t first, int64_t remaining_features)
      : low(with_bias(sums, bias, first, kBfloat16, first_lanes(remaining_features))),
        high(with_bias(sums + kLanes, bias, first + kLanes, kBfloat16,
                       first_lanes(std::max<int64_t>(0, remaining_features - kLanes)))) {}
};

// Adds the bias to the sums of some rows of a panel, applies SwiGLU if there is another weight, and stores the result.
void finish(const Matmul& matmul, int64_t first_row, int64_t num_rows, int64_t panel, const float* sums,
            const float* other_sums) {
  const int64_t first = panel * kFeatures, remaining_features = matmul.out_features - first;
  const __mmask32 lanes = remaining_features >= kFeatures ? 0xffffffffu : (1u << remaining_features) - 1;
  uint16_t* out = static_cast<uint16_t*>(matmul.out) + first_row * matmul.out_features + first;
  for (int64_t r = 0; r < num_rows; r++) {
    BiasedSums sum(sums + r * kFeatures, matmul.bias, first, remaining_features);
    if (matmul.other_weight) {
      const BiasedSums other(other_sums + r * kFeatures, matmul.other_bias, first, remaining_features);
      sum.low = silu_of(sum.low) * other.low;
      sum.high = silu_of(sum.high) * other.high;
    }
    _mm512_mask_storeu_epi16(out + r * matmul.out_features, lanes, (__m512i)_mm512_cvtne2ps_pbh(sum.high, sum.low));
  }
}

// Computes up to kMaxRows rows. Between blocks of words, the sums of all rows and panels are kept.
void multiply(const Matmul& matmul, int64_t first_row, int64_t num_rows) {
  const int64_t num_words = matmul.in_features / 2, num_steps = num_words / kTileWords;
  const int64_t num_panels = (matmul.out_features + kFeatures - 1) / kFeatures;
  const int64_t num_pairs = (num_rows + kPairRows - 1) / kPairRows;  // of tiles of rows
  const int num_weights = matmul.other_weight ? 2 : 1;
  const int64_t num_lines = whole_tiles(num_rows);
  const int64_t num_blocks = num_pairs > 1 ? (num_lines * num_words * 4 + kMaxBytes - 1) / kMaxBytes : 1;
  const int64_t kept_lines = num_blocks > 1 ? num_panels * num_lines : kPairRows;
  const Buffer<uint32_t> packed(num_lines * ((num_steps + num_blocks - 1) / num_blocks) * kTileWords);
  const Buffer<float> kept_sums(num_blocks > 1 ? num_weights * kept_lines * kFeatures : 0);
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t first_word = num_steps * block / num_blocks * kTileWords;
    const int64_t words_here = num_steps * (block + 1) / num_blocks * kTileWords - first_word;
    parallel_for(num_pairs, matmul.num_threads, [&](int64_t t) {
      const int64_t row = t * kPairRows;
      pack_rows(matmul, first_row + row, std::min(kPairRows, num_rows - row), first_word, words_here,
                packed + row * words_here);
    });
    // A quantized weight is dequantized for all pairs at once, or for a single one, a group at a time.
    const bool is_quantized = matmul.format != kPlain, is_fused = is_quantized && num_pairs == 1;
    const int64_t panel_bytes = num_steps * group_bytes(matmul.format);  // if it is quantized
    parallel_items(num_panels, matmul.num_threads, [&](Items& items) {
      const Tiles tiles;
      alignas(64) float pair_sums[2 * kPairRows * kFeatures];
      const Buffer<uint32_t> dequantized(is_quantized && !is_fused ? num_weights * words_here * kFeatures : 0);
      for (int64_t p; items.next(p);) {
        const uint32_t* panels[2] = {};
        const uint8_t* quantized[2] = {};
        for (int i = 0; i < num_weights; i++) {
          const void* weight = i ? matmul.other_weight : matmul.weight;
          panels[i] = static_cast<const uint32_t*>(weight) + (p * num_words + first_word) * kFeatures;
          if (!is_quantized) continue;
          const int64_t first_group = first_word / kTileWords;
          quantized[i] = static_cast<const uint8_t*>(weight) + p * panel_bytes + first_group * group_bytes(matmul.format);
          panels[i] = dequantized + i * words_here * kFeatures;
          if (!is_fused)
            dequantize<uint32_t>(quantized[i], matmul.format, words_here / kTileWords,
                                 dequantized + i * words_here * kFeatures);
        }
        for (int64_t t = 0; t < num_pairs; t++) {
          const int64_t row = t * kPairRows, rows_here = std::min(kPairRows, num_rows - row);
          const bool has_two = rows_here > kLines;
          const uint32_t* pair_rows = packed + row * words_here;
          float* sums = num_blocks > 1 ? kept_sums + (p * num_lines + row) * kFeatures : pair_sums;
          for (int i = 0; i < num_weights; i++) {
            float* weight_sums = sums + i * kept_lines * kFeatures;
            if (is_fused) {
              const auto add = has_two ? sum_groups<true> : sum_groups<false>;
              add(pair_rows, quantized[i], matmul.format, num_steps, weight_sums);
              continue;
            }
            // A single pair prefetches the words that follow soon. Several pairs prefetch the next panel, a part each.
            const int64_t first_ahead = words_here * t / num_pairs, end_ahead = words_here * (t + 1) / num_pairs;
            const int64_t distance = num_pairs == 1 ? kAheadBytes / 4 : num_words * kFeatures;
            const auto add = has_two ? add_words<true> : add_words<false>;
            add(pair_rows, panels[i], words_here, weight_sums, block == 0,
                panels[i] + distance + first_ahead * kFeatures, is_quantized ? 0 : end_ahead - first_ahead);
          }
          if (block == num_blocks - 1)
            finish(matmul, first_row + row, rows_here, p, sums, sums + kept_lines * kFeatures);
        }
      }
    });
  }
}

}  // namespace

bool multiply_in_tiles(const Matmul& matmul) {
  if (matmul.dtype != kBfloat16 || matmul.in_features % (2 * kTileWords) || !has_tiles()) return false;
  for (int64_t row = 0; row < matmul.num_rows; row += kMaxRows)
    multiply(matmul, row, std::min(kMaxRows, matmul.num_rows - row));
  return true;
}
#else
bool multiply_in_tiles(const Matmul&) { return false; }
#endif
