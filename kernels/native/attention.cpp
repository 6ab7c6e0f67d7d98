// Paged attention with vector instructions, over K and V in place in the pool. `kernels/native/attention.py` calls it.
//
//   a row's keys   [ 0 .. 64 )[ 64 .. 128 ) ... [ .. its own position ]      blocks of 64 keys, in this order
//
// Each row keeps its largest score, its sum of weights and its sum of weighted values, and processes one block of keys
// after the other. Blocks begin at multiples of 64 positions in any batch. A block of keys is packed once for all rows
// of an item, which attend to the block in tiles of up to kRows rows. No operation on a row depends on the other rows of
// its tile, so the bits of a row do not either. Keys that are not visible to a row have a weight of 0, which changes nothing.

#include "attention.h"
#include "threads.h"

namespace {

constexpr int kRows = kRegisters == 32 ? 8 : 6;
constexpr int kPrefetchesPerTile = 8;  // calls of `prefetch` per tile of rows
// With few rows, attention waits for float32 K and V from memory: without prefetching, 16 tokens over 8,192 took 1.2
// times as long, and 1 token 1.4 times. With many rows, computing takes longer than loading the next block, and
// prefetching would take 3 to 5 % of the time.
constexpr int64_t kMaxPrefetchingRows = 128;

// Arithmetic in float32. A word is one number.
struct InFloat32 {
  using Word = float;
  static constexpr int kNumbers = 1;

  static int words_of(int64_t head_dim) { return static_cast<int>((head_dim + kLanes - 1) / kLanes * kLanes); }

  static Floats load_row(const void* row, int64_t word, int64_t dtype, int64_t head_dim) {
    return load(row, word, dtype, first_lanes(head_dim - word));
  }

  static Floats multiply_add(Floats sum, float a, Floats b) { return ::multiply_add(broadcast(a), b, sum); }

  // Values are read in place if they are float32 and whole vectors; otherwise they are converted and padded.
  static void pack_values(const void* const* rows, int num_keys, int64_t dtype, int64_t head_dim, int dims,
                          float* packed, const float** values) {
    const bool is_in_place = dtype == kFloat32 && head_dim % kLanes == 0;
    for (int k = 0; k < num_keys; k++) {
      values[k] = is_in_place ? static_cast<const float*>(rows[k]) : packed + static_cast<int64_t>(k) * dims;
      for (int d = 0; d < dims && !is_in_place; d += kLanes)
        store_floats(packed + static_cast<int64_t>(k) * dims + d, load_row(rows[k], d, dtype, head_dim));
    }
  }

  static void store_weights(float* weights, Floats first, Floats second) {
    store_floats(weights, first);
    store_floats(weights + kLanes, second);
  }
};

#ifdef __AVX512BF16__
// Multiplies pairs of bfloat16, and adds in float32. A word is a pair: two adjacent numbers of a query or a key, or the
// numbers of two keys' values in one dimension.
struct InBfloat16 {
  using Word = uint32_t;
  static constexpr int kNumbers = 2;

  static int words_of(int64_t head_dim) { return static_cast<int>((head_dim + 31) / 32 * 16); }

  static __m512 load_row(const void* row, int64_t word, int64_t dtype, int64_t head_dim) {
    return as_floats(load_pairs(row, 2 * word, dtype, head_dim));
  }

  static __m512 multiply_add(__m512 sum, uint32_t a, __m512 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }

  // Values of two keys are interleaved: [num_keys / 2, dims] words.
  static void pack_values(const void* const* rows, int num_keys, int64_t dtype, int64_t head_dim, int dims,
                          uint32_t* packed, const uint32_t** values) {
    for (int k = 0; k < num_keys; k += 2) {
      uint32_t* to = packed + static_cast<int64_t>(k / 2) * dims;
      values[k / 2] = to;
      for (int d = 0; d < dims; d += 32) {
        const Interleaved words(load_pairs(rows[k], d, dtype, head_dim), load_pairs(rows[k + 1], d, dtype, head_dim));
        store_words(to + d, 0xffff, words.first);
        if (d + kLanes < dims) store_words(to + d + kLanes, 0xffff, words.second);
      }
    }
  }

  static void store_weights(uint32_t* weights, __m512 first, __m512 second) {
    _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
};
#endif

// The memory of one thread for the rows of an item.
template <class Arithmetic>
struct Scratch {
  using Word = typename Arithmetic::Word;

  Scratch(int64_t num_rows, int64_t head_dim)
      : words(Arithmetic::words_of(head_dim)), dims(static_cast<int>((head_dim + kLanes - 1) / kLanes * kLanes)) {
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

  const int words, dims;      // words of a query, and numbers of a result, both padded to whole vectors
  char* memory;
  Word* query;                // [num_rows, words]
  Word* keys;                 // [kKeys / 16, words, 16 keys]
  Word* packed_values;
  const Word* values[kKeys];  // one per word: the values of one key, or of two
  Word* weights;              // [kRows, kKeys]
  float* sums;                // [num_rows, dims], sums of weighted values
  float* largest;             // [num_rows], largest scores, times log2(e)
  float* weight_sums;         // [num_rows, kLanes]
  float* scores;              // [kRows, kKeys]
  float* zeros;               // [dims]
  KeyPointers current, next;         // pointers of the block that is processed, and of the block after it
  int num_prefetched, num_per_call;  // keys and values of `next` that were prefetched, and how many one call prefetches

  // Prefetches part of the next block, so that it is in a cache when it is packed.
  void prefetch(int64_t bytes) {
    for (const int end = std::min(2 * next.num_keys, num_prefetched + num_per_call); num_prefetched < end; num_prefetched++) {
      const int at = num_prefetched - next.num_keys;
      const char* from = static_cast<const char*>(at < 0 ? next.keys[num_prefetched] : next.values[at]);
      for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
    }
  }
};

// Computes the scores of `R` rows and two vectors of keys. Not inlined, because its sums would then leave the registers.
template <class Arithmetic, int R>
__attribute__((noinline)) void score(const typename Arithmetic::Word* query, int64_t words,
                                     const typename Arithmetic::Word* keys, float* scores) {
  Floats sums[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = broadcast(0.0f);
  const float* first = reinterpret_cast<const float*>(keys);
  const float* second = first + words * kLanes;
  for (int64_t w = 0; w < words; w++) {
    const Floats a = load_floats(first + w * kLanes), b = load_floats(second + w * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sums[r][0] = Arithmetic::multiply_add(sums[r][0], query[r * words + w], a);
      sums[r][1] = Arithmetic::multiply_add(sums[r][1], query[r * words + w], b);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    store_floats(scores + r * kKeys, sums[r][0]);
    store_floats(scores + r * kKeys + kLanes, sums[r][1]);
  }
}

// Rescales the sums of `R` rows and adds weighted values to them, in `N` vectors of dimensions from `at` on.
template <class Arithmetic, int R, int N>
__attribute__((noinline)) void add_values(const typename Arithmetic::Word* weights, int64_t num_words,
                                          const typename Arithmetic::Word* const* values, int64_t at, int64_t dims,
                                          const float* rescale, float* to) {
  constexpr int kStride = kKeys / Arithmetic::kNumbers;
  Floats sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const Floats factor = broadcast(rescale[r]);
    sums[r][0] = load_floats(to + r * dims + at) * factor;
    if constexpr (N == 2) sums[r][1] = load_floats(to + r * dims + at + kLanes) * factor;
  }
  for (int64_t w = 0; w < num_words; w++) {
    const float* value = reinterpret_cast<const float*>(values[w]) + at;
    const Floats a = load_floats(value), b = load_floats(value + (N - 1) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sums[r][0] = Arithmetic::multiply_add(sums[r][0], weights[r * kStride + w], a);
      if constexpr (N == 2) sums[r][1] = Arithmetic::multiply_add(sums[r][1], weights[r * kStride + w], b);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    store_floats(to + r * dims + at, sums[r][0]);
    if constexpr (N == 2) store_floats(to + r * dims + at + kLanes, sums[r][1]);
  }
}

// Attends from `R` rows to the keys [first_key, end_key), at most kKeys, which are packed. Prefetches part of the next
// block before each matmul: a single large prefetch would stall.
template <class Arithmetic, int R, bool kPrefetches>
void attend_block(const Problem& problem, Scratch<Arithmetic>& scratch, int64_t row, const int32_t* positions,
                  int first_key, int end_key) {
  const int window = static_cast<int>(problem.window);
  const int lowest = *std::min_element(positions, positions + R), highest = *std::max_element(positions, positions + R);
  const int last_key = std::min(end_key - 1, highest);
  if (last_key < first_key || (window && end_key <= lowest - window + 1)) return;
  const int num_pairs = (last_key - first_key) / kPair + 1;  // pairs of vectors of scores
  const bool is_masked = first_key + kKeys > std::min(lowest + 1, end_key) || (window && first_key <= highest - window);
  const int64_t vector_bytes = problem.head_dim * bytes_of(problem.kv_dtype);
  for (int i = 0; i < num_pairs; i++) {
    if constexpr (kPrefetches) scratch.prefetch(vector_bytes);
    score<Arithmetic, R>(scratch.query + row * scratch.words, scratch.words,
                         scratch.keys + static_cast<int64_t>(i) * kPair * scratch.words, scratch.scores + i * kPair);
  }

  // Scores are multiplied and rounded like the largest one, so that no difference exceeds 0, however large they are.
  const double power = kLog2e * problem.scale;
  const float factor = problem.softcap ? 1.0f : static_cast<float>(power);
  const Floats cap_factor = broadcast(problem.softcap ? static_cast<float>(2 * power / problem.softcap) : 0.0f);
  float rescale[kLanes] = {};
  for (int r = 0; r < R; r++) {
    float* scores = scratch.scores + r * kKeys;
    Floats top = broadcast(-INFINITY);
    for (int i = 0; i < kKeys / kLanes; i++) {
      Floats x = load_floats(scores + i * kLanes);
      if (problem.softcap) x = capped(x * cap_factor, problem.softcap);
      if (is_masked)
        x = between(x, first_key + i * kLanes, window ? positions[r] - window : -1, std::min(positions[r], end_key - 1));
      if (problem.softcap || is_masked) store_floats(scores + i * kLanes, x);
      top = max_of(top, x);
    }
    float& largest = scratch.largest[row + r];
    const float new_largest = std::max(largest, largest_of(top) * factor);
    rescale[r] = largest - new_largest;
    largest = new_largest;
  }
  store_floats(rescale, exp2_of(load_floats(rescale)));
  for (int r = 0; r < R; r++) {
    const float* scores = scratch.scores + r * kKeys;
    const Floats largest = broadcast(scratch.largest[row + r]);
    Floats x[kKeys / kLanes];
    for (int i = 0; i < kKeys / kLanes; i++)
      x[i] = exp2_of(load_floats(scores + i * kLanes) * broadcast(factor) - largest);
    Floats sum = broadcast(0.0f);
    for (int i = 0; i < kKeys / kLanes; i += 4) sum = sum + ((x[i] + x[i + 1]) + (x[i + 2] + x[i + 3]));
    float* weight_sums = scratch.weight_sums + (row + r) * kLanes;
    store_floats(weight_sums, multiply_add(load_floats(weight_sums), broadcast(rescale[r]), sum));
#pragma GCC unroll 4
    for (int i = 0; i < kKeys / kPair; i++)
      Arithmetic::store_weights(scratch.weights + (r * kKeys + i * kPair) / Arithmetic::kNumbers, x[2 * i], x[2 * i + 1]);
  }

  const int64_t num_words = num_pairs * kPair / Arithmetic::kNumbers;
  float* sums = scratch.sums + row * scratch.dims;
  int at = 0;
  for (; at + 2 * kLanes <= scratch.dims; at += 2 * kLanes) {
    if constexpr (kPrefetches) scratch.prefetch(vector_bytes);
    add_values<Arithmetic, R, 2>(scratch.weights, num_words, scratch.values, at, scratch.dims, rescale, sums);
  }
  if (at < scratch.dims)
    add_values<Arithmetic, R, 1>(scratch.weights, num_words, scratch.values, at, scratch.dims, rescale, sums);
}

template <class Arithmetic, int R, bool kPrefetches>
void attend_tile(int num_rows, const Problem& problem, Scratch<Arithmetic>& scratch, int64_t row, const int32_t* positions,
                 int first_key, int end_key) {
  if constexpr (R > 1)
    if (num_rows < R)
      return attend_tile<Arithmetic, R - 1, kPrefetches>(num_rows, problem, scratch, row, positions, first_key, end_key);
  attend_block<Arithmetic, R, kPrefetches>(problem, scratch, row, positions, first_key, end_key);
}

// Packs the keys and values of the current block.
template <class Arithmetic>
void pack_block(const Problem& problem, Scratch<Arithmetic>& scratch) {
  const KeyPointers& pointers = scratch.current;
  for (int i = 0; i < pointers.num_keys; i += kLanes) {
    float* to = reinterpret_cast<float*>(scratch.keys + static_cast<int64_t>(i) * scratch.words);
    for (int w = 0; w < scratch.words; w += kLanes) {
      Words rows[kLanes];
      for (int k = 0; k < kLanes; k++)
        rows[k] = as_words(Arithmetic::load_row(pointers.keys[i + k], w, problem.kv_dtype, problem.head_dim));
      transpose(rows);
      for (int k = 0; k < kLanes; k++) store_floats(to + (w + k) * kLanes, as_floats(rows[k]));
    }
  }
  Arithmetic::pack_values(pointers.values, pointers.num_keys, problem.kv_dtype, problem.head_dim, scratch.dims,
                          scratch.packed_values, scratch.values);
}

template <class Arithmetic>
void begin(const Problem& problem, const Item& item, const char* query, const float* sinks,
           Scratch<Arithmetic>& scratch) {
  const int64_t num_rows = item.end_row - item.first_row;
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t row = item.first_row + i, head = item.kv_head * problem.group_size + row % problem.group_size;
    const int64_t number = problem.tokens[row / problem.group_size] * problem.query_token_stride + head * problem.query_head_stride;
    const char* from = query + number * bytes_of(problem.query_dtype);
    float* to = reinterpret_cast<float*>(scratch.query + i * scratch.words);
    for (int w = 0; w < scratch.words; w += kLanes)
      store_floats(to + w, Arithmetic::load_row(from, w, problem.query_dtype, problem.head_dim));
    scratch.largest[i] = sinks ? sinks[head] * kLog2e : kInitialMax;
    store_floats(scratch.weight_sums + i * kLanes, broadcast(0.0f));
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
    const float sum = sum_of(load_floats(scratch.weight_sums + i * kLanes));
    for (int64_t d = 0; d < problem.head_dim; d += kLanes) {
      const Floats mean = load_floats(scratch.sums + i * scratch.dims + d) / broadcast(sum);
      // -0 becomes 0, because the sign of a zero sum may depend on weights of 0 that were added to it.
      store(output + number * bytes_of(problem.query_dtype), d, problem.query_dtype, first_lanes(problem.head_dim - d),
            mean + broadcast(0.0f));
    }
  }
}

template <class Arithmetic>
void attend(const Problem& problem, const Item& item, const char* query, const char* key, const char* value,
            char* output, const float* sinks, Scratch<Arithmetic>& scratch) {
  begin(problem, item, query, sinks, scratch);
  for (int s = item.first_round; s < item.end_round; s++) {
    const Round& round = problem.rounds[s];
    const int64_t first = std::max<int64_t>(round.first_token * problem.group_size, item.first_row) - item.first_row;
    const int64_t end = std::min<int64_t>(round.end_token * problem.group_size, item.end_row) - item.first_row;
    if (first >= end) continue;
    const auto find_block = [&](int first_key, KeyPointers& pointers) {
      const int end_key = std::min(round.end_key, first_key + kKeys);
      locate(problem, round, item.kv_head, key, value, first_key, end_key, scratch.zeros, pointers);
    };
    const bool prefetches = problem.kv_dtype == kFloat32 && end - first <= kMaxPrefetchingRows;
    find_block(round.first_key, scratch.next);
    for (int first_key = round.first_key; first_key < round.end_key; first_key += kKeys) {
      const int end_key = std::min(round.end_key, first_key + kKeys);
      scratch.current = scratch.next;
      find_block(end_key, scratch.next);
      scratch.num_prefetched = 0;
      pack_block(problem, scratch);
      const int64_t num_tiles = (end - first + kRows - 1) / kRows;
      for (int64_t t = 0; t < num_tiles; t++) {
        const int64_t row = first + (end - first) * t / num_tiles;
        const int num_rows = static_cast<int>(first + (end - first) * (t + 1) / num_tiles - row);
        int32_t positions[kRows];
        for (int r = 0; r < num_rows; r++)
          positions[r] = problem.positions[(item.first_row + row + r) / problem.group_size];
        if (prefetches) {
          const int64_t num_pending = 2 * scratch.next.num_keys * (t + 1) / num_tiles - scratch.num_prefetched;
          scratch.num_per_call = static_cast<int>((num_pending + kPrefetchesPerTile - 1) / kPrefetchesPerTile);
          attend_tile<Arithmetic, kRows, true>(num_rows, problem, scratch, row, positions, first_key, end_key);
        } else {
          attend_tile<Arithmetic, kRows, false>(num_rows, problem, scratch, row, positions, first_key, end_key);
        }
      }
    }
  }
  finish(problem, item, scratch, output);
}

template <class Arithmetic>
void attend_all(const Problem& problem, const void* query, const void* key, const void* value, void* output,
                const float* sinks) {
  parallel_items(problem.num_items, problem.num_threads, [&](Items& items) {
    Scratch<Arithmetic> scratch(problem.max_rows, problem.head_dim);
    for (int64_t i; items.next(i);)
      attend(problem, problem.items[i], static_cast<const char*>(query), static_cast<const char*>(key),
             static_cast<const char*>(value), static_cast<char*>(output), sinks, scratch);
  });
}

}  // namespace

extern "C" void radixkv_attend(const Problem* problem, const void* query, const void* key, const void* value,
                               void* output, const float* sinks) {
  if (attend_in_tiles(*problem, query, key, value, output, sinks)) return;
#ifdef __AVX512BF16__
  if (problem->query_dtype == kBfloat16) return attend_all<InBfloat16>(*problem, query, key, value, output, sinks);
#endif
  attend_all<InFloat32>(*problem, query, key, value, output, sinks);
}
