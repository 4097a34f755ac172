// Causal convolution along the paths of a tree: a row reads its own input, those of its ancestors, and before the root the
// text's last inputs.
#pragma once

#include <algorithm>
#include <vector>

#include "common/tensor.h"
#include "common/threads.h"

namespace yggdrasil {

// Where a pass keeps what its rows add: row r in slot (start + r) modulo the number of slots.
inline int64_t slot_of(int64_t start, int64_t row, int64_t slots) { return (start + row) % slots; }

// The parents of the rows of a pass, -1 for those behind the text; parents come before children.
inline std::vector<int64_t> checked_parents(const Tensor& parents, int64_t rows) {
  const Tensor dense = parents.contiguous();
  YGG_CHECK(dense.numel() == rows, "a pass of ", rows, " rows has ", dense.numel(), " parents");
  const auto* first = dense.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row)
    YGG_CHECK(first[row] >= -1 && first[row] < row, "row ", row, " has the parent ", first[row]);
  return {first, first + rows};
}

// Dims: W rows, C channels, K taps, M slots. `input` [W, C], `weight` [C, K], `bias` [C] or none, `window` [K - 1, C]: the
// text's last inputs, oldest first; `inputs` [M, C] keeps those of this pass. Sums go from the oldest input to the newest.
template <typename T>
void convolve_tree(const Tensor& input, const Tensor& weight, const Tensor& bias, const Tensor& window, const Tensor& inputs,
                   int64_t start, const std::vector<int64_t>& parents, int64_t num_threads, const Tensor& out) {
  const int64_t rows = input.size(0), channels = input.size(1), taps = weight.size(1), slots = inputs.size(0);
  const Tensor dense = input.contiguous(), weights = weight.floats(), shift = bias.floats();
  const auto* given = dense.const_data_ptr<T>();
  const auto* past = window.const_data_ptr<T>();
  const auto* factors = weights.const_data_ptr<float>();
  const float* added = shift.defined() ? shift.const_data_ptr<float>() : nullptr;
  auto* kept = inputs.mutable_data_ptr<T>();
  auto* result = out.mutable_data_ptr<T>();
  parallel(rows, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<const T*> read(taps);
    for (int64_t row = begin; row < end; ++row) {
      int64_t before = taps - 2;  // of the text's last inputs
      for (int64_t tap = taps - 1, node = row; tap >= 0; --tap) {
        read[tap] = node >= 0 ? given + node * channels : past + before-- * channels;
        if (node >= 0) node = parents[node];
      }
      std::copy_n(given + row * channels, channels, kept + slot_of(start, row, slots) * channels);
      for (int64_t channel = 0; channel < channels; ++channel) {
        float sum = added ? added[channel] : 0.0f;
        for (int64_t tap = 0; tap < taps; ++tap) sum += widen(read[tap][channel]) * factors[channel * taps + tap];
        result[row * channels + channel] = T(sum);
      }
    }
  });
}

inline void tree_convolution(const Tensor& input, const Tensor& weight, const Tensor& bias, const Tensor& window, const Tensor& inputs,
                             const Tensor& offsets, const Tensor& parents, int64_t num_threads, const Tensor& out) {
  const int64_t rows = input.size(0), channels = input.size(1);
  YGG_CHECK(weight.dim() == 2 && weight.size(0) == channels && window.dim() == 2 && window.size(0) == weight.size(1) - 1 &&
                window.size(1) == channels && inputs.size(1) == channels && window.is_contiguous() && inputs.is_contiguous(),
            "a convolution of ", channels, " channels has the weight ", weight.sizes(), " and the state ", window.sizes());
  YGG_CHECK(rows <= inputs.size(0), "a pass of ", rows, " rows, and room for ", inputs.size(0));
  check_result(out, {rows, channels}, input.dtype());
  const std::vector<int64_t> above = checked_parents(parents, rows);
  const int64_t start = offsets.contiguous().const_data_ptr<int64_t>()[1];
  if (input.dtype() == DType::bfloat16) {
    convolve_tree<BFloat16>(input, weight, bias, window, inputs, start, above, num_threads, out);
  } else {
    YGG_CHECK(input.dtype() == DType::float32, "tree_convolution serves bfloat16 and float32");
    convolve_tree<float>(input, weight, bias, window, inputs, start, above, num_threads, out);
  }
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
