// Attention as stages of layer bytecode: norm and rotary embedding of queries and keys, cache writes, attention.
#pragma once

#include "attention/tree_attention.h"

namespace yggdrasil {

// Rotary embedding of a head's D numbers, halves against each other. Every operation is rounded, as in the model's own
// code. `to` may equal `from`.
template <typename T>
void rotate(const T* from, const T* cos, const T* sin, int64_t head_dim, T* to) {
  const int64_t half = head_dim / 2;
  int64_t j = 0;
#ifdef YGG_AVX2
  for (; j + 16 <= half; j += 16) {
    const Lanes low = load16(from + j), high = load16(from + half + j);
    const auto product = [](Lanes numbers, const T* factors) { return apart(round_to<T>(numbers * load16(factors))); };
    const Lanes first = round_to<T>(product(low, cos + j) - product(high, sin + j));
    const Lanes second = round_to<T>(product(high, cos + half + j) + product(low, sin + half + j));
    store16(to + j, first);
    store16(to + half + j, second);
  }
#endif
  for (; j < half; ++j) {
    const float low = widen(from[j]), high = widen(from[half + j]);
    const auto product = [](float a, T b) { return apart(widen(static_cast<T>(a * widen(b)))); };
    to[j] = static_cast<T>(product(low, cos[j]) - product(high, sin[j]));
    to[half + j] = static_cast<T>(product(high, cos[half + j]) + product(low, sin[half + j]));
  }
}

// Pairs of a head's numbers that are rotated: halves with every operation rounded; halves, or neighbours, in float32
// and rounded once.
enum class Turn : int64_t { halves = 0, wide_halves = 1, wide_pairs = 2 };

// Rotary embedding in float32 by cosines and sines of all D numbers, whose second half equals the first.
template <typename T>
void rotate_wide(const T* from, const float* cos, const float* sin, int64_t head_dim, bool are_pairs, T* to) {
  const int64_t half = head_dim / 2, apart_by = are_pairs ? 1 : half, step = are_pairs ? 2 : 1;
  for (int64_t j = 0; j < half; ++j) {
    const float low = widen(from[j * step]), high = widen(from[j * step + apart_by]);
    to[j * step] = static_cast<T>(apart(low * cos[j]) - apart(high * sin[j]));
    to[j * step + apart_by] = static_cast<T>(apart(high * cos[j]) + apart(low * sin[j]));
  }
}

// Cosines and sines [W, R] for the first R numbers of a head, in the rows' dtype, or float32 for rotations in float32;
// null: no rotation.
struct Turning {
  Turn turn;
  const void *cos, *sin;
  int64_t size;  // R

  template <typename T>
  void apply(int64_t row, const T* from, int64_t d, T* to) const {
    const auto of_row = [&]<typename N>(N, const void* all) { return static_cast<const N*>(all) + row * size; };
    if (to != from) std::copy(from + size, from + d, to + size);
    if (turn == Turn::halves) return rotate(from, of_row(T{}, cos), of_row(T{}, sin), size, to);
    rotate_wide(from, of_row(0.0f, cos), of_row(0.0f, sin), size, turn == Turn::wide_pairs, to);
  }
};

// Norm and rotary embedding of heads before attention.
template <typename T>
struct RotaryEmbedding {
  NormOf<T> query_norm, key_norm;  // [D] each
  Turning turning;

  // Applies them to a head of a row; `to` may equal `from`.
  void turn(const NormOf<T>& norm, int64_t row, const T* from, int64_t d, T* to) const {
    if (norm.weight) {
      const InputRows<T> head{from, {}, norm, 1, d};
      head.read(0, 0, d, head.inverse_rms(0), to);
      from = to;
    }
    if (turning.cos) turning.apply(row, from, d, to);
    else if (to != from) std::copy(from, from + d, to);
  }
};

template <typename T>
class AttentionStage {
 public:
  // `query` [W, Hq * D] is rotated in place; `key` and `value` are [W, Hkv * D]. The query pointers of `of` are set to
  // these rows. With `gated`, `query` is [W, Hq, 2 * D]: each head is followed by a gate, whose sigmoid multiplies its
  // output.
  AttentionStage(AttentionOf<T> of, const SeenKeys& seen, int64_t rows, T* query, const T* key, const T* value, const RotaryEmbedding<T>& turn, bool gated, T* out,
                 int64_t num_threads)
      : of_(laid_out(of, query, gated)), attention_(of_, seen, rows, out, num_threads), query_(query), key_(key), value_(value), turn_(turn),
        out_(out), rows_(rows), start_(seen.start), gated_(gated) {}

  // `work` does place(), attend() and gate() when the stages run.
  template <typename Work>
  void share_out(Stages& stages, const Work& work, int64_t num_threads) const {
    stages.add<&Work::place>(work, rows_ * of_.key_heads, num_threads);
    stages.add<&Work::attend>(work, attention_.count(), num_chunks_of(attention_.count(), num_threads, kMuch));
    if (gated_) stages.add<&Work::gate>(work, rows_ * of_.query_heads, num_threads);
  }

  // Processes key heads of rows, each with the query heads that read it, so that one row has work for several threads.
  void place(int64_t begin, int64_t end) const {
    const int64_t d = of_.head_dim, group = of_.query_heads / of_.key_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / of_.key_heads, head = unit % of_.key_heads;
      for (int64_t i = 0; i < group; ++i) {
        T* query = query_ + row * of_.query_row_stride + (head * group + i) * of_.query_head_stride;
        turn_.turn(turn_.query_norm, row, query, d, query);
      }
      const int64_t from = unit * d, to = (head * of_.capacity + start_ + row) * d;
      turn_.turn(turn_.key_norm, row, key_ + from, d, const_cast<T*>(of_.key_cache) + to);
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
      const Lanes one = spread(1.0f);
      for (; j + 16 <= d; j += 16) store16(to + j, load16(to + j) * round_to<T>(one / (one + exp16(zeros() - load16(gates + j)))));
#endif
      for (; j < d; ++j) to[j] = static_cast<T>(widen(to[j]) * widen(static_cast<T>(1.0f / (1.0f + std::exp(-widen(gates[j]))))));
    }
  }

 private:
  static AttentionOf<T> laid_out(AttentionOf<T> of, const T* query, bool gated) {
    of.query = query, of.query_head_stride = of.head_dim * (gated ? 2 : 1), of.query_row_stride = of.query_heads * of.query_head_stride;
    return of;
  }

  AttentionOf<T> of_;
  TreeAttention<T> attention_;
  T* query_;
  const T *key_, *value_;
  RotaryEmbedding<T> turn_;
  T* out_;
  int64_t rows_, start_;
  bool gated_;
};

}  // namespace yggdrasil
