// Commits a path of a tree to the recurrent states.
//
// The keys and values of the path's rows are computed again from the stored inputs of the convolution, by the functions of a pass,
// and the recurrence is run again for the state alone. So a node of a tree stores no keys and values, and the state has the bits
// that plain steps give it.
#pragma once

#include "recurrence/tree_recurrence.h"

namespace yggdrasil {

// A path in one layer. Dims as in tree_recurrence.h, and P rows of the path, C channels, K taps.
template <typename T>
struct CommittedPath : RecurrenceSizes {
  TreeConvolution<T> convolution;   // of the path's rows, without its output
  const float *decays, *strengths;  // [M, Hv]
  bool delta;
  float* state;                     // [Hv, Dk, Dv]

  // One head of the state.
  void apply(int64_t head) const {
    const int64_t rows = convolution.tree.rows(), queries = key_heads * key_size, channels = convolution.channels;
    TreeConvolution<T> own = convolution;
    own.out = reinterpret_cast<T*>(scratch_words<Scratch::rows>(rows * channels));
    const int64_t key_at = (delta ? queries : heads * value_size) + head / (heads / key_heads) * key_size;
    const int64_t value_at = (delta ? 2 * queries : 0) + head * value_size;
    own.convolve_channels(key_at, key_size), own.convolve_channels(value_at, value_size);
    auto *keys = reinterpret_cast<float*>(scratch_words<Scratch::values>(rows * (key_size + value_size))), *values = keys + rows * key_size;
    for (int64_t row = 0; row < rows; ++row) {
      const T* mixed = own.out + row * channels;
      if (delta) normalise(mixed + key_at, 1.0f, key_size, keys + row * key_size);
      else for (int64_t i = 0; i < key_size; ++i) keys[row * key_size + i] = widen(mixed[key_at + i]);
      for (int64_t c = 0; c < value_size; ++c) values[row * value_size + c] = widen(mixed[value_at + c]);
    }
    for (int64_t first = 0; first < value_size; first += kColumns) {
      if (value_size - first >= kColumns) update<true>(head, first, keys, values);
      else update<false>(head, first, keys, values);
    }
  }

 private:
  // The operations of TokenStep on some columns. While a row's update is added, the product with the next row's key is summed.
  template <bool Whole>
  void update(int64_t head, int64_t first, const float* keys, const float* values) const {
    const int64_t rows = convolution.tree.rows(), count = value_size - first;
    const Columns<Whole> columns{count};
    auto* memory = reinterpret_cast<float*>(scratch_words<Scratch::columns>(key_size * kColumns));
    float *own = state + head * key_size * value_size + first, *from = own;
    int64_t stride = value_size;
    Lanes seen[kParts], added[kParts];
    for (int64_t j = 0; j < kParts; ++j) seen[j] = zeros();
    for (int64_t i = 0; delta && i < key_size; ++i)
      for (int64_t j = 0; j < kParts; ++j) seen[j] = fused(columns.load(from + i * stride, j), spread(keys[i]), seen[j]);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t place = convolution.tree.slot(row) * heads + head;
      const float decay = std::exp(decays[place]), *key = keys + row * key_size;
      const Lanes fade = spread(decay);
      for (int64_t j = 0; j < kParts; ++j) {
        added[j] = columns.load(values + row * value_size + first, j);
        if (delta) added[j] = fused(seen[j], spread(-decay), added[j]);
        added[j] = added[j] * spread(strengths[place]), seen[j] = zeros();
      }
      const bool is_last = row + 1 == rows, follows = delta && !is_last;
      float* to = is_last ? own : memory;
      const int64_t apart = is_last ? value_size : kColumns;
      for (int64_t i = 0; i < key_size; ++i)
        for (int64_t j = 0; j < kParts; ++j) {
          const Lanes now = fused(spread(key[i]), added[j], columns.load(from + i * stride, j) * fade);
          columns.store(to + i * apart, now, j);
          if (follows) seen[j] = fused(now, spread(key[key_size + i]), seen[j]);
        }
      from = memory, stride = kColumns;
    }
  }
};

// Tensors of all layers, each list as long as the first or, without states, all others but `inputs` empty.
struct RecurrentStates {
  std::vector<Tensor> windows, inputs;     // [K - 1, C], before the path; [M, C]
  std::vector<Tensor> states;              // [Hv, Dk, Dv]
  std::vector<Tensor> decays, strengths;   // [M, Hv] each
  std::vector<Tensor> taps, biases;        // [K, C] and [C], float32
  bool delta;

  template <typename T>
  CommittedPath<T> path(size_t layer, const TreeSlots& tree) const {
    const Tensor &window = windows[layer], &given = inputs[layer], &state = states[layer], &weight = taps[layer], &bias = biases[layer];
    const int64_t channels = window.size(1);
    YGG_CHECK(state.dim() == 3, "a state has heads, keys and values");
    const RecurrenceSizes sizes((channels - state.size(0) * state.size(2)) / 2, state, decays[layer], strengths[layer]);
    YGG_CHECK(weight.sizes() == Ints({window.size(0) + 1, channels}) && bias.sizes() == Ints({channels}) && given.size(1) == channels &&
                  weight.is_contiguous() && given.is_contiguous() && window.is_contiguous() && given.dtype() == window.dtype(),
              "a convolution of ", channels, " channels has the taps ", weight.sizes());
    const TreeConvolution<T> convolution{tree, nullptr, nullptr, nullptr, weight.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                                         window.const_data_ptr<T>(), given.mutable_data_ptr<T>(), nullptr, channels, weight.size(0), true};
    return {sizes, convolution, decays[layer].const_data_ptr<float>(), strengths[layer].const_data_ptr<float>(), delta, state.mutable_data_ptr<float>()};
  }

  template <typename T>
  void apply(const TreeSlots& tree, int64_t num_threads) const {
    std::vector<CommittedPath<T>> paths;
    for (size_t layer = 0; layer < states.size(); ++layer) paths.push_back(path<T>(layer, tree));
    const int64_t heads = paths[0].heads;
    for (const auto& each : paths) YGG_CHECK(each.heads == heads, "all layers have as many heads");
    parallel(heads * paths.size(), num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) paths[unit / heads].apply(unit % heads);
    });
  }

  // The rows in `slots`, a path in order, become part of the text.
  void commit(Ints slots, int64_t num_threads) const {
    YGG_CHECK(inputs.size() == windows.size() && (states.empty() || states.size() == windows.size()), "every window has its inputs");
    for (const auto* each : {&decays, &strengths, &taps, &biases}) YGG_CHECK(each->size() == states.size(), "every state has its factors");
    const std::vector<int64_t> path = slots.vec();
    for (const Tensor& each : inputs)
      for (const int64_t slot : path) YGG_CHECK(0 <= slot && slot < each.size(0), "there is no slot ", slot);
    std::vector<int64_t> parents(path.size());
    for (size_t row = 0; row < path.size(); ++row) parents[row] = static_cast<int64_t>(row) - 1;
    const TreeSlots tree(Ints(parents), path.data());
    if (!states.empty() && !path.empty()) with_rows_of(windows[0], [&]<typename T>(T) { apply<T>(tree, num_threads); });
    for (size_t layer = 0; layer < windows.size(); ++layer) commit_window(windows[layer], inputs[layer], path);
  }
};

}  // namespace yggdrasil
