// Draw a sampling target's token from the logits of one row, without sorting the vocabulary or the noise of most tokens.
//
// The result is that of `Sampler.choose` in Python: temperature, top-k, top-p and min-p as in transformers, then the token
// with the highest score + Gumbel noise. Other functions for exponentials and logarithms round differently, so where
// rounding might decide, nothing is drawn, and the caller takes the slower way.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "tree/draws.h"

namespace yggdrasil {

struct Truncation {
  float temperature;
  int64_t top_k;  // 0: off
  double top_p;   // 1: off
  double min_p;   // 0: off
};

struct DrawnToken {
  int64_t token = -1;  // -1: rounding might decide, or there is no finite largest logit
  double margin = 0.0;  // between the two highest sums of score and noise
};

template <typename T>
class TokenDraw {
 public:
  TokenDraw(const T* all, int64_t count, const Truncation& by) : logits_(all), count_(count), by_(by) {
    static thread_local std::vector<float> largest;
    largest_ = &largest;
    largest.resize(num_blocks());
    highest_ = kNone;
    int32_t odd = 0;  // whether a logit is NaN
    for (int64_t block = 0; block < num_blocks(); ++block) {
      float logits[kBlock];
      read(block, logits);
      for (int64_t i = 0; i < kBlock; ++i) odd |= logits[i] != logits[i];
      largest[block] = largest_of(logits) / by.temperature;
      highest_ = std::max(highest_, largest[block]);
    }
    if (odd) highest_ = std::numeric_limits<float>::quiet_NaN();
  }

  DrawnToken draw(int64_t key, int64_t position) {
    if (!std::isfinite(highest_) || !truncate()) return {};
    const uint64_t start = random_word(uint64_t(key), uint64_t(position));
    for (int64_t block = 0; block < num_blocks(); ++block)
      if ((*largest_)[block] >= floor_) offer(block, start);
    const double margin = best_.sum - second_.sum;
    if (margin < kNear + 1e-6 * std::abs(best_.sum) || is_unsure(best_.score)) return {};
    return {best_.token, margin};
  }

 private:
  static constexpr int64_t kBlock = 64, kLanes = 16, kInFull = 1000, kMostSorted = 1 << 14;
  static constexpr float kNone = -std::numeric_limits<float>::infinity(), kTwo = 0.693148f;
  static constexpr double kNear = 1e-4, kClose = 3e-5;  // sums of score and noise; shares of the probability

  struct Sum {
    int64_t token = -1;
    float score = kNone;
    double sum = -std::numeric_limits<double>::infinity();
  };

  int64_t num_blocks() const { return (count_ + kBlock - 1) / kBlock; }

  // Writes the logits of a block, padded with -inf.
  void read(int64_t block, float* logits) const {
    const T* from = logits_ + block * kBlock;
    const int64_t there = std::min(kBlock, count_ - block * kBlock);
    if (there == kBlock)
      for (int64_t i = 0; i < kBlock; ++i) logits[i] = to_float(from[i]);
    else
      for (int64_t i = 0; i < kBlock; ++i) logits[i] = i < there ? to_float(from[i]) : kNone;
  }

  void scores_of(int64_t block, float* scores) const {
    read(block, scores);
    for (int64_t i = 0; i < kBlock; ++i) scores[i] /= by_.temperature;
  }

  static float largest_of(const float* values) {
    float most[kLanes];
    std::copy(values, values + kLanes, most);
    for (int64_t i = kLanes; i < kBlock; i += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) most[j] = most[j] < values[i + j] ? values[i + j] : most[j];
    return *std::max_element(most, most + kLanes);
  }

  // Finds the least score that may be drawn, `floor_`. Returns whether it is known.
  bool truncate() {
    if (by_.top_k > 0 && by_.top_k < count_) floor_ = kth_score(by_.top_k);
    if (by_.top_p < 1.0 && !keep_nucleus()) return false;
    if (by_.min_p > 0.0) {
      least_ = highest_ + std::log(by_.min_p);
      floor_ = std::max(floor_, static_cast<float>(least_ - kClose));
    }
    return true;
  }

  // Returns the scores of at least `least`, in a buffer that the next call overwrites.
  std::vector<float>& scores_from(float least) const {
    static thread_local std::vector<float> found;
    found.clear();
    float scores[kBlock];
    for (int64_t block = 0; block < num_blocks(); ++block) {
      if ((*largest_)[block] < least) continue;
      scores_of(block, scores);
      for (const float score : scores)
        if (score >= least && score > kNone) found.push_back(score);
    }
    return found;
  }

  float kth_score(int64_t k) const {
    float bound = kNone;  // of k blocks' largest scores the least: so many scores are at least that
    if (k <= num_blocks()) {
      static thread_local std::vector<float> maxima;
      maxima = *largest_;
      std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
      bound = maxima[k - 1];
    }
    std::vector<float>& scores = scores_from(bound);
    if (static_cast<int64_t>(scores.size()) < k) return kNone;  // fewer are possible
    std::nth_element(scores.begin(), scores.begin() + (k - 1), scores.end(), std::greater<float>());
    return scores[k - 1];
  }

  // Raises `floor_` to the least score of the fewest tokens whose share of what is left reaches top-p, by the sums of Python
  // too. Returns whether it is known.
  bool keep_nucleus() {
    double total = 0.0;
    std::vector<float>* scores = nullptr;
    if (floor_ > kNone) {
      scores = &scores_from(floor_);
      total = weight_of(*scores);
    } else {
      total = total_weight();
      double share = 0.0;
      for (float reach = 2.0f; share < by_.top_p + kClose; reach += 2.0f) {
        if (reach > 60.0f) return false;
        scores = &scores_from(highest_ - reach);
        if (static_cast<int64_t>(scores->size()) > kMostSorted) return false;
        share = weight_of(*scores) / total;
      }
    }
    if (static_cast<int64_t>(scores->size()) > kMostSorted) return false;
    std::sort(scores->begin(), scores->end(), std::greater<float>());
    return cut(*scores, total);
  }

  bool cut(const std::vector<float>& scores, double total) {
    const double off = 5e-7 * (std::abs(highest_) + std::log(total));  // of a float32 sum of these scores
    double before = 0.0;
    float least = scores[0];
    for (size_t i = 0; i < scores.size();) {
      // All scores are sorted where many are kept: in float32, and then equal ones are not kept together.
      const bool is_in_full = static_cast<int64_t>(i) >= kInFull;
      const double share = before / total, close = off + (is_in_full ? 10 * kClose : kClose);
      if (i > 0 && share >= by_.top_p + close) break;
      least = scores[i];
      const size_t first = i;
      for (; i < scores.size() && scores[i] == least; ++i) before += std::exp(double(least) - highest_);
      const bool is_close = first > 0 && share > by_.top_p - close;
      const bool is_split = static_cast<int64_t>(i) >= kInFull && i - first > 1 && before / total > by_.top_p - close;
      if ((is_close || is_split) && unsure_ == kNone) unsure_ = least;
    }
    floor_ = std::max(floor_, least);
    return true;
  }

  double weight_of(const std::vector<float>& scores) const {
    double total = 0.0;
    for (const float score : scores) total += std::exp(double(score) - highest_);
    return total;
  }

  double total_weight() const {
    double total = 0.0;
    for (int64_t block = 0; block < num_blocks(); ++block) {
      float scores[kBlock], sums[kLanes] = {};
      scores_of(block, scores);
      for (int64_t i = 0; i < kBlock; ++i) scores[i] -= highest_;
      for (int64_t i = 0; i < kBlock; ++i) scores[i] = scores[i] < -87.0f ? -87.0f : scores[i];
      for (int64_t i = 0; i < kBlock; ++i) scores[i] = weight(scores[i]);
      for (int64_t i = 0; i < kBlock; i += kLanes)
        for (int64_t j = 0; j < kLanes; ++j) sums[j] += scores[i + j];
      for (const float sum : sums) total += sum;
    }
    return total;
  }

  // exp(x) of x from -87 to 0, by the Cephes polynomial.
  static float weight(float x) {
    constexpr float kRounding = 12582912.0f;  // added and subtracted, it rounds to whole numbers
    const float n = (x * 1.44269504088896341f + kRounding) - kRounding, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  }

  // Whether rounding might decide if tokens of this score are left out.
  bool is_unsure(float score) const { return score <= unsure_ || std::abs(score - least_) < 2 * kClose; }

  // Considers the tokens of a block whose noise, of which only the power of two is computed first, may be enough.
  void offer(int64_t block, uint64_t start) {
    const int64_t first = block * kBlock;
    float scores[kBlock], sums[kBlock];
    uint32_t words[kBlock];
    scores_of(block, scores);
    for (int64_t i = 0; i < kBlock; ++i) words[i] = static_cast<uint32_t>(random_word(start, uint64_t(first + i)) >> 32);
    for (int64_t i = 0; i < kBlock; ++i) {
      // A number with z leading zeros has at most the noise (z + 1) ln 2, see `likely_draws`. With 24 zeros it may have more.
      const auto number = static_cast<float>(static_cast<int32_t>(words[i] >> 8));
      const int32_t zeros = 127 + 24 - 1 - (std::bit_cast<int32_t>(number) >> 23);
      sums[i] = scores[i] + kTwo * static_cast<float>(zeros + 1);
    }
    for (int64_t i = 0; i < kBlock; ++i) sums[i] = scores[i] < floor_ ? kNone : sums[i];
    if (largest_of(sums) < enough_) return;
    for (int64_t i = 0; i < kBlock; ++i)
      if (sums[i] >= enough_ && sums[i] > kNone) compare({first + i, scores[i], scores[i] + exact_noise(random_word(start, uint64_t(first + i)))});
  }

  void compare(const Sum& sum) {
    if (sum.sum > best_.sum) {
      second_ = best_, best_ = sum;
    } else if (sum.sum > second_.sum) {
      second_ = sum;
    } else {
      return;
    }
    const auto second = static_cast<float>(second_.sum);
    enough_ = second - 1e-3f - 2e-6f * std::abs(second);
  }

  // Of the uniform number that Python computes in float32.
  static double exact_noise(uint64_t word) {
    return gumbel_noise((static_cast<float>(static_cast<int64_t>(word >> 12)) + 0.5f) * 0x1p-52f);
  }

  const T* logits_;
  int64_t count_;
  Truncation by_;
  std::vector<float>* largest_;  // scores of the blocks
  float highest_, floor_ = kNone, enough_ = kNone;
  float unsure_ = kNone;    // tokens up to this score may be left out by top-p
  double least_ = -std::numeric_limits<double>::infinity();  // score that min-p asks for
  Sum best_, second_;
};

}  // namespace yggdrasil
