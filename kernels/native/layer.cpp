// Consecutive decoder layers for the tokens of a step, in one call. `kernels/native/layer.py` calls it.
//
//   rows ─▶ norm ─▶ queries, keys, values ─▶ norms ─▶ rotation ─▶ K/V written ─▶ attention ─▶ matmul ──┐
//     └──────────────────────────────────────────────────────────────────────────────────────────────▶ + ─┐
//     ┌───────────────────────────────────────────────────────────────────────────────────────────────────┘
//     └─▶ norm ─▶ gated MLP ─▶ +
//
// The functions of gemm.cpp, rows.cpp and attention.cpp compute a layer, so the bits are the same as with separate calls
// of them.

#include "attention.h"
#include "buffer.h"
#include "gemm.h"
#include "rows.h"
#include "threads.h"

#include <memory>

namespace {

// The fields are documented in `kernels/native/layer.py`.
struct Norm {
  const void* weight;
  int64_t dtype, rounds_first;
  double eps;
};

struct Weight {
  const void *panels, *bias;
  int64_t in_features, out_features, format;
};

struct Layer {
  Norm first, second, query, key;
  Weight heads, attended, gate, up, down;
  int64_t num_query_heads, num_kv_heads, head_dim, dtype;
};

struct KVView {
  const Problem* problem;
  void *key, *value;
  const float* sinks;
  const int64_t* slots;
  float* largest;
};

// Returns memory that a thread keeps from layer to layer, because the operating system would zero new memory each time.
char* kept_memory(int64_t num_bytes) {
  static thread_local std::unique_ptr<Buffer<char>> memory;
  static thread_local int64_t size = 0;
  if (num_bytes > size) {
    memory.reset();  // frees the old memory before the new memory is allocated
    memory.reset(new Buffer<char>(num_bytes));
    size = num_bytes;
  }
  return *memory;
}

// One layer and the tokens of one step. Rows are contiguous.
class LayerOfTokens {
 public:
  LayerOfTokens(const Layer& layer, const KVView& view, int64_t num_tokens, int64_t num_threads)
      : layer_(layer), view_(view), num_tokens_(num_tokens), num_threads_(num_threads) {}

  // `output` may be the memory of `rows`.
  void compute(const void* rows, const void* cos, const void* sin, void* output) const {
    const int64_t size = layer_.heads.in_features, num_numbers = num_tokens_ * size;
    const int64_t attention_bytes = bytes_of_all(layer_.heads.out_features) + bytes_of_all(rotated_width()) +
                                    bytes_of_all(query_width());
    const int64_t joined_bytes = is_joined() ? bytes_of_all(layer_.gate.out_features) : 0;
    const int64_t mlp_bytes = bytes_of_all(layer_.down.in_features) + joined_bytes;
    char* normed = kept_memory(bytes_of_all(size) + std::max(attention_bytes, mlp_bytes));
    char* scratch = normed + bytes_of_all(size);
    norm(layer_.first, rows, normed);
    attend(normed, cos, sin, scratch);
    add(rows, normed, output, num_numbers);
    norm(layer_.second, output, normed);
    apply_mlp(normed, scratch);
    add(output, normed, output, num_numbers);
  }

 private:
  // Whether one weight, `gate`, contains both projections of the MLP.
  bool is_joined() const { return layer_.up.panels == nullptr; }
  int64_t query_width() const { return layer_.num_query_heads * layer_.head_dim; }
  int64_t rotated_width() const { return query_width() + layer_.num_kv_heads * layer_.head_dim; }

  // Bytes of `width` numbers for each token, padded to whole cache lines.
  int64_t bytes_of_all(int64_t width) const { return (num_tokens_ * width * bytes_of(layer_.dtype) + 63) / 64 * 64; }

  // Replaces rows by the output of the attention block.
  void attend(char* rows, const void* cos, const void* sin, char* scratch) const {
    const int64_t width = layer_.heads.out_features, bytes = bytes_of(layer_.dtype);
    char* heads = scratch;  // queries, keys, values
    char* rotated = heads + bytes_of_all(width);
    char* attended = rotated + bytes_of_all(rotated_width());
    multiply(rows, layer_.heads, nullptr, heads);
    norm_heads(layer_.query, heads, layer_.num_query_heads);
    norm_heads(layer_.key, heads + query_width() * bytes, layer_.num_kv_heads);
    radixkv_rotate(heads, cos, sin, rotated, num_tokens_, layer_.num_query_heads + layer_.num_kv_heads, layer_.head_dim,
                   width, layer_.dtype, num_threads_);
    const Problem& problem = *view_.problem;
    radixkv_write(rotated + query_width() * bytes, heads + rotated_width() * bytes, view_.slots, view_.key,
                  view_.value, view_.largest, num_tokens_, layer_.num_kv_heads, layer_.head_dim, problem.block_size,
                  rotated_width(), width, problem.kv_head_stride, problem.kv_block_stride, layer_.dtype,
                  problem.kv_dtype);
    radixkv_attend(&problem, rotated, view_.key, view_.value, attended, view_.sinks);
    multiply(attended, layer_.attended, nullptr, rows);
  }

  // Replaces rows by the output of the MLP.
  void apply_mlp(char* rows, char* scratch) const {
    const int64_t width = layer_.down.in_features;
    char* gated = scratch;
    if (is_joined()) {
      char* both = gated + bytes_of_all(width);
      multiply(rows, layer_.gate, nullptr, both);
      radixkv_gate(both, gated, num_tokens_, width, layer_.dtype, num_threads_);
    } else {
      multiply(rows, layer_.gate, &layer_.up, gated);
    }
    multiply(gated, layer_.down, nullptr, rows);
  }

  void norm(const Norm& norm, const void* rows, void* normed) const {
    const int64_t size = layer_.heads.in_features;
    radixkv_norm(rows, norm.weight, normed, num_tokens_, size, size, layer_.dtype, norm.dtype, norm.eps,
                 norm.rounds_first, num_threads_);
  }

  void norm_heads(const Norm& norm, char* heads, int64_t num_heads) const {
    if (norm.weight == nullptr) return;
    const int64_t size = layer_.head_dim, width = layer_.heads.out_features;
    const bool is_shared = num_threads_ > 1 && num_tokens_ * num_heads * size > kMaxSerialNumbers;
    parallel_for(num_tokens_, is_shared ? num_threads_ : 1, [&](int64_t t) {
      char* token_heads = heads + t * width * bytes_of(layer_.dtype);
      radixkv_norm(token_heads, norm.weight, token_heads, num_heads, size, size, layer_.dtype, norm.dtype, norm.eps,
                   norm.rounds_first, 1);
    });
  }

  void multiply(const void* rows, const Weight& weight, const Weight* up, void* output) const {
    const Matmul matmul = {rows,       weight.panels,      up ? up->panels : nullptr, weight.bias, up ? up->bias : nullptr,
                             output,     num_tokens_,        weight.in_features,        weight.out_features,
                             layer_.dtype, weight.format, num_threads_};
    radixkv_multiply(&matmul);
  }

  void add(const void* a, const void* b, void* sums, int64_t num_numbers) const {
    const bool is_shared = num_threads_ > 1 && num_numbers > kMaxSerialNumbers;
    parallel_for((num_numbers + kLanes - 1) / kLanes, is_shared ? num_threads_ : 1, [&](int64_t vector) {
      const int64_t i = vector * kLanes;
      const Lanes lanes = first_lanes(num_numbers - i);
      store(sums, i, layer_.dtype, lanes, load(a, i, layer_.dtype, lanes) + load(b, i, layer_.dtype, lanes));
    });
  }

  const Layer& layer_;
  const KVView& view_;
  const int64_t num_tokens_, num_threads_;
};

}  // namespace

extern "C" void radixkv_layers(const Layer* layers, const KVView* views, int64_t num_layers, const void* rows,
                               const void* cos, const void* sin, void* output, int64_t num_tokens,
                               int64_t num_threads) {
  for (int64_t i = 0; i < num_layers; i++)
    LayerOfTokens(layers[i], views[i], num_tokens, num_threads).compute(i ? output : rows, cos, sin, output);
}
