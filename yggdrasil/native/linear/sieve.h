// Select the panels that may contain a row's largest output, from outputs known within a bound (bounded_argmax.h).
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "common/lanes.h"

namespace yggdrasil {

constexpr int64_t kFactors = 3;  // of an output: its weights' scale, the norm of what rounding took from them, that of what is left

// A row's own factors: of its sums, and of the two norms.
struct RowFactors {
  float scale, of_lost, of_left;
};

#ifdef YGG_AVX2
inline bool reaches(Lanes some, Lanes others) {  // in any lane
#ifdef YGG_AVX512
  return _mm512_cmp_ps_mask(some, others, _CMP_GE_OQ) != 0;
#else
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(some.low, others.low, _CMP_GE_OQ), _mm256_cmp_ps(some.high, others.high, _CMP_GE_OQ))) != 0;
#endif
}

// Finds the panels of one thread that may have the largest output. A panel is kept if one of its outputs may reach the
// largest certain value so far.
class Sieve {
 public:
  struct Panel {
    int64_t panel;
    float most;  // that one of its outputs may be
  };

  // `factors` [panels, 3, 16] are those of the outputs; `slack` is the share of the largest output that rounding may
  // take from it.
  Sieve(const float* factors, const std::vector<RowFactors>& rows, float slack) : factors_(factors), slack_(slack) {
    for (const RowFactors& each : rows) rows_.push_back({each, kNothing, kNothing, {}});
  }

  // Considers a panel's products with a row, given as integer sums to which `bias` is added.
  void offer(int64_t row, int64_t panel, Lanes sums, Lanes bias) {
    Row& own = rows_[row];
    const float* factors = factors_ + panel * kFactors * kLanesOfPanel;
    const Lanes about = fused(sums, load16(factors) * spread(own.factors.scale), bias);
    const Lanes off = fused(load16(factors + kLanesOfPanel), spread(own.factors.of_lost), load16(factors + 2 * kLanesOfPanel) * spread(own.factors.of_left));
    const Lanes most = about + off;
    if (reaches(most, spread(own.enough))) keep(own, panel, largest_of(most), largest_of(about - off));
  }

  float least(int64_t row) const { return rows_[row].least; }
  const std::vector<Panel>& kept(int64_t row) const { return rows_[row].kept; }

  // Returns a bound: outputs below it are smaller than one of value `greatest`, before and after rounding.
  static float reduced(float greatest, float slack) { return greatest - std::abs(greatest) * slack - kTiny; }

 private:
  static constexpr int64_t kLanesOfPanel = 16;
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();
  static constexpr float kTiny = 1e-30f;  // more than is lost where units take next to nothing for zero

  struct Row {
    RowFactors factors;
    float least;   // the greatest output that is certain
    float enough;  // the least that an output must reach to be the greatest
    std::vector<Panel> kept;
  };

  [[gnu::noinline]] void keep(Row& row, int64_t panel, float most, float least) const {
    row.kept.push_back({panel, most});
    if (least > row.least) row.least = least, row.enough = reduced(least, slack_);
  }

  const float* factors_;
  float slack_;
  std::vector<Row> rows_;
};
#endif

}  // namespace yggdrasil
