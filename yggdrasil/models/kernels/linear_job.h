// A linear layer over packed weights: what its kernels, for the vector and for the matrix unit, work on.
#pragma once

#include <algorithm>

#include "simd.h"

namespace yggdrasil {

constexpr int kPanel = 16;      // outputs of a packed panel: one 512-bit register of float32
constexpr int kTilePairs = 16;  // bf16 panels end on a whole tile of so many input pairs, filled with zeros

// bf16: [P, K/2, 16, 2] (pairs along K beside each other, K rounded up to whole tiles); float32: [P, K, 16].
struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;      // [W, K words]: two bf16 or one float32 a word
  const uint32_t* tiled;  // the same for the matrix unit; null where it is not used
  const float* bias;      // nullable
  void* out;              // [W, N]
  int64_t rows, k_steps, outputs, panel_words;
  bool is_bf16;
};

inline void store_row(const LinearJob& job, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, job.outputs - begin);
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  if (count == kPanel && job.is_bf16) {
    __m512 whole = _mm512_loadu_ps(values);
    if (job.bias) whole = _mm512_add_ps(whole, _mm512_loadu_ps(job.bias + begin));
    BFloat16* out = static_cast<BFloat16*>(job.out) + row * job.outputs + begin;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(whole));
    return;
  }
#endif
  float sums[kPanel];
  for (int j = 0; j < count; ++j) sums[j] = job.bias ? values[j] + job.bias[begin + j] : values[j];
  if (job.is_bf16) {
    BFloat16* out = static_cast<BFloat16*>(job.out) + row * job.outputs + begin;
    for (int j = 0; j < count; ++j) out[j] = BFloat16(sums[j]);
  } else {
    std::memcpy(static_cast<float*>(job.out) + row * job.outputs + begin, sums, count * sizeof(float));
  }
}

}  // namespace yggdrasil
