// Commits a path of a tree to the recurrent states.
//
// The keys and values of the path's rows are recomputed from the stored inputs of the convolution, with the same
// functions as in a pass, and the recurrence is run again without outputs. So a node of a tree stores no keys and
// values, and the state is bitwise that of plain steps.
#pragma once

#include "recurrence/tree_recurrence.h"

namespace yggdrasil {

// A path in one layer. Dims as in tree_recurrence.h, and C channels, K taps.
template <typename T>
struct CommittedPath : RecurrenceSizes {
  TreeConvolution<T> convolution;   // over the path's rows; `out` is not used
  const float *decays, *strengths;  // [M, Hv]
  bool delta;
  float* state;                     // [Hv, Dk, Dv]

  // Updates one head of the state.
  void apply(int64_t head) const {
    const int64_t rows = convolution.tree.rows(), queries = key_heads * key_size, channels = convolution.channels;
    TreeConvolution<T> local = convolution;
    local.out = reinterpret_cast<T*>(scratch_words<Scratch::rows>(rows * channels));
    const int64_t key_at = (delta ? queries : heads * value_size) + head / (heads / key_heads) * key_size;
    const int64_t value_at = (delta ? 2 * queries : 0) + head * value_size;
    local.convolve_channels(key_at, key_size), local.convolve_channels(value_at, value_size);
    auto *keys = reinterpret_cast<float*>(scratch_words<Scratch::values>(rows * (key_size + value_size))), *values = keys + rows * key_size;
    for (int64_t row = 0; row < rows; ++row) {
      const T* mixed = local.out + row * channels;
      if (delta) normalise(mixed + key_at, 1.0f, key_size, keys + row * key_size);
      else for (int64_t i = 0; i < key_size; ++i) keys[row * key_size + i] = to_float(mixed[key_at + i]);
      for (int64_t c = 0; c < value_size; ++c) values[row * value_size + c] = to_float(mixed[value_at + c]);
    }
    for (int64_t first = 0; first < value_size; first += kColumns) {
      if (value_size - first >= kColumns) update<true>(head, first, keys, values);
      else update<false>(head, first, keys, values);
    }
  }

 private:
  // The arithmetic of TokenStep on some columns of the state. The product with the next row's key is accumulated in the
  // loop that adds a row's update.
  template <bool Whole>
  void update(int64_t head, int64_t first, const float* keys, const float* values) const {
    const int64_t rows = convolution.tree.rows(), count = value_size - first;
    const Columns<Whole> columns{count};
    auto* memory = reinterpret_cast<float*>(scratch_words<Scratch::columns>(key_size * kColumns));
    float *local = state + head * key_size * value_size + first, *from = local;
    int64_t stride = value_size;
    Lanes products[kParts], added[kParts];
    for (int64_t j = 0; j < kParts; ++j) products[j] = zeros();
    for (int64_t i = 0; delta && i < key_size; ++i)
      for (int64_t j = 0; j < kParts; ++j) products[j] = fmadd(columns.load(from + i * stride, j), broadcast(keys[i]), products[j]);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t factor_index = convolution.tree.slot(row) * heads + head;
      const float decay = std::exp(decays[factor_index]), *key = keys + row * key_size;
      const Lanes decay_lanes = broadcast(decay);
      for (int64_t j = 0; j < kParts; ++j) {
        added[j] = columns.load(values + row * value_size + first, j);
        if (delta) added[j] = fmadd(products[j], broadcast(-decay), added[j]);
        added[j] = added[j] * broadcast(strengths[factor_index]), products[j] = zeros();
      }
      const bool is_last = row + 1 == rows, accumulates = delta && !is_last;
      float* to = is_last ? local : memory;
      const int64_t to_stride = is_last ? value_size : kColumns;
      for (int64_t i = 0; i < key_size; ++i)
        for (int64_t j = 0; j < kParts; ++j) {
          const Lanes updated = fmadd(broadcast(key[i]), added[j], columns.load(from + i * stride, j) * decay_lanes);
          columns.store(to + i * to_stride, updated, j);
          if (accumulates) products[j] = fmadd(updated, broadcast(key[key_size + i]), products[j]);
        }
      from = memory, stride = kColumns;
    }
  }
};

// Tensors of all layers, one element per layer. Without recurrent states, only `windows` and `inputs` are not empty.
struct RecurrentStates {
  std::vector<Tensor> windows, inputs;     // [K - 1, C], before the path; [M, C]
  std::vector<Tensor> states;              // [Hv, Dk, Dv]
  std::vector<Tensor> decays, strengths;   // [M, Hv] each
  std::vector<Tensor> taps, biases;        // [K, C] and [C], float32
  bool delta;

  template <typename T>
  CommittedPath<T> path(size_t layer, const TreeSlots& tree) const {
    const Tensor &window = windows[layer], &kept_inputs = inputs[layer], &state = states[layer], &weight = taps[layer], &bias = biases[layer];
    const int64_t channels = window.size(1);
    YGG_CHECK(state.dim() == 3, "a state has heads, keys and values");
    const RecurrenceSizes sizes((channels - state.size(0) * state.size(2)) / 2, state, decays[layer], strengths[layer]);
    YGG_CHECK(weight.sizes() == Ints({window.size(0) + 1, channels}) && bias.sizes() == Ints({channels}) && kept_inputs.size(1) == channels &&
                  weight.is_contiguous() && kept_inputs.is_contiguous() && window.is_contiguous() && kept_inputs.dtype() == window.dtype(),
              "a convolution of ", channels, " channels has the taps ", weight.sizes());
    const TreeConvolution<T> convolution{tree, nullptr, nullptr, nullptr, weight.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                                         window.const_data_ptr<T>(), kept_inputs.mutable_data_ptr<T>(), nullptr, channels, weight.size(0), true};
    return {sizes, convolution, decays[layer].const_data_ptr<float>(), strengths[layer].const_data_ptr<float>(), delta, state.mutable_data_ptr<float>()};
  }

  template <typename T>
  void apply(const TreeSlots& tree, int64_t num_threads) const {
    std::vector<CommittedPath<T>> paths;
    for (size_t layer = 0; layer < states.size(); ++layer) paths.push_back(path<T>(layer, tree));
    const int64_t heads = paths[0].heads;
    for (const auto& other : paths) YGG_CHECK(other.heads == heads, "all layers have as many heads");
    parallel(heads * paths.size(), num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) paths[unit / heads].apply(unit % heads);
    });
  }

  // Commits the rows in `slots`, a path in order, to the states and windows.
  void commit(Ints slots, int64_t num_threads) const {
    YGG_CHECK(inputs.size() == windows.size() && (states.empty() || states.size() == windows.size()), "every window has its inputs");
    for (const auto* other : {&decays, &strengths, &taps, &biases}) YGG_CHECK(other->size() == states.size(), "every state has its factors");
    const std::vector<int64_t> path = slots.vec();
    for (const Tensor& other : inputs)
      for (const int64_t slot : path) YGG_CHECK(0 <= slot && slot < other.size(0), "there is no slot ", slot);
    std::vector<int64_t> parents(path.size());
    for (size_t row = 0; row < path.size(); ++row) parents[row] = static_cast<int64_t>(row) - 1;
    const TreeSlots tree(Ints(parents), path.data());
    if (!states.empty() && !path.empty()) with_rows_of(windows[0], [&]<typename T>(T) { apply<T>(tree, num_threads); });
    for (size_t layer = 0; layer < windows.size(); ++layer) commit_window(windows[layer], inputs[layer], path);
  }
};

}  // namespace yggdrasil
