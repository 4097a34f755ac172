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
  const float* scales = nullptr;  // [N], null where sums are not scaled
};

// bf16: [P, K/2, 16, 2] (pairs along K beside each other, K rounded up to whole tiles); float32: [P, K, 16].
struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;      // [W, K words]: two bf16 or one float32 a word
  const uint32_t* tiled;  // the same for the matrix unit; null where it is not used
  int64_t rows, k_steps, panel_words;
  LinearOutput output;
  const int8_t* bytes = nullptr;  // weights as int8 in place of packed
};

// Small integers are exact in bfloat16.
inline void widen_weights(const int8_t* packed, int64_t count, uint32_t* words) {
  auto* out = reinterpret_cast<BFloat16*>(words);
  int64_t i = 0;
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + i));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
  for (; i < count; ++i) out[i] = BFloat16(static_cast<float>(packed[i]));
}

inline void store_row(const LinearOutput& to, int64_t row, int64_t panel, const float* values) {
  const int64_t begin = panel * kPanel, count = std::min<int64_t>(kPanel, to.outputs - begin);
#if defined(YGG_AVX512) && defined(__AVX512BF16__)
  if (count == kPanel && to.is_bf16) {
    __m512 whole = _mm512_loadu_ps(values);
    if (to.scales) whole = _mm512_mul_ps(whole, _mm512_loadu_ps(to.scales + begin));
    if (to.bias) whole = _mm512_add_ps(whole, _mm512_loadu_ps(to.bias + begin));
    BFloat16* out = static_cast<BFloat16*>(to.out) + row * to.outputs + begin;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(whole));
    return;
  }
#endif
  float sums[kPanel];
  for (int j = 0; j < count; ++j) {
    sums[j] = to.scales ? values[j] * to.scales[begin + j] : values[j];
    if (to.bias) sums[j] += to.bias[begin + j];
  }
  if (to.is_bf16) {
    BFloat16* out = static_cast<BFloat16*>(to.out) + row * to.outputs + begin;
    for (int j = 0; j < count; ++j) out[j] = BFloat16(sums[j]);
  } else {
    std::memcpy(static_cast<float*>(to.out) + row * to.outputs + begin, sums, count * sizeof(float));
  }
}

}  // namespace yggdrasil
