// Several linear layers over quantised weights and the same rows: one stage rounds the rows, the next multiplies them.
#pragma once

#include <limits>
#include <vector>

#include "quantised/quantised_tiles.h"
#include "common/threads.h"

namespace yggdrasil {

// Bytes of a pair of panels of a format for so many inputs.
inline int64_t pair_bytes(int64_t format, int64_t inputs) {
  return with_format(format, [&](auto f) { return decltype(f)::groups(inputs) * decltype(f)::kGroup; });
}

inline int64_t num_pairs(int64_t outputs) { return (outputs + 2 * kLanes - 1) / (2 * kLanes); }

// Bytes that a rounded row takes. Rows lie in tiles, the last of which may be narrower.
inline int64_t rounded_bytes(int64_t inputs) { return inputs / kChunk * InputChunk::kBytes; }

// Rows rounded in blocks of 32 and of 256 inputs, each where a layer's format asks for it.
class RoundedRows {
 public:
  // Words of memory that both take.
  static int64_t words(int64_t rows, int64_t inputs) { return (inputs % kLargeBlock ? 1 : 2) * bytes(rows, inputs) / 4; }

  RoundedRows(int64_t rows, int64_t inputs, uint32_t* memory)
      : places_{reinterpret_cast<uint8_t*>(memory), reinterpret_cast<uint8_t*>(memory) + bytes(rows, inputs)} {}

  // The rows in the blocks of this format, which are rounded from now on.
  uint8_t* of(int64_t format) {
    const bool is_large = with_format(format, [](auto f) { return decltype(f)::kBlockInputs == kLargeBlock; });
    is_used_[is_large] = true;
    return places_[is_large];
  }

  template <int Inputs>
  bool is_used() const { return is_used_[Inputs == kLargeBlock]; }
  template <int Inputs>
  uint8_t* place() const { return places_[Inputs == kLargeBlock]; }

 private:
  static int64_t bytes(int64_t rows, int64_t inputs) { return (rows + kMostRows - 1) / kMostRows * kMostRows * rounded_bytes(inputs); }

  uint8_t* places_[2];
  bool is_used_[2] = {};
};

// Products of quantised weights with rounded rows, shared out by pairs of panels.
class QuantisedProducts {
 public:
  void add(const QuantisedJob& job, uint8_t* rounded, int64_t rows) {
    all_.push_back({job, rounded, rows});
    first_pair_.push_back(first_pair_.back() + num_pairs(job.output.outputs));
  }

  int64_t pairs() const { return first_pair_.back(); }

  // Pairs [begin, end); adjust(job, number) says what of a job is known only now.
  template <typename Adjust>
  void run(int64_t begin, int64_t end, const Adjust& adjust) const {
    size_t i = std::upper_bound(first_pair_.begin(), first_pair_.end(), begin) - first_pair_.begin() - 1;
    for (int64_t pair = begin, last = 0; pair < end; pair = last) {
      while (pair >= first_pair_[i + 1]) ++i;
      const auto& [given, rounded, rows] = all_[i];
      const int64_t together = rows > kMostRows ? kNear : std::numeric_limits<int64_t>::max();
      last = pair + std::min(together, std::min(end, first_pair_[i + 1]) - pair);
      QuantisedJob job = given;
      adjust(job, i);
      for (int64_t row = 0; row < rows; row += kMostRows) {
        const int64_t count = std::min(kMostRows, rows - row);
        const TileSize& size = tile_size(count);
        size.run(job, rounded + row * rounded_bytes(job.inputs), size.rows, row, count, pair - first_pair_[i], last - first_pair_[i]);
      }
    }
  }

 private:
  static constexpr int64_t kNear = 6;  // pairs that all tiles visit before the next ones: they are read from memory once

  struct Product {
    QuantisedJob job;
    uint8_t* rounded;
    int64_t rows;
  };

  std::vector<Product> all_;
  std::vector<int64_t> first_pair_{0};
};

template <typename T>
class QuantisedStage {
 public:
  // Words of memory that rounding so many rows of so many inputs takes.
  static int64_t words(int64_t rows, int64_t inputs) { return RoundedRows::words(rows, inputs); }

  QuantisedStage(const InputRows<T>& input, uint32_t* memory, SharedBest* best = nullptr)
      : input_(input), rounded_(input.rows, input.inputs, memory), best_(best) {}

  void add(const Tensor& packed, int64_t format, const LinearOutput& output) {
    YGG_CHECK(packed.size(0) == num_pairs(output.outputs) && packed.size(1) == pair_bytes(format, input_.inputs), "weights were not packed for this layer");
    products_.add({packed.const_data_ptr<uint8_t>(), format, input_.inputs, output}, rounded_.of(format), input_.rows);
  }

  // From now on rows, weights and outputs lie where this says when the stage runs.
  void move_to(const LinearPlaces<T>& places) { places_ = &places; }

  // `is_alone`: threads are not at hand yet, and few rows are rounded sooner than a second one sees them.
  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    const int64_t chunks = is_alone && input_.rows < kFewRows ? 1 : num_threads;
    if (rounded_.is_used<kChunk>()) stages.add<&QuantisedStage::round<kChunk>>(*this, units(kChunk), chunks);
    if (rounded_.is_used<kLargeBlock>()) stages.add<&QuantisedStage::round<kLargeBlock>>(*this, units(kLargeBlock), chunks);
    stages.add<&QuantisedStage::multiply>(*this, products_.pairs(), num_chunks_of(products_.pairs(), num_threads, kMuch));
  }

 private:
  int64_t units(int64_t block) const { return (input_.rows + kMostRows - 1) / kMostRows * (input_.inputs / block); }

  // Rows in tiles, one behind the other, a block of a tile at a time: blocks share no cache line, rows do.
  template <int Inputs>
  void round(int64_t begin, int64_t end) const {
    const InputRows<T> input = places_ ? places_->input() : input_;
    const int64_t blocks = input.inputs / Inputs;
    float inverses[kMostRows];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / blocks * kMostRows, block = unit % blocks;
      const int64_t count = std::min(kMostRows, input_.rows - first), m = tile_size(count).rows;
      if (unit == begin || block == 0)
        for (int64_t row = 0; row < count; ++row) inverses[row] = input.inverse_rms(first + row);
      const auto row_of = [first](int64_t row) { return first + row; };
      round_rows<Inputs>(input, row_of, count, inverses, m, block, rounded_.place<Inputs>() + first * rounded_bytes(input.inputs));
    }
  }

  void multiply(int64_t begin, int64_t end) const {
    shared_best(best_, [&](BestOfPanels* best) {
      products_.run(begin, end, [&](QuantisedJob& job, size_t i) {
        if (places_) job.packed = static_cast<const uint8_t*>(places_->packed(i)), job.output = places_->output(i);
        job.output.best = best;
      });
    });
  }

  InputRows<T> input_;
  RoundedRows rounded_;
  SharedBest* best_;
  const LinearPlaces<T>* places_ = nullptr;
  QuantisedProducts products_;
};

}  // namespace yggdrasil
