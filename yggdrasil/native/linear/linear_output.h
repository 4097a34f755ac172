// Outputs of linear layers: written to tensors, with bias and residual, or reduced to the argmax.
#pragma once

#include <algorithm>
#include <limits>
#include <mutex>
#include <vector>

#include "common/input_rows.h"

namespace yggdrasil {

constexpr int kPanel = 16;  // outputs of a packed panel

// The largest output of each row so far, for each lane of the panels: ties go to the lower panel, NaN counts as
// largest.
class BestOfPanels {
 public:
  explicit BestOfPanels(int64_t rows) : values_(rows * kPanel, -std::numeric_limits<float>::infinity()), panels_(rows * kPanel, 0) {}

  // Compares the `count` outputs of a panel for a row; panels must come in order.
#ifdef YGG_AVX512
  void offer(int64_t row, int64_t panel, Lanes outputs, int64_t count) {
    float* values = values_.data() + row * kPanel;
    int32_t* panels = panels_.data() + row * kPanel;
    const __mmask16 there = first_of(count);
    const __m512 known = _mm512_loadu_ps(values);
    const __mmask16 comes_first = _mm512_cmp_ps_mask(outputs, known, _CMP_NLE_UQ) & _mm512_cmp_ps_mask(known, known, _CMP_ORD_Q) & there;
    _mm512_mask_storeu_ps(values, comes_first, outputs);
    _mm512_mask_storeu_epi32(panels, comes_first, _mm512_set1_epi32(static_cast<int32_t>(panel)));
  }
#elif defined(YGG_AVX2)
  void offer(int64_t row, int64_t panel, Lanes outputs, int64_t count) {
    float* values = values_.data() + row * kPanel;
    int32_t* panels = panels_.data() + row * kPanel;
    offer_half(values, panels, panel, outputs.low, count);
    offer_half(values + kPanel / 2, panels + kPanel / 2, panel, outputs.high, count - kPanel / 2);
  }
#else
  void offer(int64_t row, int64_t panel, const float* outputs, int64_t count) {
    float* values = values_.data() + row * kPanel;
    int32_t* panels = panels_.data() + row * kPanel;
    for (int64_t j = 0; j < count; ++j) {
      const bool is_better = outputs[j] > values[j] || (outputs[j] != outputs[j] && values[j] == values[j]);
      values[j] = is_better ? outputs[j] : values[j];
      panels[j] = is_better ? static_cast<int32_t>(panel) : panels[j];
    }
  }
#endif

  // Replaces `best` and `place` by the row's best output if that precedes them.
  void take(int64_t row, float& best, int64_t& place) const {
    for (int64_t j = row * kPanel; j < (row + 1) * kPanel; ++j) {
      const float value = values_[j];
      const int64_t at = static_cast<int64_t>(panels_[j]) * kPanel + j % kPanel;
      const bool is_odd = value != value, was_odd = best != best;
      const bool is_equal = is_odd ? was_odd : value == best;
      if (is_equal ? at < place : !was_odd && (is_odd || value > best)) best = value, place = at;
    }
  }

 private:
#if defined(YGG_AVX2) && !defined(YGG_AVX512)
  static void offer_half(float* values, int32_t* panels, int64_t panel, __m256 outputs, int64_t count) {
    const __m256 known = _mm256_loadu_ps(values), known_panels = _mm256_loadu_ps(reinterpret_cast<const float*>(panels));
    const __m256 is_better = _mm256_and_ps(_mm256_cmp_ps(outputs, known, _CMP_NLE_UQ), _mm256_cmp_ps(known, known, _CMP_ORD_Q));
    const __m256 comes_first = _mm256_and_ps(is_better, _mm256_castsi256_ps(first_of(count)));
    const __m256 this_panel = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(panel)));
    _mm256_storeu_ps(values, _mm256_blendv_ps(known, outputs, comes_first));
    _mm256_storeu_ps(reinterpret_cast<float*>(panels), _mm256_blendv_ps(known_panels, this_panel, comes_first));
  }
#endif

  std::vector<float> values_;
  std::vector<int32_t> panels_;
};

// Destination of a layer's sums.
struct LinearOutput {
  BestOfPanels* best;  // nullable: then they are only compared
  void* out;           // [W, N]
  const float* bias;     // nullable
  const void* residual;  // [W, N], added to what is rounded; nullable
  int64_t outputs;
  bool is_bf16;
  float scale = 1.0f;  // what is rounded is multiplied by this, and rounded again, before a residual is added
};

// Present addresses of a stage's rows, weights and outputs, which differ between layers that share a program.
template <typename T>
struct LinearPlaces {
  virtual ~LinearPlaces() = default;
  virtual InputRows<T> input() const = 0;
  virtual const void* packed(size_t layer) const = 0;
  virtual LinearOutput output(size_t layer) const = 0;
};

inline void offer_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values, int64_t count) {
  const float* bias = to.bias ? to.bias + panel * kPanel : nullptr;
#ifdef YGG_AVX2
  Lanes sums = load16(values);
  if (bias) sums = sums + load_first(bias, count);
  to.best->offer(row, panel, to.is_bf16 ? round_to<BFloat16>(sums) : sums, count);
#else
  float sums[kPanel] = {};
  for (int64_t j = 0; j < count; ++j) {
    sums[j] = bias ? values[j] + bias[j] : values[j];
    if (to.is_bf16) sums[j] = widen(BFloat16(sums[j]));
  }
  to.best->offer(row, panel, sums, count);
#endif
}

#ifdef YGG_AVX2
// Adds bias and residual to a panel of a row, without rounding; all 16 outputs must exist.
template <typename T>
inline Lanes finished_panel(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel;
  Lanes whole = load16(values);
  if (to.bias) whole = whole + load16(to.bias + begin);
  if (to.scale != 1.0f) whole = round_to<T>(whole) * spread(to.scale);
  if (!to.residual) return whole;
  whole = round_to<T>(whole);
  return apart(whole) + load16(static_cast<const T*>(to.residual) + row * to.outputs + begin);
}
#endif

// Writes outputs one by one: the last ones of a layer, which do not fill a panel, and all without vector instructions.
template <typename T>
[[gnu::noinline]] void store_some(const LinearOutput& to, int64_t row, int64_t begin, int64_t count, const float* values) {
  auto* out = static_cast<T*>(to.out);
  const auto* residual = static_cast<const T*>(to.residual);
  for (int64_t j = 0, place = row * to.outputs + begin; j < count; ++j, ++place) {
    T sum = static_cast<T>(to.bias ? values[j] + to.bias[begin + j] : values[j]);
    if (to.scale != 1.0f) sum = static_cast<T>(widen(sum) * to.scale);
    out[place] = residual ? static_cast<T>(apart(widen(sum)) + widen(residual[place])) : sum;
  }
}

inline void store_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, to.outputs - begin);
  if (to.best) return offer_row(to, row, panel, values, count);
  const auto store = [&]<typename T>(T* out) {
#ifdef YGG_AVX2
    if (count == kPanel) return store16(out + row * to.outputs + begin, finished_panel<T>(to, row, panel, values));
#endif
    store_some<T>(to, row, begin, count, values);
  };
  to.is_bf16 ? store(static_cast<BFloat16*>(to.out)) : store(static_cast<float*>(to.out));
}

// Writes two panels of a row, the second if it exists: together they are a cache line.
inline void store_two(const LinearOutput& to, int64_t row, int64_t panel, const float* first, const float* second) {
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  if (!to.best && to.is_bf16 && (panel + 2) * kPanel <= to.outputs) {
    const __m512 sides[2] = {finished_panel<BFloat16>(to, row, panel, first), finished_panel<BFloat16>(to, row, panel + 1, second)};
    _mm512_storeu_si512(static_cast<BFloat16*>(to.out) + row * to.outputs + panel * kPanel, (__m512i)_mm512_cvtne2ps_pbh(sides[1], sides[0]));
    return;
  }
#endif
  store_row(to, row, panel, first);
  if ((panel + 1) * kPanel < to.outputs) store_row(to, row, panel + 1, second);
}

// The largest outputs that the threads have found, combined.
struct SharedBest {
  int64_t rows;
  float* best;
  int64_t* place;
  std::mutex mutex;
};

// Calls body(best), where `best` receives the outputs of this chunk; null if outputs are written.
template <typename Function>
void shared_best(SharedBest* shared, const Function& body) {
  if (!shared) return body(nullptr);
  BestOfPanels best(shared->rows);
  body(&best);
  const std::lock_guard<std::mutex> one_share(shared->mutex);
  for (int64_t row = 0; row < shared->rows; ++row) best.take(row, shared->best[row], shared->place[row]);
}

// Outputs of several layers over the same rows; or of one layer, the largest output of each row and its index.
class Outputs {
 public:
  // `results` are [..., N] for each layer; or the largest outputs and their indices, [W] each.
  Outputs(const RowsOf& x, const Around& around, Ints sizes, List<Tensor> biases, List<Tensor> results)
      : results_(results), is_bf16_(x.is_bf16()), is_best_(around.is_best), sizes_(sizes), residual_(around.residual.contiguous()) {
    const bool has_residual = residual_.defined();
    YGG_CHECK(sizes.size() == 1 || !(has_residual || is_best_), "a residual is added to one layer, and the best sought of one");
    YGG_CHECK(!(has_residual && is_best_), "there is no residual where only the best is sought");
    for (const Tensor& bias : biases) biases_.push_back(bias.floats());
    YGG_CHECK(biases_.size() == sizes.size() && results.size() == (is_best_ ? 2 : sizes.size()), "a bias and a result for each layer");
    if (is_best_) {
      prepare_best(x);
    } else {
      for (size_t i = 0; i < sizes.size(); ++i) check_result(results[i], with_last(x.given(), sizes[i]), x.given().dtype());
    }
    YGG_CHECK(!has_residual || (residual_.sizes() == results[0].sizes() && residual_.dtype() == x.given().dtype()),
              "a residual has the shape and dtype of the outputs");
  }

  LinearOutput of(size_t i) const {
    return {nullptr, is_best_ ? nullptr : results_[i].mutable_data_ptr(), biases_[i].defined() ? biases_[i].const_data_ptr<float>() : nullptr,
            residual_.defined() ? residual_.const_data_ptr() : nullptr, sizes_[i], is_bf16_};
  }

  // Returns the combined largest outputs; null if outputs are written.
  SharedBest* best() { return is_best_ ? &best_ : nullptr; }

  // Writes results that are known only at the end.
  void finish() const {
    if (is_best_ && is_bf16_) std::copy(values_.begin(), values_.end(), results_[0].mutable_data_ptr<BFloat16>());
  }

 private:
  void prepare_best(const RowsOf& x) {
    best_.rows = x.rows();
    check_result(results_[0], {best_.rows}, x.given().dtype());
    check_result(results_[1], {best_.rows}, DType::int64);
    if (is_bf16_) values_.resize(best_.rows);
    best_.best = is_bf16_ ? values_.data() : results_[0].mutable_data_ptr<float>();
    best_.place = results_[1].mutable_data_ptr<int64_t>();
    std::fill_n(best_.best, best_.rows, -std::numeric_limits<float>::infinity());
    std::fill_n(best_.place, best_.rows, 0);
  }

  List<Tensor> results_;
  bool is_bf16_, is_best_;
  Ints sizes_;
  std::vector<Tensor> biases_;
  Tensor residual_;
  SharedBest best_{};
  std::vector<float> values_;  // the best of each row, where they are rounded at the end
};

}  // namespace yggdrasil
