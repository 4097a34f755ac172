// Argmax of each row of a large layer (the LM head), reading an 8-bit copy of the weights, half the bytes of bf16.
//
// The copy gives every output within a bound: for a row x and weights w, rounded to x' and w', the products differ by
// at most |x| |w - w'| + |x - x'| |w'| (Cauchy-Schwarz). Panels that may contain the largest output are then multiplied
// with the full weights, so results are bitwise the same. These are about five of thousands of panels per row.
#pragma once

#include <mutex>
#include <vector>

#include "linear/byte_products.h"
#include "linear/linear_ops.h"
#include "linear/candidate_filter.h"

namespace yggdrasil {

#ifdef YGG_BYTE_PRODUCTS
constexpr int64_t kMaxBoundedRows = 16;  // rows of an AMX tile; with more rows the layer is not bound by memory bandwidth alone

// The stages that multiply rows with the 8-bit copy.
template <typename T>
class BoundStage {
 public:
  static int64_t words(int64_t rows, int64_t inputs) { return ByteRows::words(rows, inputs); }

  // `copy` [panels, padded inputs / 4, 16, 4] are the 8-bit weights, `factors` [panels, 3, 16] the scales and norms of
  // the outputs.
  BoundStage(const InputRows<T>& input, const Tensor& copy, const Tensor& factors, const LinearOutput& output, uint32_t* memory)
      : input_(input), output_(output), copy_(copy.const_data_ptr<uint8_t>()), outputs_(factors.const_data_ptr<float>()),
        bytes_{reinterpret_cast<int8_t*>(memory), reinterpret_cast<int32_t*>(memory) + 2 * input.rows * padded(input.inputs) / 4, input.rows, input.inputs},
        rows_(input.rows), lower_bounds_(input.rows, kMinusInfinity), candidates_(input.rows) {
    YGG_CHECK(copy.is_contiguous() && copy.numel() == panels() * panel_bytes(input.inputs) && factors.is_contiguous() &&
                    factors.numel() == panels() * kFactors * kPanel,
                "the copy was not made of this layer");
  }

  void add_stages(Stages& stages, int64_t num_threads) const {
    stages.add<&BoundStage::round>(*this, input_.rows, input_.rows < kFewRows ? 1 : num_threads);
    stages.add<&BoundStage::filter_panels>(*this, panels(), num_chunks_of(panels(), num_threads, kManyItems));
  }

  // Returns the panels that may have the largest output of a row, ascending; none if rows or outputs are not finite.
  std::vector<int64_t> candidate_panels() const {
    std::vector<int64_t> found;
    for (int64_t row = 0; row < input_.rows; ++row) {
      const float threshold = CandidateFilter::threshold_for(lower_bounds_[row], slack());
      if (!std::isfinite(threshold)) return {};
      for (const CandidateFilter::Panel& each : candidates_[row])
        if (each.upper_bound >= threshold) found.push_back(each.panel);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

 private:
  static constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  static constexpr float kMinNorm = 1e-6f;  // smallest norm of a row: for smaller ones, squares may underflow

  int64_t panels() const { return (output_.outputs + kPanel - 1) / kPanel; }

  // Relative difference up to which rounding may reverse the order of two outputs.
  float slack() const { return output_.is_bf16 ? 0x1p-7f : 0x1p-20f; }

  void round(int64_t begin, int64_t end) const {
    std::vector<float> numbers(input_.inputs);
    for (int64_t row = begin; row < end; ++row) {
      input_.read(row, 0, input_.inputs, 1.0f, numbers.data());
      float largest = 0.0f, squares = 0.0f;
      for (const float number : numbers) largest = std::max(largest, std::abs(number)), squares += number * number;
      const float norm = std::sqrt(squares), scale = largest / ByteRows::kMaxValue;
      rows_[row] = factors_of(scale, norm);
      if (std::isfinite(norm) && norm > kMinNorm) {
        bytes_.write(row, numbers.data(), 1.0f / scale);
      } else {
        rows_[row] = {kNan, kNan, kNan};
        std::fill(numbers.begin(), numbers.end(), 0.0f);
        bytes_.write(row, numbers.data(), 0.0f);
      }
    }
  }

  // Includes the rounding error of float32 sums over all inputs of the row.
  RowFactors factors_of(float scale, float norm) const {
    const auto count = static_cast<float>(input_.inputs);
    const float full_norm = norm * (1.0f + 0x1p-22f * count), rounding = 0x1p-22f * count * full_norm;
    return {scale, full_norm + rounding, 0.501f * scale * std::sqrt(count) + rounding};
  }

  void filter_panels(int64_t begin, int64_t end) const {
    CandidateFilter filter(outputs_, rows_, slack());
    multiply_panels(bytes_, copy_, begin, end, [&](int64_t panel, int64_t row, Lanes sums) {
      const int64_t first = panel * kPanel;
      filter.consider(row, panel, sums, output_.bias ? load_first(output_.bias + first, std::min<int64_t>(kPanel, output_.outputs - first)) : zeros());
    });
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t row = 0; row < input_.rows; ++row) {
      lower_bounds_[row] = std::max(lower_bounds_[row], filter.lower_bound(row));
      candidates_[row].insert(candidates_[row].end(), filter.candidates(row).begin(), filter.candidates(row).end());
    }
  }

  InputRows<T> input_;
  LinearOutput output_;
  const uint8_t* copy_;
  const float* outputs_;
  ByteRows bytes_;
  mutable std::vector<RowFactors> rows_;
  mutable std::vector<float> lower_bounds_;  // highest lower bound of each row
  mutable std::vector<std::vector<CandidateFilter::Panel>> candidates_;
  mutable std::mutex mutex_;
};

template <typename T>
std::vector<int64_t> find_candidates(const InputRows<T>& rows, const Tensor& copy, const Tensor& factors, const LinearOutput& output, int64_t num_threads) {
  if (rows.rows > kMaxBoundedRows) return {};
  const BoundStage<T> bounds(rows, copy, factors, output, scratch_words<Scratch::rows>(BoundStage<T>::words(rows.rows, rows.inputs)));
  Stages stages;
  bounds.add_stages(stages, num_threads);
  stages.run(num_threads);
  return bounds.candidate_panels();
}
#endif

inline bool has_byte_products() {
#ifdef YGG_BYTE_PRODUCTS
  return true;
#else
  return false;
#endif
}

// The operator, with the results of packed_best.
inline void bounded_argmax(const Tensor& input, const Tensor& packed, const Tensor& bias, const Tensor& copy,
                                                const Tensor& factors, int64_t out_features, int64_t num_threads, const Tensor& best, const Tensor& index) {
  const FusedOps fused_ops{.argmax = true};
  const LinearInput x(input, fused_ops);
  const Ints sizes{&out_features, 1};
  const Tensor results[] = {best, index};
  Outputs outputs(x, fused_ops, sizes, {&bias, 1}, {results, 2});
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    std::vector<int64_t> panels;  // empty: all panels are multiplied
#ifdef YGG_BYTE_PRODUCTS
    panels = find_candidates(rows, copy, factors, outputs.of(0), num_threads);
#endif
    PackedStage<T> stage(rows, scratch_words<Scratch::rows>(PackedStage<T>::words(rows.rows, rows.inputs)), outputs.best());
    stage.add(packed, 0, outputs.of(0));
    stage.select(panels);
    Stages stages;
    stage.add_stages(stages, num_threads, /*is_first_stage=*/true);
    stages.run(num_threads);
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
  outputs.finish();
}

}  // namespace yggdrasil
