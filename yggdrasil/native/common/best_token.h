// Argmax of each row, as torch.max computes it: the first index of equal values, and NaN counts as largest.
#pragma once

#include <limits>

#include "common/simd.h"
#include "common/threads.h"

namespace yggdrasil {

template <typename T>
void best_of_row(const T* values, int64_t size, T* best, int64_t* place) {
  constexpr int kLanes = 64;  // searched side by side, in registers
  float top[kLanes];
  int32_t top_block[kLanes] = {};
  int32_t num_blocks = static_cast<int32_t>(size / kLanes), odd = 0;
  std::fill(top, top + kLanes, -std::numeric_limits<float>::infinity());
  for (int32_t block = 0; block < num_blocks; ++block) {
    for (int j = 0; j < kLanes; ++j) {
      const float value = widen(values[static_cast<int64_t>(block) * kLanes + j]);
      const bool is_better = value > top[j];
      top[j] = is_better ? value : top[j];
      top_block[j] = is_better ? block : top_block[j];
      odd |= value != value;
    }
  }
  *place = 0;
  float found = -std::numeric_limits<float>::infinity();
  const auto offer = [&](float value, int64_t at) {
    if (value > found || (value == found && at < *place)) found = value, *place = at;
  };
  if (num_blocks > 0)
    for (int j = 0; j < kLanes; ++j) offer(top[j], static_cast<int64_t>(top_block[j]) * kLanes + j);
  for (int64_t i = static_cast<int64_t>(num_blocks) * kLanes; i < size; ++i) {
    offer(widen(values[i]), i);
    odd |= widen(values[i]) != widen(values[i]);
  }
  if (odd) *place = std::find_if(values, values + size, [](T value) { return widen(value) != widen(value); }) - values;
  *best = values[*place];
}

inline void best_tokens(const Tensor& logits, int64_t num_threads, const Tensor& best, const Tensor& place) {
  const Tensor input = logits.stride(-1) == 1 ? logits : logits.contiguous();
  YGG_CHECK(input.dim() == 2 && input.size(1) > 0, "logits must be [W, V]");
  const int64_t rows = input.size(0), size = input.size(1), stride = input.stride(0);
  check_result(best, {rows}, input.dtype());
  check_result(place, {rows}, DType::int64);
  with_rows_of(input, [&]<typename T>(T) {
    parallel(rows, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        best_of_row(input.const_data_ptr<T>() + row * stride, size, best.mutable_data_ptr<T>() + row, place.mutable_data_ptr<int64_t>() + row);
    });
  });
}

}  // namespace yggdrasil
