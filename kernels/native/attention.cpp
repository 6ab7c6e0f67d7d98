// Paged attention over K and V where they lie, by vectors of 512 bits. `kernels/native/attention.py` calls it.
//
//   a row's keys   [ 0 .. 64 )[ 64 .. 128 ) ... [ .. its own position ]      blocks of 64 keys, in this order
//
// Each row keeps its largest score, its sum of weights and its weighted values, and meets one block of keys after the
// other: at multiples of 64 positions, whatever is computed with it. A block of keys is laid out once for all rows that
// see it, in tiles of up to 8 rows. No operation of a row depends on the others of its tile, so its bits do not either.
// Keys that a row does not see have a weight of 0, which changes nothing.

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

// Fields are told in `kernels/native/attention.py`. Rows are counted head by head: token * group_size + head.
struct Step {
  int32_t first_token, end_token, first_key, end_key, first_written, first_block;
};

struct Item {
  int32_t kv_head, first_row, end_row, first_step, end_step;
};

struct Problem {
  const int32_t *tokens, *positions, *blocks;
  const Step* steps;
  const Item* items;
  int64_t num_items, most_rows;
  int64_t num_kv_heads, group_size, head_dim, block_size;
  int64_t query_token_stride, query_head_stride, kv_head_stride, kv_block_stride;
  int64_t query_kind, kv_kind;
  int64_t window, num_threads;
  double scale, softcap;
};

namespace {

constexpr int kKeys = 64;
constexpr int kRows = 8;
constexpr float kNothingSeen = -1e30f;  // finite, so that the difference of two is a number

// Multiplies in float32. A word is one number.
struct InFloat32 {
  using Word = float;
  static constexpr int kNumbers = 1;

  static int words_of(int64_t head_dim) { return static_cast<int>((head_dim + 15) / 16 * 16); }

  static __m512 load_words(const void* row, int64_t word, int64_t kind, int64_t head_dim) {
    return load(row, word, kind, first_lanes(head_dim - word));
  }

  static __m512 multiply_add(__m512 sum, float a, __m512 b) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum); }

  // Values are read where they are, if they are floats in whole vectors; else they are copied as such.
  static void pack_values(const void* const* rows, int num_keys, int64_t kind, int64_t head_dim, int dims,
                          float* packed, const float** values) {
    const bool is_in_place = kind == kFloat32 && head_dim % kLanes == 0;
    for (int k = 0; k < num_keys; k++) {
      values[k] = is_in_place ? static_cast<const float*>(rows[k]) : packed + static_cast<int64_t>(k) * dims;
      for (int d = 0; d < dims && !is_in_place; d += kLanes)
        _mm512_storeu_ps(packed + static_cast<int64_t>(k) * dims + d, load_words(rows[k], d, kind, head_dim));
    }
  }

  static void store_weights(float* weights, __m512 first, __m512 second) {
    _mm512_storeu_ps(weights, first);
    _mm512_storeu_ps(weights + kLanes, second);
  }
};

#ifdef __AVX512BF16__
// Multiplies pairs of bfloat16, and adds in float32. A word is two neighbours: of a vector, or of two keys' values.
struct InBfloat16 {
  using Word = uint32_t;
  static constexpr int kNumbers = 2;

  static int words_of(int64_t head_dim) { return static_cast<int>((head_dim + 31) / 32 * 16); }

  static __m512 load_words(const void* row, int64_t word, int64_t kind, int64_t head_dim) {
    const int64_t at = 2 * word, left = head_dim - at;
    if (kind == kBfloat16) {
      const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
      return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(row) + at));
    }
    const __m512 low = load(row, at, kind, first_lanes(left));
    const __m512 high = load(row, at + kLanes, kind, left > kLanes ? first_lanes(left - kLanes) : 0);
    return (__m512)_mm512_cvtne2ps_pbh(high, low);
  }

  static __m512 multiply_add(__m512 sum, uint32_t a, __m512 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }

  // Values of two keys are interleaved: [num_keys / 2, dims] words.
  static void pack_values(const void* const* rows, int num_keys, int64_t kind, int64_t head_dim, int dims,
                          uint32_t* packed, const uint32_t** values) {
    alignas(64) static constexpr uint16_t kPairs[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kPairs), high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
    for (int k = 0; k < num_keys; k += 2) {
      uint32_t* to = packed + static_cast<int64_t>(k / 2) * dims;
      values[k / 2] = to;
      for (int d = 0; d < dims; d += 32) {
        const __m512i a = _mm512_castps_si512(load_words(rows[k], d / 2, kind, head_dim));
        const __m512i b = _mm512_castps_si512(load_words(rows[k + 1], d / 2, kind, head_dim));
        _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
        if (d + kLanes < dims) _mm512_storeu_si512(to + d + kLanes, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }

  static void store_weights(uint32_t* weights, __m512 first, __m512 second) {
    _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
};
#endif

// What one thread works with, for the rows of an item.
template <class Arithmetic>
struct Scratch {
  using Word = typename Arithmetic::Word;

  Scratch(int64_t num_rows, int64_t head_dim)
      : words(Arithmetic::words_of(head_dim)), dims(static_cast<int>((head_dim + 15) / 16 * 16)) {
    const int64_t sizes[] = {num_rows * words, kKeys * words,  kKeys * dims,        kRows * kKeys / Arithmetic::kNumbers,
                             num_rows * dims,  num_rows,       num_rows * kLanes,   kRows * kKeys,
                             dims};
    int64_t starts[9], total = 0;
    for (int i = 0; i < 9; i++) {
      starts[i] = total;
      total += (sizes[i] * 4 + 63) / 64 * 64;
    }
    memory = static_cast<char*>(aligned_alloc(64, total));
    if (memory == nullptr) abort();
    query = reinterpret_cast<Word*>(memory + starts[0]);
    keys = reinterpret_cast<Word*>(memory + starts[1]);
    packed_values = reinterpret_cast<Word*>(memory + starts[2]);
    weights = reinterpret_cast<Word*>(memory + starts[3]);
    sums = reinterpret_cast<float*>(memory + starts[4]);
    largest = reinterpret_cast<float*>(memory + starts[5]);
    weight_sums = reinterpret_cast<float*>(memory + starts[6]);
    scores = reinterpret_cast<float*>(memory + starts[7]);
    zeros = reinterpret_cast<float*>(memory + starts[8]);
    memset(zeros, 0, dims * 4);
  }
  ~Scratch() { free(memory); }
  Scratch(const Scratch&) = delete;

  const int words, dims;      // of a query in words, and of a result in numbers, both filled up to whole vectors
  char* memory;
  Word* query;                // [num_rows, words]
  Word* keys;                 // [kKeys / 16, words, 16 keys]
  Word* packed_values;
  const Word* values[kKeys];  // of one key, or of two
  Word* weights;              // [kRows, kKeys]
  float* sums;                // [num_rows, dims], of weighted values
  float* largest;             // [num_rows], of the scores times log2(e)
  float* weight_sums;         // [num_rows, kLanes]
  float* scores;              // [kRows, kKeys]
  float* zeros;               // [dims]
};

// Scores of `R` rows and 32 keys. A function of its own: inlined, its sums do not stay in registers.
template <class Arithmetic, int R>
__attribute__((noinline)) void score(const typename Arithmetic::Word* query, int64_t words,
                                     const typename Arithmetic::Word* keys, float* scores) {
  __m512 sums[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const float* first = reinterpret_cast<const float*>(keys);
  const float* second = first + words * kLanes;
  for (int64_t w = 0; w < words; w++) {
    const __m512 a = _mm512_loadu_ps(first + w * kLanes), b = _mm512_loadu_ps(second + w * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sums[r][0] = Arithmetic::multiply_add(sums[r][0], query[r * words + w], a);
      sums[r][1] = Arithmetic::multiply_add(sums[r][1], query[r * words + w], b);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(scores + r * kKeys, sums[r][0]);
    _mm512_storeu_ps(scores + r * kKeys + kLanes, sums[r][1]);
  }
}

// Shrinks what `R` rows have summed up, and adds weighted values, in 16 * `N` dimensions from `at` on.
template <class Arithmetic, int R, int N>
__attribute__((noinline)) void add_values(const typename Arithmetic::Word* weights, int64_t num_words,
                                          const typename Arithmetic::Word* const* values, int64_t at, int64_t dims,
                                          const float* shrink, float* to) {
  constexpr int kStride = kKeys / Arithmetic::kNumbers;
  __m512 sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const __m512 factor = _mm512_set1_ps(shrink[r]);
    sums[r][0] = _mm512_mul_ps(_mm512_loadu_ps(to + r * dims + at), factor);
    if constexpr (N == 2) sums[r][1] = _mm512_mul_ps(_mm512_loadu_ps(to + r * dims + at + kLanes), factor);
  }
  for (int64_t w = 0; w < num_words; w++) {
    const float* value = reinterpret_cast<const float*>(values[w]) + at;
    const __m512 a = _mm512_loadu_ps(value), b = _mm512_loadu_ps(value + (N - 1) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sums[r][0] = Arithmetic::multiply_add(sums[r][0], weights[r * kStride + w], a);
      if constexpr (N == 2) sums[r][1] = Arithmetic::multiply_add(sums[r][1], weights[r * kStride + w], b);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(to + r * dims + at, sums[r][0]);
    if constexpr (N == 2) _mm512_storeu_ps(to + r * dims + at + kLanes, sums[r][1]);
  }
}

// softcap * tanh(x / softcap), times log2(e). `doubled` is 2 * log2(e) * x / softcap.
inline __m512 capped(__m512 doubled, double softcap) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 power = exp2_of(_mm512_min_ps(doubled, _mm512_set1_ps(100.0f)));
  const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(static_cast<float>(softcap) * kLog2e));
}

// Lets `R` rows meet the keys [first_key, end_key), which are laid out: up to kKeys of them.
template <class Arithmetic, int R>
void meet(const Problem& problem, Scratch<Arithmetic>& scratch, int64_t row, const int32_t* positions, int first_key,
          int end_key) {
  const int window = static_cast<int>(problem.window);
  const int lowest = *std::min_element(positions, positions + R), highest = *std::max_element(positions, positions + R);
  const int last_key = std::min(end_key - 1, highest);
  if (last_key < first_key || (window && end_key <= lowest - window + 1)) return;
  const int num_pairs = (last_key - first_key) / 32 + 1;  // of vectors of scores
  const bool is_masked = first_key + kKeys > std::min(lowest + 1, end_key) || (window && first_key <= highest - window);
  for (int i = 0; i < num_pairs; i++)
    score<Arithmetic, R>(scratch.query + row * scratch.words, scratch.words,
                         scratch.keys + static_cast<int64_t>(i) * 32 * scratch.words, scratch.scores + i * 32);

  // A score is multiplied and rounded like the largest one, so that no difference is above 0, however large they are.
  const double power = kLog2e * problem.scale;
  const __m512 factor = _mm512_set1_ps(problem.softcap ? 1.0f : static_cast<float>(power));
  const __m512 cap_factor = _mm512_set1_ps(problem.softcap ? static_cast<float>(2 * power / problem.softcap) : 0.0f);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  float shrink[kLanes] = {};
  for (int r = 0; r < R; r++) {
    float* scores = scratch.scores + r * kKeys;
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int i = 0; i < kKeys / kLanes; i++) {
      __m512 x = _mm512_loadu_ps(scores + i * kLanes);
      if (problem.softcap) x = capped(_mm512_mul_ps(x, cap_factor), problem.softcap);
      if (is_masked) {
        const __m512i keys = _mm512_add_epi32(lanes, _mm512_set1_epi32(first_key + i * kLanes));
        __mmask16 is_seen = _mm512_cmple_epi32_mask(keys, _mm512_set1_epi32(std::min(positions[r], end_key - 1)));
        if (window) is_seen &= _mm512_cmpgt_epi32_mask(keys, _mm512_set1_epi32(positions[r] - window));
        x = _mm512_mask_blend_ps(is_seen, _mm512_set1_ps(-INFINITY), x);
      }
      if (problem.softcap || is_masked) _mm512_storeu_ps(scores + i * kLanes, x);
      top = _mm512_max_ps(top, x);
    }
    float& largest = scratch.largest[row + r];
    const float now = std::max(largest, _mm512_reduce_max_ps(top) * _mm512_cvtss_f32(factor));
    shrink[r] = largest - now;
    largest = now;
  }
  _mm512_storeu_ps(shrink, exp2_of(_mm512_loadu_ps(shrink)));
  for (int r = 0; r < R; r++) {
    const float* scores = scratch.scores + r * kKeys;
    const __m512 largest = _mm512_set1_ps(scratch.largest[row + r]);
    __m512 x[kKeys / kLanes];
    for (int i = 0; i < kKeys / kLanes; i++)
      x[i] = exp2_of(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + i * kLanes), factor), largest));
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
    float* weight_sums = scratch.weight_sums + (row + r) * kLanes;
    _mm512_storeu_ps(weight_sums, _mm512_fmadd_ps(_mm512_loadu_ps(weight_sums), _mm512_set1_ps(shrink[r]), sum));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
      Arithmetic::store_weights(scratch.weights + (r * kKeys + i * 32) / Arithmetic::kNumbers, x[2 * i], x[2 * i + 1]);
  }

  const int64_t num_words = num_pairs * 32 / Arithmetic::kNumbers;
  float* sums = scratch.sums + row * scratch.dims;
  int at = 0;
  for (; at + 2 * kLanes <= scratch.dims; at += 2 * kLanes)
    add_values<Arithmetic, R, 2>(scratch.weights, num_words, scratch.values, at, scratch.dims, shrink, sums);
  if (at < scratch.dims)
    add_values<Arithmetic, R, 1>(scratch.weights, num_words, scratch.values, at, scratch.dims, shrink, sums);
}

// Lays out the keys [first_key, end_key) of a step, and their values. Keys that are not written are zeros.
template <class Arithmetic>
void lay_out(const Problem& problem, const Step& step, int64_t kv_head, const char* key, const char* value,
             int first_key, int end_key, Scratch<Arithmetic>& scratch) {
  const void *key_rows[kKeys], *value_rows[kKeys];
  const int num_keys = (end_key - first_key + 31) / 32 * 32;
  for (int i = 0; i < num_keys; i++) {
    const int at = first_key + i;
    if (at >= end_key || at < step.first_written) {
      key_rows[i] = value_rows[i] = scratch.zeros;
      continue;
    }
    const int64_t block = problem.blocks[step.first_block + at / problem.block_size - step.first_key / problem.block_size];
    const int64_t number = kv_head * problem.kv_head_stride + block * problem.kv_block_stride +
                           at % problem.block_size * problem.head_dim;
    key_rows[i] = key + number * bytes_of(problem.kv_kind);
    value_rows[i] = value + number * bytes_of(problem.kv_kind);
  }
  for (int i = 0; i < num_keys; i += kLanes) {
    float* to = reinterpret_cast<float*>(scratch.keys + static_cast<int64_t>(i) * scratch.words);
    for (int w = 0; w < scratch.words; w += kLanes) {
      __m512i rows[kLanes];
      for (int k = 0; k < kLanes; k++)
        rows[k] = _mm512_castps_si512(Arithmetic::load_words(key_rows[i + k], w, problem.kv_kind, problem.head_dim));
      transpose(rows);
      for (int k = 0; k < kLanes; k++) _mm512_storeu_si512(to + (w + k) * kLanes, rows[k]);
    }
  }
  Arithmetic::pack_values(value_rows, num_keys, problem.kv_kind, problem.head_dim, scratch.dims, scratch.packed_values,
                          scratch.values);
}

template <class Arithmetic>
void begin(const Problem& problem, const Item& item, const char* query, const float* sinks,
           Scratch<Arithmetic>& scratch) {
  const int64_t num_rows = item.end_row - item.first_row;
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t row = item.first_row + i, head = item.kv_head * problem.group_size + row % problem.group_size;
    const int64_t number = problem.tokens[row / problem.group_size] * problem.query_token_stride + head * problem.query_head_stride;
    const char* from = query + number * bytes_of(problem.query_kind);
    float* to = reinterpret_cast<float*>(scratch.query + i * scratch.words);
    for (int w = 0; w < scratch.words; w += kLanes)
      _mm512_storeu_ps(to + w, Arithmetic::load_words(from, w, problem.query_kind, problem.head_dim));
    scratch.largest[i] = sinks ? sinks[head] * kLog2e : kNothingSeen;
    _mm512_storeu_ps(scratch.weight_sums + i * kLanes, _mm512_setzero_ps());
    if (sinks) scratch.weight_sums[i * kLanes] = 1.0f;
  }
  memset(scratch.sums, 0, num_rows * scratch.dims * sizeof(float));
}

template <class Arithmetic>
void finish(const Problem& problem, const Item& item, const Scratch<Arithmetic>& scratch, char* output) {
  for (int64_t i = 0; i < item.end_row - item.first_row; i++) {
    const int64_t row = item.first_row + i, head = item.kv_head * problem.group_size + row % problem.group_size;
    const int64_t token = problem.tokens[row / problem.group_size];
    const int64_t number = (token * problem.num_kv_heads * problem.group_size + head) * problem.head_dim;
    const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(scratch.weight_sums + i * kLanes));
    for (int64_t d = 0; d < problem.head_dim; d += kLanes) {
      const __m512 mean = _mm512_div_ps(_mm512_loadu_ps(scratch.sums + i * scratch.dims + d), _mm512_set1_ps(sum));
      // -0 becomes 0: whether a sum is one may depend on weights of 0 that were added to it.
      store(output + number * bytes_of(problem.query_kind), d, problem.query_kind, first_lanes(problem.head_dim - d),
            _mm512_add_ps(mean, _mm512_setzero_ps()));
    }
  }
}

template <class Arithmetic>
void attend(const Problem& problem, const Item& item, const char* query, const char* key, const char* value,
            char* output, const float* sinks, Scratch<Arithmetic>& scratch) {
  using Meet = void (*)(const Problem&, Scratch<Arithmetic>&, int64_t, const int32_t*, int, int);
  static constexpr Meet kMeet[kRows] = {meet<Arithmetic, 1>, meet<Arithmetic, 2>, meet<Arithmetic, 3>,
                                        meet<Arithmetic, 4>, meet<Arithmetic, 5>, meet<Arithmetic, 6>,
                                        meet<Arithmetic, 7>, meet<Arithmetic, 8>};
  begin(problem, item, query, sinks, scratch);
  for (int s = item.first_step; s < item.end_step; s++) {
    const Step& step = problem.steps[s];
    const int64_t first = std::max<int64_t>(step.first_token * problem.group_size, item.first_row) - item.first_row;
    const int64_t end = std::min<int64_t>(step.end_token * problem.group_size, item.end_row) - item.first_row;
    if (first >= end) continue;
    for (int first_key = step.first_key; first_key < step.end_key; first_key += kKeys) {
      const int end_key = std::min(step.end_key, first_key + kKeys);
      lay_out(problem, step, item.kv_head, key, value, first_key, end_key, scratch);
      for (int64_t row = first; row < end; row += kRows) {
        const int num_rows = static_cast<int>(std::min<int64_t>(kRows, end - row));
        int32_t positions[kRows];
        for (int r = 0; r < num_rows; r++)
          positions[r] = problem.positions[(item.first_row + row + r) / problem.group_size];
        kMeet[num_rows - 1](problem, scratch, row, positions, first_key, end_key);
      }
    }
  }
  finish(problem, item, scratch, output);
}

template <class Arithmetic>
void attend_all(const Problem& problem, const void* query, const void* key, const void* value, void* output,
                const float* sinks) {
#pragma omp parallel num_threads(problem.num_threads) if (problem.num_threads > 1)
  {
    Scratch<Arithmetic> scratch(problem.most_rows, problem.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < problem.num_items; i++)
      attend(problem, problem.items[i], static_cast<const char*>(query), static_cast<const char*>(key),
             static_cast<const char*>(value), static_cast<char*>(output), sinks, scratch);
  }
}

}  // namespace

extern "C" void radixkv_attend(const Problem* problem, const void* query, const void* key, const void* value,
                               void* output, const float* sinks) {
#ifdef __AVX512BF16__
  if (problem->query_kind == kBfloat16) return attend_all<InBfloat16>(*problem, query, key, value, output, sinks);
#endif
  attend_all<InFloat32>(*problem, query, key, value, output, sinks);
}
