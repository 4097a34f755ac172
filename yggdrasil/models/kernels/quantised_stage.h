// Several layers of quantised weights over the same rows: a stage that rounds the rows, and one that multiplies them.
#pragma once

#include <limits>
#include <vector>

#include "quantised_tiles.h"
#include "threads.h"

namespace yggdrasil {

// Bytes of a pair of panels of a format for so many inputs.
inline int64_t pair_bytes(int64_t format, int64_t inputs) {
  return with_format(format, [&](auto f) { return decltype(f)::groups(inputs) * decltype(f)::kGroup; });
}

inline int64_t num_pairs(int64_t outputs) { return (outputs + 2 * kLanes - 1) / (2 * kLanes); }

template <typename T>
class QuantisedStage {
 public:
  // Words of memory that rounding so many rows of so many inputs takes.
  static int64_t words(int64_t rows, int64_t inputs) { return (rows + kMostRows - 1) / kMostRows * kMostRows * row_bytes(inputs) / 4; }

  QuantisedStage(const InputRows<T>& input, uint32_t* memory, SharedBest* best = nullptr)
      : input_(input), rounded_(reinterpret_cast<uint8_t*>(memory)), best_(best) {}

  void add(const Tensor& packed, int64_t format, const LinearOutput& output) {
    TORCH_CHECK(packed.size(0) == num_pairs(output.outputs) && packed.size(1) == pair_bytes(format, input_.inputs), "weights were not packed for this layer");
    jobs_.push_back({packed.const_data_ptr<uint8_t>(), format, input_.inputs, output});
    first_pair_.push_back(first_pair_.back() + packed.size(0));
  }

  // From now on rows, weights and outputs lie where this says when the stage runs.
  void move_to(const LinearPlaces<T>& places) { places_ = &places; }

  // `is_alone`: threads are not at hand yet, and few rows are rounded sooner than a second one sees them.
  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    stages.add<&QuantisedStage::round>(*this, units(), is_alone && input_.rows < kFewRows ? 1 : num_threads);
    stages.add<&QuantisedStage::multiply>(*this, first_pair_.back(), num_chunks_of(first_pair_.back(), num_threads, kMuch));
  }

 private:
  static constexpr int64_t kNear = 6;  // pairs that all tiles visit before the next ones: they are read from memory once

  static int64_t row_bytes(int64_t inputs) { return inputs / kChunk * InputChunk::kBytes; }
  int64_t chunks() const { return input_.inputs / kChunk; }
  int64_t units() const { return (input_.rows + kMostRows - 1) / kMostRows * chunks(); }

  // Rows in tiles, one behind the other, a chunk of a tile at a time: chunks share no cache line, rows do.
  void round(int64_t begin, int64_t end) const {
    const InputRows<T> input = places_ ? places_->input() : input_;
    float inverses[kMostRows];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / chunks() * kMostRows, chunk = unit % chunks();
      const int64_t count = std::min(kMostRows, input_.rows - first), m = tile_size(count).rows;
      if (unit == begin || chunk == 0)
        for (int64_t row = 0; row < count; ++row) inverses[row] = input.inverse_rms(first + row);
      round_rows(input, first, count, inverses, m, chunk, rounded_ + (first * chunks() + chunk * m) * InputChunk::kBytes);
    }
  }

  void multiply(int64_t begin, int64_t end) const {
    shared_best(best_, [&](BestOfPanels* best) { multiply_for(best, begin, end); });
  }

  void multiply_for(BestOfPanels* best, int64_t begin, int64_t end) const {
    const int64_t together = input_.rows > kMostRows ? kNear : std::numeric_limits<int64_t>::max();
    size_t i = std::upper_bound(first_pair_.begin(), first_pair_.end(), begin) - first_pair_.begin() - 1;
    for (int64_t pair = begin, last = 0; pair < end; pair = last) {
      while (pair >= first_pair_[i + 1]) ++i;
      last = pair + std::min(together, std::min(end, first_pair_[i + 1]) - pair);
      QuantisedJob job = jobs_[i];
      if (places_) job.packed = static_cast<const uint8_t*>(places_->packed(i)), job.output = places_->output(i);
      job.output.best = best;
      for (int64_t row = 0; row < input_.rows; row += kMostRows) {
        const int64_t count = std::min(kMostRows, input_.rows - row);
        const TileSize& size = tile_size(count);
        size.run(job, rounded_ + row * row_bytes(input_.inputs), size.rows, row, count, pair - first_pair_[i], last - first_pair_[i]);
      }
    }
  }

  InputRows<T> input_;
  uint8_t* rounded_;
  SharedBest* best_;
  const LinearPlaces<T>* places_ = nullptr;
  std::vector<QuantisedJob> jobs_;
  std::vector<int64_t> first_pair_{0};
};

}  // namespace yggdrasil
