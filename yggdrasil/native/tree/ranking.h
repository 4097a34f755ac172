// Ranking of one tree's nodes by score, recomputed between passes; the buffers are registered once.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/tensor.h"

namespace yggdrasil {

class Ranking {
 public:
  // Ranks N nodes by `scores` float32, with their `depths`, into `order`. For each of the ascending `widths` v,
  // `totals` float64 receives the expected tokens of the best `widths[v]` nodes, the root's 1 included, and `levels`
  // their largest depth.
  Ranking(const Tensor& scores, const Tensor& depths, const Tensor& order, const Tensor& widths,
          const Tensor& totals, const Tensor& levels)
      : scores_(scores), depths_(depths), order_(order), widths_(widths), totals_(totals), levels_(levels) {
    YGG_CHECK(scores.numel() == depths.numel() && scores.numel() == order.numel(), "buffers of one tree are of one size");
    YGG_CHECK(widths.numel() == totals.numel() && widths.numel() == levels.numel(), "a result for each width");
    YGG_CHECK(widths.numel() && widths.const_data_ptr<int64_t>()[widths.numel() - 1] <= scores.numel(), "widths are no wider than the tree");
  }

  // Sorts the nodes by descending score, ties by ascending number.
  void rank() {
    const float* score = scores_.const_data_ptr<float>();
    const auto *depth = depths_.const_data_ptr<int64_t>(), *width = widths_.const_data_ptr<int64_t>();
    auto *node = order_.mutable_data_ptr<int64_t>(), *level = levels_.mutable_data_ptr<int64_t>();
    auto* total = totals_.mutable_data_ptr<double>();
    const int64_t size = scores_.numel(), count = widths_.numel();
    std::iota(node, node + size, 0);
    const auto better = [score](int64_t a, int64_t b) { return score[a] > score[b]; };
    if (!std::is_sorted(node, node + size, better)) std::stable_sort(node, node + size, better);
    double sum = 0.0;
    int64_t deepest = 0, width_index = 0;
    for (int64_t i = 0; width_index < count; ++i) {
      if (std::isfinite(score[node[i]])) sum += std::exp(double(score[node[i]])), deepest = std::max(deepest, depth[node[i]]);
      if (i + 1 == width[width_index]) total[width_index] = sum, level[width_index++] = deepest;
    }
  }

 private:
  Tensor scores_, depths_, order_, widths_, totals_, levels_;
};

}  // namespace yggdrasil
