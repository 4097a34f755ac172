// Several linear layers over packed weights and the same rows: one stage prepares the rows, the next multiplies them.
//
// All rows of a step use the same instructions, and every output is accumulated over K in a fixed order: a row's result is
// independent of the number of rows.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear/linear_matrix.h"
#include "linear/linear_vector.h"
#include "common/threads.h"

namespace yggdrasil {

// Divides rows into tiles: two blocks of AMX, or even parts of at most 8 rows.
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

// All rows use the same kernel at any width, because AMX and vector kernels round sums differently.
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

// Panels that are multiplied with rows at the same time are assigned together: a layer of 576 outputs has 36 panels, of
// which two threads would get 12 and 24 in pieces of a dozen.
inline int64_t panels_together(std::span<const int64_t> shares, bool is_tiled) {
  return is_tiled || shares.empty() ? kMatrixPanels : panels_at_once(*std::max_element(shares.begin(), shares.end()));
}

inline int64_t panels_of(const LinearOutput& output) { return (output.outputs + kPanel - 1) / kPanel; }

// Products of packed weights with rows, divided into pieces: panels that are multiplied with rows at the same time.
class Products {
 public:
  // `shares`, the tiles of the job's rows, must exist when the pieces run.
  void add(const LinearJob& job, std::span<const int64_t> shares) {
    const int64_t panels = panels_of(job.output), piece = panels_together(shares, job.tiled != nullptr);
    all_.push_back({job, shares, piece});
    first_piece_.push_back(first_piece_.back() + (panels + piece - 1) / piece);
    panels_ += panels;
  }

  int64_t pieces() const { return first_piece_.back(); }

  int64_t chunks(int64_t num_threads) const {
    constexpr int64_t kMany = 3072;  // panels, which threads share out in more than a chunk each
    return std::min(pieces(), panels_ < kMany ? num_threads : 4 * num_threads);
  }

  const LinearJob& job(size_t number) const { return all_[number].job; }

  // Runs the pieces [begin, end); adjust(job, number) sets the parts of a job that are known only now.
  template <typename Adjust>
  void run(int64_t begin, int64_t end, const Adjust& adjust) const {
    size_t i = std::upper_bound(first_piece_.begin(), first_piece_.end(), begin) - first_piece_.begin() - 1;
    for (int64_t now = begin, last = 0; now < end; now = last) {
      while (now >= first_piece_[i + 1]) ++i;
      const auto& [given, shares, piece] = all_[i];
      const int64_t at_once = given.tiled ? 1 : kTilesAtOnce;
      const int64_t most = static_cast<int64_t>(shares.size()) > at_once ? kNear / piece : std::numeric_limits<int64_t>::max();
      last = now + std::min(most, std::min(end, first_piece_[i + 1]) - now);
      LinearJob job = given;
      adjust(job, i);
      run_rows(job, shares, (now - first_piece_[i]) * piece, std::min((last - first_piece_[i]) * piece, panels_of(job.output)));
    }
  }

 private:
  static constexpr int64_t kNear = 12;  // panels that all rows visit before the next ones, where too many to meet them at once

  struct Product {
    LinearJob job;
    std::span<const int64_t> shares;
    int64_t piece;  // panels
  };

  std::vector<Product> all_;
  std::vector<int64_t> first_piece_{0};
  int64_t panels_ = 0;
};

// Rows in the dtype and layout in which packed weights are multiplied with them.
template <typename Given>
struct MetRows {
  using Made = std::conditional_t<kMultipliesPairs, Given, float>;

  static bool are_tiled() { return std::is_same_v<Given, BFloat16> && has_amx(); }
  static int64_t steps(int64_t inputs) { return std::is_same_v<Given, BFloat16> ? inputs / 2 : inputs; }

  // Returns the words of memory for this number of rows and inputs, in whole cache lines.
  static int64_t words(int64_t rows, int64_t inputs) {
    constexpr int64_t kLine = 16;
    return (rows * inputs * static_cast<int64_t>(sizeof(Made)) / 4 + kLine) / kLine * kLine;
  }

  static const uint32_t* words_of(const Tensor& packed) {
    YGG_CHECK(packed.dtype() == dtype_of<Given>, "input and packed weights must have one dtype");
    return static_cast<const uint32_t*>(packed.const_data_ptr());
  }

  static LinearJob job(const uint32_t* packed, int64_t panel_steps, const uint32_t* x, const uint32_t* tiled, int64_t rows, int64_t inputs,
                       const LinearOutput& output) {
    return {packed, x, tiled, rows, steps(inputs), kMultipliesPairs ? steps(inputs) : inputs, panel_steps * kPanel, output};
  }
};

template <typename Given>
class PackedStage {
 public:
  // Returns the words of memory that preparing this number of rows and inputs takes.
  static int64_t words(int64_t rows, int64_t inputs) {
    return Met::words(rows, inputs) + (Met::are_tiled() ? tiled_words(rows, Met::steps(inputs)) : 0);
  }

  PackedStage(const InputRows<Given>& input, uint32_t* memory, SharedBest* best = nullptr)
      : input_(input), shares_(row_shares(input.rows, Met::are_tiled())), best_(best) {
    if (!is_given()) made_ = reinterpret_cast<Made*>(memory);
    if (Met::are_tiled()) tiled_ = memory + Met::words(input.rows, input.inputs);
  }

  PackedStage(const PackedStage&) = delete;  // its products read its own shares

  void add(const Tensor& packed, int64_t, const LinearOutput& output) {
    YGG_CHECK(packed.size(0) == panels_of(output), "weights were not packed for this layer");
    products_.add(Met::job(Met::words_of(packed), packed.size(1), words_of(input_), tiled_, input_.rows, input_.inputs, output), shares_);
  }

  // Sets the addresses of rows, weights and outputs for later runs; they are read when the stage runs.
  void move_to(const LinearPlaces<Given>& places) { places_ = &places; }

  // Limits the stage to these panels of its only layer, in ascending order.
  void choose(std::span<const int64_t> panels) { chosen_ = panels; }

  // `is_alone`: threads are not at hand yet, and few rows are made sooner than a second one sees them.
  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    if (!is_given() || tiled_) stages.add<&PackedStage::make>(*this, input_.rows, is_alone && input_.rows < kFewRows ? 1 : num_threads);
    if (!chosen_.empty()) {
      stages.add<&PackedStage::multiply_chosen>(*this, chosen_.size(), num_threads);
      return;
    }
    stages.add<&PackedStage::multiply>(*this, products_.pieces(), products_.chunks(num_threads));
  }

 private:
  using Met = MetRows<Given>;
  using Made = typename Met::Made;

  bool is_given() const { return std::is_same_v<Made, Given> && input_.are_given(); }
  InputRows<Given> input_now() const { return places_ ? places_->input() : input_; }
  const uint32_t* words_of(const InputRows<Given>& input) const { return static_cast<const uint32_t*>(is_given() ? static_cast<const void*>(input.x) : made_); }

  void make(int64_t begin, int64_t end) const {
    const InputRows<Given> input = input_now();
    const int64_t steps = Met::steps(input.inputs);
    for (int64_t row = begin; row < end; ++row) {
      if (!is_given()) input.read(row, 0, input.inputs, input.inverse_rms(row), made_ + row * input.inputs);
      if (tiled_) tile_row(words_of(input) + row * steps, row, steps, tiled_);
    }
  }

  void multiply(int64_t begin, int64_t end) const {
    shared_best(best_, [&](BestOfPanels* best) {
      products_.run(begin, end, [&](LinearJob& job, size_t i) {
        if (places_) job.packed = static_cast<const uint32_t*>(places_->packed(i)), job.x = words_of(places_->input()), job.output = places_->output(i);
        job.output.best = best;
      });
    });
  }

  void multiply_chosen(int64_t begin, int64_t end) const {
    shared_best(best_, [&](BestOfPanels* best) {
      LinearJob job = products_.job(0);
      job.output.best = best;
      for (const int64_t panel : chosen_.subspan(begin, end - begin)) run_rows(job, shares_, panel, panel + 1);
    });
  }

  InputRows<Given> input_;
  std::vector<int64_t> shares_;
  SharedBest* best_;
  const LinearPlaces<Given>* places_ = nullptr;
  Made* made_ = nullptr;
  uint32_t* tiled_ = nullptr;
  Products products_;
  std::span<const int64_t> chosen_;
};

}  // namespace yggdrasil
