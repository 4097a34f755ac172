// Mixture of experts over quantised weights; each matrix has the layout of a quantised linear layer.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "linear/experts.h"
#include "quantised/quantised_stage.h"

namespace yggdrasil {

// One matrix of all experts: packed [E, pairs of panels, bytes], in one format.
struct QuantisedMatrix {
  const void* packed;
  int64_t format;
};

// Throws unless `packed` has the size of the experts' weights [E, N, K] in this format.
inline void check_quantised(const Tensor& packed, int64_t format, int64_t num_experts, int64_t outputs, int64_t inputs) {
  YGG_CHECK(packed.is_contiguous() && packed.dim() == 3 && packed.size(0) == num_experts && packed.size(1) == num_pairs(outputs) && packed.size(2) == pair_bytes(format, inputs),
            "weights were not packed for these experts");
}

// One linear layer of all experts, in two stages: round the rows to int8, and multiply them with the weights of their
// experts.
template <typename T>
class QuantisedExpertsStage {
 public:
  static_assert(kMaxTileRows == kTileRows, "rows of an expert lie as if all before them filled whole tiles");
  static bool are_tiled() { return true; }
  static int64_t words(const Choices& choices, int64_t inputs) { return QuantisedStage<T>::words(choices.rows_tiled(), inputs); }

  // `input` has the rows of the step, or one row per choice if `is_by_choice`.
  QuantisedExpertsStage(const InputRows<T>& input, const Choices& choices, bool is_by_choice, uint32_t* memory)
      : input_(input), choices_(choices), is_by_choice_(is_by_choice), rounded_(choices.rows_tiled(), input.inputs, memory) {
    for (const ExpertBatch& batch : choices.batches())
      for (int64_t row = 0; row < batch.rows; row += kMaxTileRows)
        tiles_.push_back({batch.first + row, std::min(kMaxTileRows, batch.rows - row), (batch.first_tiled + row) * rounded_bytes(input.inputs)});
  }

  QuantisedExpertsStage(const QuantisedExpertsStage&) = delete;

  // out [choices, N]; biases [E, N], nullable.
  void add(const QuantisedMatrix& matrix, T* out, int64_t outputs, const float* biases) {
    const int64_t inputs = input_.inputs, bytes = num_pairs(outputs) * pair_bytes(matrix.format, inputs);
    uint8_t* rounded = rounded_.of(matrix.format);
    for (const ExpertBatch& batch : choices_.batches()) {
      const float* bias = biases ? biases + batch.expert * outputs : nullptr;
      const LinearOutput output{nullptr, out + batch.first * outputs, bias, nullptr, outputs, std::is_same_v<T, BFloat16>};
      const uint8_t* packed = static_cast<const uint8_t*>(matrix.packed) + batch.expert * bytes;
      products_.add({packed, matrix.format, inputs, output}, rounded + batch.first_tiled * rounded_bytes(inputs), batch.rows);
    }
  }

  void add_stages(Stages& stages, int64_t num_threads, bool is_first_stage) const {
    const int64_t chunks = is_first_stage && choices_.count() < kFewRows ? 1 : num_threads;
    if (rounded_.is_used<kChunk>()) stages.add<&QuantisedExpertsStage::round<kChunk>>(*this, num_units(kChunk), chunks);
    if (rounded_.is_used<kLargeBlock>()) stages.add<&QuantisedExpertsStage::round<kLargeBlock>>(*this, num_units(kLargeBlock), chunks);
    stages.add<&QuantisedExpertsStage::multiply>(*this, products_.pairs(), num_chunks_of(products_.pairs(), num_threads, kManyItems));
  }

 private:
  struct Tile {
    int64_t first, count;  // choices
    int64_t offset;         // byte offset of the rounded rows
  };

  int64_t num_units(int64_t block) const { return tiles_.size() * (input_.inputs / block); }

  template <int Inputs>
  void round(int64_t begin, int64_t end) const {
    constexpr auto kOnes = [] {
      std::array<float, kMaxTileRows> ones;
      ones.fill(1.0f);
      return ones;
    }();
    const int64_t blocks = input_.inputs / Inputs;
    for (int64_t unit = begin; unit < end; ++unit) {
      const Tile& tile = tiles_[unit / blocks];
      const int64_t m = tile_size(tile.count).rows;
      const auto row_of = [&](int64_t row) { return is_by_choice_ ? tile.first + row : choices_.row_of(tile.first + row); };
      round_rows<Inputs>(input_, row_of, tile.count, kOnes.data(), m, unit % blocks, rounded_.data<Inputs>() + tile.offset);
    }
  }

  void multiply(int64_t begin, int64_t end) const { products_.run(begin, end, [](QuantisedJob&, size_t) {}); }

  InputRows<T> input_;
  const Choices& choices_;
  bool is_by_choice_;
  RoundedRows rounded_;
  std::vector<Tile> tiles_;
  QuantisedProducts products_;
};

// Operator: `packed` holds gate (unless there is none) and up, of I outputs, and down, of H outputs, each in its own
// format.
inline void quantised_experts(const Tensor& input, const Tensor& chosen, const Tensor& shares, List<Tensor> packed, Ints formats, int64_t inner_features,
                              List<Tensor> biases, int64_t activation, List<double> clamp, int64_t num_threads, const Tensor& out) {
  const size_t first_matrix = packed.size() == 2 ? 1 : 0;  // without a gate
  YGG_CHECK(packed.size() + first_matrix == 3 && formats.size() == packed.size(), "experts are a gate or none, what it multiplies, and what reads both");
  const int64_t num_experts = packed[0].size(0), hidden = input.size(-1), sizes[] = {inner_features, inner_features, hidden};
  const ExpertsConfig config = experts_config(biases, activation, clamp, sizes, num_experts);
  YGG_CHECK(config.is_gated() == (first_matrix == 0), "experts of this activation have ", config.is_gated() ? "a" : "no", " gate");
  for (size_t i = 0; i < packed.size(); ++i)
    check_quantised(packed[i], formats[i], num_experts, sizes[i + first_matrix], i + first_matrix < 2 ? hidden : inner_features);
  const auto matrix = [&](size_t i) { return QuantisedMatrix{packed[std::max(i, first_matrix) - first_matrix].const_data_ptr(), formats[std::max(i, first_matrix) - first_matrix]}; };
  const QuantisedMatrix matrices[] = {matrix(0), matrix(1), matrix(2)};
  run_experts<QuantisedExpertsStage>(input, chosen, shares, matrices, num_experts, inner_features, config, num_threads, out);
}

}  // namespace yggdrasil
