// When a tree need not grow on: `tree/stakes.py` is the same in Python, and says why.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace yggdrasil {

class Race {
 public:
  // `stakes`: the numbers of `Stakes`, none where nothing is at stake. `standing`: scores of nodes that are there already.
  explicit Race(std::span<const double> stakes, std::vector<double> standing = {})
      : kept_(stakes.empty() ? 0.0 : stakes[0]), next_(stakes.data() + !stakes.empty()),
        end_(stakes.data() + stakes.size()), standing_(std::move(standing)) {
    std::sort(standing_.begin(), standing_.end());
  }

  // The tree has another node.
  void add(double score) {
    pass_standing(score);
    count(score);
  }

  // Whether no wider pass can win, if no further node has more than `score`.
  bool is_over(double score) {
    pass_standing(score);
    if (std::isinf(best_)) return false;
    const double likely = std::exp(score);
    for (const double* pass = next_; pass != end_; pass += 2)
      if (worth(promised_ + (pass[0] - double(size_)) * likely, pass[1]) * kRounding > best_) return false;
    return true;
  }

 private:
  static constexpr double kRounding = 1.0 + 1e-6;  // scores are kept as float32

  void pass_standing(double score) {
    for (; !standing_.empty() && standing_.back() >= score; standing_.pop_back()) count(standing_.back());
  }

  void count(double score) {
    ++size_, promised_ += std::exp(score);
    if (next_ == end_ || double(size_) != next_[0]) return;
    best_ = std::max(best_, worth(promised_, next_[1]));
    next_ += 2;
  }

  double worth(double promised, double weight) const { return (1.0 + (promised - 1.0) * kept_) * weight; }

  double kept_;
  const double *next_, *end_;  // passes that are wider than the tree: width and what a token is worth
  double best_ = -std::numeric_limits<double>::infinity(), promised_ = 0.0;
  int64_t size_ = 0;
  std::vector<double> standing_;  // not counted yet, the best last
};

}  // namespace yggdrasil
