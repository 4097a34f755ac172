// Several linear layers over quantised weights and the same rows, in two stages: round the rows to int8, and multiply
// them.
#pragma once

#include <limits>
#include <vector>

#include "quantised/quantised_tiles.h"
#include "common/threads.h"

namespace yggdrasil {

// Returns the bytes of a pair of panels with `inputs` weights per output.
inline int64_t pair_bytes(int64_t format, int64_t inputs) {
  return with_format(format, [&](auto f) { return decltype(f)::groups(inputs) * decltype(f)::kGroup; });
}

inline int64_t num_pairs(int64_t outputs) { return (outputs + 2 * kLanes - 1) / (2 * kLanes); }

// Returns the bytes of a rounded row. Rows are stored in tiles, of which the last may have fewer rows.
inline int64_t rounded_bytes(int64_t inputs) { return inputs / kChunk * InputChunk::kBytes; }

// Buffers of rows rounded in blocks of 32 and of 256 inputs; only the blocks that a layer's format needs are computed.
class RoundedRows {
 public:
  // Returns the 32-bit words of both buffers.
  static int64_t words(int64_t rows, int64_t inputs) { return (inputs % kLargeBlock ? 1 : 2) * bytes(rows, inputs) / 4; }

  RoundedRows(int64_t rows, int64_t inputs, uint32_t* memory)
      : data_{reinterpret_cast<uint8_t*>(memory), reinterpret_cast<uint8_t*>(memory) + bytes(rows, inputs)} {}

  // Returns the buffer for the block size of this format, and marks it as used.
  uint8_t* of(int64_t format) {
    const bool is_large = with_format(format, [](auto f) { return decltype(f)::kBlockInputs == kLargeBlock; });
    is_used_[is_large] = true;
    return data_[is_large];
  }

  template <int Inputs>
  bool is_used() const { return is_used_[Inputs == kLargeBlock]; }
  template <int Inputs>
  uint8_t* data() const { return data_[Inputs == kLargeBlock]; }

 private:
  static int64_t bytes(int64_t rows, int64_t inputs) { return (rows + kMaxTileRows - 1) / kMaxTileRows * kMaxTileRows * rounded_bytes(inputs); }

  uint8_t* data_[2];
  bool is_used_[2] = {};
};

// The multiplications of several layers with rounded rows, divided among threads by pairs of panels.
class QuantisedProducts {
 public:
  void add(const QuantisedJob& job, uint8_t* rounded, int64_t rows) {
    all_.push_back({job, rounded, rows});
    first_pair_.push_back(first_pair_.back() + num_pairs(job.output.outputs));
  }

  int64_t pairs() const { return first_pair_.back(); }

  // Runs the pairs [begin, end) of all layers. adjust(job, number) sets the parts of a job that are known only when the
  // stage runs.
  template <typename Adjust>
  void run(int64_t begin, int64_t end, const Adjust& adjust) const {
    size_t i = std::upper_bound(first_pair_.begin(), first_pair_.end(), begin) - first_pair_.begin() - 1;
    for (int64_t pair = begin, last = 0; pair < end; pair = last) {
      while (pair >= first_pair_[i + 1]) ++i;
      const auto& [product_job, rounded, rows] = all_[i];
      const int64_t max_pairs = rows > kMaxTileRows ? kPairsTogether : std::numeric_limits<int64_t>::max();
      last = pair + std::min(max_pairs, std::min(end, first_pair_[i + 1]) - pair);
      QuantisedJob job = product_job;
      adjust(job, i);
      for (int64_t row = 0; row < rows; row += kMaxTileRows) {
        const int64_t count = std::min(kMaxTileRows, rows - row);
        const TileSize& size = tile_size(count);
        size.run(job, rounded + row * rounded_bytes(job.inputs), size.rows, row, count, pair - first_pair_[i], last - first_pair_[i]);
      }
    }
  }

 private:
  static constexpr int64_t kPairsTogether = 6;  // pairs of panels that all tiles are multiplied with before the next pairs, so that weights are read from memory once

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
  // Returns the words of scratch memory for rounding this number of rows and inputs.
  static int64_t words(int64_t rows, int64_t inputs) { return RoundedRows::words(rows, inputs); }

  QuantisedStage(const InputRows<T>& input, uint32_t* memory, SharedArgmax* best = nullptr)
      : input_(input), rounded_(input.rows, input.inputs, memory), best_(best) {}

  void add(const Tensor& packed, int64_t format, const LinearOutput& output) {
    YGG_CHECK(packed.size(0) == num_pairs(output.outputs) && packed.size(1) == pair_bytes(format, input_.inputs), "weights were not packed for this layer");
    products_.add({packed.const_data_ptr<uint8_t>(), format, input_.inputs, output}, rounded_.of(format), input_.rows);
  }

  // Sets an object that the stage asks for the addresses of rows, weights and outputs when it runs.
  void use_addresses(const LinearAddresses<T>& places) { addresses_ = &places; }

  // `is_first_stage`: no thread has been woken yet, and few rows take less time than waking one.
  void add_stages(Stages& stages, int64_t num_threads, bool is_first_stage) const {
    const int64_t chunks = is_first_stage && input_.rows < kFewRows ? 1 : num_threads;
    if (rounded_.is_used<kChunk>()) stages.add<&QuantisedStage::round<kChunk>>(*this, num_units(kChunk), chunks);
    if (rounded_.is_used<kLargeBlock>()) stages.add<&QuantisedStage::round<kLargeBlock>>(*this, num_units(kLargeBlock), chunks);
    stages.add<&QuantisedStage::multiply>(*this, products_.pairs(), num_chunks_of(products_.pairs(), num_threads, kManyItems));
  }

 private:
  int64_t num_units(int64_t block) const { return (input_.rows + kMaxTileRows - 1) / kMaxTileRows * (input_.inputs / block); }

  // Rounds one block of all rows of a tile per unit of work: blocks share no cache line, whereas rows do.
  template <int Inputs>
  void round(int64_t begin, int64_t end) const {
    const InputRows<T> input = addresses_ ? addresses_->input() : input_;
    const int64_t blocks = input.inputs / Inputs;
    float inverses[kMaxTileRows];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / blocks * kMaxTileRows, block = unit % blocks;
      const int64_t count = std::min(kMaxTileRows, input_.rows - first), m = tile_size(count).rows;
      if (unit == begin || block == 0)
        for (int64_t row = 0; row < count; ++row) inverses[row] = input.inverse_rms(first + row);
      const auto row_of = [first](int64_t row) { return first + row; };
      round_rows<Inputs>(input, row_of, count, inverses, m, block, rounded_.data<Inputs>() + first * rounded_bytes(input.inputs));
    }
  }

  void multiply(int64_t begin, int64_t end) const {
    with_thread_best(best_, [&](PanelArgmax* best) {
      products_.run(begin, end, [&](QuantisedJob& job, size_t i) {
        if (addresses_) job.packed = static_cast<const uint8_t*>(addresses_->packed(i)), job.output = addresses_->output(i);
        job.output.best = best;
      });
    });
  }

  InputRows<T> input_;
  RoundedRows rounded_;
  SharedArgmax* best_;
  const LinearAddresses<T>* addresses_ = nullptr;
  QuantisedProducts products_;
};

}  // namespace yggdrasil
