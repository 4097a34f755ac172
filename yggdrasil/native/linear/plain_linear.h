// Linear layer over unpacked weights, for small layers such as a mixture's router.
//
// Each output is accumulated in a fixed order, so a row's result is independent of the number of rows.
#pragma once

#include "common/input_rows.h"
#include "common/threads.h"

namespace yggdrasil {

template <typename T>
inline float dot(const T* a, const T* b, int64_t count) {
  float sum = 0.0f;
  int64_t k = 0;
#ifdef YGG_AVX2
  Lanes sums[4] = {zeros(), zeros(), zeros(), zeros()};
  for (; k + 64 <= count; k += 64)
    for (int i = 0; i < 4; ++i) sums[i] = fmadd(load16(a + k + 16 * i), load16(b + k + 16 * i), sums[i]);
  sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
#endif
  for (; k < count; ++k) sum += to_float(a[k]) * to_float(b[k]);
  return sum;
}

// input [..., K], weight [N, K], bias [N], all of one dtype.
inline void plain_linear(const Tensor& input, const Tensor& weight, const Tensor& bias, int64_t num_threads, const Tensor& out) {
  const LinearInput x(input, {});
  const Tensor weights = weight.contiguous(), added = bias.floats();
  const int64_t inputs = x.inputs(), outputs = weights.size(0);
  YGG_CHECK(weights.dim() == 2 && weights.size(1) == inputs && weights.dtype() == input.dtype(), "weights have the inputs and the dtype of the rows");
  check_result(out, with_last(input, outputs), input.dtype());
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    T* to = out.mutable_data_ptr<T>();
    const T* weight_rows = weights.const_data_ptr<T>();
    const float* biases = added.defined() ? added.const_data_ptr<float>() : nullptr;
    parallel(outputs, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t row = 0; row < rows.rows; ++row) {
          const float sum = dot(rows.x + row * inputs, weight_rows + n * inputs, inputs);
          to[row * outputs + n] = static_cast<T>(biases ? sum + biases[n] : sum);
        }
    });
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
}

}  // namespace yggdrasil
