// Products of rows with a weight that was laid out once. `kernels/native/products.py` calls it.
//
//   weight   [panel][word][32 features]      a word is one float32, or two neighbours in bfloat16
//   rows     [tile][word][up to 12 rows]     laid out for each call, as many words at once as a cache holds
//
// A number of the result is one sum over all words, from the first to the last, in a register or stored in float32
// between two blocks of words. No operation of a row depends on others, so its bits do not depend on how many there are.

#include "vectors.h"

#include <algorithm>
#include <cstdlib>

// Fields are told in `kernels/native/products.py`.
struct Product {
  const void* rows;
  const float *weight, *other_weight;
  const void *bias, *other_bias;
  void* out;
  int64_t num_rows, in_features, out_features, kind, num_threads;
};

namespace {

constexpr int kRows = 12;  // of a tile: sums of 12 rows and 32 features fill the registers
constexpr int kFeatures = 32;
constexpr int64_t kMostRows = 43 * kRows;  // whose words fit in a cache
constexpr int64_t kMostWords = 448;
constexpr int64_t kAhead = 1024;  // floats of a weight that are asked for before they are needed
constexpr int64_t kLine = 16;     // floats of a cache line

struct InFloat32 {
  using Word = float;
  static constexpr int kNumbers = 1;
  static __m512 multiply_add(__m512 sum, float a, __m512 b) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum); }
};

#ifdef __AVX512BF16__
struct InBfloat16 {
  using Word = uint32_t;
  static constexpr int kNumbers = 2;
  static __m512 multiply_add(__m512 sum, uint32_t a, __m512 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
};
#endif

// Adds words of R rows and 32 features to their sums. Asks for `num_lines` lines of the weight from `ahead` on.
template <class Arithmetic, int R>
__attribute__((noinline)) void add_words(const typename Arithmetic::Word* rows, const float* panel, int64_t num_words,
                                         float* sums, int64_t stride, bool is_first, const float* ahead,
                                         int64_t num_lines) {
  __m512 sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
      sum[r][i] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * stride + i * kLanes);
#pragma GCC unroll 4
  for (int64_t w = 0; w < num_words; w++) {
    const __m512 first = _mm512_loadu_ps(panel + w * kFeatures), second = _mm512_loadu_ps(panel + w * kFeatures + kLanes);
    if (2 * w < num_lines) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 2 * w * kLine), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 2 * w * kLine + kLine), _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      sum[r][0] = Arithmetic::multiply_add(sum[r][0], rows[w * R + r], first);
      sum[r][1] = Arithmetic::multiply_add(sum[r][1], rows[w * R + r], second);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) _mm512_storeu_ps(sums + r * stride + i * kLanes, sum[r][i]);
}

// Lays out words of some rows, one row's beside the other's.
void lay_out(const uint32_t* rows, int64_t stride, int64_t num_rows, int64_t num_words, uint32_t* to) {
  for (int64_t w = 0; w < num_words; w += kLanes) {
    __m512i words[kLanes];
    for (int r = 0; r < kLanes; r++)
      words[r] = r < num_rows ? _mm512_maskz_loadu_epi32(first_lanes(num_words - w), rows + r * stride + w)
                              : _mm512_setzero_si512();
    transpose(words);
    const int64_t num_here = std::min<int64_t>(kLanes, num_words - w);
    for (int64_t i = 0; i < num_here; i++)
      _mm512_mask_storeu_epi32(to + (w + i) * num_rows, first_lanes(num_rows), words[i]);
  }
}

__m512 with_bias(const float* sums, const void* bias, int64_t at, int64_t kind, __mmask16 mask) {
  const __m512 sum = _mm512_loadu_ps(sums);
  return bias ? _mm512_add_ps(sum, load(bias, at, kind, mask)) : sum;
}

// Adds the bias to the sums of a panel, gates those of the other weight with them, and stores the result.
void finish(const Product& product, int64_t first_row, int64_t num_rows, int64_t panel, const float* sums,
            int64_t stride) {
  const int64_t first = panel * kFeatures, end = std::min<int64_t>(product.out_features, first + kFeatures);
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t f = first; f < end; f += kLanes) {
      const __mmask16 mask = first_lanes(product.out_features - f);
      const float* at = sums + r * stride + f - first;
      __m512 number = with_bias(at, product.bias, f, product.kind, mask);
      if (product.other_weight)
        number = _mm512_mul_ps(silu_of(number),
                               with_bias(at + num_rows * stride, product.other_bias, f, product.kind, mask));
      store(product.out, (first_row + r) * product.out_features + f, product.kind, mask, number);
    }
}

// Memory of one call.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~Scratch() { std::free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const { return static_cast<T*>(memory_); }

 private:
  void* memory_;
};

// Up to `kMostRows` rows. Sums are kept in the result where it has their shape; elsewhere a panel is summed up at once.
template <class Arithmetic>
void multiply(const Product& product, int64_t first_row, int64_t num_rows) {
  using Word = typename Arithmetic::Word;
  using Add = void (*)(const Word*, const float*, int64_t, float*, int64_t, bool, const float*, int64_t);
  static constexpr Add kAdd[kRows] = {
      add_words<Arithmetic, 1>, add_words<Arithmetic, 2>,  add_words<Arithmetic, 3>,  add_words<Arithmetic, 4>,
      add_words<Arithmetic, 5>, add_words<Arithmetic, 6>,  add_words<Arithmetic, 7>,  add_words<Arithmetic, 8>,
      add_words<Arithmetic, 9>, add_words<Arithmetic, 10>, add_words<Arithmetic, 11>, add_words<Arithmetic, 12>};
  const int64_t num_words = product.in_features / Arithmetic::kNumbers;
  const int64_t num_panels = (product.out_features + kFeatures - 1) / kFeatures;
  const int64_t num_tiles = (num_rows + kRows - 1) / kRows;
  const int num_weights = product.other_weight ? 2 : 1;
  const bool is_in_place = product.kind == kFloat32 && product.out_features % kFeatures == 0 && num_weights == 1;
  const int64_t num_blocks = is_in_place && num_tiles > 1 ? (num_words + kMostWords - 1) / kMostWords : 1;
  const int64_t stride = is_in_place ? product.out_features : kFeatures;
  const uint32_t* rows = static_cast<const uint32_t*>(product.rows) + first_row * num_words;
  const Scratch laid_out(num_rows * ((num_words + num_blocks - 1) / num_blocks) * 4);
  const auto row_of = [&](int64_t tile) { return num_rows * tile / num_tiles; };
#pragma omp parallel num_threads(product.num_threads) if (product.num_threads > 1)
  {
    const Scratch own(is_in_place ? 0 : num_weights * num_rows * kFeatures * 4);
    for (int64_t block = 0; block < num_blocks; block++) {
      const int64_t first_word = num_words * block / num_blocks;
      const int64_t words_here = num_words * (block + 1) / num_blocks - first_word;
#pragma omp for schedule(static)
      for (int64_t t = 0; t < num_tiles; t++)
        lay_out(rows + row_of(t) * num_words + first_word, num_words, row_of(t + 1) - row_of(t), words_here,
                laid_out.as<uint32_t>() + row_of(t) * words_here);
#pragma omp for schedule(static)
      for (int64_t p = 0; p < num_panels; p++) {
        float* sums = is_in_place ? static_cast<float*>(product.out) + first_row * stride + p * kFeatures : own.as<float>();
        for (int i = 0; i < num_weights; i++) {
          const float* panel = (i ? product.other_weight : product.weight) + (p * num_words + first_word) * kFeatures;
          for (int64_t t = 0; t < num_tiles; t++) {
            // A single tile asks for what follows soon; of several, each asks for its part of the next panel.
            const bool is_single = num_tiles == 1;
            const int64_t first_line = is_single ? 0 : 2 * words_here * t / num_tiles;
            const int64_t end_line = is_single ? 2 * words_here : 2 * words_here * (t + 1) / num_tiles;
            const float* ahead = panel + (is_single ? kAhead : num_words * kFeatures) + first_line * kLine;
            kAdd[row_of(t + 1) - row_of(t) - 1](laid_out.as<Word>() + row_of(t) * words_here, panel, words_here,
                                                sums + (i * num_rows + row_of(t)) * stride, stride, block == 0, ahead,
                                                end_line - first_line);
          }
        }
        if (block == num_blocks - 1) finish(product, first_row, num_rows, p, sums, stride);
      }
    }
  }
}

template <class Arithmetic>
void multiply_all(const Product& product) {
  for (int64_t row = 0; row < product.num_rows; row += kMostRows)
    multiply<Arithmetic>(product, row, std::min(kMostRows, product.num_rows - row));
}

}  // namespace

extern "C" void radixkv_multiply(const Product* product) {
#ifdef __AVX512BF16__
  if (product->kind == kBfloat16) return multiply_all<InBfloat16>(*product);
#endif
  multiply_all<InFloat32>(*product);
}
