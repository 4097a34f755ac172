// The (row, expert) pairs of a step of a mixture, sorted by expert.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "linear/linear_stage.h"

namespace yggdrasil {

// The rows routed to one expert, which are multiplied with its weights together: choices [first, first + rows).
struct ExpertBatch {
  int64_t expert, first, rows, first_tiled;  // first_tiled: index of the first row if each batch is padded to whole tiles
  std::vector<int64_t> tile_sizes;
};

// The choices of a step, numbered in the order of experts, and within an expert in the order of rows.
class Choices {
 public:
  // `expert` and `routing_weights` are [W, K]. The id `num_experts` means no expert, as in transformers.
  Choices(const int64_t* expert, const float* routing_weights, int64_t rows, int64_t top_k, int64_t num_experts, bool are_tiled) : rows_(rows), top_k_(top_k) {
    std::vector<int64_t> next(num_experts + 1, 0);  // index of each expert's next choice
    for (int64_t i = 0; i < rows_ * top_k_; ++i) {
      YGG_CHECK(expert[i] >= 0 && expert[i] <= num_experts, "expert ", expert[i], " is chosen of ", num_experts);
      ++next[expert[i]];
    }
    for (int64_t e = 0, tiled = 0; e < num_experts; ++e) {
      const int64_t count = std::exchange(next[e], count_);
      if (count == 0) continue;
      batches_.push_back({e, count_, count, tiled, split_rows(count, are_tiled)});
      count_ += count;
      tiled += (count + kTileRows - 1) / kTileRows * kTileRows;
    }
    row_of_.resize(count_);
    routing_weights_.resize(count_);
    for (int64_t rank = 0; rank < top_k_; ++rank)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t i = row * top_k_ + rank;
        if (expert[i] == num_experts) continue;
        const int64_t choice = next[expert[i]]++;
        row_of_[choice] = row;
        routing_weights_[choice] = routing_weights[i];
      }
    std::vector<int64_t> num_known(rows_, 0);
    choices_of_.assign(rows_ * top_k_, -1);
    for (int64_t choice = 0; choice < count_; ++choice) {
      const int64_t row = row_of_[choice];
      choices_of_[row * top_k_ + num_known[row]++] = choice;
    }
  }

  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  int64_t row_of(int64_t choice) const { return row_of_[choice]; }
  float routing_weight_of(int64_t choice) const { return routing_weights_[choice]; }
  const std::vector<ExpertBatch>& batches() const { return batches_; }
  int64_t rows_tiled() const { return batches_.empty() ? 0 : batches_.back().first_tiled + batches_.back().rows; }

  const ExpertBatch* batch_of(int64_t choice) const {
    return &*(std::upper_bound(batches_.begin(), batches_.end(), choice, [](int64_t wanted, const ExpertBatch& m) { return wanted < m.first; }) - 1);
  }

  // Calls body(choice) for every choice of the row, in the order of expert ids.
  template <typename Function>
  void each_of(int64_t row, const Function& body) const {
    const int64_t* choices = choices_of_.data() + row * top_k_;
    for (int64_t i = 0; i < top_k_ && choices[i] >= 0; ++i) body(choices[i]);
  }

 private:
  int64_t rows_, top_k_, count_ = 0;
  std::vector<ExpertBatch> batches_;
  std::vector<int64_t> row_of_, choices_of_;  // [choices]; [W, K], -1 behind a row's last
  std::vector<float> routing_weights_;               // [choices]
};

}  // namespace yggdrasil
