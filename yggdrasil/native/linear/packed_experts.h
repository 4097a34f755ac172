// Mixture of experts over packed weights; each matrix has the layout of a packed linear layer.
#pragma once

#include <utility>

#include "linear/experts.h"

namespace yggdrasil {

// The number-th matrix of every expert, of packed [E, M, ...].
struct PackedMatrix {
  const Tensor& packed;
  int64_t number;
};

// One product of every choice: a stage that makes the rows, and one that multiplies them by their experts' weights.
template <typename T>
class PackedExpertsStage {
 public:
  static bool are_tiled() { return MetRows<T>::are_tiled(); }

  static int64_t words(const Choices& choices, int64_t inputs) {
    return Met::are_tiled() ? tiled_words(choices.rows_tiled(), Met::steps(inputs)) : Met::words(choices.count(), inputs);
  }

  // `input` has the rows of the step, or those of the choices.
  PackedExpertsStage(const InputRows<T>& input, const Choices& choices, bool is_by_choice, uint32_t* memory)
      : input_(input), choices_(choices), is_by_choice_(is_by_choice), memory_(memory) {}

  PackedExpertsStage(const PackedExpertsStage&) = delete;

  // out [choices, N]; biases [E, N], nullable.
  void add(const PackedMatrix& matrix_of_each, T* out, int64_t outputs, const float* biases) {
    const auto& [packed, number] = matrix_of_each;
    const int64_t panel_steps = packed.size(3), words = packed.size(2) * panel_steps * kPanel;
    const uint32_t* matrices = Met::words_of(packed);
    for (const Meeting& meeting : choices_.meetings()) {
      const float* bias = biases ? biases + meeting.expert * outputs : nullptr;
      const LinearOutput output{nullptr, out + meeting.first * outputs, bias, nullptr, outputs, std::is_same_v<T, BFloat16>};
      const uint32_t *x = nullptr, *tiled = nullptr;
      Met::are_tiled() ? tiled = tiled_of(meeting) : x = reinterpret_cast<const uint32_t*>(made() + meeting.first * input_.inputs);
      const uint32_t* matrix = matrices + (meeting.expert * packed.size(1) + number) * words;
      products_.add(Met::job(matrix, panel_steps, x, tiled, meeting.rows, input_.inputs, output), meeting.shares);
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

// The operator: packed are gate_up [E, 2, ...] of I outputs and down [E, 1, ...] of H.
inline void packed_experts(const Tensor& input, const Tensor& chosen, const Tensor& shares, const Tensor& gate_up, const Tensor& down,
                             int64_t inner_features, const ExpertsForm& form, int64_t num_threads, const Tensor& out) {
  const auto is_of = [&](const Tensor& packed, int64_t matrices, int64_t outputs) {
    return packed.is_contiguous() && packed.dim() >= 5 && packed.size(0) == down.size(0) && packed.size(1) == matrices &&
           packed.size(2) == (outputs + kPanel - 1) / kPanel;
  };
  YGG_CHECK(is_of(gate_up, 2, inner_features) && is_of(down, 1, input.size(-1)), "experts are packed one beside the other");
  const PackedMatrix matrices[] = {{gate_up, 0}, {gate_up, 1}, {down, 0}};
  run_experts<PackedExpertsStage>(input, chosen, shares, matrices, down.size(0), inner_features, form, num_threads, out);
}

}  // namespace yggdrasil
