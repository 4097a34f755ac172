// The random draws of a sampling target, which are known before it runs.
//
// A sampling target takes the token with the highest log p + Gumbel noise, and the noise is a function of the request's
// key, the position and the token (native/random_numbers.py). So a candidate with high noise is more likely to be drawn
// than its probability: `Draws` reweighs candidates (`drafters/statistics/draws.py` is the Python reference and has the
// fitted weights). `likely_draws` finds the few tokens that may be drawn, from bounds of their noise.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "tree/scorer.h"

namespace yggdrasil {

// Output `index` of SplitMix64 seeded with `start`.
inline uint64_t random_word(uint64_t start, uint64_t index) {
  uint64_t mixed = start + (index + 1) * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return mixed ^ (mixed >> 31);
}

inline double gumbel_noise(double uniform) { return -std::log(-std::log1p(-std::min(uniform, 1.0 - 0x1p-24))); }

class Draws {
 public:
  Draws() = default;
  Draws(int64_t key, double noise, double rest_factor) : key_(uint64_t(key)), noise_(noise), rest_factor_(std::exp(rest_factor)) {}

  // `position`: index in the text of the token that is drawn.
  void reweigh(std::vector<Candidate>& found, int64_t position) const {
    if (noise_ == 0.0) return;
    const uint64_t start = random_word(key_, uint64_t(position));
    double total_before = 0.0, total = 0.0;
    for (Candidate& each : found) {
      total_before += each.probability;
      total += each.probability *= std::exp(noise_ * gumbel(random_word(start, uint64_t(each.token))));
    }
    total += std::max(1.0 - total_before, kMinRest) * rest_factor_;
    for (Candidate& each : found) each.probability = double(float(each.probability / total));
  }

 private:
  static constexpr double kMinRest = 1e-3;

  static double gumbel(uint64_t random) { return gumbel_noise((double(random >> 12) + 0.5) * 0x1p-52); }

  uint64_t key_ = 0;
  double noise_ = 0.0, rest_factor_ = 1.0;
};

// Writes the tokens, ascending, whose sum of score and noise may be one of the two highest, and returns their number.
// Tokens of score -inf are none of them.
//
// A uniform number with z leading zeros is from 2^-(z + 1) to 2^-z, so its noise is at most (z + 1) ln 2, and at least
// z ln 2 - 0.33, or -2.82 if z is 0. Margins cover the rounding of float32 and of other libraries' logarithms.
inline int64_t likely_draws(const float* scores, int64_t count, int64_t key, int64_t position, int64_t* tokens) {
  constexpr float kLn2 = 0.693147f, kMinusInfinity = -std::numeric_limits<float>::infinity();
  constexpr int64_t kLanes = 16;
  static thread_local std::vector<float> sums;  // scores + z ln 2
  sums.resize(count);
  const uint64_t start = random_word(uint64_t(key), uint64_t(position));
  float highest[kLanes];  // highest lower bound of each lane (token % 16); two lanes are two tokens
  std::fill(highest, highest + kLanes, kMinusInfinity);
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t num_lanes = std::min(kLanes, count - first);
    for (int64_t i = 0; i < num_lanes; ++i) {
      // Bits 23 and up of a positive float32 are its exponent.
      const auto uniform = static_cast<float>(static_cast<int64_t>(random_word(start, uint64_t(first + i)) >> 12 | 1));
      const int32_t zeros = 127 + 52 - 1 - (std::bit_cast<int32_t>(uniform) >> 23);
      const float sum = scores[first + i] + kLn2 * static_cast<float>(zeros), lower_bound = sum - (zeros > 0 ? 0.33f : 2.82f);
      sums[first + i] = sum;
      highest[i] = highest[i] < lower_bound ? lower_bound : highest[i];
    }
  }
  if (count > 1) std::nth_element(highest, highest + 1, highest + kLanes, std::greater<float>());
  const float second = highest[1], threshold = second - kLn2 - 1e-3f - 2e-6f * std::abs(second);
  int64_t found = 0;
  for (int64_t token = 0; token < count; ++token)
    if (sums[token] > kMinusInfinity && !(sums[token] < threshold)) tokens[found++] = token;
  return found;
}

}  // namespace yggdrasil
