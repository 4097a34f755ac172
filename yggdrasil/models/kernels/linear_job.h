// A linear layer over packed weights: what its kernels, for the vector and for the matrix unit, work on.
#pragma once

#include <algorithm>
#include <vector>

#include "input_rows.h"

namespace yggdrasil {

constexpr int kPanel = 16;      // outputs of a packed panel: one 512-bit register of float32
constexpr int kTilePairs = 16;  // bf16 panels end on a whole tile of so many input pairs, filled with zeros

// Where a layer's sums go.
struct LinearOutput {
  void* out;          // [W, N]
  const float* bias;     // nullable
  const void* residual;  // [W, N], added to what is rounded; nullable
  int64_t outputs;
  bool is_bf16;
};

// bf16: [P, K/2, 16, 2] (pairs along K beside each other, K rounded up to whole tiles); float32: [P, K, 16].
struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;      // [W, K words]: two bf16 or one float32 a word
  const uint32_t* tiled;  // the same for the matrix unit; null where it is not used
  int64_t rows, k_steps, panel_words;
  LinearOutput output;
};

inline void store_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, to.outputs - begin);
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  if (count == kPanel && to.is_bf16) {
    __m512 whole = _mm512_loadu_ps(values);
    if (to.bias) whole = _mm512_add_ps(whole, _mm512_loadu_ps(to.bias + begin));
    const int64_t place = row * to.outputs + begin;
    if (to.residual) whole = _mm512_add_ps(round_to<BFloat16>(whole), load16(static_cast<const BFloat16*>(to.residual) + place));
    store_16(static_cast<BFloat16*>(to.out) + place, whole);
    return;
  }
#endif
  const auto store = [&](auto* out, const auto* residual) {
    using T = std::remove_pointer_t<decltype(out)>;
    for (int64_t j = 0, place = row * to.outputs + begin; j < count; ++j, ++place) {
      const T sum = static_cast<T>(to.bias ? values[j] + to.bias[begin + j] : values[j]);
      out[place] = to.residual ? static_cast<T>(widen(sum) + widen(residual[place])) : sum;
    }
  };
  if (to.is_bf16) {
    store(static_cast<BFloat16*>(to.out), static_cast<const BFloat16*>(to.residual));
  } else {
    store(static_cast<float*>(to.out), static_cast<const float*>(to.residual));
  }
}

// Outputs of several layers over the same rows.
class Outputs {
 public:
  Outputs(const Tensor& rows, at::IntArrayRef sizes, const c10::List<std::optional<Tensor>>& biases, const std::optional<Tensor>& residual) {
    TORCH_CHECK(!residual || sizes.size() == 1, "a residual is added to one layer");
    if (residual) residual_ = residual->contiguous();
    for (size_t i = 0; i < sizes.size(); ++i) {
      auto shape = rows.sizes().vec();
      shape.back() = sizes[i];
      tensors.push_back(at::empty(shape, rows.options()));
      const std::optional<Tensor> bias = biases.get(i);
      biases_.push_back(bias ? bias->to(at::kFloat).contiguous() : Tensor());
    }
    TORCH_CHECK(!residual || (residual_.sizes() == tensors[0].sizes() && residual_.scalar_type() == rows.scalar_type()),
                "a residual has the shape and dtype of the outputs");
  }

  LinearOutput of(size_t i) const {
    return {tensors[i].mutable_data_ptr(), biases_[i].defined() ? biases_[i].const_data_ptr<float>() : nullptr,
            residual_.defined() ? residual_.const_data_ptr() : nullptr, tensors[i].size(-1), tensors[i].scalar_type() == at::kBFloat16};
  }

  std::vector<Tensor> tensors;

 private:
  std::vector<Tensor> biases_;
  Tensor residual_;
};

}  // namespace yggdrasil
