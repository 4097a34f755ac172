// Input rows of linear layers, with a fused RMS norm or gate.
//
// Operations are rounded to the rows' dtype where the model's own code rounds. A row's result is independent of the
// other rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/lanes.h"

namespace yggdrasil {

constexpr int64_t kFewRows = 4;  // fewer rows are processed by one thread: waking another takes longer

// Optional operations fused with a linear layer.
struct FusedOps {
  Tensor gate{};            // [W, K]: the rows are silu(gate) * input
  bool gelu = false;        // gelu(gate), by tanh
  Tensor norm{};            // [K]: the rows are norm * (input / its root mean square)
  bool plus_one = false;    // (input / its root mean square) * (1 + norm), rounded once
  double eps = 0.0;         // added to the mean square
  Tensor residual{};        // [W, N]: added to the outputs
  bool argmax = false;     // return each row's largest output and its index instead of the outputs
};

enum class Activation : int64_t { silu, gelu, relu };  // gelu by tanh

template <typename T>
struct GateOp {
  const T* rows;  // null for none
  Activation kind;
  float limit = 0.0f, alpha = 0.0f;  // limit > 0: gate and rows are clamped, as in gpt-oss

  // Returns (row + 1) * gate * sigmoid(alpha * gate), with the gate clamped to at most `limit` and the row to [-limit,
  // limit].
  float clamped(float gate, float row) const {
    gate = std::min(gate, limit);
    const float sigmoid = rounded(1.0f / (1.0f + std::exp(-rounded(gate * alpha))));
    return rounded(rounded(std::clamp(row, -limit, limit) + 1.0f) * rounded(gate * sigmoid));
  }
#ifdef YGG_AVX2
  Lanes clamped(Lanes gate, Lanes row) const {
    const Lanes upper = broadcast(limit), zero = zeros(), one = broadcast(1.0f);
    gate = lane_min(upper, gate);  // operand order: NaN is propagated
    row = lane_min(upper, lane_max(zero - upper, row));
    const Lanes sigmoid = round_to<T>(one / (one + exp16(zero - round_to<T>(gate * broadcast(alpha)))));
    return round_to<T>(round_to<T>(row + one) * round_to<T>(gate * sigmoid));
  }
#endif

  // Returns the activation of x: x / (1 + e^-slope) for GELU, x / (1 + e^-x) for SiLU.
  float active(float x) const {
    if (kind == Activation::relu) return std::max(0.0f, x);
    return x / (1.0f + std::exp(kind == Activation::gelu ? -x * (kLinear + kCubic * x * x) : -x));
  }
#ifdef YGG_AVX2
  Lanes active(Lanes x) const {
    if (kind == Activation::relu) return lane_max(zeros(), x);
    return x / (broadcast(1.0f) + exp16(zeros() - (kind == Activation::gelu ? x * fmadd(broadcast(kCubic), x * x, broadcast(kLinear)) : x)));
  }
#endif

 private:
  static float rounded(float value) { return to_float(static_cast<T>(value)); }
  static constexpr float kLinear = 1.5957691216057308f, kCubic = 0.044715f * kLinear;  // twice the root of 2 / pi
};

template <typename T>
struct NormOp {
  const T* weight;  // null for none
  bool plus_one;  // multiply by (1 + weight) and round the product once
  float eps;
  bool rounds_product_once = false;  // multiply by the weight and round the product once

  // Whether the normalised value is multiplied by the weight (or by 1 + weight) before it is rounded.
  bool rounds_once() const { return plus_one || rounds_product_once; }
  float offset() const { return plus_one ? 1.0f : 0.0f; }
};

template <typename T>
struct InputRows {
  const T* x;  // [W, K]
  GateOp<T> gate;
  NormOp<T> norm;
  int64_t rows, inputs;

  bool is_unmodified() const { return !gate.rows && !norm.weight; }

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
        const Lanes value = load16(values + k + 16 * i);
        sums[i] = fmadd(value, value, sums[i]);
      }
    sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
#endif
    for (; k < inputs; ++k) sum += to_float(values[k]) * to_float(values[k]);
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
    const Lanes factor = broadcast(inverse), offset = broadcast(norm.offset());
    const bool rounds_once = norm.rounds_once();
    for (; k + 16 <= count; k += 16) {
      Lanes value = load16(values + k);
      if (weights) {
        const Lanes weight = load16(weights + k), scaled = value * factor;
        value = round_to<T>(rounds_once ? scaled * (offset + weight) : weight * round_to<T>(scaled));
      }
      if (gates) {
        const Lanes gate_value = load16(gates + k);
        value = gate.limit > 0.0f ? gate.clamped(gate_value, value) : round_to<T>(round_to<T>(gate.active(gate_value)) * value);
      }
      store16(to + k, value);
    }
#endif
    for (; k < count; ++k) {
      float value = to_float(values[k]);
      if (weights) {
        const float weight = to_float(weights[k]), scaled = value * inverse;
        value = rounded(norm.rounds_once() ? scaled * (norm.offset() + weight) : weight * rounded(scaled));
      }
      if (gates) {
        const float gate_value = to_float(gates[k]);
        value = gate.limit > 0.0f ? gate.clamped(gate_value, value) : rounded(rounded(gate.active(gate_value)) * value);
      }
      to[k] = static_cast<To>(value);
    }
  }

 private:
  static float rounded(float value) { return to_float(static_cast<T>(value)); }
};

// The input tensors of a linear layer: rows, and an optional gate and norm of the same dtype.
class LinearInput {
 public:
  LinearInput(const Tensor& input, const FusedOps& fused_ops)
      : x_(input.contiguous()), gate_(fused_ops.gate.contiguous()), norm_(fused_ops.norm.contiguous()), gelu_(fused_ops.gelu), plus_one_(fused_ops.plus_one), eps_(fused_ops.eps) {
    YGG_CHECK(x_.dtype() == DType::bfloat16 || x_.dtype() == DType::float32, "linear layers take bfloat16 or float32 rows");
    for (const Tensor& other : {gate_, norm_})
      YGG_CHECK(!other.defined() || other.dtype() == x_.dtype(), "a gate and a norm have the dtype of the rows");
    YGG_CHECK(!gate_.defined() || gate_.sizes() == x_.sizes(), "a gate has the shape of the rows");
    YGG_CHECK(!norm_.defined() || norm_.numel() == inputs(), "a norm has a weight an input");
  }

  const Tensor& tensor() const { return x_; }
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
