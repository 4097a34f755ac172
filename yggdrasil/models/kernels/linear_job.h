// A linear layer over packed weights: what its kernels, for the vector and for the matrix unit, work on.
#pragma once

#include <algorithm>

#include "simd.h"

namespace yggdrasil {

constexpr int kPanel = 16;      // outputs of a packed panel: one 512-bit register of float32
constexpr int kTilePairs = 16;  // bf16 panels end on a whole tile of so many input pairs, filled with zeros

// Where a layer's sums go.
struct LinearOutput {
  void* out;          // [W, N]
  const float* bias;  // nullable
  int64_t outputs;
  bool is_bf16;
};

// bf16: [P, K/2, 16, 2] (pairs along K beside each other, K rounded up to whole tiles); float32: [P, K, 16].
struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;      // [W, K words]: two bf16 or one float32 a word
  const uint32_t* tiled;  // the same for the matrix unit; null where it is not used
  int64_t rows, k_steps, panel_words;
  LinearOutput output;
};

inline void store_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, to.outputs - begin);
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  if (count == kPanel && to.is_bf16) {
    __m512 whole = _mm512_loadu_ps(values);
    if (to.bias) whole = _mm512_add_ps(whole, _mm512_loadu_ps(to.bias + begin));
    BFloat16* out = static_cast<BFloat16*>(to.out) + row * to.outputs + begin;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(whole));
    return;
  }
#endif
  float sums[kPanel];
  for (int j = 0; j < count; ++j) {
    sums[j] = to.bias ? values[j] + to.bias[begin + j] : values[j];
  }
  if (to.is_bf16) {
    BFloat16* out = static_cast<BFloat16*>(to.out) + row * to.outputs + begin;
    for (int j = 0; j < count; ++j) out[j] = BFloat16(sums[j]);
  } else {
    std::memcpy(static_cast<float*>(to.out) + row * to.outputs + begin, sums, count * sizeof(float));
  }
}

}  // namespace yggdrasil
