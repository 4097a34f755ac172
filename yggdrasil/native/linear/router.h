// Routers of mixtures: which experts each row chooses, and their shares.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

struct Router {
  int64_t sigmoid;          // shares are the softmax of the logits (0), or their sigmoids, rounded (1) or not (2)
  bool normed;              // the shares of the chosen experts add up to one
  const float* correction;  // [E], added to the sigmoids by which experts are chosen, but not to the shares; null: none
  int64_t experts, places;  // E, K
};

// The K experts of each row, best first (of equal scores the lower index), and their shares.
struct Routes {
  std::vector<int64_t> experts;  // [W, K]
  std::vector<float> shares;     // [W, K]

  // `logits` [W, E]
  template <typename T>
  void choose(const Router& router, const T* logits, int64_t rows) {
    const int64_t places = router.places;
    experts.resize(rows * places), shares.resize(rows * places);
    order_.resize(router.experts), scores_.resize(router.experts);
    for (int64_t row = 0; row < rows; ++row) {
      const T* given = logits + row * router.experts;
      for (int64_t e = 0; e < router.experts; ++e) {
        scores_[e] = widen(given[e]);
        if (router.sigmoid) scores_[e] = sigmoid_of(router, given[e]) + (router.correction ? router.correction[e] : 0.0f);
      }
      std::iota(order_.begin(), order_.end(), 0);
      std::partial_sort(order_.begin(), order_.begin() + places, order_.end(),
                        [&](int64_t a, int64_t b) { return scores_[a] != scores_[b] ? scores_[a] > scores_[b] : a < b; });
      std::copy_n(order_.begin(), places, experts.begin() + row * places);
      share_out(router, given, shares.data() + row * places);
    }
  }

 private:
  template <typename T>
  static float sigmoid_of(const Router& router, T logit) {
    const float share = 1.0f / (1.0f + std::exp(-widen(logit)));
    return router.sigmoid == 1 ? widen(T(share)) : share;
  }

  // Computes the shares of the chosen experts, the first ones in order_.
  template <typename T>
  void share_out(const Router& router, const T* logits, float* to) const {
    const float most = widen(logits[order_[0]]);
    const auto share_of = [&](int64_t expert) { return router.sigmoid ? sigmoid_of(router, logits[expert]) : std::exp(widen(logits[expert]) - most); };
    float sum = 0.0f;
    for (int64_t i = 0; i < router.places; ++i) sum += to[i] = share_of(order_[i]);
    if (!router.normed && !router.sigmoid)
      for (int64_t i = router.places; i < router.experts; ++i) sum += share_of(order_[i]);
    const float whole = router.sigmoid ? router.normed ? sum + (router.sigmoid == 1 ? 1e-6f : 1e-20f) : 1.0f : sum;
    for (int64_t i = 0; i < router.places; ++i) to[i] = router.sigmoid == 2 ? to[i] / whole : widen(T(to[i] / whole));
  }

  std::vector<int64_t> order_;
  std::vector<float> scores_;
};

}  // namespace yggdrasil
