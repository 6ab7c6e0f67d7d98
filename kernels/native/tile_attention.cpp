// Attention of bfloat16 queries in AMX tiles. `attention.cpp` describes what is computed, and in which order.
//
//   scores   [64 keys][16 rows]  =  keys, in place             times queries, packed once per item
//   sums     [dims][16 rows]    +=  values, packed per block   times weights, two keys per word
//
// A row occupies the same lane of every vector, so that no sum crosses lanes.

#include "attention.h"
#include "threads.h"
#include "buffer.h"
#include "tiles.h"

#include <vector>

#ifdef RADIXKV_TILES
namespace {

// 2^x with a relative error of at most 9e-5, and exactly 1 for 0. Weights are rounded to bfloat16 afterwards, which adds an
// error of up to 2e-3.
Floats weight_of(Floats x) {
  const Split split = split_of(x);
  Floats sum = multiply_add(broadcast(7.7067241e-2f), split.fraction, broadcast(2.2764498e-1f));
  sum = multiply_add(sum, split.fraction, broadcast(6.9511664e-1f));
  sum = multiply_add(sum, split.fraction, broadcast(1.0f));
  return times_power_of_2(sum, split);
}

// 16 consecutive rows of an item, or fewer at its end.
struct Rows {
  int64_t first;
  int count;
  alignas(64) int32_t positions[kLines];
  Floats largest, weight_sums;
  uint32_t* query;  // [words][16 rows]
  float* sums;      // [dims][16 rows]
  // For the current round and block of keys:
  Words selected_positions;  // positions of the rows of the round; -1 for other rows, to which no key is visible
  Lanes selected_lanes;
  int lowest, highest;
  int num_pairs;  // pairs of vectors of keys, up to the last visible key; 0 if no key is visible
  bool is_masked;

  // Selects the rows of a round: the rows [from, to) of the item.
  void select(int64_t from, int64_t to) {
    alignas(64) int32_t selected[kLines];
    lowest = INT32_MAX, highest = -1;
    for (int r = 0; r < kLines; r++) {
      const bool is_selected = r < count && first + r >= from && first + r < to;
      selected[r] = is_selected ? positions[r] : -1;
      if (is_selected) lowest = std::min(lowest, positions[r]), highest = std::max(highest, positions[r]);
    }
    selected_positions = _mm512_load_si512(selected);
    selected_lanes = _mm512_cmpge_epi32_mask(selected_positions, _mm512_setzero_si512());
  }

  void set_keys(const Problem& problem, int first_key, int end_key) {
    const int window = static_cast<int>(problem.window), last_key = std::min(end_key - 1, highest);
    const bool is_hidden = last_key < first_key || (window && end_key <= lowest - window + 1);
    num_pairs = is_hidden ? 0 : (last_key - first_key) / kPair + 1;
    is_masked = selected_lanes != 0xffff || first_key + kKeys > std::min(lowest + 1, end_key) ||
                (window && first_key <= highest - window);
  }
};

class Attention {
 public:
  Attention(const Problem& problem, const char* query, const char* key, const char* value, char* output,
            const float* sinks)
      : problem_(problem), query_(query), key_(key), value_(value), output_(output), sinks_(sinks),
        words_((problem.head_dim + 2 * kTileWords - 1) / (2 * kTileWords) * kTileWords),
        dims_(2 * words_),
        reads_in_place_(problem.kv_dtype == kBfloat16 && problem.head_dim % (2 * kTileWords) == 0 &&
                        problem.block_size % kLines == 0),
        rows_((problem.max_rows + kLines - 1) / kLines), query_words_(rows_.size() * words_ * kLines),
        sums_(rows_.size() * dims_ * kLines), scores_(kKeys * kLines), weights_(kKeys / 2 * kLines),
        copied_keys_(kKeys * words_), values_(kKeys / 2 * dims_), added_(2 * kTileNumbers), zeros_(kLines * words_) {
    memset(zeros_, 0, kLines * words_ * 4);
  }

  void attend(const Item& item) {
    const int64_t num_rows = item.end_row - item.first_row;
    for (int64_t row = 0; row < num_rows; row += kLines) begin(item, row, std::min<int64_t>(kLines, num_rows - row));
    for (int s = item.first_round; s < item.end_round; s++) {
      const Round& round = problem_.rounds[s];
      const int64_t first = std::max<int64_t>(round.first_token * problem_.group_size, item.first_row) - item.first_row;
      const int64_t end = std::min<int64_t>(round.end_token * problem_.group_size, item.end_row) - item.first_row;
      if (first < end) attend_keys(item, round, first, end);
    }
    for (int64_t row = 0; row < num_rows; row += kLines) finish(item, rows_[row / kLines]);
  }

 private:
  int64_t head_of(const Item& item, int64_t row) const {
    return item.kv_head * problem_.group_size + (item.first_row + row) % problem_.group_size;
  }
  int64_t token_of(const Item& item, int64_t row) const { return (item.first_row + row) / problem_.group_size; }

  // Initializes up to 16 rows, and packs their queries.
  void begin(const Item& item, int64_t first, int64_t count) {
    const int64_t t = first / kLines;
    Rows& rows = rows_[t];
    rows.first = first;
    rows.count = static_cast<int>(count);
    rows.query = query_words_ + t * words_ * kLines;
    rows.sums = sums_ + t * dims_ * kLines;
    const char* queries[kLines];
    alignas(64) float largest[kLines];
    for (int r = 0; r < kLines; r++) {
      const int64_t row = first + std::min<int64_t>(r, count - 1), token = token_of(item, row), head = head_of(item, row);
      const int64_t number = problem_.tokens[token] * problem_.query_token_stride + head * problem_.query_head_stride;
      queries[r] = query_ + 2 * number;
      rows.positions[r] = problem_.positions[token];
      largest[r] = sinks_ ? sinks_[head] * kLog2e : kInitialMax;
    }
    rows.largest = load_floats(largest);
    rows.weight_sums = broadcast(sinks_ ? 1.0f : 0.0f);
    Words lines[kLines];
    for (int64_t w = 0; w < words_; w += kTileWords) {
      for (int r = 0; r < kLines; r++) lines[r] = load_pairs(queries[r], 2 * w, kBfloat16, problem_.head_dim);
      transpose(lines);
      for (int i = 0; i < kTileWords; i++) store_words(rows.query + (w + i) * kLines, 0xffff, lines[i]);
    }
    memset(rows.sums, 0, dims_ * kLines * sizeof(float));
  }

  // Attends from the rows [first, end) of an item to the keys of a round, block by block.
  void attend_keys(const Item& item, const Round& round, int64_t first, int64_t end) {
    Rows *first_rows = rows_.data() + first / kLines, *end_rows = rows_.data() + (end + kLines - 1) / kLines;
    for (Rows* rows = first_rows; rows < end_rows; rows++) rows->select(first, end);
    for (int first_key = round.first_key; first_key < round.end_key; first_key += kKeys) {
      const int end_key = std::min(round.end_key, first_key + kKeys);
      locate(problem_, round, item.kv_head, key_, value_, first_key, end_key, zeros_, pointers_);
      pack_keys();
      pack_values();
      for (Rows* rows = first_rows; rows < end_rows; rows++) {
        rows->set_keys(problem_, first_key, end_key);
        if (rows->num_pairs == 0) continue;
        score(*rows);
        add(*rows, first_key);
      }
    }
  }

  // Sets `keys_` to tiles of 16 keys, in place in the pool if possible, and otherwise in a copy.
  void pack_keys() {
    for (int i = 0; i < pointers_.num_keys; i += kLines) {
      const void*& tile = keys_[i / kLines] = zeros_;
      if (reads_in_place_) {
        // The 16 keys lie in one block of the pool. Unwritten keys among them are masked.
        for (int k = kLines - 1; k >= 0; k--)
          if (pointers_.keys[i + k] != zeros_) tile = static_cast<const char*>(pointers_.keys[i + k]) - k * words_ * 4;
        continue;
      }
      tile = copied_keys_ + i * words_;
      for (int k = i; k < i + kLines; k++)
        for (int64_t w = 0; w < words_; w += kTileWords)
          store_words(copied_keys_ + k * words_ + w, 0xffff,
                      load_pairs(pointers_.keys[k], 2 * w, problem_.kv_dtype, problem_.head_dim));
    }
  }

  // Packs values in tiles of 16 dimensions and 32 keys: [dims / 16][2][16 dims][16 words].
  void pack_values() {
    for (int i = 0; i < pointers_.num_keys; i += kPair)
      for (int64_t d = 0; d < dims_; d += 2 * kLines) {
        Words first[kTileWords], second[kTileWords];
        for (int w = 0; w < kTileWords; w++) {
          const void** values = pointers_.values + i + 2 * w;
          const Interleaved words(load_pairs(values[0], d, problem_.kv_dtype, problem_.head_dim),
                                  load_pairs(values[1], d, problem_.kv_dtype, problem_.head_dim));
          first[w] = words.first;
          second[w] = words.second;
        }
        transpose(first);
        transpose(second);
        uint32_t* to = values_ + (d / kLines * 2 + i / kPair) * kTileNumbers;
        for (int line = 0; line < kLines; line++) {
          store_words(to + line * kTileWords, 0xffff, first[line]);
          store_words(to + 2 * kTileNumbers + line * kTileWords, 0xffff, second[line]);
        }
      }
  }

  // Computes the scores of the packed keys.
  void score(const Rows& rows) const {
    const int64_t stride = words_ * 4;
    const bool has_two = rows.num_pairs == 2;
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int64_t w = 0; w < words_; w += kTileWords) {
      load_tile<4>(rows.query + w * kLines, 64);
      load_tile<6>(static_cast<const uint32_t*>(keys_[0]) + w, stride);
      add_products<0, 6, 4>();
      load_tile<7>(static_cast<const uint32_t*>(keys_[1]) + w, stride);
      add_products<1, 7, 4>();
      if (!has_two) continue;
      load_tile<6>(static_cast<const uint32_t*>(keys_[2]) + w, stride);
      add_products<2, 6, 4>();
      load_tile<7>(static_cast<const uint32_t*>(keys_[3]) + w, stride);
      add_products<3, 7, 4>();
    }
    store_tile<0>(scores_, 64), store_tile<1>(scores_ + kTileNumbers, 64);
    if (has_two) store_tile<2>(scores_ + 2 * kTileNumbers, 64), store_tile<3>(scores_ + 3 * kTileNumbers, 64);
  }

  // Adds the weighted values of the keys from `first_key` on to the sums of the rows.
  void add(Rows& rows, int first_key) {
    const int num_keys = rows.num_pairs * kPair;
    // Scores are multiplied and rounded like the largest one, so that no difference exceeds 0, however large they are.
    const double power = kLog2e * problem_.scale;
    const Floats factor = broadcast(problem_.softcap ? 1.0f : static_cast<float>(power));
    if (problem_.softcap) {
      const Floats cap_factor = broadcast(static_cast<float>(2 * power / problem_.softcap));
      for (int k = 0; k < num_keys; k++) {
        float* score = scores_ + k * kLines;
        store_floats(score, capped(load_floats(score) * cap_factor, problem_.softcap));
      }
    }
    if (rows.is_masked) mask_scores(rows, first_key, num_keys);
    Floats tops[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    for (int k = 0; k < num_keys; k += 4)
      for (int i = 0; i < 4; i++) tops[i] = max_of(tops[i], load_floats(scores_ + (k + i) * kLines));
    const Floats top = max_of(max_of(tops[0], tops[1]), max_of(tops[2], tops[3]));
    const Floats largest = max_of(rows.largest, top * factor), rescale = exp2_of(rows.largest - largest);
    rows.largest = largest;

    alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const Words pairs = _mm512_load_si512(kPairs);
    Floats weight_sums[2] = {broadcast(0.0f), broadcast(0.0f)};
    for (int k = 0; k < num_keys; k += 2) {
      const Floats a = weight_of(load_floats(scores_ + k * kLines) * factor - largest);
      const Floats b = weight_of(load_floats(scores_ + (k + 1) * kLines) * factor - largest);
      weight_sums[0] = weight_sums[0] + a;
      weight_sums[1] = weight_sums[1] + b;
      store_words(weights_ + k / 2 * kLines, 0xffff,
                  _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
    }
    rows.weight_sums = multiply_add(rows.weight_sums, rescale, weight_sums[0] + weight_sums[1]);

    load_tile<4>(weights_, 64);
    if (rows.num_pairs == 2) load_tile<5>(weights_ + kTileNumbers, 64);
    const bool has_all_lanes = rows.selected_lanes == 0xffff;
    for (int64_t d = 0; d < dims_; d += 2 * kLines) {
      const uint32_t* values = values_ + d / kLines * 2 * kTileNumbers;
      clear_tile<0>(), clear_tile<1>();
      load_tile<6>(values, 64);
      add_products<0, 6, 4>();
      load_tile<7>(values + 2 * kTileNumbers, 64);
      add_products<1, 7, 4>();
      if (rows.num_pairs == 2) {
        load_tile<6>(values + kTileNumbers, 64);
        add_products<0, 6, 5>();
        load_tile<7>(values + 3 * kTileNumbers, 64);
        add_products<1, 7, 5>();
      }
      store_tile<0>(added_, 64), store_tile<1>(added_ + kTileNumbers, 64);
      for (int i = 0; i < 2 * kLines; i++) {
        float* sums = rows.sums + (d + i) * kLines;
        const Floats before = load_floats(sums), now = multiply_add(before, rescale, load_floats(added_ + i * kLines));
        // Rows that are not selected keep their sums: a weight of 0 times a value that is not finite is not 0.
        store_floats(sums, has_all_lanes ? now : _mm512_mask_mov_ps(before, rows.selected_lanes, now));
      }
    }
  }

  // Sets scores of keys that are not visible to -infinity. Keys past the end of a round need no check: a round ends after
  // the positions of its rows, or with a whole block of keys.
  void mask_scores(const Rows& rows, int first_key, int num_keys) const {
    const Words window = _mm512_set1_epi32(problem_.window);
    const Words last_hidden = problem_.window ? _mm512_sub_epi32(rows.selected_positions, window) : _mm512_set1_epi32(-1);
    for (int k = 0; k < num_keys; k++) {
      const Words key = _mm512_set1_epi32(first_key + k);
      const Lanes is_visible =
          _mm512_cmple_epi32_mask(key, rows.selected_positions) & _mm512_cmpgt_epi32_mask(key, last_hidden);
      float* score = scores_ + k * kLines;
      store_floats(score, _mm512_mask_blend_ps(is_visible, broadcast(-INFINITY), load_floats(score)));
    }
  }

  void finish(const Item& item, const Rows& rows) const {
    Words lines[kLines];
    for (int64_t d = 0; d < problem_.head_dim; d += kLines) {
      // -0 becomes 0, because the sign of a zero sum may depend on weights of 0 that were added to it.
      for (int i = 0; i < kLines; i++)
        lines[i] = as_words(load_floats(rows.sums + (d + i) * kLines) / rows.weight_sums + broadcast(0.0f));
      transpose(lines);
      for (int r = 0; r < rows.count; r++) {
        const int64_t token = problem_.tokens[token_of(item, rows.first + r)];
        const int64_t head = token * problem_.num_kv_heads * problem_.group_size + head_of(item, rows.first + r);
        const Lanes lanes = first_lanes(problem_.head_dim - d);
        store(output_, head * problem_.head_dim + d, kBfloat16, lanes, as_floats(lines[r]));
      }
    }
  }

  const Problem& problem_;
  const char *query_, *key_, *value_;
  char* output_;
  const float* sinks_;
  const int64_t words_, dims_;  // words and numbers of a vector, both padded to whole tiles
  const bool reads_in_place_;   // whether keys are read in place
  std::vector<Rows> rows_;      // the rows of an item
  const Buffer<uint32_t> query_words_;  // [rows_, words, 16 rows]
  const Buffer<float> sums_;            // [rows_, dims, 16 rows], sums of weighted values
  const Buffer<float> scores_;          // [kKeys, 16 rows]
  const Buffer<uint32_t> weights_;      // [kKeys / 2, 16 rows]
  const Buffer<uint32_t> copied_keys_;  // [kKeys, words]
  const Buffer<uint32_t> values_;       // [dims / 16, 2, 16 dims, 16 words]
  const Buffer<float> added_;           // [2 * 16 dims, 16 rows]
  const Buffer<float> zeros_;           // [16, words]
  const void* keys_[kKeys / kLines];  // tiles of 16 keys, with a stride of `words`
  KeyPointers pointers_;
};

}  // namespace

bool attend_in_tiles(const Problem& problem, const void* query, const void* key, const void* value, void* output,
                     const float* sinks) {
  if (problem.query_dtype != kBfloat16 || !has_tiles()) return false;
  parallel_items(problem.num_items, problem.num_threads, [&](Items& items) {
    const Tiles tiles;
    Attention attention(problem, static_cast<const char*>(query), static_cast<const char*>(key),
                        static_cast<const char*>(value), static_cast<char*>(output), sinks);
    for (int64_t i; items.next(i);) attention.attend(problem.items[i]);
  });
  return true;
}
#else
bool attend_in_tiles(const Problem&, const void*, const void*, const void*, void*, const float*) { return false; }
#endif
