// A recurrent layer with a matrix state as stages of layer bytecode: the factors of rows, the recurrence, and the gated norm.
// A gated delta network (Qwen3.5) has a delta rule, Mamba-2 (Granite 4, Bamba, Falcon-H1, Nemotron-H) has none.
//
// Dims: W rows, Hk key heads, Hv value heads, Dk and Dv their sizes.
#pragma once

#include "common/input_rows.h"
#include "recurrence/tree_recurrence.h"

namespace yggdrasil {

template <typename T>
struct RecurrentLayer {
  TreeRecurrence recurrence;
  const T* mixed;                       // behind the convolution, [W, 2 * Hk * Dk + Hv * Dv]: queries, keys and values; of Mamba-2 in reverse
  const T *decay, *beta, *gate;         // [W, Hv] twice, `beta` is null of Mamba-2; [W, Hv * Dv]
  const float *bias, *rate, *skip;      // [Hv]: added to decays; what they are multiplied by, below zero; of Mamba-2 what inputs are
  NormOf<T> norm;                       // [Dv]; of Mamba-2 [Hv * Dv], each key head's values by themselves, or none
  bool norm_first;                      // Mamba-2: before the gate
  float least, most;                    // Mamba-2: of time steps
  T* out;                               // [W, Hv * Dv]

  // Words of memory: queries, keys, their overlaps, and values that become outputs.
  static int64_t words(int64_t rows, int64_t queries, int64_t heads, int64_t values) { return rows * (2 * queries + heads + values); }

  // `work` does prepare(), recur() and finish() when the stages run.
  template <typename Work>
  void share_out(Stages& stages, const Work& work, int64_t num_threads) const {
    const int64_t rows = recurrence.tree.rows();
    stages.add<&Work::prepare>(work, rows * recurrence.key_heads, num_threads);
    stages.add<&Work::recur>(work, recurrence.units(), num_threads);
    stages.add<&Work::finish>(work, rows * (beta ? recurrence.heads : recurrence.key_heads), num_threads);
  }

  // Key heads of rows, each with its value heads.
  void prepare(int64_t begin, int64_t end) const {
    const auto& of = recurrence;
    const int64_t keys = of.key_heads * of.key_size, values = of.heads * of.value_size, group = of.heads / of.key_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / of.key_heads, head = unit % of.key_heads, at = head * of.key_size, slot = of.tree.slot(row);
      const T *from = mixed + row * (2 * keys + values), *given = beta ? from + 2 * keys : from;
      float *asked = of.query + row * keys + at, *own_keys = of.keys + row * keys + at;
      if (beta) {
        normalise(from + at, 1.0f / std::sqrt(static_cast<float>(of.key_size)), of.key_size, asked);
        normalise(from + keys + at, 1.0f, of.key_size, own_keys);
      } else {
        for (int64_t i = 0; i < of.key_size; ++i) own_keys[i] = widen(from[values + at + i]), asked[i] = widen(from[values + keys + at + i]);
      }
      of.overlaps[unit] = dot(asked, own_keys, of.key_size);
      for (int64_t own = head * group; own < (head + 1) * group; ++own) {
        const int64_t place = row * of.heads + own;
        const float time = time_of(place, own);
        of.decays[slot * of.heads + own] = rate[own] * time;
        of.strengths[slot * of.heads + own] = beta ? widen(T(1.0f / (1.0f + std::exp(-widen(beta[place]))))) : time;
        const T* some = given + own * of.value_size;
        for (int64_t c = 0; c < of.value_size; ++c) of.rows[place * of.value_size + c] = widen(some[c]);
      }
    }
  }

  // Value heads of rows; of Mamba-2 their key heads, each with its value heads.
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
  // Mamba-2 rounds a time step after each operation, a gated delta network does not.
  float time_of(int64_t place, int64_t head) const {
    const float given = widen(decay[place]) + bias[head], sum = beta ? given : widen(T(given));
    const float time = sum > 20.0f ? sum : std::log1p(std::exp(sum));
    return beta ? time : std::clamp(widen(T(time)), least, most);
  }

  void finish_group(int64_t row, int64_t group) const {
    const auto& of = recurrence;
    const int64_t count = of.heads / of.key_heads, size = count * of.value_size, values = of.heads * of.value_size, first = group * size;
    const int64_t channels = 2 * of.key_heads * of.key_size + values;
    float* rows = of.rows + row * values + first;
    const T *inputs = mixed + row * channels + first, *gates = gate + row * values + first;
    for (int64_t head = 0; head < count; ++head)
      for (int64_t c = head * of.value_size; c < (head + 1) * of.value_size; ++c) rows[c] += skip[group * count + head] * widen(inputs[c]);
    if (!norm_first) apply_gate(gates, size, rows);
    if (norm.weight) {
      const float factor = 1.0f / std::sqrt(dot(rows, rows, size) / static_cast<float>(size) + norm.eps);
      for (int64_t c = 0; c < size; ++c) rows[c] = widen(norm.weight[first + c]) * (rows[c] * factor);
    }
    if (norm_first) apply_gate(gates, size, rows);
    T* to = out + row * values + first;
    for (int64_t c = 0; c < size; ++c) to[c] = T(rows[c]);
  }

  // Without a norm the gate is rounded, as transformers does it.
  void apply_gate(const T* gates, int64_t count, float* rows) const {
    int64_t c = 0;
#ifdef YGG_AVX2
    for (; c + 16 <= count; c += 16) {
      const Lanes some = load16(gates + c), factor = some / (spread(1.0f) + exp16(zeros() - some));
      store16(rows + c, load16(rows + c) * (norm.weight ? factor : round_to<T>(factor)));
    }
#endif
    for (; c < count; ++c) {
      const float factor = widen(gates[c]) / (1.0f + std::exp(-widen(gates[c])));
      rows[c] *= norm.weight ? factor : widen(T(factor));
    }
  }
};

}  // namespace yggdrasil
