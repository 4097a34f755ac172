// The mixtures of experts of a program. Their work is known only after the router has run, so they split a program's
// stages.
#pragma once

#include <deque>

#include "layers/program_code.h"
#include "layers/program_values.h"
#include "linear/packed_experts.h"
#include "linear/router.h"
#include "quantised/quantised_experts.h"

namespace yggdrasil {

template <typename T>
class ProgramExperts : public ProgramValues<T> {
  using Base = ProgramValues<T>;

 public:
  using Base::size;

  ProgramExperts(int64_t rows, const Tensors& tensors, int64_t num_threads) : Base(rows, tensors), num_threads_(num_threads) {}

 protected:
  using typename Base::Needs;
  using Base::rows_, Base::at, Base::at_raw, Base::floats_at, Base::result_at, Base::tensor_at, Base::check_sizes, Base::check_rows, Base::check_floats;

  struct ExpertsWork {
    ExpertsCode code;
    const Tensor *gate, *up, *down;  // of the layer that was bound; other layers of its kind have the same shapes
    int64_t value;                   // number of the output value

    bool is_quantised() const { return code.formats[2] >= 0; }
    bool is_gated() const { return static_cast<Activation>(code.activation) != Activation::relu; }
  };

  Stages& stages() { return all_stages_.back(); }

  void clear() { experts_.clear(), all_stages_.clear(), all_stages_.emplace_back(); }

  void run_stages() {
    for (size_t i = 0; i < all_stages_.size(); ++i) {
      all_stages_[i].run(num_threads_);
      if (i < experts_.size()) run_experts_of(experts_[i]);
    }
  }

  Needs needs_of(const ExpertsCode& code) const { return {{code.input, code.logits, code.shared, code.shared_gate, code.residual}, {size(code.input)}}; }

  int64_t add(const ExpertsCode& code, int64_t value, const Tensors& tensors) {
    const ExpertsWork& work = experts_.emplace_back(ExpertsWork{code, &tensor_at(code.gate, tensors), &tensor_at(code.up, tensors), &tensor_at(code.down, tensors), value});
    const int64_t num_experts = size(code.logits), hidden = size(code.input);
    YGG_CHECK(code.top_k > 0 && code.top_k <= num_experts, "of ", num_experts, " experts ", code.top_k, " are chosen");
    check_rows({code.input, code.logits, code.shared, code.shared_gate, code.residual}, tensors);
    check_sizes({code.residual}, hidden, "a residual has the size of the input,");
    check_sizes({code.shared_gate}, 1, "the gate of shared experts has the size");
    check_sizes({code.gate_bias, code.up_bias}, code.inner, "biases of experts have the size of their outputs,");
    check_sizes({code.down_bias}, hidden, "biases of experts have the size of their outputs,");
    check_sizes({code.correction}, num_experts, "each expert has a correction,");
    check_floats({code.correction, code.gate_bias, code.up_bias, code.down_bias}, tensors);
    for (const int64_t bias : {code.gate_bias, code.up_bias, code.down_bias})
      YGG_CHECK(bias < 0 || tensor_at(bias, tensors).numel() == num_experts * size(bias), "each expert has its biases");
    if (work.is_quantised()) {
      check_quantised(*work.gate, code.formats[0], num_experts, code.inner, hidden);
      check_quantised(*work.up, code.formats[1], num_experts, code.inner, hidden);
      check_quantised(*work.down, code.formats[2], num_experts, hidden, code.inner);
    } else {
      YGG_CHECK(code.gate == code.up && Base::is_of_rows(*work.gate) && Base::is_of_rows(*work.down), "gate and up are packed together, in the dtype of the rows");
      check_packed(*work.gate, num_experts, work.is_gated() ? 2 : 1, code.inner);
      check_packed(*work.down, num_experts, 1, hidden);
    }
    all_stages_.emplace_back();
    return 1;
  }

  const int64_t num_threads_;
  uint32_t* memory_ = nullptr;  // scratch memory of the running stage

 private:
  void run_experts_of(const ExpertsWork& work) const {
    static thread_local Routes routes;
    const ExpertsCode& code = work.code;
    const int64_t num_experts = size(code.logits);
    routes.choose(Router{code.sigmoid, code.normed != 0, floats_at(code.correction), num_experts, code.top_k}, at(code.logits), rows_);
    if (code.shared >= 0) gate_shared(code);
    const InputRows<T> rows{at(code.input), {}, {}, rows_, size(code.input)};
    const ExpertsConfig config{{floats_at(code.gate_bias), floats_at(code.up_bias), floats_at(code.down_bias)}, static_cast<Activation>(code.activation),
                           static_cast<float>(code.limit), static_cast<float>(code.alpha)};
    const SumOutput<T> to{static_cast<T*>(result_at(work.value)), at(code.residual), static_cast<float>(code.scale)};
    const auto run = [&]<template <typename> class StageOf>(const auto& matrices) {
      const Choices choices(routes.experts.data(), routes.weights.data(), rows_, code.top_k, num_experts, StageOf<T>::are_tiled());
      run_choices<StageOf>(rows, choices, matrices, code.inner, config, num_threads_, to);
    };
    if (work.is_quantised()) {
      const QuantisedMatrix matrices[] = {{at_raw(code.gate), code.formats[0]}, {at_raw(code.up), code.formats[1]}, {at_raw(code.down), code.formats[2]}};
      run.template operator()<QuantisedExpertsStage>(matrices);
    } else {
      const PackedMatrix matrices[] = {{*work.gate, 0, at_raw(code.gate)}, {*work.gate, work.is_gated(), at_raw(code.gate)}, {*work.down, 0, at_raw(code.down)}};
      run.template operator()<PackedExpertsStage>(matrices);
    }
  }

  // Multiplies the input of the shared experts' last layer by the sigmoid of their gate.
  void gate_shared(const ExpertsCode& code) const {
    const int64_t inner = size(code.shared);
    for (int64_t row = 0; row < rows_; ++row) {
      const float factor = to_float(T(1.0f / (1.0f + std::exp(-to_float(at(code.shared_gate)[row])))));
      T* to = static_cast<T*>(result_at(code.shared)) + row * inner;
      for (int64_t k = 0; k < inner; ++k) to[k] = T(to_float(to[k]) * factor);
    }
  }

  std::deque<ExpertsWork> experts_;
  std::deque<Stages> all_stages_;  // the stages before, between and after mixtures
};

}  // namespace yggdrasil
