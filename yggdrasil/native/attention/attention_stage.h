// Attention as stages of layer bytecode: norm and rotary embedding of queries and keys, cache writes, attention.
#pragma once

#include "attention/tree_attention.h"

namespace yggdrasil {

// Rotary embedding of a head of size D in pairs (i, i + D/2). Every operation is rounded, as in the model's own code.
// `to` may equal `from`.
template <typename T>
void rotate(const T* from, const T* cos, const T* sin, int64_t head_dim, T* to) {
  const int64_t half = head_dim / 2;
  int64_t j = 0;
#ifdef YGG_AVX2
  for (; j + 16 <= half; j += 16) {
    const Lanes low = load16(from + j), high = load16(from + half + j);
    const auto product = [](Lanes numbers, const T* factors) { return uncontracted(round_to<T>(numbers * load16(factors))); };
    const Lanes first = round_to<T>(product(low, cos + j) - product(high, sin + j));
    const Lanes second = round_to<T>(product(high, cos + half + j) + product(low, sin + half + j));
    store16(to + j, first);
    store16(to + half + j, second);
  }
#endif
  for (; j < half; ++j) {
    const float low = to_float(from[j]), high = to_float(from[half + j]);
    const auto product = [](float a, T b) { return uncontracted(to_float(static_cast<T>(a * to_float(b)))); };
    to[j] = static_cast<T>(product(low, cos[j]) - product(high, sin[j]));
    to[half + j] = static_cast<T>(product(high, cos[half + j]) + product(low, sin[half + j]));
  }
}

// Rotary variant: pairs (i, i + D/2) with every operation rounded; the same in float32, rounded once; pairs (2i, 2i +
// 1) in float32, rounded once.
enum class RotaryLayout : int64_t { halves = 0, float32_halves = 1, float32_pairs = 2 };

// Rotary embedding in float32, rounded once. `cos` and `sin` [D] have equal halves, of which the first is read.
template <typename T>
void rotate_float32(const T* from, const float* cos, const float* sin, int64_t head_dim, bool adjacent_pairs, T* to) {
  const int64_t half = head_dim / 2, pair_stride = adjacent_pairs ? 1 : half, step = adjacent_pairs ? 2 : 1;
  for (int64_t j = 0; j < half; ++j) {
    const float low = to_float(from[j * step]), high = to_float(from[j * step + pair_stride]);
    to[j * step] = static_cast<T>(uncontracted(low * cos[j]) - uncontracted(high * sin[j]));
    to[j * step + pair_stride] = static_cast<T>(uncontracted(high * cos[j]) + uncontracted(low * sin[j]));
  }
}

// Cosines and sines [W, R] for the first R elements of a head, in the rows' dtype, or float32 for the float32 variants;
// null for no rotation.
struct RotaryTables {
  RotaryLayout layout;
  const void *cos, *sin;
  int64_t size;  // R

  template <typename T>
  void apply(int64_t row, const T* from, int64_t d, T* to) const {
    const auto row_of = [&]<typename N>(N, const void* all) { return static_cast<const N*>(all) + row * size; };
    if (to != from) std::copy(from + size, from + d, to + size);
    if (layout == RotaryLayout::halves) return rotate(from, row_of(T{}, cos), row_of(T{}, sin), size, to);
    rotate_float32(from, row_of(0.0f, cos), row_of(0.0f, sin), size, layout == RotaryLayout::float32_pairs, to);
  }
};

// RMS norm and rotary embedding of query and key heads before attention.
template <typename T>
struct RotaryEmbedding {
  NormOp<T> query_norm, key_norm;  // [D] each
  RotaryTables tables;

  // Applies them to a head of a row; `to` may equal `from`.
  void layout(const NormOp<T>& norm, int64_t row, const T* from, int64_t d, T* to) const {
    if (norm.weight) {
      const InputRows<T> head{from, {}, norm, 1, d};
      head.read(0, 0, d, head.inverse_rms(0), to);
      from = to;
    }
    if (tables.cos) tables.apply(row, from, d, to);
    else if (to != from) std::copy(from, from + d, to);
  }
};

template <typename T>
class AttentionStage {
 public:
  // `query` [W, Hq * D] is rotated in place; `key` and `value` are [W, Hkv * D]. The query pointer and strides of `of`
  // are set to these rows. With `gated`, `query` is [W, Hq, 2 * D]: each head is followed by a gate, whose sigmoid
  // multiplies the head's output.
  AttentionStage(AttentionInputs<T> of, const VisibleKeys& visible, int64_t rows, T* query, const T* key, const T* value, const RotaryEmbedding<T>& layout, bool gated, T* out,
                 int64_t num_threads)
      : of_(with_queries(of, query, gated)), attention_(of_, visible, rows, out, num_threads), query_(query), key_(key), value_(value), rotary_(layout),
        out_(out), rows_(rows), start_(visible.start), gated_(gated) {}

  // The stages call write_keys(), attend() and gate() of `work`.
  template <typename Work>
  void add_stages(Stages& stages, const Work& work, int64_t num_threads) const {
    stages.add<&Work::write_keys>(work, rows_ * of_.key_heads, num_threads);
    stages.add<&Work::attend>(work, attention_.count(), num_chunks_of(attention_.count(), num_threads, kManyItems));
    if (gated_) stages.add<&Work::gate>(work, rows_ * of_.query_heads, num_threads);
  }

  // Applies norms and rotary embeddings, and writes keys and values to the cache. A unit of work is a key head of a row
  // with the query heads that read it, so that one row has work for several threads.
  void write_keys(int64_t begin, int64_t end) const {
    const int64_t d = of_.head_dim, group = of_.query_heads / of_.key_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / of_.key_heads, head = unit % of_.key_heads;
      for (int64_t i = 0; i < group; ++i) {
        T* query = query_ + row * of_.query_row_stride + (head * group + i) * of_.query_head_stride;
        rotary_.layout(rotary_.query_norm, row, query, d, query);
      }
      const int64_t from = unit * d, to = (head * of_.capacity + start_ + row) * d;
      rotary_.layout(rotary_.key_norm, row, key_ + from, d, const_cast<T*>(of_.key_cache) + to);
      std::copy(value_ + from, value_ + from + d, const_cast<T*>(of_.value_cache) + to);
    }
  }

  void attend(int64_t begin, int64_t end) const { attention_.attend(begin, end); }

  // Multiplies heads of rows by their gates.
  void gate(int64_t begin, int64_t end) const {
    const int64_t d = of_.head_dim;
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* gates = query_ + unit * 2 * d + d;
      T* to = out_ + unit * d;
      int64_t j = 0;
#ifdef YGG_AVX2
      const Lanes one = broadcast(1.0f);
      for (; j + 16 <= d; j += 16) store16(to + j, load16(to + j) * round_to<T>(one / (one + exp16(zeros() - load16(gates + j)))));
#endif
      for (; j < d; ++j) to[j] = static_cast<T>(to_float(to[j]) * to_float(static_cast<T>(1.0f / (1.0f + std::exp(-to_float(gates[j]))))));
    }
  }

 private:
  static AttentionInputs<T> with_queries(AttentionInputs<T> of, const T* query, bool gated) {
    of.query = query, of.query_head_stride = of.head_dim * (gated ? 2 : 1), of.query_row_stride = of.query_heads * of.query_head_stride;
    return of;
  }

  AttentionInputs<T> of_;
  TreeAttention<T> attention_;
  T* query_;
  const T *key_, *value_;
  RotaryEmbedding<T> rotary_;
  T* out_;
  int64_t rows_, start_;
  bool gated_;
};

}  // namespace yggdrasil
