// Argmax of each row with the semantics of torch.max: the lowest index of equal values, and NaN counts as largest.
#pragma once

#include <limits>

#include "common/simd.h"
#include "common/threads.h"

namespace yggdrasil {

template <typename T>
void best_of_row(const T* values, int64_t size, T* best, int64_t* index) {
  constexpr int kLanes = 64;  // each lane holds the maximum of every 64th value, in registers
  float top[kLanes];
  int32_t top_block[kLanes] = {};
  int32_t num_blocks = static_cast<int32_t>(size / kLanes), has_nan = 0;
  std::fill(top, top + kLanes, -std::numeric_limits<float>::infinity());
  for (int32_t block = 0; block < num_blocks; ++block) {
    for (int j = 0; j < kLanes; ++j) {
      const float value = to_float(values[static_cast<int64_t>(block) * kLanes + j]);
      const bool is_better = value > top[j];
      top[j] = is_better ? value : top[j];
      top_block[j] = is_better ? block : top_block[j];
      has_nan |= value != value;
    }
  }
  *index = 0;
  float top_value = -std::numeric_limits<float>::infinity();
  const auto consider = [&](float value, int64_t at) {
    if (value > top_value || (value == top_value && at < *index)) top_value = value, *index = at;
  };
  if (num_blocks > 0)
    for (int j = 0; j < kLanes; ++j) consider(top[j], static_cast<int64_t>(top_block[j]) * kLanes + j);
  for (int64_t i = static_cast<int64_t>(num_blocks) * kLanes; i < size; ++i) {
    consider(to_float(values[i]), i);
    has_nan |= to_float(values[i]) != to_float(values[i]);
  }
  if (has_nan) *index = std::find_if(values, values + size, [](T value) { return to_float(value) != to_float(value); }) - values;
  *best = values[*index];
}

inline void best_tokens(const Tensor& logits, int64_t num_threads, const Tensor& best, const Tensor& index) {
  const Tensor input = logits.stride(-1) == 1 ? logits : logits.contiguous();
  YGG_CHECK(input.dim() == 2 && input.size(1) > 0, "logits must be [W, V]");
  const int64_t rows = input.size(0), size = input.size(1), stride = input.stride(0);
  check_result(best, {rows}, input.dtype());
  check_result(index, {rows}, DType::int64);
  with_rows_of(input, [&]<typename T>(T) {
    parallel(rows, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        best_of_row(input.const_data_ptr<T>() + row * stride, size, best.mutable_data_ptr<T>() + row, index.mutable_data_ptr<int64_t>() + row);
    });
  });
}

}  // namespace yggdrasil
