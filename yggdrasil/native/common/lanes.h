// Vectors of 16 float32: one 512-bit register or two of 256 bits, with bitwise equal results; elsewhere an array.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/simd.h"

namespace yggdrasil {

// Fused multiply-add with one rounding where the processor has it; else two roundings.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

#ifdef YGG_AVX512
using Lanes = __m512;
constexpr int kLaneRegisters = 32;  // in registers

inline Lanes zeros() { return _mm512_setzero_ps(); }
inline Lanes broadcast(float value) { return _mm512_set1_ps(value); }
inline Lanes fmadd(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c, one rounding
inline Lanes lane_max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes lane_min(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes round_nearest(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes ldexp_lanes(Lanes x, Lanes power) { return _mm512_scalef_ps(x, power); }  // x * 2^power for integers from -126 to 128

inline Lanes load16(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes load16(const BFloat16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store16(float* to, Lanes values) { _mm512_storeu_ps(to, values); }
inline Lanes load16_float16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }

using IntLanes = __m512i;  // 16 lanes of int32

inline IntLanes zero_ints() { return _mm512_setzero_si512(); }
inline IntLanes load16(const int32_t* p) { return _mm512_loadu_si512(p); }
inline Lanes to_floats(IntLanes numbers) { return _mm512_cvtepi32_ps(numbers); }
inline IntLanes interleave_words(const uint8_t* low, const uint8_t* high) {  // zero-extends 16 bytes each of `low` and `high` into the low and high 16-bit words of 32-bit lanes
  const auto numbers = [](const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); };
  return _mm512_or_si512(numbers(low), _mm512_slli_epi32(numbers(high), 16));
}
inline IntLanes madd_words(IntLanes sums, IntLanes words, int32_t word) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(words, _mm512_set1_epi32(word)));
}

// Mask of the first `count` of 16 lanes. Masked loads return 0 in the other lanes, and neither loads nor stores access
// their memory.
inline __mmask16 lane_mask(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
inline Lanes keep_first(Lanes values, int64_t count) { return _mm512_maskz_mov_ps(lane_mask(count), values); }
inline Lanes load_first(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(lane_mask(count), p); }
inline void store_first(float* to, Lanes values, int64_t count) { _mm512_mask_storeu_ps(to, lane_mask(count), values); }

inline __m256i to_bf16(Lanes values) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(values);
#else
  const __m512i bits = _mm512_castps_si512(values), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0)));
#endif
}
inline Lanes round_to_bf16(Lanes values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(values)), 16)); }

// Applies the operation to both halves.
template <typename Operation>
inline __m256 reduce_halves(Lanes x, const Operation& both) {
  return both(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}

// Reduces 128-bit quads of four vectors to one lane each: lane j of a result quad is the reduction of that quad of
// vector j (a to d).
template <typename Operation>
inline Lanes reduce_quads(Lanes a, Lanes b, Lanes c, Lanes d, const Operation& both) {
  const __m512d ab = _mm512_castps_pd(both(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(both(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  return both(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}
#elif defined(YGG_AVX2)
struct Lanes {
  __m256 low, high;
};
constexpr int kLaneRegisters = 8;

inline Lanes operator+(Lanes a, Lanes b) { return {a.low + b.low, a.high + b.high}; }
inline Lanes operator-(Lanes a, Lanes b) { return {a.low - b.low, a.high - b.high}; }
inline Lanes operator*(Lanes a, Lanes b) { return {a.low * b.low, a.high * b.high}; }
inline Lanes operator/(Lanes a, Lanes b) { return {a.low / b.low, a.high / b.high}; }

inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Lanes fmadd(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline Lanes lane_max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes lane_min(Lanes a, Lanes b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Lanes round_nearest(Lanes x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}
inline __m256 ldexp_lanes(__m256 x, __m256 power) {  // in two factors: 2^128 itself is not representable
  const __m256i rounded = _mm256_cvtps_epi32(power), half = _mm256_srai_epi32(rounded, 1), bias = _mm256_set1_epi32(127);
  const auto two_to = [&](__m256i exponent) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, bias), 23)); };
  return x * two_to(half) * two_to(_mm256_sub_epi32(rounded, half));
}
inline Lanes ldexp_lanes(Lanes x, Lanes power) { return {ldexp_lanes(x.low, power.low), ldexp_lanes(x.high, power.high)}; }

inline Lanes load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 bf16_to_floats(__m128i values) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16)); }
inline Lanes load16(const BFloat16* p) {
  const auto* eights = reinterpret_cast<const __m128i*>(p);
  return {bf16_to_floats(_mm_loadu_si128(eights)), bf16_to_floats(_mm_loadu_si128(eights + 1))};
}
inline void store16(float* to, Lanes values) {
  _mm256_storeu_ps(to, values.low);
  _mm256_storeu_ps(to + 8, values.high);
}

inline Lanes load16_float16(const void* p) {
  const auto* eights = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
}

struct IntLanes {
  __m256i low, high;
};

inline IntLanes zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline IntLanes load16(const int32_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Lanes to_floats(IntLanes numbers) { return {_mm256_cvtepi32_ps(numbers.low), _mm256_cvtepi32_ps(numbers.high)}; }
inline IntLanes interleave_words(const uint8_t* low, const uint8_t* high) {
  const __m128i lows = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low)), highs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(lows, highs)), _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(lows, highs))};
}
inline IntLanes madd_words(IntLanes sums, IntLanes words, int32_t word) {
  const __m256i words_of_two = _mm256_set1_epi32(word);
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(words.low, words_of_two)), _mm256_add_epi32(sums.high, _mm256_madd_epi16(words.high, words_of_two))};
}

// Mask of the first `count` of eight values: all of them if `count` is larger, none if it is negative.
inline __m256i lane_mask(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes keep_first(Lanes values, int64_t count) {
  if (count >= 16) return values;
  return {_mm256_and_ps(values.low, _mm256_castsi256_ps(lane_mask(count))), _mm256_and_ps(values.high, _mm256_castsi256_ps(lane_mask(count - 8)))};
}
inline Lanes load_first(const float* p, int64_t count) {
  if (count >= 16) return load16(p);
  return {_mm256_maskload_ps(p, lane_mask(count)), _mm256_maskload_ps(p + 8, lane_mask(count - 8))};
}
inline void store_first(float* to, Lanes values, int64_t count) {
  if (count >= 16) return store16(to, values);
  _mm256_maskstore_ps(to, lane_mask(count), values.low);
  _mm256_maskstore_ps(to + 8, lane_mask(count - 8), values.high);
}

// Rounds float32 to bfloat16, in the upper half of each 32-bit word.
inline __m256i rounded_words(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}
inline __m256i to_bf16(Lanes values) {
  const __m256i low = _mm256_srli_epi32(rounded_words(values.low), 16), high = _mm256_srli_epi32(rounded_words(values.high), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
inline Lanes round_to_bf16(Lanes values) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(rounded_words(values.low), upper)), _mm256_castsi256_ps(_mm256_and_si256(rounded_words(values.high), upper))};
}

template <typename Operation>
inline __m256 reduce_halves(Lanes x, const Operation& both) {
  return both(x.low, x.high);
}

template <typename Operation>
inline __m256 reduce_quads(__m256 a, __m256 b, __m256 c, __m256 d, const Operation& both) {
  const __m256d ab = _mm256_castps_pd(both(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
  const __m256d cd = _mm256_castps_pd(both(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
  return both(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
}
template <typename Operation>
inline Lanes reduce_quads(Lanes a, Lanes b, Lanes c, Lanes d, const Operation& both) {
  return {reduce_quads(a.low, b.low, c.low, d.low, both), reduce_quads(a.high, b.high, c.high, d.high, both)};
}
#else
struct Lanes {
  float at[16];
};

// Returns a vector whose lane i is operation(i).
inline Lanes lanes_of(const auto& operation) {
  Lanes all;
  for (int i = 0; i < 16; ++i) all.at[i] = operation(i);
  return all;
}
inline Lanes operator-(Lanes a, Lanes b) {
  return lanes_of([&](int i) { return a.at[i] - b.at[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
  return lanes_of([&](int i) { return a.at[i] * b.at[i]; });
}
inline Lanes zeros() { return {}; }
inline Lanes broadcast(float value) {
  return lanes_of([&](int) { return value; });
}
inline Lanes fmadd(Lanes a, Lanes b, Lanes c) {
  return lanes_of([&](int i) { return multiply_add(a.at[i], b.at[i], c.at[i]); });
}
inline Lanes load_first(const float* p, int64_t count) {
  return lanes_of([&](int i) { return i < count ? p[i] : 0.0f; });
}
inline Lanes load16(const float* p) { return load_first(p, 16); }
inline void store_first(float* to, Lanes values, int64_t count) {
  for (int i = 0; i < count; ++i) to[i] = values.at[i];
}
inline void store16(float* to, Lanes values) { store_first(to, values, 16); }
#endif

#ifdef YGG_AVX2
struct Sum {
  template <typename Register>
  Register operator()(Register a, Register b) const {
    return a + b;
  }
};
struct Max {
#ifdef YGG_AVX512
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
#endif
  __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
  __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};

// Reduces the result of reduce_quads further: lane j of the returned vector is the reduction of vector j.
template <typename Operation>
inline __m128 reduce4(Lanes quads, const Operation& both) {
  const __m256 halves = reduce_halves(quads, both);
  return both(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// Reduces a vector to one number by repeated halving.
template <typename Operation>
inline float reduce(Lanes x, const Operation& both) {
  const __m128 four = reduce4(x, both), word = both(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(both(word, _mm_movehdup_ps(word)));
}
inline float reduce_add(Lanes x) { return reduce(x, Sum{}); }
inline float reduce_max(Lanes x) { return reduce(x, Max{}); }

inline Lanes exp16(Lanes x) {  // Cephes polynomial; inputs are clamped to -87.3 from below, and above 88.7 the result is infinity
  x = lane_min(lane_max(x, broadcast(-87.3f)), broadcast(89.0f));
  const Lanes exponent = round_nearest(x * broadcast(1.44269504088896341f));
  const Lanes rest = fmadd(exponent, broadcast(2.12194440e-4f), fmadd(exponent, broadcast(-0.693359375f), x));
  Lanes p = broadcast(1.9875691500e-4f);
  p = fmadd(p, rest, broadcast(1.3981999507e-3f));
  p = fmadd(p, rest, broadcast(8.3334519073e-3f));
  p = fmadd(p, rest, broadcast(4.1665795894e-2f));
  p = fmadd(p, rest, broadcast(1.6666665459e-1f));
  p = fmadd(p, rest, broadcast(5.0000001201e-1f));
  return ldexp_lanes(fmadd(p, rest * rest, rest + broadcast(1.0f)), exponent);
}

inline void store16(BFloat16* to, Lanes values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(values)); }

template <typename T>
inline Lanes round_to(Lanes values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return round_to_bf16(values);
}
#endif

// Prevents contraction: GCC may fuse a multiplication and an addition into one FMA, which omits the rounding of the
// product.
#ifdef __x86_64__
[[gnu::always_inline]] inline float uncontracted(float x) {
  asm("" : "+x"(x));
  return x;
}
#else
inline float uncontracted(float x) {
  volatile float value = x;
  return value;
}
#endif
#ifdef YGG_AVX512
[[gnu::always_inline]] inline Lanes uncontracted(Lanes x) {
  asm("" : "+v"(x));
  return x;
}
#elif defined(YGG_AVX2)
[[gnu::always_inline]] inline Lanes uncontracted(Lanes x) {
  asm("" : "+x"(x.low), "+x"(x.high));
  return x;
}
#endif

}  // namespace yggdrasil
