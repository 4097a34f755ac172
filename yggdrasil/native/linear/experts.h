// Mixture of experts: the weighted sum of the outputs of each row's experts.
//
// Rows routed to the same expert are multiplied with its weights together. A row's result is independent of the other
// rows: its experts' outputs are added in the order of expert ids.
#pragma once

#include "linear/choices.h"
#include "common/scratch.h"

namespace yggdrasil {

// Destination of the rows' weighted sums: out = scale * sum + residual; `residual` may be null.
template <typename T>
struct SumOutput {
  T* out;
  const T* residual = nullptr;
  float scale = 1.0f;
};

// Computes the weighted sum of the outputs of each row's experts. Each product and each sum is rounded, as in
// transformers.
template <typename T>
class WeightedSums {
 public:
  // `outputs` [choices, H] are the experts' outputs, which are multiplied with the routing weights in place.
  WeightedSums(const Choices& choices, T* outputs, int64_t size, const SumOutput<T>& to) : choices_(choices), outputs_(outputs), size_(size), to_(to) {}

  void add_stages(Stages& stages, int64_t num_threads) const { stages.add<&WeightedSums::add_up>(*this, choices_.rows(), num_threads); }

 private:
  void add_up(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      T* to = to_.out + row * size_;
      std::fill(to, to + size_, static_cast<T>(0.0f));
      choices_.each_of(row, [&](int64_t choice) {
        T* values = outputs_ + choice * size_;
        // NOTE: two loops, because a compiler would fuse multiplication and addition into one FMA, without the rounding
        // in between.
        scale(values, choices_.routing_weight_of(choice));
        add(to, values);
      });
      if (to_.scale != 1.0f) scale(to, to_.scale);
      if (to_.residual) add(to, to_.residual + row * size_);
    }
  }

  [[gnu::noinline]] void scale(T* values, float factor) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= size_; k += 16) store16(values + k, load16(values + k) * broadcast(factor));
#endif
    for (; k < size_; ++k) values[k] = static_cast<T>(to_float(values[k]) * factor);
  }

  [[gnu::noinline]] void add(T* to, const T* values) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= size_; k += 16) store16(to + k, load16(to + k) + load16(values + k));
#endif
    for (; k < size_; ++k) to[k] = static_cast<T>(to_float(to[k]) + to_float(values[k]));
  }

  const Choices& choices_;
  T* outputs_;
  int64_t size_;
  SumOutput<T> to_;
};

// Biases and activation of experts: float32 biases of gate [E, I], up [E, I] and down [E, H], or none.
struct ExpertsConfig {
  const float* biases[3];
  Activation kind;
  float limit, alpha;  // of a clamped gate; 0 for none

  // Squared ReLU has no gate: the output of `up` is multiplied by its own ReLU.
  bool is_gated() const { return kind != Activation::relu; }

  template <typename T>
  GateOp<T> gate(const T* rows) const {
    return {rows, kind, limit, alpha};
  }
};

// Checks and converts an operator's arguments: no biases or three, no clamp or two numbers. `sizes` are the matrices'
// numbers of outputs.
inline ExpertsConfig experts_config(List<Tensor> biases, int64_t activation, List<double> clamp, const int64_t (&sizes)[3], int64_t num_experts) {
  YGG_CHECK((biases.size() == 0 || biases.size() == 3) && (clamp.size() == 0 || clamp.size() == 2), "experts have three biases or none, a clamp two numbers");
  YGG_CHECK(0 <= activation && activation <= 2, "there is no activation ", activation);
  ExpertsConfig config{{}, static_cast<Activation>(activation), 0.0f, 0.0f};
  YGG_CHECK(config.is_gated() || biases.size() + clamp.size() == 0, "experts without a gate have no biases and no clamp");
  if (clamp.size()) config.limit = static_cast<float>(clamp[0]), config.alpha = static_cast<float>(clamp[1]);
  for (size_t i = 0; i < biases.size(); ++i) {
    YGG_CHECK(biases[i].sizes() == Ints({num_experts, sizes[i]}) && biases[i].dtype() == DType::float32 && biases[i].is_contiguous(),
              "a bias of experts is float32, of each expert as long as its outputs");
    config.biases[i] = biases[i].const_data_ptr<float>();
  }
  return config;
}

// Computes down(act(gate(row)) * up(row)) for each choice of `rows`, with SiLU or GELU, or without a gate
// down(relu(up(row)) * up(row)), and then the weighted sums. The matrices are gate and up, of I outputs, and down, of H
// outputs, each of all experts.
template <template <typename> class StageOf, typename T, typename Matrix>
void run_choices(const InputRows<T>& rows, const Choices& choices, const Matrix (&matrices)[3], int64_t inner_features, const ExpertsConfig& config,
                 int64_t num_threads, const SumOutput<T>& to) {
  using Stage = StageOf<T>;
  const int64_t count = choices.count(), sizes[] = {inner_features, inner_features, rows.inputs};
  int64_t offsets[6] = {};  // word offsets of both stages' rows, then of the three matrices' outputs
  offsets[1] = Stage::words(choices, rows.inputs);
  offsets[2] = offsets[1] + Stage::words(choices, inner_features);
  for (int i = 0; i < 3; ++i) offsets[i + 3] = offsets[i + 2] + PreparedRows<T>::words(count, sizes[i]);
  uint32_t* memory = scratch_words<Scratch::experts>(offsets[5]);
  const auto outputs = [&](int i) { return reinterpret_cast<T*>(memory + offsets[i + 2]); };
  Stage first(rows, choices, /*is_by_choice=*/false, memory);
  if (config.is_gated()) first.add(matrices[0], outputs(0), inner_features, config.biases[0]);
  first.add(matrices[1], outputs(1), inner_features, config.biases[1]);
  Stage second({outputs(1), config.gate<T>(outputs(config.is_gated() ? 0 : 1)), {}, count, inner_features}, choices, /*is_by_choice=*/true, memory + offsets[1]);
  second.add(matrices[2], outputs(2), rows.inputs, config.biases[2]);
  const WeightedSums<T> sums(choices, outputs(2), rows.inputs, to);
  Stages stages;
  first.add_stages(stages, num_threads, /*is_first_stage=*/true);
  second.add_stages(stages, num_threads, /*is_first_stage=*/false);
  sums.add_stages(stages, num_threads);
  stages.run(num_threads);
}

// Computes a mixture for rows [W, H], chosen experts [W, K] int64 and routing weights [W, K].
template <template <typename> class StageOf, typename Matrix>
void run_experts(const Tensor& input, const Tensor& chosen, const Tensor& routing_weights, const Matrix (&matrices)[3], int64_t num_experts,
                 int64_t inner_features, const ExpertsConfig& config, int64_t num_threads, const Tensor& out) {
  const LinearInput x(input, {});
  YGG_CHECK(input.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == input.size(0), "each row chooses experts");
  YGG_CHECK(chosen.dtype() == DType::int64 && chosen.sizes() == routing_weights.sizes(), "each row chooses as many experts as it has weights for");
  check_result(out, input.sizes(), input.dtype());
  const Tensor experts = chosen.contiguous(), routing_floats = routing_weights.floats();
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    const Choices choices(experts.const_data_ptr<int64_t>(), routing_floats.const_data_ptr<float>(), rows.rows, chosen.size(1), num_experts, StageOf<T>::are_tiled());
    run_choices<StageOf>(rows, choices, matrices, inner_features, config, num_threads, SumOutput<T>{out.mutable_data_ptr<T>()});
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
}

}  // namespace yggdrasil
