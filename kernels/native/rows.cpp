// Operations between matmuls: norms, rotary embeddings, gates, and K/V writes into the pool. The bits of a row do not
// depend on other rows. `kernels/native/rows.py` calls these functions.

#include "rows.h"
#include "threads.h"

#include <cmath>

namespace {

void norm_row(const char* row, const void* weight, char* normed, int64_t num_columns, int64_t dtype, int64_t weight_dtype,
              float eps, bool rounds_first) {
  Floats squares = broadcast(0.0f);
  for (int64_t i = 0; i < num_columns; i += kLanes) {
    const Floats x = load(row, i, dtype, first_lanes(num_columns - i));
    squares = multiply_add(x, x, squares);
  }
  const float mean = sum_of(squares) / static_cast<float>(num_columns);
  const Floats scale = broadcast(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < num_columns; i += kLanes) {
    const Lanes lanes = first_lanes(num_columns - i);
    const Floats x = load(row, i, dtype, lanes) * scale;
    store(normed, i, dtype, lanes, (rounds_first ? rounded(x, dtype) : x) * load(weight, i, weight_dtype, lanes));
  }
}

// Applies a rotary embedding to pairs of one number of the first half of a vector and one of the second. Products are
// rounded before they are added.
void rotate_head(const char* head, const char* cos, const char* sin, char* rotated, int64_t head_dim, int64_t dtype) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Lanes lanes = first_lanes(half - i);
    const Floats first = load(head, i, dtype, lanes), second = load(head, half + i, dtype, lanes);
    const Floats first_cos = load(cos, i, dtype, lanes), second_cos = load(cos, half + i, dtype, lanes);
    const Floats first_sin = load(sin, i, dtype, lanes), second_sin = load(sin, half + i, dtype, lanes);
    store(rotated, i, dtype, lanes, rounded(first * first_cos, dtype) - rounded(second * first_sin, dtype));
    store(rotated, half + i, dtype, lanes, rounded(second * second_cos, dtype) + rounded(first * second_sin, dtype));
  }
}

// Multiplies the SiLU of the first half of a row, rounded, by the second half.
void gate_row(const char* row, char* gated, int64_t width, int64_t dtype) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes lanes = first_lanes(width - i);
    const Floats silu = silu_of(load(row, i, dtype, lanes));
    store(gated, i, dtype, lanes, rounded(silu, dtype) * load(row, width + i, dtype, lanes));
  }
}

// Copies a vector. Returns the bits of its largest magnitude. Compared as integers, bits order like magnitudes, with NaN
// above all others.
uint32_t write_vector(const char* vector, char* slot, int64_t head_dim, int64_t dtype, int64_t kv_dtype) {
  Words largest = as_words(broadcast(0.0f));
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Lanes lanes = first_lanes(head_dim - i);
    const Floats x = load(vector, i, dtype, lanes);
    largest = max_of_words(largest, and_bits(as_words(x), 0x7fffffff));
    store(slot, i, kv_dtype, lanes, x);
  }
  return largest_of(largest);
}

}  // namespace

extern "C" void radixkv_norm(const void* rows, const void* weight, void* normed, int64_t num_rows, int64_t num_columns,
                             int64_t row_stride, int64_t dtype, int64_t weight_dtype, double eps, int64_t rounds_first,
                             int64_t num_threads) {
  const bool is_shared = num_threads > 1 && num_rows * num_columns > kMaxSerialNumbers;
  parallel_for(num_rows, is_shared ? num_threads : 1, [&](int64_t r) {
    norm_row(static_cast<const char*>(rows) + r * row_stride * bytes_of(dtype), weight,
             static_cast<char*>(normed) + r * num_columns * bytes_of(dtype), num_columns, dtype, weight_dtype,
             static_cast<float>(eps), rounds_first != 0);
  });
}

extern "C" void radixkv_rotate(const void* heads, const void* cos, const void* sin, void* rotated, int64_t num_tokens,
                               int64_t num_heads, int64_t head_dim, int64_t token_stride, int64_t dtype,
                               int64_t num_threads) {
  const int64_t bytes = head_dim * bytes_of(dtype);
  const bool is_shared = num_threads > 1 && num_tokens * num_heads * head_dim > kMaxSerialNumbers;
  parallel_for(num_tokens, is_shared ? num_threads : 1, [&](int64_t t) {
    for (int64_t h = 0; h < num_heads; h++)
      rotate_head(static_cast<const char*>(heads) + t * token_stride * bytes_of(dtype) + h * bytes,
                  static_cast<const char*>(cos) + t * bytes, static_cast<const char*>(sin) + t * bytes,
                  static_cast<char*>(rotated) + (t * num_heads + h) * bytes, head_dim, dtype);
  });
}

extern "C" void radixkv_gate(const void* rows, void* gated, int64_t num_rows, int64_t width, int64_t dtype,
                             int64_t num_threads) {
  const bool is_shared = num_threads > 1 && num_rows * width > kMaxSerialNumbers;
  parallel_for(num_rows, is_shared ? num_threads : 1, [&](int64_t r) {
    gate_row(static_cast<const char*>(rows) + 2 * r * width * bytes_of(dtype),
             static_cast<char*>(gated) + r * width * bytes_of(dtype), width, dtype);
  });
}

extern "C" void radixkv_write(const void* key, const void* value, const int64_t* slots, void* key_pool,
                              void* value_pool, float* largest, int64_t num_tokens, int64_t num_heads,
                              int64_t head_dim, int64_t block_size, int64_t key_stride, int64_t value_stride,
                              int64_t head_stride, int64_t block_stride, int64_t dtype, int64_t kv_dtype) {
  for (int64_t t = 0; t < num_tokens; t++)
    for (int64_t h = 0; h < num_heads; h++) {
      const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
      const int64_t to = (block * block_stride + h * head_stride + offset * head_dim) * bytes_of(kv_dtype);
      const int64_t key_at = (t * key_stride + h * head_dim) * bytes_of(dtype);
      uint32_t largest_bits = write_vector(static_cast<const char*>(key) + key_at, static_cast<char*>(key_pool) + to,
                                           head_dim, dtype, kv_dtype);
      if (value != nullptr) {
        const int64_t value_at = (t * value_stride + h * head_dim) * bytes_of(dtype);
        const uint32_t value_bits = write_vector(static_cast<const char*>(value) + value_at,
                                                 static_cast<char*>(value_pool) + to, head_dim, dtype, kv_dtype);
        largest_bits = largest_bits > value_bits ? largest_bits : value_bits;
      }
      if (largest == nullptr) continue;
      uint32_t previous_bits;
      memcpy(&previous_bits, largest + t * num_heads + h, 4);
      if (largest_bits > previous_bits) memcpy(largest + t * num_heads + h, &largest_bits, 4);
    }
}
