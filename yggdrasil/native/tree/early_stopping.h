// Early stopping of the growth of model-free trees; `policy/objective.py` explains the bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace yggdrasil {

class EarlyStopping {
 public:
  // `bound` has the numbers of `StoppingBound`; it is empty for a tree that is grown to its capacity. `existing` are
  // the scores of the nodes that the tree already has.
  explicit EarlyStopping(std::span<const double> bound, std::vector<double> existing = {})
      : next_(bound.data()), end_(bound.data() + bound.size()), existing_(std::move(existing)) {
    std::sort(existing_.begin(), existing_.end());
  }

  // Counts a new node; the first one is the root, whose score is 0.
  void add(double score) {
    count_existing(score);
    count(score);
  }

  // Whether no wider pass can have a higher objective value, if no further node has a score above `score`.
  bool is_over(double score) {
    count_existing(score);
    if (std::isinf(best_)) return false;
    const double probability = std::exp(score);
    for (const double* pass = next_; pass != end_; pass += 3)
      if (value(pass, accepted_ + (pass[0] - double(size_)) * probability) * kRounding > best_) return false;
    return true;
  }

 private:
  static constexpr double kRounding = 1.0 + 1e-6;  // scores are kept as float32

  void count_existing(double score) {
    for (; !existing_.empty() && existing_.back() >= score; existing_.pop_back()) count(existing_.back());
  }

  void count(double score) {
    if (size_ != 0) accepted_ += std::exp(score);
    ++size_;
    if (next_ == end_ || double(size_) != next_[0]) return;
    best_ = std::max(best_, value(next_, accepted_));
    next_ += 3;
  }

  // Returns the objective value of a pass: its value with nothing accepted, plus the value of each expected token.
  // Python computes both.
  static double value(const double* pass, double accepted) { return pass[1] + pass[2] * accepted; }

  const double *next_, *end_;  // three numbers for each pass wider than the tree: width, value, value per expected token
  double best_ = -std::numeric_limits<double>::infinity(), accepted_ = 0.0;
  int64_t size_ = 0;
  std::vector<double> existing_;  // ascending scores that are not counted yet
};

}  // namespace yggdrasil
