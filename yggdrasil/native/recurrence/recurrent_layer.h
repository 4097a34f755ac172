// A recurrent layer with a matrix state as stages of layer bytecode: the factors of rows, the recurrence, and the gated
// norm. A gated delta network (Qwen3.5) has a delta rule, Mamba-2 (Granite 4, Bamba, Falcon-H1, Nemotron-H) has none.
//
// Dims: W rows, Hk key heads, Hv value heads, Dk and Dv their sizes.
#pragma once

#include "common/input_rows.h"
#include "recurrence/tree_recurrence.h"

namespace yggdrasil {

template <typename T>
struct RecurrentLayer {
  TreeRecurrence recurrence;
  const T* mixed;                       // outputs of the convolution, [W, 2 * Hk * Dk + Hv * Dv]: queries, keys, values; for Mamba-2 values, keys, queries
  const T *decay, *beta, *gate;         // [W, Hv], [W, Hv] (null for Mamba-2), [W, Hv * Dv]
  const float *bias, *rate, *skip;      // [Hv] each: bias of the time step; negative decay rate; Mamba-2's skip weight D
  NormOp<T> norm;                       // [Dv]; for Mamba-2 [Hv * Dv], normalised per key head, or none
  bool norm_first;                      // Mamba-2: normalise before the gate
  float min_time, max_time;                    // Mamba-2: limits of the time step
  T* out;                               // [W, Hv * Dv]

  // Returns the words of scratch memory: queries, keys, their dot products, and values, which are overwritten by
  // outputs.
  static int64_t words(int64_t rows, int64_t queries, int64_t heads, int64_t values) { return rows * (2 * queries + heads + values); }

  // The stages call prepare(), recur() and finish() of `work`.
  template <typename Work>
  void add_stages(Stages& stages, const Work& work, int64_t num_threads) const {
    const int64_t rows = recurrence.tree.rows();
    stages.add<&Work::prepare>(work, rows * recurrence.key_heads, num_threads);
    stages.add<&Work::recur>(work, recurrence.units(), num_threads);
    stages.add<&Work::finish>(work, rows * (beta ? recurrence.heads : recurrence.key_heads), num_threads);
  }

  // Prepares the recurrence. A unit of work is a key head of a row, with its value heads.
  void prepare(int64_t begin, int64_t end) const {
    const auto& of = recurrence;
    const int64_t keys = of.key_heads * of.key_size, values = of.heads * of.value_size, group = of.heads / of.key_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / of.key_heads, head = unit % of.key_heads, at = head * of.key_size, slot = of.tree.slot(row);
      const T *from = mixed + row * (2 * keys + values), *value_rows = beta ? from + 2 * keys : from;
      float *own_query = of.query + row * keys + at, *own_keys = of.keys + row * keys + at;
      if (beta) {
        normalise(from + at, 1.0f / std::sqrt(static_cast<float>(of.key_size)), of.key_size, own_query);
        normalise(from + keys + at, 1.0f, of.key_size, own_keys);
      } else {
        for (int64_t i = 0; i < of.key_size; ++i) own_keys[i] = to_float(from[values + at + i]), own_query[i] = to_float(from[values + keys + at + i]);
      }
      of.overlaps[unit] = dot(own_query, own_keys, of.key_size);
      for (int64_t own = head * group; own < (head + 1) * group; ++own) {
        const int64_t index = row * of.heads + own;
        const float time = time_of(index, own);
        of.decays[slot * of.heads + own] = rate[own] * time;
        of.strengths[slot * of.heads + own] = beta ? to_float(T(1.0f / (1.0f + std::exp(-to_float(beta[index]))))) : time;
        const T* values_of_head = value_rows + own * of.value_size;
        for (int64_t c = 0; c < of.value_size; ++c) of.rows[index * of.value_size + c] = to_float(values_of_head[c]);
      }
    }
  }

  // Applies the gated norm. A unit of work is a value head of a row; for Mamba-2 a key head with its value heads.
  void finish(int64_t begin, int64_t end) const {
    if (!beta) {
      for (int64_t unit = begin; unit < end; ++unit) finish_group(unit / recurrence.key_heads, unit % recurrence.key_heads);
      return;
    }
    const int64_t size = recurrence.value_size;
    const InputRows<T> heads{out, {gate, Activation::silu}, norm, recurrence.tree.rows() * recurrence.heads, size};
    for (int64_t unit = begin; unit < end; ++unit) {
      T* to = out + unit * size;
      for (int64_t c = 0; c < size; ++c) to[c] = T(recurrence.rows[unit * size + c]);
      heads.read(unit, 0, size, heads.inverse_rms(unit), to);
    }
  }

 private:
  // Returns the softplus of the biased time step. Mamba-2 rounds after each operation, a gated delta network does not.
  float time_of(int64_t index, int64_t head) const {
    const float value_rows = to_float(decay[index]) + bias[head], sum = beta ? value_rows : to_float(T(value_rows));
    const float time = sum > 20.0f ? sum : std::log1p(std::exp(sum));
    return beta ? time : std::clamp(to_float(T(time)), min_time, max_time);
  }

  void finish_group(int64_t row, int64_t group) const {
    const auto& of = recurrence;
    const int64_t count = of.heads / of.key_heads, size = count * of.value_size, values = of.heads * of.value_size, first = group * size;
    const int64_t channels = 2 * of.key_heads * of.key_size + values;
    float* rows = of.rows + row * values + first;
    const T *inputs = mixed + row * channels + first, *gates = gate + row * values + first;
    for (int64_t head = 0; head < count; ++head)
      for (int64_t c = head * of.value_size; c < (head + 1) * of.value_size; ++c) rows[c] += skip[group * count + head] * to_float(inputs[c]);
    if (!norm_first) apply_gate(gates, size, rows);
    if (norm.weight) {
      const float factor = 1.0f / std::sqrt(dot(rows, rows, size) / static_cast<float>(size) + norm.eps);
      for (int64_t c = 0; c < size; ++c) rows[c] = to_float(norm.weight[first + c]) * (rows[c] * factor);
    }
    if (norm_first) apply_gate(gates, size, rows);
    T* to = out + row * values + first;
    for (int64_t c = 0; c < size; ++c) to[c] = T(rows[c]);
  }

  // Without a norm, silu(gate) is rounded, as in transformers.
  void apply_gate(const T* gates, int64_t count, float* rows) const {
    int64_t c = 0;
#ifdef YGG_AVX2
    for (; c + 16 <= count; c += 16) {
      const Lanes values_of_head = load16(gates + c), factor = values_of_head / (broadcast(1.0f) + exp16(zeros() - values_of_head));
      store16(rows + c, load16(rows + c) * (norm.weight ? factor : round_to<T>(factor)));
    }
#endif
    for (; c < count; ++c) {
      const float factor = to_float(gates[c]) / (1.0f + std::exp(-to_float(gates[c])));
      rows[c] *= norm.weight ? factor : to_float(T(factor));
    }
  }
};

}  // namespace yggdrasil
