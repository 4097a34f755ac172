// Top-k routing of mixtures of experts: the experts of each row and their routing weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

struct Router {
  int64_t sigmoid;          // routing weights are the softmax of the logits (0), or their sigmoids, rounded to the rows' dtype (1) or not (2)
  bool normed;              // the weights of the chosen experts are divided by their sum
  const float* correction;  // [E], added to the sigmoids for choosing experts only, not to the weights; null for none
  int64_t experts, top_k;  // E, K
};

// The top-k experts of each row, the highest score first (ties to the lower index), and their routing weights.
struct Routes {
  std::vector<int64_t> experts;  // [W, K]
  std::vector<float> weights;     // [W, K]

  // `logits` [W, E]
  template <typename T>
  void choose(const Router& router, const T* logits, int64_t rows) {
    const int64_t top_k = router.top_k;
    experts.resize(rows * top_k), weights.resize(rows * top_k);
    order_.resize(router.experts), scores_.resize(router.experts);
    for (int64_t row = 0; row < rows; ++row) {
      const T* row_logits = logits + row * router.experts;
      for (int64_t e = 0; e < router.experts; ++e) {
        scores_[e] = to_float(row_logits[e]);
        if (router.sigmoid) scores_[e] = sigmoid_of(router, row_logits[e]) + (router.correction ? router.correction[e] : 0.0f);
      }
      std::iota(order_.begin(), order_.end(), 0);
      std::partial_sort(order_.begin(), order_.begin() + top_k, order_.end(),
                        [&](int64_t a, int64_t b) { return scores_[a] != scores_[b] ? scores_[a] > scores_[b] : a < b; });
      std::copy_n(order_.begin(), top_k, experts.begin() + row * top_k);
      compute_weights(router, row_logits, weights.data() + row * top_k);
    }
  }

 private:
  template <typename T>
  static float sigmoid_of(const Router& router, T logit) {
    const float sigmoid = 1.0f / (1.0f + std::exp(-to_float(logit)));
    return router.sigmoid == 1 ? to_float(T(sigmoid)) : sigmoid;
  }

  // Computes the routing weights of the chosen experts, which come first in order_.
  template <typename T>
  void compute_weights(const Router& router, const T* logits, float* to) const {
    const float max_logit = to_float(logits[order_[0]]);
    const auto weight_of = [&](int64_t expert) { return router.sigmoid ? sigmoid_of(router, logits[expert]) : std::exp(to_float(logits[expert]) - max_logit); };
    float sum = 0.0f;
    for (int64_t i = 0; i < router.top_k; ++i) sum += to[i] = weight_of(order_[i]);
    if (!router.normed && !router.sigmoid)
      for (int64_t i = router.top_k; i < router.experts; ++i) sum += weight_of(order_[i]);
    const float denominator = router.sigmoid ? router.normed ? sum + (router.sigmoid == 1 ? 1e-6f : 1e-20f) : 1.0f : sum;
    for (int64_t i = 0; i < router.top_k; ++i) to[i] = router.sigmoid == 2 ? to[i] / denominator : to_float(T(to[i] / denominator));
  }

  std::vector<int64_t> order_;
  std::vector<float> scores_;
};

}  // namespace yggdrasil
