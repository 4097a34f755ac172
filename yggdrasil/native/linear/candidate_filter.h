// Finds the panels that may contain a row's largest output, from estimates with error bounds (bounded_argmax.h).
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "common/lanes.h"

namespace yggdrasil {

constexpr int64_t kFactors = 3;  // factors of an output: the scale of its 8-bit weights w', the norm of the rounding error w - w', and the norm of w'

// Factors of a row x, rounded to x': its scale, a bound of |x|, and a bound of |x - x'|.
struct RowFactors {
  float scale, norm, error_norm;
};

#ifdef YGG_AVX2
inline bool any_greater_equal(Lanes a, Lanes b) {  // whether a >= b in any lane
#ifdef YGG_AVX512
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ) != 0;
#else
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ))) != 0;
#endif
}

// Collects one thread's candidate panels for each row. A panel is a candidate if the upper bound of one of its outputs
// reaches the highest lower bound so far.
class CandidateFilter {
 public:
  struct Panel {
    int64_t panel;
    float upper_bound;  // upper bound of its outputs
  };

  // `factors` [panels, 3, 16] are those of the outputs. `slack` is the relative error of rounding an output to its
  // dtype.
  CandidateFilter(const float* factors, const std::vector<RowFactors>& rows, float slack) : factors_(factors), slack_(slack) {
    for (const RowFactors& each : rows) rows_.push_back({each, kMinusInfinity, kMinusInfinity, {}});
  }

  // Adds the panel to the row's candidates if it may contain the largest output. `sums` are the integer products of the
  // 8-bit copy.
  void consider(int64_t row, int64_t panel, Lanes sums, Lanes bias) {
    Row& state = rows_[row];
    const float* factors = factors_ + panel * kFactors * kPanelLanes;
    const Lanes estimate = fmadd(sums, load16(factors) * broadcast(state.factors.scale), bias);
    const Lanes error = fmadd(load16(factors + kPanelLanes), broadcast(state.factors.norm), load16(factors + 2 * kPanelLanes) * broadcast(state.factors.error_norm));
    const Lanes upper_bound = estimate + error;
    if (any_greater_equal(upper_bound, broadcast(state.threshold))) add_candidate(state, panel, reduce_max(upper_bound), reduce_max(estimate - error));
  }

  float lower_bound(int64_t row) const { return rows_[row].lower_bound; }
  const std::vector<Panel>& candidates(int64_t row) const { return rows_[row].candidates; }

  // Returns a threshold: outputs below it are smaller than an output of `value`, before and after rounding.
  static float threshold_for(float value, float slack) { return value - std::abs(value) * slack - kTiny; }

 private:
  static constexpr int64_t kPanelLanes = 16;
  static constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  static constexpr float kTiny = 1e-30f;  // covers subnormal numbers, which may be flushed to zero

  struct Row {
    RowFactors factors;
    float lower_bound;   // largest lower bound of an output
    float threshold;  // outputs below this cannot be the largest
    std::vector<Panel> candidates;
  };

  [[gnu::noinline]] void add_candidate(Row& row, int64_t panel, float upper_bound, float lower_bound) const {
    row.candidates.push_back({panel, upper_bound});
    if (lower_bound > row.lower_bound) row.lower_bound = lower_bound, row.threshold = threshold_for(lower_bound, slack_);
  }

  const float* factors_;
  float slack_;
  std::vector<Row> rows_;
};
#endif

}  // namespace yggdrasil
