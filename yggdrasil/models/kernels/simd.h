// Which instructions there are, and the number formats that every kernel shares.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define YGG_AVX512 1
#endif
#if defined(YGG_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define YGG_AMX 1
#endif

namespace yggdrasil {

using at::BFloat16;
using at::Tensor;

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.x) << 16); }
inline float widen(float value) { return value; }

}  // namespace yggdrasil
