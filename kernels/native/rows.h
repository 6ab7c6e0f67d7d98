// Operations on rows between matmuls. The bits of a row do not depend on other rows.
#pragma once

#include "vectors.h"

// Up to this many numbers, one thread computes everything, because waking the others takes longer.
constexpr int64_t kMaxSerialNumbers = 1 << 15;

// `normed` may be the same memory as `rows`, if `row_stride` is `num_columns`.
extern "C" void radixkv_norm(const void* rows, const void* weight, void* normed, int64_t num_rows, int64_t num_columns,
                             int64_t row_stride, int64_t dtype, int64_t weight_dtype, double eps, int64_t rounds_first,
                             int64_t num_threads);
extern "C" void radixkv_rotate(const void* heads, const void* cos, const void* sin, void* rotated, int64_t num_tokens,
                               int64_t num_heads, int64_t head_dim, int64_t token_stride, int64_t dtype,
                               int64_t num_threads);
extern "C" void radixkv_gate(const void* rows, void* gated, int64_t num_rows, int64_t width, int64_t dtype,
                             int64_t num_threads);
extern "C" void radixkv_write(const void* key, const void* value, const int64_t* slots, void* key_pool,
                              void* value_pool, float* largest, int64_t num_tokens, int64_t num_heads,
                              int64_t head_dim, int64_t block_size, int64_t key_stride, int64_t value_stride,
                              int64_t head_stride, int64_t block_stride, int64_t dtype, int64_t kv_dtype);
