// The n-gram scorer: a network with one hidden layer over a candidate's counts, and a softmax over the candidates of one
// position and "none of them". `drafters/statistics/scorer.py` documents the weights.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tree/continuations.h"

namespace yggdrasil {

constexpr int64_t kLongest = 6;      // tokens of the longest context of the text
constexpr int64_t kTableLength = 3;  // of a table
constexpr int64_t kContexts = kLongest + kTableLength;
constexpr int64_t kHidden = 16;

struct Candidate {
  int32_t token;
  std::array<int32_t, kContexts> followed;  // how often, each context: the text's from one token on, then the table's
  double likely;
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
      const Tensor whole = part->contiguous();
      const auto* first = whole.const_data_ptr<double>();
      weights_.insert(weights_.end(), first, first + whole.numel());
    }
  }

  // Prefetches the scorer's weights.
  void expect() const { fetch(weights_.data(), weights_.size() * sizeof(double)); }

  // Computes the probability of each candidate; `seen` is how often each context was seen.
  void score(const std::array<int64_t, kContexts>& seen, std::vector<Candidate>& found) const {
    const double *counts = weights_.data(), *totals = counts + kContexts * 2 * kHidden,
                 *bias = totals + kContexts * kHidden, *out = bias + kHidden;
    double base[kHidden], most = out[kHidden];
    std::copy_n(bias, kHidden, base);
    for (int64_t context = 0; context < kContexts; ++context)
      if (seen[context]) add(totals + context * kHidden, logarithm(seen[context]), base);
    for (Candidate& each : found) {
      double hidden[kHidden];
      std::copy_n(base, kHidden, hidden);
      for (int64_t context = 0; context < kContexts; ++context) {
        const int64_t count = each.followed[context];
        if (!count) continue;
        const double* row = counts + context * 2 * kHidden;
        add(row, logarithm(count), hidden);
        add(row + kHidden, double(count) / double(seen[context]), hidden);
      }
      each.likely = 0.0;
      for (int64_t unit = 0; unit < kHidden; ++unit) each.likely += out[unit] * std::max(hidden[unit], 0.0);
      most = std::max(most, each.likely);
    }
    double whole = std::exp(out[kHidden] - most);
    for (Candidate& each : found) whole += each.likely = std::exp(each.likely - most);
    // Rounded to float32, so that sums in another order, such as those of the Python reference, give equal results.
    for (Candidate& each : found) each.likely = float(each.likely / whole);
  }

 private:
  static void add(const double* row, double times, double* to) {
    for (int64_t unit = 0; unit < kHidden; ++unit) to[unit] += times * row[unit];
  }

  // Returns log(1 + count), for small counts from a table.
  static double logarithm(int64_t count) {
    static const auto known = [] {
      std::array<double, 256> of{};
      for (size_t i = 0; i < of.size(); ++i) of[i] = std::log1p(double(i));
      return of;
    }();
    return count < int64_t(known.size()) ? known[count] : std::log1p(double(count));
  }

  std::vector<double> weights_;
};

}  // namespace yggdrasil
