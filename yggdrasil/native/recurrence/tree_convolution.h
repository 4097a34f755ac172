// Causal convolution along the paths of a tree: a row reads its own input, those of its ancestors, and before the root the
// text's last inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/lanes.h"
#include "common/tensor.h"
#include "common/threads.h"

namespace yggdrasil {

// The rows of a pass: a row follows its parent, -1 for the text; what it adds is kept in a slot.
struct TreeSlots {
  Ints parents;
  int64_t start, slots;                // row r has slot (start + r) modulo the number of slots
  const int64_t* places = nullptr;  // slots of the rows instead

  // `parents` [W] and `offsets` [2], both int64 and dense; parents come before children.
  TreeSlots(const Tensor& parents, const Tensor& offsets, int64_t rows, int64_t slots)
      : parents(parents.const_data_ptr<int64_t>(), rows), start(offsets.const_data_ptr<int64_t>()[1]), slots(slots) {
    YGG_CHECK(parents.is_contiguous() && parents.numel() == rows, "a pass of ", rows, " rows has ", parents.numel(), " parents");
    YGG_CHECK(rows <= slots, "a pass of ", rows, " rows, and room for ", slots);
    for (int64_t row = 0; row < rows; ++row)
      YGG_CHECK(this->parents[row] >= -1 && this->parents[row] < row, "row ", row, " has the parent ", this->parents[row]);
  }

  TreeSlots(Ints parents, const int64_t* places) : parents(parents), start(0), slots(0), places(places) {}

  int64_t rows() const { return static_cast<int64_t>(parents.size()); }
  int64_t slot(int64_t row) const { return places ? places[row] : (start + row) % slots; }
};

// Dims: W rows, C channels, K taps, M slots. Sums go from the newest input to the oldest.
template <typename T>
struct TreeConvolution {
  TreeSlots tree;
  const T *input, *factor, *gate;  // [W, C] each: `factor` multiplies the inputs, `gate` the outputs; null: none; no input: `inputs` have it
  const float *weight, *bias;      // [K, C]; [C] or null
  const T* window;                 // [K - 1, C]: the text's last inputs, oldest first
  T *inputs, *out;                 // [M, C], keeps the inputs of this pass; [W, C]
  int64_t channels, taps;
  bool silu;  // of the sums

  // `work` does convolve() when the stages run.
  template <typename Work>
  void share_out(Stages& stages, const Work& work, int64_t num_threads) const {
    stages.add<&Work::convolve>(work, blocks(), num_threads);
  }

  int64_t blocks() const { return (channels + kBlock - 1) / kBlock; }

  // Blocks of channels of all rows, in their order: a row reads what was kept of its ancestors.
  void convolve(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, channels - first);
      for (int64_t row = 0; row < tree.rows(); ++row) {
        if (input) keep(row, first, count);
        sum(row, first, count);
      }
    }
  }

  // Of the rows without `input`: the blocks that have the channels from `first` on.
  void convolve_channels(int64_t first, int64_t count) const { convolve(first / kBlock, (first + count + kBlock - 1) / kBlock); }

 private:
  static constexpr int64_t kBlock = 64;

  void keep(int64_t row, int64_t first, int64_t count) const {
    const T* from = input + row * channels + first;
    T* to = inputs + tree.slot(row) * channels + first;
    if (!factor) {
      std::copy_n(from, count, to);
      return;
    }
    const T* factors = factor + row * channels + first;
    for (int64_t c = 0; c < count; ++c) to[c] = T(widen(from[c]) * widen(factors[c]));
  }

  void sum(int64_t row, int64_t first, int64_t count) const {
    float sums[kBlock] = {};
    if (bias) std::copy_n(bias + first, count, sums);
    int64_t before = taps - 2;  // of the text's last inputs
    for (int64_t tap = taps - 1, node = row; tap >= 0; --tap) {
      const T* read = first + (node >= 0 ? inputs + tree.slot(node) * channels : window + before-- * channels);
      const float* factors = weight + tap * channels + first;
      for (int64_t c = 0; c < count; ++c) sums[c] = multiply_add(widen(read[c]), factors[c], sums[c]);
      if (node >= 0) node = tree.parents[node];
    }
    T* to = out + row * channels + first;
    for (int64_t c = 0; c < count; ++c) to[c] = T(sums[c]);
    if (silu) activate(to, count);
    if (!gate) return;
    const T* gates = gate + row * channels + first;
    for (int64_t c = 0; c < count; ++c) to[c] = T(widen(to[c]) * widen(gates[c]));
  }

  static void activate(T* values, int64_t count) {
    int64_t c = 0;
#ifdef YGG_AVX2
    for (; c + 16 <= count; c += 16) {
      const Lanes some = load16(values + c);
      store16(values + c, some / (spread(1.0f) + exp16(zeros() - some)));
    }
#endif
    for (; c < count; ++c) values[c] = T(widen(values[c]) / (1.0f + std::exp(-widen(values[c]))));
  }
};

// The operator: `input` [W, C], `weight` [C, K], `bias` [C] or none, `window` [K - 1, C], `inputs` [M, C]; `silu` of the sums.
inline void tree_convolution(const Tensor& input, const Tensor& weight, const Tensor& bias, const Tensor& window, const Tensor& inputs,
                             const Tensor& offsets, const Tensor& parents, bool silu, int64_t num_threads, const Tensor& out) {
  const int64_t rows = input.size(0), channels = input.size(1), taps = weight.size(1);
  YGG_CHECK(weight.dim() == 2 && weight.size(0) == channels && window.dim() == 2 && window.size(0) == taps - 1 &&
                window.size(1) == channels && inputs.size(1) == channels && window.is_contiguous() && inputs.is_contiguous(),
            "a convolution of ", channels, " channels has the weight ", weight.sizes(), " and the state ", window.sizes());
  check_result(out, {rows, channels}, input.dtype());
  const Tensor given = input.contiguous(), above = parents.contiguous(), places = offsets.contiguous(), wide = weight.floats(), shift = bias.floats();
  std::vector<float> transposed(taps * channels);
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t tap = 0; tap < taps; ++tap) transposed[tap * channels + c] = wide.const_data_ptr<float>()[c * taps + tap];
  with_rows_of(input, [&]<typename T>(T) {
    const TreeConvolution<T> all{TreeSlots(above, places, rows, inputs.size(0)), given.const_data_ptr<T>(), nullptr, nullptr, transposed.data(),
                                 shift.defined() ? shift.const_data_ptr<float>() : nullptr, window.const_data_ptr<T>(),
                                 inputs.mutable_data_ptr<T>(), out.mutable_data_ptr<T>(), channels, taps, silu};
    parallel(all.blocks(), num_threads, [&](int64_t begin, int64_t end) { all.convolve(begin, end); });
  });
}

// The inputs in `slots`, a path in order, become the text's.
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
