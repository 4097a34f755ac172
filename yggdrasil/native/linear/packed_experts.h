// Mixture of experts over packed weights; each matrix has the layout of a packed linear layer.
#pragma once

#include <utility>

#include "linear/experts.h"

namespace yggdrasil {

// Matrix number `number` of every expert, in `packed` [E, M, panels, steps, ...].
struct PackedMatrix {
  const void* packed;
  int64_t matrices, panels, panel_steps, number;

  PackedMatrix(const Tensor& of, int64_t number, const void* data = nullptr)
      : packed(data ? data : of.const_data_ptr()), matrices(of.size(1)), panels(of.size(2)), panel_steps(of.size(3)), number(number) {}
};

// Throws unless `packed` has this number of matrices of this number of outputs for each expert.
inline void check_packed(const Tensor& packed, int64_t num_experts, int64_t matrices, int64_t outputs) {
  YGG_CHECK(packed.is_contiguous() && packed.dim() >= 5 && packed.size(0) == num_experts && packed.size(1) == matrices &&
                packed.size(2) == (outputs + kPanel - 1) / kPanel,
            "experts are packed one beside the other");
}

// One linear layer of all experts, in two stages: prepare the rows, and multiply them with the weights of their
// experts.
template <typename T>
class PackedExpertsStage {
 public:
  static bool are_tiled() { return PreparedRows<T>::are_tiled(); }

  static int64_t words(const Choices& choices, int64_t inputs) {
    return Rows::are_tiled() ? tiled_words(choices.rows_tiled(), Rows::steps(inputs)) : Rows::words(choices.count(), inputs);
  }

  // `input` has the rows of the step, or one row per choice if `is_by_choice`.
  PackedExpertsStage(const InputRows<T>& input, const Choices& choices, bool is_by_choice, uint32_t* memory)
      : input_(input), choices_(choices), is_by_choice_(is_by_choice), memory_(memory) {}

  PackedExpertsStage(const PackedExpertsStage&) = delete;

  // out [choices, N]; biases [E, N], nullable.
  void add(const PackedMatrix& of, T* out, int64_t outputs, const float* biases) {
    const int64_t words = of.panels * of.panel_steps * kPanel;
    const auto* matrices = static_cast<const uint32_t*>(of.packed);
    for (const ExpertBatch& batch : choices_.batches()) {
      const float* bias = biases ? biases + batch.expert * outputs : nullptr;
      const LinearOutput output{nullptr, out + batch.first * outputs, bias, nullptr, outputs, std::is_same_v<T, BFloat16>};
      const uint32_t *x = nullptr, *tiled = nullptr;
      Rows::are_tiled() ? tiled = tiled_of(batch) : x = reinterpret_cast<const uint32_t*>(prepared_rows() + batch.first * input_.inputs);
      const uint32_t* matrix = matrices + (batch.expert * of.matrices + of.number) * words;
      products_.add(Rows::job(matrix, of.panel_steps, x, tiled, batch.rows, input_.inputs, output), batch.tile_sizes);
    }
  }

  void add_stages(Stages& stages, int64_t num_threads, bool is_first_stage) const {
    stages.add<&PackedExpertsStage::prepare>(*this, choices_.count(), is_first_stage && choices_.count() < kFewRows ? 1 : num_threads);
    stages.add<&PackedExpertsStage::multiply>(*this, products_.pieces(), products_.chunks(num_threads));
  }

 private:
  using Rows = PreparedRows<T>;
  using Element = typename Rows::Element;

  Element* prepared_rows() const { return reinterpret_cast<Element*>(memory_); }
  uint32_t* tiled_of(const ExpertBatch& batch) const { return memory_ + tiled_words(batch.first_tiled, Rows::steps(input_.inputs)); }

  void prepare(int64_t begin, int64_t end) const {
    if (begin == end) return;
    const int64_t inputs = input_.inputs, steps = Rows::steps(inputs);
    auto* row = reinterpret_cast<Element*>(scratch_words(Rows::words(1, inputs)));
    const ExpertBatch* batch = choices_.batch_of(begin);
    for (int64_t choice = begin; choice < end; ++choice) {
      if (choice == batch->first + batch->rows) ++batch;
      Element* to = Rows::are_tiled() ? row : prepared_rows() + choice * inputs;
      input_.read(is_by_choice_ ? choice : choices_.row_of(choice), 0, inputs, 1.0f, to);
      if (Rows::are_tiled()) tile_row(reinterpret_cast<const uint32_t*>(to), choice - batch->first, steps, tiled_of(*batch));
    }
  }

  void multiply(int64_t begin, int64_t end) const { products_.run(begin, end, [](LinearJob&, size_t) {}); }

  InputRows<T> input_;
  const Choices& choices_;
  bool is_by_choice_;
  uint32_t* memory_;
  Products products_;
};

// Operator: packed weights are gate_up [E, 2, ...] of I outputs ([E, 1, ...] without a gate) and down [E, 1, ...] of H
// outputs.
inline void packed_experts(const Tensor& input, const Tensor& chosen, const Tensor& tile_sizes, const Tensor& gate_up, const Tensor& down,
                           int64_t inner_features, List<Tensor> biases, int64_t activation, List<double> clamp, int64_t num_threads, const Tensor& out) {
  const int64_t num_experts = down.size(0), sizes[] = {inner_features, inner_features, input.size(-1)};
  const ExpertsConfig config = experts_config(biases, activation, clamp, sizes, num_experts);
  check_packed(gate_up, num_experts, config.is_gated() ? 2 : 1, inner_features);
  check_packed(down, num_experts, 1, input.size(-1));
  YGG_CHECK(gate_up.dtype() == input.dtype() && down.dtype() == input.dtype(), "input and packed weights must have one dtype");
  const PackedMatrix matrices[] = {{gate_up, 0}, {gate_up, config.is_gated()}, {down, 0}};
  run_experts<PackedExpertsStage>(input, chosen, tile_sizes, matrices, num_experts, inner_features, config, num_threads, out);
}

}  // namespace yggdrasil
