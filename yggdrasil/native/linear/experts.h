// Mixture of experts: the weighted sum of the outputs of each row's experts.
//
// Rows routed to the same expert are multiplied with its weights together. A row's result is independent of the other rows:
// its experts' outputs are added in the order of expert ids.
#pragma once

#include "linear/choices.h"
#include "common/scratch.h"

namespace yggdrasil {

// Destination of the rows' weighted sums: `residual` is added to the sums times `scale`; null: nothing is added.
template <typename T>
struct SumsTo {
  T* out;
  const T* residual = nullptr;
  float scale = 1.0f;
};

// Computes the weighted sum of the outputs of a row's experts, rounded as transformers does: each product, and after
// each addition.
template <typename T>
class WeightedSums {
 public:
  // `given` [choices, H] are the experts' outputs, which become their products with the shares.
  WeightedSums(const Choices& choices, T* given, int64_t size, const SumsTo<T>& to) : choices_(choices), given_(given), size_(size), to_(to) {}

  void share_out(Stages& stages, int64_t num_threads) const { stages.add<&WeightedSums::add_up>(*this, choices_.rows(), num_threads); }

 private:
  void add_up(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      T* to = to_.out + row * size_;
      std::fill(to, to + size_, static_cast<T>(0.0f));
      choices_.each_of(row, [&](int64_t choice) {
        T* values = given_ + choice * size_;
        // NOTE: in two loops, or a compiler makes one operation of both, which does not round between them.
        scale(values, choices_.share_of(choice));
        add(to, values);
      });
      if (to_.scale != 1.0f) scale(to, to_.scale);
      if (to_.residual) add(to, to_.residual + row * size_);
    }
  }

  [[gnu::noinline]] void scale(T* values, float share) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= size_; k += 16) store16(values + k, load16(values + k) * spread(share));
#endif
    for (; k < size_; ++k) values[k] = static_cast<T>(widen(values[k]) * share);
  }

  [[gnu::noinline]] void add(T* to, const T* values) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= size_; k += 16) store16(to + k, load16(to + k) + load16(values + k));
#endif
    for (; k < size_; ++k) to[k] = static_cast<T>(widen(to[k]) + widen(values[k]));
  }

  const Choices& choices_;
  T* given_;
  int64_t size_;
  SumsTo<T> to_;
};

// Properties of experts beside their weights: float32 biases (none, or of gate [E, I], up [E, I] and down [E, H]) and
// the gate.
struct ExpertsForm {
  const float* biases[3];
  Activation kind;
  float limit, alpha;  // of a clamped gate; 0: it is not

  // Squared ReLU has no gate: it multiplies what `up` gives by its own ReLU.
  bool is_gated() const { return kind != Activation::relu; }

  template <typename T>
  GateOf<T> gate(const T* rows) const {
    return {rows, kind, limit, alpha};
  }
};

// Returns these properties from an operator's arguments: no biases or three, no clamp or two numbers. `sizes` are the
// numbers of outputs of the matrices.
inline ExpertsForm form_of(List<Tensor> biases, int64_t activation, List<double> clamp, const int64_t (&sizes)[3], int64_t num_experts) {
  YGG_CHECK((biases.size() == 0 || biases.size() == 3) && (clamp.size() == 0 || clamp.size() == 2), "experts have three biases or none, a clamp two numbers");
  YGG_CHECK(0 <= activation && activation <= 2, "there is no activation ", activation);
  ExpertsForm form{{}, static_cast<Activation>(activation), 0.0f, 0.0f};
  YGG_CHECK(form.is_gated() || biases.size() + clamp.size() == 0, "experts without a gate have no biases and no clamp");
  if (clamp.size()) form.limit = static_cast<float>(clamp[0]), form.alpha = static_cast<float>(clamp[1]);
  for (size_t i = 0; i < biases.size(); ++i) {
    YGG_CHECK(biases[i].sizes() == Ints({num_experts, sizes[i]}) && biases[i].dtype() == DType::float32 && biases[i].is_contiguous(),
              "a bias of experts is float32, of each expert as long as its outputs");
    form.biases[i] = biases[i].const_data_ptr<float>();
  }
  return form;
}

// Computes down(silu(gate(row)) * up(row)) for each choice of `rows`; with GELU instead of SiLU if so configured, and
// without a gate down(relu(up(row)) * up(row)). The matrices are gate and up, of I outputs, and down, of H outputs, with the weights of all experts.
template <template <typename> class StageOf, typename T, typename Matrix>
void run_choices(const InputRows<T>& rows, const Choices& choices, const Matrix (&matrices)[3], int64_t inner_features, const ExpertsForm& form,
                 int64_t num_threads, const SumsTo<T>& to) {
  using Stage = StageOf<T>;
  const int64_t count = choices.count(), sizes[] = {inner_features, inner_features, rows.inputs};
  int64_t places[6] = {};  // of both stages' rows, then of what is given
  places[1] = Stage::words(choices, rows.inputs);
  places[2] = places[1] + Stage::words(choices, inner_features);
  for (int i = 0; i < 3; ++i) places[i + 3] = places[i + 2] + MetRows<T>::words(count, sizes[i]);
  uint32_t* memory = scratch_words<Scratch::experts>(places[5]);
  const auto given = [&](int i) { return reinterpret_cast<T*>(memory + places[i + 2]); };
  Stage first(rows, choices, /*is_by_choice=*/false, memory);
  if (form.is_gated()) first.add(matrices[0], given(0), inner_features, form.biases[0]);
  first.add(matrices[1], given(1), inner_features, form.biases[1]);
  Stage second({given(1), form.gate<T>(given(form.is_gated() ? 0 : 1)), {}, count, inner_features}, choices, /*is_by_choice=*/true, memory + places[1]);
  second.add(matrices[2], given(2), rows.inputs, form.biases[2]);
  const WeightedSums<T> sums(choices, given(2), rows.inputs, to);
  Stages stages;
  first.share_out(stages, num_threads, /*is_alone=*/true);
  second.share_out(stages, num_threads, /*is_alone=*/false);
  sums.share_out(stages, num_threads);
  stages.run(num_threads);
}

// Computes a mixture for rows [W, H], chosen experts [W, K] int64 and shares [W, K].
template <template <typename> class StageOf, typename Matrix>
void run_experts(const Tensor& input, const Tensor& chosen, const Tensor& shares, const Matrix (&matrices)[3], int64_t num_experts,
                 int64_t inner_features, const ExpertsForm& form, int64_t num_threads, const Tensor& out) {
  const RowsOf x(input, {});
  YGG_CHECK(input.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == input.size(0), "each row chooses experts");
  YGG_CHECK(chosen.dtype() == DType::int64 && chosen.sizes() == shares.sizes(), "each row chooses as many experts as it has weights for");
  check_result(out, input.sizes(), input.dtype());
  const Tensor experts = chosen.contiguous(), weights = shares.floats();
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    const Choices choices(experts.const_data_ptr<int64_t>(), weights.const_data_ptr<float>(), rows.rows, chosen.size(1), num_experts, StageOf<T>::are_tiled());
    run_choices<StageOf>(rows, choices, matrices, inner_features, form, num_threads, SumsTo<T>{out.mutable_data_ptr<T>()});
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
}

}  // namespace yggdrasil
