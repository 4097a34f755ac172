// RMS norm as a separate stage, for norms after a linear layer, with a fused residual addition.
#pragma once

#include "common/input_rows.h"
#include "common/threads.h"

namespace yggdrasil {

template <typename T>
class NormStage {
 public:
  // `input` includes a norm. `residual` [W, K] is added to the output; null for none.
  NormStage(const InputRows<T>& input, const T* residual, T* out) : input_(input), residual_(residual), out_(out) {}

  // `is_first_stage`: no thread has been woken yet, and few rows take less time than waking one.
  // The stages call write() of `work`.
  template <typename Work>
  void add_stages(Stages& stages, const Work& work, int64_t num_threads, bool is_first_stage) const {
    stages.add<&Work::write>(work, input_.rows, is_first_stage && input_.rows < kFewRows ? 1 : num_threads);
  }

  void write(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      T* to = out_ + row * input_.inputs;
      input_.read(row, 0, input_.inputs, input_.inverse_rms(row), to);
      if (residual_) add(residual_ + row * input_.inputs, to);
    }
  }

 private:
  void add(const T* residual, T* to) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= input_.inputs; k += 16) store16(to + k, load16(to + k) + load16(residual + k));
#endif
    for (; k < input_.inputs; ++k) to[k] = static_cast<T>(to_float(to[k]) + to_float(residual[k]));
  }

  InputRows<T> input_;
  const T* residual_;
  T* out_;
};

// Operator: writes the RMS norm of the rows of `input`, plus `residual` if given, to `out`.
inline void norm_rows(const Tensor& input, const Tensor& norm, bool plus_one, double eps, const Tensor& residual, int64_t num_threads,
                      const Tensor& out) {
  const LinearInput x(input, {.norm = norm, .plus_one = plus_one, .eps = eps});
  const Tensor added = residual.contiguous();
  YGG_CHECK(!added.defined() || (added.sizes() == input.sizes() && added.dtype() == input.dtype()), "a residual has the shape and dtype of the rows");
  check_result(out, input.sizes(), input.dtype());
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    const NormStage<T> stage(rows, added.defined() ? added.const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>());
    Stages stages;
    stage.add_stages(stages, stage, num_threads, /*is_first_stage=*/true);
    stages.run(num_threads);
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
}

}  // namespace yggdrasil
