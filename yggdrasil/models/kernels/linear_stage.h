// Several layers of packed weights over the same rows: a stage that makes the rows, and one that multiplies them.
//
// All rows of a step take the same unit, and every output is accumulated over K in one fixed order: a row's result does
// not depend on how many rows travel with it.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear_matrix.h"
#include "linear_vector.h"
#include "threads.h"

namespace yggdrasil {

// Rows of tiles: two blocks of the matrix unit, or an even share of up to 8.
inline std::vector<int64_t> row_shares(int64_t rows, bool is_tiled) {
  std::vector<int64_t> shares;
  if (is_tiled) {
    for (int64_t row = 0; row < rows; row += 32) shares.push_back(std::min<int64_t>(32, rows - row));
    return shares;
  }
  const int64_t tiles = (rows + kVectorRows - 1) / kVectorRows;
  for (int64_t i = 0; i < tiles; ++i) shares.push_back(rows * (i + 1) / tiles - rows * i / tiles);
  return shares;
}

// All rows take the same unit, whatever the width: the two round their sums differently.
inline void run_rows(const LinearJob& job, std::span<const int64_t> shares, int64_t begin, int64_t end) {
  int64_t row = 0;
#ifdef YGG_AMX
  if (job.tiled) {
    for (const int64_t rows : shares) run_matrix_panels(job, std::exchange(row, row + rows), rows, begin, end);
    return;
  }
#endif
  while (!shares.empty()) {
    const auto together = shares.first(std::min<size_t>(shares.size(), kTilesAtOnce));
    run_panels(job, row, together, begin, end);
    row = std::accumulate(together.begin(), together.end(), row);
    shares = shares.subspan(together.size());
  }
}

// Panels that meet rows at once are shared out together: a layer of 576 outputs has 36 panels, of which two threads would
// get 12 and 24 in pieces of a dozen.
inline int64_t panels_together(std::span<const int64_t> shares, bool is_tiled) {
  return is_tiled || shares.empty() ? kMatrixPanels : panels_at_once(*std::max_element(shares.begin(), shares.end()));
}

template <typename Given>
class PackedStage {
 public:
  // Words of memory that making so many rows of so many inputs takes.
  static int64_t words(int64_t rows, int64_t inputs) {
    return made_words(rows, inputs) + (is_on_matrix_unit() ? tiled_words(rows, steps_of(inputs)) : 0);
  }

  PackedStage(const InputRows<Given>& input, uint32_t* memory, SharedBest* best = nullptr)
      : input_(input), shares_(row_shares(input.rows, is_on_matrix_unit())), piece_(panels_together(shares_, is_on_matrix_unit())), best_(best) {
    if (!is_given()) made_ = reinterpret_cast<Made*>(memory);
    if (is_on_matrix_unit()) tiled_ = memory + made_words(input.rows, input.inputs);
  }

  void add(const Tensor& packed, int64_t, const LinearOutput& output) {
    TORCH_CHECK(packed.scalar_type() == c10::CppTypeToScalarType<Given>::value, "input and packed weights must have one dtype");
    TORCH_CHECK(packed.size(0) == panels_of(output), "weights were not packed for this layer");
    const int64_t row_words = kMultipliesPairs ? steps_of(input_.inputs) : input_.inputs;
    jobs_.push_back({static_cast<const uint32_t*>(packed.const_data_ptr()), words_of(input_), tiled_, input_.rows, steps_of(input_.inputs), row_words,
                     packed.size(1) * kPanel, output});
    first_piece_.push_back(first_piece_.back() + (panels_of(output) + piece_ - 1) / piece_);
  }

  // From now on rows, weights and outputs lie where this says when the stage runs.
  void move_to(const LinearPlaces<Given>& places) { places_ = &places; }

  // Of one layer only these panels are wanted, which ascend.
  void choose(std::span<const int64_t> panels) { chosen_ = panels; }

  // `is_alone`: threads are not at hand yet, and few rows are made sooner than a second one sees them.
  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    constexpr int64_t kMany = 3072;  // panels, which threads share out in more than a chunk each
    if (!is_given() || tiled_) stages.add<&PackedStage::make>(*this, input_.rows, is_alone && input_.rows < kFewRows ? 1 : num_threads);
    if (!chosen_.empty()) {
      stages.add<&PackedStage::multiply_chosen>(*this, chosen_.size(), num_threads);
      return;
    }
    stages.add<&PackedStage::multiply>(*this, first_piece_.back(), num_chunks_of(first_piece_.back(), num_threads, kMany / piece_));
  }

 private:
  using Made = std::conditional_t<kMultipliesPairs, Given, float>;
  static constexpr int64_t kNear = 12;  // panels that all rows visit before the next ones, where too many to meet them at once

  static bool is_on_matrix_unit() { return std::is_same_v<Given, BFloat16> && has_matrix_unit(); }
  static int64_t steps_of(int64_t inputs) { return std::is_same_v<Given, BFloat16> ? inputs / 2 : inputs; }
  static int64_t panels_of(const LinearOutput& output) { return (output.outputs + kPanel - 1) / kPanel; }
  static int64_t made_words(int64_t rows, int64_t inputs) {
    constexpr int64_t kLine = 16;
    return (rows * inputs * static_cast<int64_t>(sizeof(Made)) / 4 + kLine) / kLine * kLine;
  }

  bool is_given() const { return std::is_same_v<Made, Given> && input_.are_given(); }
  InputRows<Given> input_now() const { return places_ ? places_->input() : input_; }
  const uint32_t* words_of(const InputRows<Given>& input) const { return static_cast<const uint32_t*>(is_given() ? static_cast<const void*>(input.x) : made_); }

  void make(int64_t begin, int64_t end) const {
    const InputRows<Given> input = input_now();
    for (int64_t row = begin; row < end; ++row)
      if (!is_given()) input.read(row, 0, input.inputs, input.inverse_rms(row), made_ + row * input.inputs);
    if (tiled_) tile_input(words_of(input), begin, end, steps_of(input_.inputs), tiled_);
  }

  void multiply(int64_t begin, int64_t end) const {
    shared_best(best_, [&](BestOfPanels* best) { multiply_for(best, begin, end); });
  }

  void multiply_chosen(int64_t begin, int64_t end) const {
    shared_best(best_, [&](BestOfPanels* best) {
      LinearJob job = jobs_[0];
      job.output.best = best;
      for (const int64_t panel : chosen_.subspan(begin, end - begin)) run_rows(job, shares_, panel, panel + 1);
    });
  }

  void multiply_for(BestOfPanels* best, int64_t begin, int64_t end) const {
    const int64_t at_once = tiled_ ? 1 : kTilesAtOnce;
    const int64_t most = static_cast<int64_t>(shares_.size()) > at_once ? kNear / piece_ : std::numeric_limits<int64_t>::max();
    size_t i = std::upper_bound(first_piece_.begin(), first_piece_.end(), begin) - first_piece_.begin() - 1;
    for (int64_t now = begin, last = 0; now < end; now = last) {
      while (now >= first_piece_[i + 1]) ++i;
      last = now + std::min(most, std::min(end, first_piece_[i + 1]) - now);
      LinearJob job = jobs_[i];
      if (places_) job.packed = static_cast<const uint32_t*>(places_->packed(i)), job.x = words_of(places_->input()), job.output = places_->output(i);
      job.output.best = best;
      run_rows(job, shares_, (now - first_piece_[i]) * piece_, std::min((last - first_piece_[i]) * piece_, panels_of(job.output)));
    }
  }

  InputRows<Given> input_;
  std::vector<int64_t> shares_;
  int64_t piece_;
  SharedBest* best_;
  const LinearPlaces<Given>* places_ = nullptr;
  Made* made_ = nullptr;
  uint32_t* tiled_ = nullptr;
  std::vector<LinearJob> jobs_;
  std::vector<int64_t> first_piece_{0};
  std::span<const int64_t> chosen_;
};

}  // namespace yggdrasil
