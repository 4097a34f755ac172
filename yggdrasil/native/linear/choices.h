// The (row, expert) pairs of a step of a mixture, sorted by expert.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "linear/linear_stage.h"

namespace yggdrasil {

// The choices of one expert: consecutive rows among the rows of all choices.
struct Meeting {
  int64_t expert, first, rows, first_tiled;  // as if all before it filled whole tiles
  std::vector<int64_t> shares;
};

// The choices of a step, numbered by expert, and those of an expert in the order of the rows.
class Choices {
 public:
  // `expert` and `shares` are [W, K]. An expert id past the last expert is no choice; transformers marks absent experts
  // so.
  Choices(const int64_t* expert, const float* shares, int64_t rows, int64_t places, int64_t num_experts, bool are_tiled) : rows_(rows), places_(places) {
    std::vector<int64_t> next(num_experts + 1, 0);  // the number of an expert's next choice
    for (int64_t i = 0; i < rows_ * places_; ++i) {
      YGG_CHECK(expert[i] >= 0 && expert[i] <= num_experts, "expert ", expert[i], " is chosen of ", num_experts);
      ++next[expert[i]];
    }
    for (int64_t e = 0, tiled = 0; e < num_experts; ++e) {
      const int64_t count = std::exchange(next[e], count_);
      if (count == 0) continue;
      meetings_.push_back({e, count_, count, tiled, row_shares(count, are_tiled)});
      count_ += count;
      tiled += (count + kTileRows - 1) / kTileRows * kTileRows;
    }
    row_of_.resize(count_);
    share_of_.resize(count_);
    for (int64_t place = 0; place < places_; ++place)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t i = row * places_ + place;
        if (expert[i] == num_experts) continue;
        const int64_t choice = next[expert[i]]++;
        row_of_[choice] = row;
        share_of_[choice] = shares[i];
      }
    std::vector<int64_t> known(rows_, 0);
    choices_of_.assign(rows_ * places_, -1);
    for (int64_t choice = 0; choice < count_; ++choice) {
      const int64_t row = row_of_[choice];
      choices_of_[row * places_ + known[row]++] = choice;
    }
  }

  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  int64_t row_of(int64_t choice) const { return row_of_[choice]; }
  float share_of(int64_t choice) const { return share_of_[choice]; }
  const std::vector<Meeting>& meetings() const { return meetings_; }
  int64_t rows_tiled() const { return meetings_.empty() ? 0 : meetings_.back().first_tiled + meetings_.back().rows; }

  const Meeting* meeting_of(int64_t choice) const {
    return &*(std::upper_bound(meetings_.begin(), meetings_.end(), choice, [](int64_t one, const Meeting& m) { return one < m.first; }) - 1);
  }

  // Calls body(choice) for every choice of the row, in the order of expert ids.
  template <typename Function>
  void each_of(int64_t row, const Function& body) const {
    const int64_t* choices = choices_of_.data() + row * places_;
    for (int64_t i = 0; i < places_ && choices[i] >= 0; ++i) body(choices[i]);
  }

 private:
  int64_t rows_, places_, count_ = 0;
  std::vector<Meeting> meetings_;
  std::vector<int64_t> row_of_, choices_of_;  // [choices]; [W, K], -1 behind a row's last
  std::vector<float> share_of_;               // [choices]
};

}  // namespace yggdrasil
