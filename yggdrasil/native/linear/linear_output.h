// Outputs of linear layers: written to tensors, with bias and residual, or reduced to the argmax.
#pragma once

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "common/input_rows.h"

namespace yggdrasil {

constexpr int kPanel = 16;  // outputs per packed panel

// The running argmax of each row, for each lane of the panels. Ties go to the lower panel, and NaN counts as largest.
class PanelArgmax {
 public:
  explicit PanelArgmax(int64_t rows) : values_(rows * kPanel, -std::numeric_limits<float>::infinity()), panels_(rows * kPanel, 0) {}

  // Updates a row's maxima by the `count` outputs of a panel. Panels must come in ascending order.
#ifdef YGG_AVX512
  void consider(int64_t row, int64_t panel, Lanes outputs, int64_t count) {
    float* values = values_.data() + row * kPanel;
    int32_t* panels = panels_.data() + row * kPanel;
    const __mmask16 valid = lane_mask(count);
    const __m512 previous = _mm512_loadu_ps(values);
    const __mmask16 replaces = _mm512_cmp_ps_mask(outputs, previous, _CMP_NLE_UQ) & _mm512_cmp_ps_mask(previous, previous, _CMP_ORD_Q) & valid;
    _mm512_mask_storeu_ps(values, replaces, outputs);
    _mm512_mask_storeu_epi32(panels, replaces, _mm512_set1_epi32(static_cast<int32_t>(panel)));
  }
#elif defined(YGG_AVX2)
  void consider(int64_t row, int64_t panel, Lanes outputs, int64_t count) {
    float* values = values_.data() + row * kPanel;
    int32_t* panels = panels_.data() + row * kPanel;
    consider_half(values, panels, panel, outputs.low, count);
    consider_half(values + kPanel / 2, panels + kPanel / 2, panel, outputs.high, count - kPanel / 2);
  }
#else
  void consider(int64_t row, int64_t panel, const float* outputs, int64_t count) {
    float* values = values_.data() + row * kPanel;
    int32_t* panels = panels_.data() + row * kPanel;
    for (int64_t j = 0; j < count; ++j) {
      const bool is_better = outputs[j] > values[j] || (outputs[j] != outputs[j] && values[j] == values[j]);
      values[j] = is_better ? outputs[j] : values[j];
      panels[j] = is_better ? static_cast<int32_t>(panel) : panels[j];
    }
  }
#endif

  // Replaces `best` and `index` by the row's largest output if that is larger, or equal with a lower index.
  void merge_into(int64_t row, float& best, int64_t& index) const {
    for (int64_t j = row * kPanel; j < (row + 1) * kPanel; ++j) {
      const float value = values_[j];
      const int64_t own_index = static_cast<int64_t>(panels_[j]) * kPanel + j % kPanel;
      const bool is_nan = value != value, was_nan = best != best;
      const bool is_equal = is_nan ? was_nan : value == best;
      if (is_equal ? own_index < index : !was_nan && (is_nan || value > best)) best = value, index = own_index;
    }
  }

 private:
#if defined(YGG_AVX2) && !defined(YGG_AVX512)
  static void consider_half(float* values, int32_t* panels, int64_t panel, __m256 outputs, int64_t count) {
    const __m256 previous = _mm256_loadu_ps(values), previous_panels = _mm256_loadu_ps(reinterpret_cast<const float*>(panels));
    const __m256 is_better = _mm256_and_ps(_mm256_cmp_ps(outputs, previous, _CMP_NLE_UQ), _mm256_cmp_ps(previous, previous, _CMP_ORD_Q));
    const __m256 replaces = _mm256_and_ps(is_better, _mm256_castsi256_ps(lane_mask(count)));
    const __m256 this_panel = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(panel)));
    _mm256_storeu_ps(values, _mm256_blendv_ps(previous, outputs, replaces));
    _mm256_storeu_ps(reinterpret_cast<float*>(panels), _mm256_blendv_ps(previous_panels, this_panel, replaces));
  }
#endif

  std::vector<float> values_;
  std::vector<int32_t> panels_;
};

// Destination of a layer's sums.
struct LinearOutput {
  PanelArgmax* best;  // if not null, outputs are only compared
  void* out;           // [W, N]
  const float* bias;     // nullable
  const void* residual;  // [W, N], added after rounding; nullable
  int64_t outputs;
  bool is_bf16;
  float scale = 1.0f;  // the rounded output is multiplied by this and rounded again, before a residual is added
};

// Addresses of a stage's rows, weights and outputs, looked up when the stage runs: they differ between layers that
// share a program.
template <typename T>
struct LinearAddresses {
  virtual ~LinearAddresses() = default;
  virtual InputRows<T> input() const = 0;
  virtual const void* packed(size_t layer) const = 0;
  virtual LinearOutput output(size_t layer) const = 0;
};

inline void consider_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values, int64_t count) {
  const float* bias = to.bias ? to.bias + panel * kPanel : nullptr;
#ifdef YGG_AVX2
  Lanes sums = load16(values);
  if (bias) sums = sums + load_first(bias, count);
  to.best->consider(row, panel, to.is_bf16 ? round_to<BFloat16>(sums) : sums, count);
#else
  float sums[kPanel] = {};
  for (int64_t j = 0; j < count; ++j) {
    sums[j] = bias ? values[j] + bias[j] : values[j];
    if (to.is_bf16) sums[j] = to_float(BFloat16(sums[j]));
  }
  to.best->consider(row, panel, sums, count);
#endif
}

#ifdef YGG_AVX2
// Adds bias and residual to a panel of a row, without rounding; all 16 outputs must exist.
template <typename T>
inline Lanes finish_panel(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel;
  Lanes sum = load16(values);
  if (to.bias) sum = sum + load16(to.bias + begin);
  if (to.scale != 1.0f) sum = round_to<T>(sum) * broadcast(to.scale);
  if (!to.residual) return sum;
  sum = round_to<T>(sum);
  return uncontracted(sum) + load16(static_cast<const T*>(to.residual) + row * to.outputs + begin);
}
#endif

// Writes outputs one by one: those of a partial panel, and all outputs without vector instructions.
template <typename T>
[[gnu::noinline]] void store_scalar(const LinearOutput& to, int64_t row, int64_t begin, int64_t count, const float* values) {
  auto* out = static_cast<T*>(to.out);
  const auto* residual = static_cast<const T*>(to.residual);
  for (int64_t j = 0, index = row * to.outputs + begin; j < count; ++j, ++index) {
    T sum = static_cast<T>(to.bias ? values[j] + to.bias[begin + j] : values[j]);
    if (to.scale != 1.0f) sum = static_cast<T>(to_float(sum) * to.scale);
    out[index] = residual ? static_cast<T>(uncontracted(to_float(sum)) + to_float(residual[index])) : sum;
  }
}

inline void store_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, to.outputs - begin);
  if (to.best) return consider_row(to, row, panel, values, count);
  const auto store = [&]<typename T>(T* out) {
#ifdef YGG_AVX2
    if (count == kPanel) return store16(out + row * to.outputs + begin, finish_panel<T>(to, row, panel, values));
#endif
    store_scalar<T>(to, row, begin, count, values);
  };
  to.is_bf16 ? store(static_cast<BFloat16*>(to.out)) : store(static_cast<float*>(to.out));
}

// Writes two panels of a row (the second if it exists), which in bf16 are one cache line.
inline void store_pair_of_panels(const LinearOutput& to, int64_t row, int64_t panel, const float* first, const float* second) {
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  if (!to.best && to.is_bf16 && (panel + 2) * kPanel <= to.outputs) {
    const __m512 sides[2] = {finish_panel<BFloat16>(to, row, panel, first), finish_panel<BFloat16>(to, row, panel + 1, second)};
    _mm512_storeu_si512(static_cast<BFloat16*>(to.out) + row * to.outputs + panel * kPanel, (__m512i)_mm512_cvtne2ps_pbh(sides[1], sides[0]));
    return;
  }
#endif
  store_row(to, row, panel, first);
  if ((panel + 1) * kPanel < to.outputs) store_row(to, row, panel + 1, second);
}

// The argmax of each row, combined from all threads.
struct SharedArgmax {
  int64_t rows;
  float* best;
  int64_t* index;
  std::mutex mutex;
};

// Calls body(best) and merges `best`, this chunk's argmax, into `shared`; body(nullptr) if outputs are written.
template <typename Function>
void with_thread_best(SharedArgmax* shared, const Function& body) {
  if (!shared) return body(nullptr);
  PanelArgmax best(shared->rows);
  body(&best);
  const std::lock_guard<std::mutex> lock(shared->mutex);
  for (int64_t row = 0; row < shared->rows; ++row) best.merge_into(row, shared->best[row], shared->index[row]);
}

// Outputs of several layers over the same rows; or of one layer, the largest output of each row and its index.
class Outputs {
 public:
  // `results` are [..., N] for each layer; or the largest outputs and their indices, [W] each.
  Outputs(const LinearInput& x, const FusedOps& fused_ops, Ints sizes, List<Tensor> biases, List<Tensor> results)
      : results_(results), is_bf16_(x.is_bf16()), argmax_(fused_ops.argmax), sizes_(sizes), residual_(fused_ops.residual.contiguous()) {
    const bool has_residual = residual_.defined();
    YGG_CHECK(sizes.size() == 1 || !(has_residual || argmax_), "a residual is added to one layer, and the best sought of one");
    YGG_CHECK(!(has_residual && argmax_), "there is no residual where only the best is sought");
    for (const Tensor& bias : biases) biases_.push_back(bias.floats());
    YGG_CHECK(biases_.size() == sizes.size() && results.size() == (argmax_ ? 2 : sizes.size()), "a bias and a result for each layer");
    if (argmax_) {
      prepare_best(x);
    } else {
      for (size_t i = 0; i < sizes.size(); ++i) check_result(results[i], with_last(x.tensor(), sizes[i]), x.tensor().dtype());
    }
    YGG_CHECK(!has_residual || (residual_.sizes() == results[0].sizes() && residual_.dtype() == x.tensor().dtype()),
              "a residual has the shape and dtype of the outputs");
  }

  LinearOutput of(size_t i) const {
    return {nullptr, argmax_ ? nullptr : results_[i].mutable_data_ptr(), biases_[i].defined() ? biases_[i].const_data_ptr<float>() : nullptr,
            residual_.defined() ? residual_.const_data_ptr() : nullptr, sizes_[i], is_bf16_};
  }

  // Returns the combined largest outputs; null if outputs are written.
  SharedArgmax* best() { return argmax_ ? &best_ : nullptr; }

  // Writes results that are known only at the end.
  void finish() const {
    if (argmax_ && is_bf16_) std::copy(values_.begin(), values_.end(), results_[0].mutable_data_ptr<BFloat16>());
  }

 private:
  void prepare_best(const LinearInput& x) {
    best_.rows = x.rows();
    check_result(results_[0], {best_.rows}, x.tensor().dtype());
    check_result(results_[1], {best_.rows}, DType::int64);
    if (is_bf16_) values_.resize(best_.rows);
    best_.best = is_bf16_ ? values_.data() : results_[0].mutable_data_ptr<float>();
    best_.index = results_[1].mutable_data_ptr<int64_t>();
    std::fill_n(best_.best, best_.rows, -std::numeric_limits<float>::infinity());
    std::fill_n(best_.index, best_.rows, 0);
  }

  List<Tensor> results_;
  bool is_bf16_, argmax_;
  Ints sizes_;
  std::vector<Tensor> biases_;
  Tensor residual_;
  SharedArgmax best_{};
  std::vector<float> values_;  // float32 maxima of each row, rounded to bf16 at the end
};

}  // namespace yggdrasil
