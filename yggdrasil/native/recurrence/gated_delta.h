// A gated delta network (Qwen3.5) as stages of layer bytecode: normalised queries and keys, the recurrence, the gated norm.
//
// Dims: W rows, Hk key heads, Hv value heads, Dk and Dv their sizes.
#pragma once

#include "common/input_rows.h"
#include "recurrence/tree_recurrence.h"

namespace yggdrasil {

template <typename T>
struct GatedDelta {
  TreeRecurrence recurrence;
  const T *mixed, *decay, *beta, *gate;  // [W, 2 * Hk * Dk + Hv * Dv] behind the convolution; [W, Hv] twice; [W, Hv * Dv]
  const float *bias, *rate;              // [Hv]: added to decays; what they are multiplied by, below zero
  NormOf<T> norm;                        // [Dv]
  T* out;                                // [W, Hv * Dv]

  // Words of memory: queries, betas, and values that become outputs.
  static int64_t words(int64_t rows, int64_t queries, int64_t heads, int64_t values) { return rows * (queries + heads + values); }

  // `work` does prepare(), recur() and finish() when the stages run.
  template <typename Work>
  void share_out(Stages& stages, const Work& work, int64_t num_threads) const {
    const int64_t rows = recurrence.tree.rows();
    stages.add<&Work::prepare>(work, rows * recurrence.key_heads, num_threads);
    stages.add<&Work::recur>(work, recurrence.units(), num_threads);
    stages.add<&Work::finish>(work, rows * recurrence.heads, num_threads);
  }

  // Key heads of rows, each with its value heads.
  void prepare(int64_t begin, int64_t end) const {
    const auto& of = recurrence;
    const int64_t keys = of.key_heads * of.key_size, channels = 2 * keys + of.heads * of.value_size, group = of.heads / of.key_heads;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / of.key_heads, head = unit % of.key_heads, at = head * of.key_size, slot = of.tree.slot(row);
      const T* from = mixed + row * channels;
      normalise(from + at, 1.0f / std::sqrt(static_cast<float>(of.key_size)), const_cast<float*>(of.query) + row * keys + at);
      normalise(from + keys + at, 1.0f, const_cast<float*>(of.keys) + slot * keys + at);
      for (int64_t own = head * group; own < (head + 1) * group; ++own) {
        const int64_t place = row * of.heads + own;
        const float time = widen(decay[place]) + bias[own];
        const_cast<float*>(of.decays)[slot * of.heads + own] = rate[own] * (time > 20.0f ? time : std::log1p(std::exp(time)));
        const_cast<float*>(of.beta)[place] = widen(T(1.0f / (1.0f + std::exp(-widen(beta[place])))));
        const T* values = from + 2 * keys + own * of.value_size;
        for (int64_t c = 0; c < of.value_size; ++c) of.rows[place * of.value_size + c] = widen(values[c]);
      }
    }
  }

  // Value heads of rows.
  void finish(int64_t begin, int64_t end) const {
    const int64_t size = recurrence.value_size;
    const InputRows<T> heads{out, {gate, false}, norm, recurrence.tree.rows() * recurrence.heads, size};
    for (int64_t unit = begin; unit < end; ++unit) {
      T* to = out + unit * size;
      for (int64_t c = 0; c < size; ++c) to[c] = T(recurrence.rows[unit * size + c]);
      heads.read(unit, 0, size, heads.inverse_rms(unit), to);
    }
  }

 private:
  void normalise(const T* from, float scale, float* to) const {
    constexpr int64_t kSums = 16;
    const int64_t size = recurrence.key_size;
    float sums[kSums] = {}, sum = 0.0f;
    int64_t i = 0;
    for (; i + kSums <= size; i += kSums)
      for (int64_t j = 0; j < kSums; ++j) sums[j] = multiply_add(widen(from[i + j]), widen(from[i + j]), sums[j]);
    for (; i < size; ++i) sums[0] += widen(from[i]) * widen(from[i]);
    for (const float some : sums) sum += some;
    const float factor = 1.0f / std::sqrt(sum + 1e-6f);
    for (i = 0; i < size; ++i) to[i] = widen(from[i]) * factor * scale;
  }
};

}  // namespace yggdrasil
