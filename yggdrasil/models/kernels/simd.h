// Which instructions there are, and the number formats that every kernel shares.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define YGG_AVX512 1
#endif
#if defined(YGG_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
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

#ifdef YGG_AVX512
// Fetches a line of a stream from memory, as far as the second cache: on its way to the first it would hold one of the few
// buffers for misses until it is there, and fewer lines than memory could give were under way.
// NOTE: GCC drops calls of the intrinsic where it takes a function that only fetches for one without effects.
inline void fetch_ahead(const void* line) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line))); }

inline __m512 exp16(__m512 x) {  // Cephes polynomial; 0 below -87.3, infinity above 88.7
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.3f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}
struct Sum {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
  __m256 operator()(__m256 a, __m256 b) const { return _mm256_add_ps(a, b); }
  __m128 operator()(__m128 a, __m128 b) const { return _mm_add_ps(a, b); }
};
struct Larger {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
  __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
  __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};

// Four vectors become one: every 128 bits hold what the operation makes of theirs in a, in b, in c, in d. Then one number each.
template <typename Operation>
inline __m512 quads_of(__m512 a, __m512 b, __m512 c, __m512 d, const Operation& both) {
  const __m512d ab = _mm512_castps_pd(both(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(both(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  return both(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

template <typename Operation>
inline __m128 reduce4(__m512 quads, const Operation& both) {
  const __m256 halves = both(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return both(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const BFloat16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#endif

}  // namespace yggdrasil
