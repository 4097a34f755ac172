// Reweighs candidates by the target's random draws, which are known before the target runs.
//
// A sampling target takes the token with the highest log p + Gumbel noise, and the noise is a function of the request's
// key, the position and the token (native/random_numbers.py). So a candidate with much noise is likelier to be drawn
// than its probability says. `drafters/statistics/draws.py` is the Python reference and has the fitted weights.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tree/scorer.h"

namespace yggdrasil {

class Draws {
 public:
  Draws() = default;
  Draws(int64_t key, double noise, double others) : key_(uint64_t(key)), noise_(noise), others_(std::exp(others)) {}

  // `position`: index in the text of the token that is drawn.
  void reweigh(std::vector<Candidate>& found, int64_t position) const {
    if (noise_ == 0.0) return;
    const uint64_t start = word(key_, uint64_t(position));
    double known = 0.0, total = 0.0;
    for (Candidate& each : found) {
      known += each.likely;
      total += each.likely *= std::exp(noise_ * gumbel(word(start, uint64_t(each.token))));
    }
    total += std::max(1.0 - known, kLeastRest) * others_;
    for (Candidate& each : found) each.likely = double(float(each.likely / total));
  }

 private:
  static constexpr double kLeastRest = 1e-3;

  // Output `index` of SplitMix64 seeded with `start`.
  static uint64_t word(uint64_t start, uint64_t index) {
    uint64_t mixed = start + (index + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return mixed ^ (mixed >> 31);
  }

  static double gumbel(uint64_t random) {
    const double uniform = std::min((double(random >> 12) + 0.5) * 0x1p-52, 1.0 - 0x1p-24);
    return -std::log(-std::log1p(-uniform));
  }

  uint64_t key_ = 0;
  double noise_ = 0.0, others_ = 1.0;
};

}  // namespace yggdrasil
