// Mixture of experts over quantised weights; each matrix has the layout of a quantised linear layer.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "linear/experts.h"
#include "quantised/quantised_stage.h"

namespace yggdrasil {

// A matrix of every expert: packed [E, pairs of panels, bytes] in one format.
struct QuantisedMatrix {
  const void* packed;
  int64_t format;
};

// Refuses `packed` unless it has the experts' weights [E, N, K] in a format.
inline void check_quantised(const Tensor& packed, int64_t format, int64_t num_experts, int64_t outputs, int64_t inputs) {
  YGG_CHECK(packed.is_contiguous() && packed.dim() == 3 && packed.size(0) == num_experts && packed.size(1) == num_pairs(outputs) && packed.size(2) == pair_bytes(format, inputs),
            "weights were not packed for these experts");
}

// One product of every choice: a stage that rounds the rows, and one that multiplies them by their experts' weights.
template <typename T>
class QuantisedExpertsStage {
 public:
  static_assert(kMostRows == kTileRows, "rows of an expert lie as if all before them filled whole tiles");
  static bool are_tiled() { return true; }
  static int64_t words(const Choices& choices, int64_t inputs) { return QuantisedStage<T>::words(choices.rows_tiled(), inputs); }

  // `input` has the rows of the step, or those of the choices.
  QuantisedExpertsStage(const InputRows<T>& input, const Choices& choices, bool is_by_choice, uint32_t* memory)
      : input_(input), choices_(choices), is_by_choice_(is_by_choice), rounded_(choices.rows_tiled(), input.inputs, memory) {
    for (const Meeting& meeting : choices.meetings())
      for (int64_t row = 0; row < meeting.rows; row += kMostRows)
        tiles_.push_back({meeting.first + row, std::min(kMostRows, meeting.rows - row), (meeting.first_tiled + row) * rounded_bytes(input.inputs)});
  }

  QuantisedExpertsStage(const QuantisedExpertsStage&) = delete;

  // out [choices, N]; biases [E, N], nullable.
  void add(const QuantisedMatrix& matrix, T* out, int64_t outputs, const float* biases) {
    const int64_t inputs = input_.inputs, bytes = num_pairs(outputs) * pair_bytes(matrix.format, inputs);
    uint8_t* rounded = rounded_.of(matrix.format);
    for (const Meeting& meeting : choices_.meetings()) {
      const float* bias = biases ? biases + meeting.expert * outputs : nullptr;
      const LinearOutput output{nullptr, out + meeting.first * outputs, bias, nullptr, outputs, std::is_same_v<T, BFloat16>};
      const uint8_t* packed = static_cast<const uint8_t*>(matrix.packed) + meeting.expert * bytes;
      products_.add({packed, matrix.format, inputs, output}, rounded + meeting.first_tiled * rounded_bytes(inputs), meeting.rows);
    }
  }

  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    const int64_t chunks = is_alone && choices_.count() < kFewRows ? 1 : num_threads;
    if (rounded_.is_used<kChunk>()) stages.add<&QuantisedExpertsStage::round<kChunk>>(*this, units(kChunk), chunks);
    if (rounded_.is_used<kLargeBlock>()) stages.add<&QuantisedExpertsStage::round<kLargeBlock>>(*this, units(kLargeBlock), chunks);
    stages.add<&QuantisedExpertsStage::multiply>(*this, products_.pairs(), num_chunks_of(products_.pairs(), num_threads, kMuch));
  }

 private:
  struct Tile {
    int64_t first, count;  // choices
    int64_t place;         // of the rounded rows, in bytes
  };

  int64_t units(int64_t block) const { return tiles_.size() * (input_.inputs / block); }

  template <int Inputs>
  void round(int64_t begin, int64_t end) const {
    constexpr auto kOnes = [] {
      std::array<float, kMostRows> ones;
      ones.fill(1.0f);
      return ones;
    }();
    const int64_t blocks = input_.inputs / Inputs;
    for (int64_t unit = begin; unit < end; ++unit) {
      const Tile& tile = tiles_[unit / blocks];
      const int64_t m = tile_size(tile.count).rows;
      const auto row_of = [&](int64_t row) { return is_by_choice_ ? tile.first + row : choices_.row_of(tile.first + row); };
      round_rows<Inputs>(input_, row_of, tile.count, kOnes.data(), m, unit % blocks, rounded_.place<Inputs>() + tile.place);
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

// The operator: packed are gate (unless there is none) and up, of I outputs, and down, of H, each in its format.
inline void quantised_experts(const Tensor& input, const Tensor& chosen, const Tensor& shares, List<Tensor> packed, Ints formats, int64_t inner_features,
                              List<Tensor> biases, int64_t activation, List<double> clamp, int64_t num_threads, const Tensor& out) {
  const size_t shift = packed.size() == 2 ? 1 : 0;  // without a gate
  YGG_CHECK(packed.size() + shift == 3 && formats.size() == packed.size(), "experts are a gate or none, what it multiplies, and what reads both");
  const int64_t num_experts = packed[0].size(0), hidden = input.size(-1), sizes[] = {inner_features, inner_features, hidden};
  const ExpertsForm form = form_of(biases, activation, clamp, sizes, num_experts);
  YGG_CHECK(form.is_gated() == (shift == 0), "experts of this activation have ", form.is_gated() ? "a" : "no", " gate");
  for (size_t i = 0; i < packed.size(); ++i)
    check_quantised(packed[i], formats[i], num_experts, sizes[i + shift], i + shift < 2 ? hidden : inner_features);
  const auto matrix = [&](size_t i) { return QuantisedMatrix{packed[std::max(i, shift) - shift].const_data_ptr(), formats[std::max(i, shift) - shift]}; };
  const QuantisedMatrix matrices[] = {matrix(0), matrix(1), matrix(2)};
  run_experts<QuantisedExpertsStage>(input, chosen, shares, matrices, num_experts, inner_features, form, num_threads, out);
}

}  // namespace yggdrasil
