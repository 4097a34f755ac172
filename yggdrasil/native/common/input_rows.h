// Input rows of linear layers, with a fused RMS norm or gate.
//
// Every operation is rounded to the step's dtype wherever the model's code does that, and depends on the row alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/lanes.h"

namespace yggdrasil {

constexpr int64_t kFewRows = 4;  // fewer rows are computed on one thread: waking a second one takes longer

// Optional operations fused with a linear layer.
struct Around {
  Tensor gate{};            // [W, K]: the rows are silu(gate) * input
  bool gelu = false;        // gelu(gate), by tanh
  Tensor norm{};            // [K]: the rows are norm * (input / its root mean square)
  bool plus_one = false;    // (input / its root mean square) * (1 + norm), rounded once
  double eps = 0.0;         // added to the mean square
  Tensor residual{};        // [W, N]: added to the outputs
  bool is_best = false;     // of the outputs only the greatest of each row and its place are wanted
};

enum class Activation : int64_t { silu, gelu, relu };  // gelu by tanh

template <typename T>
struct GateOf {
  const T* rows;  // null: there is none
  Activation kind;
  float limit = 0.0f, alpha = 0.0f;  // above 0: gate and rows are clamped, as gpt-oss does it

  // Returns (row + 1) * gate * sigmoid(alpha * gate) for a gate clamped from above and a row clamped on both sides, by
  // the limit.
  float clamped(float gate, float row) const {
    gate = std::min(gate, limit);
    const float half = rounded(1.0f / (1.0f + std::exp(-rounded(gate * alpha))));
    return rounded(rounded(std::clamp(row, -limit, limit) + 1.0f) * rounded(gate * half));
  }
#ifdef YGG_AVX2
  Lanes clamped(Lanes gate, Lanes row) const {
    const Lanes most = spread(limit), zero = zeros(), one = spread(1.0f);
    gate = smaller(most, gate);  // in this order: what is not a number stays
    row = smaller(most, larger(zero - most, row));
    const Lanes half = round_to<T>(one / (one + exp16(zero - round_to<T>(gate * spread(alpha)))));
    return round_to<T>(round_to<T>(row + one) * round_to<T>(gate * half));
  }
#endif

  // Returns the activation of x: x / (1 + e^-slope) for GELU, x / (1 + e^-x) for SiLU.
  float active(float x) const {
    if (kind == Activation::relu) return std::max(0.0f, x);
    return x / (1.0f + std::exp(kind == Activation::gelu ? -x * (kLinear + kCubic * x * x) : -x));
  }
#ifdef YGG_AVX2
  Lanes active(Lanes x) const {
    if (kind == Activation::relu) return larger(zeros(), x);
    return x / (spread(1.0f) + exp16(zeros() - (kind == Activation::gelu ? x * fused(spread(kCubic), x * x, spread(kLinear)) : x)));
  }
#endif

 private:
  static float rounded(float value) { return widen(static_cast<T>(value)); }
  static constexpr float kLinear = 1.5957691216057308f, kCubic = 0.044715f * kLinear;  // twice the root of 2 / pi
};

template <typename T>
struct NormOf {
  const T* weight;  // null: there is none
  bool plus_one;  // one is added to the weight, and the product is rounded once
  float eps;
  bool once = false;  // the product with the weight as it is is rounded once

  // Whether the normalised value is multiplied by the weight (or by 1 + weight) before it is rounded.
  bool rounds_once() const { return plus_one || once; }
  float offset() const { return plus_one ? 1.0f : 0.0f; }
};

template <typename T>
struct InputRows {
  const T* x;  // [W, K]
  GateOf<T> gate;
  NormOf<T> norm;
  int64_t rows, inputs;

  bool are_given() const { return !gate.rows && !norm.weight; }

  // Returns one over the root mean square of a row; 1 if rows are not normalised.
  float inverse_rms(int64_t row) const {
    if (!norm.weight) return 1.0f;
    const T* values = x + row * inputs;
    float sum = 0.0f;
    int64_t k = 0;
#ifdef YGG_AVX2
    Lanes sums[4] = {zeros(), zeros(), zeros(), zeros()};
    for (; k + 64 <= inputs; k += 64)
      for (int i = 0; i < 4; ++i) {
        const Lanes some = load16(values + k + 16 * i);
        sums[i] = fused(some, some, sums[i]);
      }
    sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
#endif
    for (; k < inputs; ++k) sum += widen(values[k]) * widen(values[k]);
    return 1.0f / std::sqrt(sum / static_cast<float>(inputs) + norm.eps);
  }

  // Writes the inputs [first, first + count) of a row, normalised with the row's `inverse`.
  template <typename To>
  void read(int64_t row, int64_t first, int64_t count, float inverse, To* to) const {
    const T* values = x + row * inputs + first;
    const T* gates = gate.rows ? gate.rows + row * inputs + first : nullptr;
    const T* weights = norm.weight ? norm.weight + first : nullptr;
    int64_t k = 0;
#ifdef YGG_AVX2
    const Lanes factor = spread(inverse), offset = spread(norm.offset());
    const bool rounds_once = norm.rounds_once();
    for (; k + 16 <= count; k += 16) {
      Lanes some = load16(values + k);
      if (weights) {
        const Lanes weight = load16(weights + k), scaled = some * factor;
        some = round_to<T>(rounds_once ? scaled * (offset + weight) : weight * round_to<T>(scaled));
      }
      if (gates) {
        const Lanes given = load16(gates + k);
        some = gate.limit > 0.0f ? gate.clamped(given, some) : round_to<T>(round_to<T>(gate.active(given)) * some);
      }
      store16(to + k, some);
    }
#endif
    for (; k < count; ++k) {
      float one_value = widen(values[k]);
      if (weights) {
        const float weight = widen(weights[k]), scaled = one_value * inverse;
        one_value = rounded(norm.rounds_once() ? scaled * (norm.offset() + weight) : weight * rounded(scaled));
      }
      if (gates) {
        const float given = widen(gates[k]);
        one_value = gate.limit > 0.0f ? gate.clamped(given, one_value) : rounded(rounded(gate.active(given)) * one_value);
      }
      to[k] = static_cast<To>(one_value);
    }
  }

 private:
  static float rounded(float value) { return widen(static_cast<T>(value)); }
};

// The rows of a tensor of one dtype, as the kernels iterate over them.
class RowsOf {
 public:
  RowsOf(const Tensor& input, const Around& around)
      : x_(input.contiguous()), gate_(around.gate.contiguous()), norm_(around.norm.contiguous()), gelu_(around.gelu), plus_one_(around.plus_one), eps_(around.eps) {
    YGG_CHECK(x_.dtype() == DType::bfloat16 || x_.dtype() == DType::float32, "linear layers take bfloat16 or float32 rows");
    for (const Tensor& other : {gate_, norm_})
      YGG_CHECK(!other.defined() || other.dtype() == x_.dtype(), "a gate and a norm have the dtype of the rows");
    YGG_CHECK(!gate_.defined() || gate_.sizes() == x_.sizes(), "a gate has the shape of the rows");
    YGG_CHECK(!norm_.defined() || norm_.numel() == inputs(), "a norm has a weight an input");
  }

  const Tensor& given() const { return x_; }
  bool is_bf16() const { return x_.dtype() == DType::bfloat16; }
  int64_t inputs() const { return x_.size(-1); }
  int64_t rows() const { return x_.numel() / inputs(); }

  template <typename T>
  InputRows<T> as() const {
    const auto data = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr; };
    return {x_.const_data_ptr<T>(), {data(gate_), gelu_ ? Activation::gelu : Activation::silu}, {data(norm_), plus_one_, static_cast<float>(eps_)}, rows(), inputs()};
  }

 private:
  Tensor x_, gate_, norm_;
  bool gelu_, plus_one_;
  double eps_;
};

}  // namespace yggdrasil
