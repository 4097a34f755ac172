// Causal depthwise convolution along the paths of a tree: a row reads its own input, those of its ancestors, and before
// the root the last inputs of the text.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/lanes.h"
#include "common/tensor.h"
#include "common/threads.h"

namespace yggdrasil {

// The rows of a pass: each has a parent row (-1 for the end of the text), and a slot in which its inputs and factors
// are stored.
struct TreeSlots {
  Ints parents;
  int64_t start, slots;                // row r uses slot (start + r) % slots
  const int64_t* row_slots = nullptr;  // if not null, the rows' slots

  // `parents` [W] and `offsets` [2], both int64 and dense; parents come before children.
  TreeSlots(const Tensor& parents, const Tensor& offsets, int64_t rows, int64_t slots)
      : parents(parents.const_data_ptr<int64_t>(), rows), start(offsets.const_data_ptr<int64_t>()[1]), slots(slots) {
    YGG_CHECK(parents.is_contiguous() && parents.numel() == rows, "a pass of ", rows, " rows has ", parents.numel(), " parents");
    YGG_CHECK(rows <= slots, "a pass of ", rows, " rows, and room for ", slots);
    for (int64_t row = 0; row < rows; ++row)
      YGG_CHECK(this->parents[row] >= -1 && this->parents[row] < row, "row ", row, " has the parent ", this->parents[row]);
  }

  TreeSlots(Ints parents, const int64_t* row_slots) : parents(parents), start(0), slots(0), row_slots(row_slots) {}

  int64_t rows() const { return static_cast<int64_t>(parents.size()); }
  int64_t slot(int64_t row) const { return row_slots ? row_slots[row] : (start + row) % slots; }
};

// Dims: W rows, C channels, K taps, M slots. Sums go from the newest input to the oldest.
template <typename T>
struct TreeConvolution {
  TreeSlots tree;
  const T *input, *factor, *gate;  // [W, C] each: `factor` multiplies the inputs, `gate` the outputs; null for none. If `input` is null, `inputs` already has it
  const float *weight, *bias;      // [K, C]; [C] or null
  const T* window;                 // [K - 1, C]: the text's last inputs, oldest first
  T *inputs, *out;                 // [M, C], receives the inputs of this pass; [W, C]
  int64_t channels, taps;
  bool silu;  // applied to the sums

  // The stages call convolve() of `work`.
  template <typename Work>
  void add_stages(Stages& stages, const Work& work, int64_t num_threads) const {
    stages.add<&Work::convolve>(work, blocks(), num_threads);
  }

  int64_t blocks() const { return (channels + kBlock - 1) / kBlock; }

  // Processes blocks of channels, each for all rows in order, because a row reads the stored inputs of its ancestors.
  void convolve(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, channels - first);
      for (int64_t row = 0; row < tree.rows(); ++row) {
        if (input) store_inputs(row, first, count);
        sum(row, first, count);
      }
    }
  }

  // Processes the blocks that contain the channels [first, first + count), without storing inputs.
  void convolve_channels(int64_t first, int64_t count) const { convolve(first / kBlock, (first + count + kBlock - 1) / kBlock); }

 private:
  static constexpr int64_t kBlock = 64;

  void store_inputs(int64_t row, int64_t first, int64_t count) const {
    const T* from = input + row * channels + first;
    T* to = inputs + tree.slot(row) * channels + first;
    if (!factor) {
      std::copy_n(from, count, to);
      return;
    }
    const T* factors = factor + row * channels + first;
    for (int64_t c = 0; c < count; ++c) to[c] = T(to_float(from[c]) * to_float(factors[c]));
  }

  void sum(int64_t row, int64_t first, int64_t count) const {
    float sums[kBlock] = {};
    if (bias) std::copy_n(bias + first, count, sums);
    int64_t before = taps - 2;  // index in the text's last inputs
    for (int64_t tap = taps - 1, node = row; tap >= 0; --tap) {
      const T* read = first + (node >= 0 ? inputs + tree.slot(node) * channels : window + before-- * channels);
      const float* factors = weight + tap * channels + first;
      for (int64_t c = 0; c < count; ++c) sums[c] = multiply_add(to_float(read[c]), factors[c], sums[c]);
      if (node >= 0) node = tree.parents[node];
    }
    T* to = out + row * channels + first;
    for (int64_t c = 0; c < count; ++c) to[c] = T(sums[c]);
    if (silu) activate(to, count);
    if (!gate) return;
    const T* gates = gate + row * channels + first;
    for (int64_t c = 0; c < count; ++c) to[c] = T(to_float(to[c]) * to_float(gates[c]));
  }

  static void activate(T* values, int64_t count) {
    int64_t c = 0;
#ifdef YGG_AVX2
    for (; c + 16 <= count; c += 16) {
      const Lanes value = load16(values + c);
      store16(values + c, value / (broadcast(1.0f) + exp16(zeros() - value)));
    }
#endif
    for (; c < count; ++c) values[c] = T(to_float(values[c]) / (1.0f + std::exp(-to_float(values[c]))));
  }
};

// Operator: `input` [W, C], `weight` [C, K], `bias` [C] or none, `window` [K - 1, C], `inputs` [M, C]; `silu` is
// applied to the sums.
inline void tree_convolution(const Tensor& input, const Tensor& weight, const Tensor& bias, const Tensor& window, const Tensor& inputs,
                             const Tensor& offsets, const Tensor& parents, bool silu, int64_t num_threads, const Tensor& out) {
  const int64_t rows = input.size(0), channels = input.size(1), taps = weight.size(1);
  YGG_CHECK(weight.dim() == 2 && weight.size(0) == channels && window.dim() == 2 && window.size(0) == taps - 1 &&
                window.size(1) == channels && inputs.size(1) == channels && window.is_contiguous() && inputs.is_contiguous(),
            "a convolution of ", channels, " channels has the weight ", weight.sizes(), " and the state ", window.sizes());
  check_result(out, {rows, channels}, input.dtype());
  const Tensor dense_input = input.contiguous(), dense_parents = parents.contiguous(), row_slots = offsets.contiguous(), weight_float32 = weight.floats(), bias_float32 = bias.floats();
  std::vector<float> transposed(taps * channels);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t tap = 0; tap < taps; ++tap) transposed[tap * channels + c] = weight_float32.const_data_ptr<float>()[c * taps + tap];
  with_rows_of(input, [&]<typename T>(T) {
    const TreeConvolution<T> all{TreeSlots(dense_parents, row_slots, rows, inputs.size(0)), dense_input.const_data_ptr<T>(), nullptr, nullptr, transposed.data(),
                                 bias_float32.defined() ? bias_float32.const_data_ptr<float>() : nullptr, window.const_data_ptr<T>(),
                                 inputs.mutable_data_ptr<T>(), out.mutable_data_ptr<T>(), channels, taps, silu};
    parallel(all.blocks(), num_threads, [&](int64_t begin, int64_t end) { all.convolve(begin, end); });
  });
}

// Appends the inputs in `slots`, a path in order, to the window of the text's last inputs.
inline void commit_window(const Tensor& window, const Tensor& inputs, const std::vector<int64_t>& slots) {
  const int64_t length = window.size(0), row = window.size(1) * window.element_size();
  auto* past = static_cast<char*>(window.mutable_data_ptr());
  const auto* kept = static_cast<const char*>(inputs.const_data_ptr());
  const int64_t added = std::min<int64_t>(slots.size(), length);
  std::memmove(past, past + added * row, (length - added) * row);
  for (int64_t i = 0; i < added; ++i)
    std::memcpy(past + (length - added + i) * row, kept + slots[slots.size() - added + i] * row, row);
}

}  // namespace yggdrasil
