// Mixture of experts over packed weights; each matrix has the layout of a packed linear layer.
#pragma once

#include <utility>

#include "linear/experts.h"

namespace yggdrasil {

// Matrix number `number` of every expert, in packed [E, M, panels, steps, ...].
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

// One product for every choice: a stage that prepares the rows, and one that multiplies them with their experts'
// weights.
template <typename T>
class PackedExpertsStage {
 public:
  static bool are_tiled() { return MetRows<T>::are_tiled(); }

  static int64_t words(const Choices& choices, int64_t inputs) {
    return Met::are_tiled() ? tiled_words(choices.rows_tiled(), Met::steps(inputs)) : Met::words(choices.count(), inputs);
  }

  // `input` has the rows of the step, or one row per choice if `is_by_choice`.
  PackedExpertsStage(const InputRows<T>& input, const Choices& choices, bool is_by_choice, uint32_t* memory)
      : input_(input), choices_(choices), is_by_choice_(is_by_choice), memory_(memory) {}

  PackedExpertsStage(const PackedExpertsStage&) = delete;

  // out [choices, N]; biases [E, N], nullable.
  void add(const PackedMatrix& of, T* out, int64_t outputs, const float* biases) {
    const int64_t words = of.panels * of.panel_steps * kPanel;
    const auto* matrices = static_cast<const uint32_t*>(of.packed);
    for (const Meeting& meeting : choices_.meetings()) {
      const float* bias = biases ? biases + meeting.expert * outputs : nullptr;
      const LinearOutput output{nullptr, out + meeting.first * outputs, bias, nullptr, outputs, std::is_same_v<T, BFloat16>};
      const uint32_t *x = nullptr, *tiled = nullptr;
      Met::are_tiled() ? tiled = tiled_of(meeting) : x = reinterpret_cast<const uint32_t*>(made() + meeting.first * input_.inputs);
      const uint32_t* matrix = matrices + (meeting.expert * of.matrices + of.number) * words;
      products_.add(Met::job(matrix, of.panel_steps, x, tiled, meeting.rows, input_.inputs, output), meeting.shares);
    }
  }

  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    stages.add<&PackedExpertsStage::make>(*this, choices_.count(), is_alone && choices_.count() < kFewRows ? 1 : num_threads);
    stages.add<&PackedExpertsStage::multiply>(*this, products_.pieces(), products_.chunks(num_threads));
  }

 private:
  using Met = MetRows<T>;
  using Made = typename Met::Made;

  Made* made() const { return reinterpret_cast<Made*>(memory_); }
  uint32_t* tiled_of(const Meeting& meeting) const { return memory_ + tiled_words(meeting.first_tiled, Met::steps(input_.inputs)); }

  void make(int64_t begin, int64_t end) const {
    if (begin == end) return;
    const int64_t inputs = input_.inputs, steps = Met::steps(inputs);
    auto* alone = reinterpret_cast<Made*>(scratch_words(Met::words(1, inputs)));
    const Meeting* meeting = choices_.meeting_of(begin);
    for (int64_t choice = begin; choice < end; ++choice) {
      if (choice == meeting->first + meeting->rows) ++meeting;
      Made* to = Met::are_tiled() ? alone : made() + choice * inputs;
      input_.read(is_by_choice_ ? choice : choices_.row_of(choice), 0, inputs, 1.0f, to);
      if (Met::are_tiled()) tile_row(reinterpret_cast<const uint32_t*>(to), choice - meeting->first, steps, tiled_of(*meeting));
    }
  }

  void multiply(int64_t begin, int64_t end) const { products_.run(begin, end, [](LinearJob&, size_t) {}); }

  InputRows<T> input_;
  const Choices& choices_;
  bool is_by_choice_;
  uint32_t* memory_;
  Products products_;
};

// The operator: packed weights are gate_up [E, 2, ...] of I outputs, without a gate [E, 1, ...], and down [E, 1, ...] of H outputs.
inline void packed_experts(const Tensor& input, const Tensor& chosen, const Tensor& shares, const Tensor& gate_up, const Tensor& down,
                           int64_t inner_features, List<Tensor> biases, int64_t activation, List<double> clamp, int64_t num_threads, const Tensor& out) {
  const int64_t num_experts = down.size(0), sizes[] = {inner_features, inner_features, input.size(-1)};
  const ExpertsForm form = form_of(biases, activation, clamp, sizes, num_experts);
  check_packed(gate_up, num_experts, form.is_gated() ? 2 : 1, inner_features);
  check_packed(down, num_experts, 1, input.size(-1));
  YGG_CHECK(gate_up.dtype() == input.dtype() && down.dtype() == input.dtype(), "input and packed weights must have one dtype");
  const PackedMatrix matrices[] = {{gate_up, 0}, {gate_up, form.is_gated()}, {down, 0}};
  run_experts<PackedExpertsStage>(input, chosen, shares, matrices, num_experts, inner_features, form, num_threads, out);
}

}  // namespace yggdrasil
