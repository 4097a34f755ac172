// The n-gram scorer: a network with one hidden layer over a candidate's counts, and a softmax over the candidates of
// one position and "none of them". `drafters/statistics/scorer.py` documents the weights.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tree/continuations.h"

namespace yggdrasil {

constexpr int64_t kLongest = 6;      // longest context of the text
constexpr int64_t kTableLength = 3;  // longest context of a table
constexpr int64_t kContexts = kLongest + kTableLength;
constexpr int64_t kHidden = 16;

struct Candidate {
  int32_t token;
  std::array<int32_t, kContexts> counts;  // how often it followed each context: the text's by length, then the table's
  double probability;
};

class NGramScorer {
 public:
  // float64: `counts` [K, 2, H], `totals` [K, H], `bias` [H], `out` [H], `nothing` [1].
  NGramScorer(const Tensor& counts, const Tensor& totals, const Tensor& bias, const Tensor& out, const Tensor& nothing) {
    const std::array<std::pair<const Tensor*, std::vector<int64_t>>, 5> parts{{{&counts, {kContexts, 2, kHidden}},
                                                                                   {&totals, {kContexts, kHidden}},
                                                                                   {&bias, {kHidden}},
                                                                                   {&out, {kHidden}},
                                                                                   {&nothing, {1}}}};
    for (const auto& [part, shape] : parts) {
      YGG_CHECK(part->sizes() == shape && part->dtype() == DType::float64, "weights are not those of a scorer");
      const Tensor denominator = part->contiguous();
      const auto* first = denominator.const_data_ptr<double>();
      weights_.insert(weights_.end(), first, first + denominator.numel());
    }
  }

  // Prefetches the scorer's weights.
  void prefetch() const { prefetch_bytes(weights_.data(), weights_.size() * sizeof(double)); }

  // Computes the probability of each candidate; `seen` is how often each context was seen.
  void score(const std::array<int64_t, kContexts>& seen, std::vector<Candidate>& found) const {
    const double *counts = weights_.data(), *totals = counts + kContexts * 2 * kHidden,
                 *bias = totals + kContexts * kHidden, *out = bias + kHidden;
    double base[kHidden], max_logit = out[kHidden];
    std::copy_n(bias, kHidden, base);
    for (int64_t context = 0; context < kContexts; ++context)
      if (seen[context]) add(totals + context * kHidden, logarithm(seen[context]), base);
    for (Candidate& each : found) {
      double hidden[kHidden];
      std::copy_n(base, kHidden, hidden);
      for (int64_t context = 0; context < kContexts; ++context) {
        const int64_t count = each.counts[context];
        if (!count) continue;
        const double* row = counts + context * 2 * kHidden;
        add(row, logarithm(count), hidden);
        add(row + kHidden, double(count) / double(seen[context]), hidden);
      }
      each.probability = 0.0;
      for (int64_t unit = 0; unit < kHidden; ++unit) each.probability += out[unit] * std::max(hidden[unit], 0.0);
      max_logit = std::max(max_logit, each.probability);
    }
    double denominator = std::exp(out[kHidden] - max_logit);
    for (Candidate& each : found) denominator += each.probability = std::exp(each.probability - max_logit);
    // Rounded to float32, so that sums in another order, such as those of the Python reference, give equal results.
    for (Candidate& each : found) each.probability = float(each.probability / denominator);
  }

 private:
  static void add(const double* row, double times, double* to) {
    for (int64_t unit = 0; unit < kHidden; ++unit) to[unit] += times * row[unit];
  }

  // Returns log(1 + count), for small counts from a table.
  static double logarithm(int64_t count) {
    static const auto small_logs = [] {
      std::array<double, 256> logs{};
      for (size_t i = 0; i < logs.size(); ++i) logs[i] = std::log1p(double(i));
      return logs;
    }();
    return count < int64_t(small_logs.size()) ? small_logs[count] : std::log1p(double(count));
  }

  std::vector<double> weights_;
};

}  // namespace yggdrasil
