// The rows of a step as int8 with one scale every 32 inputs, the function that quantised linears compute on them.
//
// Rounding is part of that function: it depends on the row alone, so it is the same at every width.
#pragma once

#include <cmath>
#include <limits>

#include "input_rows.h"
#include "quantised_format.h"

namespace yggdrasil {

constexpr int64_t kMostRows = 16;  // that meet a panel together

// A tile of M rows is a sequence of chunks; in a chunk every item lies M times, once a row.
struct InputChunk {
  static constexpr int64_t kBytes = kChunk + 5 * 4;  // a row

  static int8_t* values(uint8_t* chunk, int64_t) { return reinterpret_cast<int8_t*>(chunk); }
  static float* scales(uint8_t* chunk, int64_t m) { return reinterpret_cast<float*>(chunk + m * kChunk); }
  static float* sums(uint8_t* chunk, int64_t m) { return scales(chunk, m) + m; }  // of the rounded inputs, scaled
  // Sums of the values, negative: of the whole chunk, of its first half and of its second.
  static int32_t* counts(uint8_t* chunk, int64_t m) { return reinterpret_cast<int32_t*>(sums(chunk, m) + m); }
};

#if defined(YGG_AVX512) && defined(__AVX512VNNI__)
#define YGG_VNNI 1
#endif

// Rounds 32 inputs to values[32]; returns their scale and the sums of both halves. Where one is not finite the scale is not
// a number, and so is every output.
inline float round_chunk(const float* x, int8_t* values, int32_t (&halves)[2]) {
#ifdef YGG_VNNI
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
  const __m512 infinite = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  const bool is_finite = !(_mm512_cmp_ps_mask(_mm512_abs_ps(low), infinite, _CMP_NLT_UQ) | _mm512_cmp_ps_mask(_mm512_abs_ps(high), infinite, _CMP_NLT_UQ));
  const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
  const __m512i rounded[2] = {_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))};
  for (int i = 0; i < 2; ++i) {
    const __m128i bytes = _mm512_cvtsepi32_epi8(rounded[i]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16 * i), bytes);
    const __m128i fours = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes);
    const __m128i twos = _mm_add_epi32(fours, _mm_unpackhi_epi64(fours, fours));
    halves[i] = _mm_cvtsi128_si32(twos) + _mm_extract_epi32(twos, 1);
  }
#else
  float largest = 0.0f;
  bool is_finite = true;
  for (int i = 0; i < kChunk; ++i) {
    largest = std::max(largest, std::abs(x[i]));
    is_finite = is_finite && std::isfinite(x[i]);
  }
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  halves[0] = halves[1] = 0;
  for (int i = 0; i < kChunk; ++i) {
    values[i] = is_finite ? static_cast<int8_t>(std::nearbyint(x[i] * inverse)) : 0;
    halves[i / 16] += values[i];
  }
#endif
  return is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

// A chunk of a tile of m rows, of which there are `count` from `first` on; inverses are those of the rows. Rows and inputs
// that are not there are zeros.
template <typename T>
void round_rows(const InputRows<T>& input, int64_t first, int64_t count, const float* inverses, int64_t m, int64_t number, uint8_t* chunk) {
  const bool is_past = number * kChunk >= input.inputs;
  if (count < m || is_past) std::memset(chunk, 0, m * InputChunk::kBytes);
  if (is_past) return;
  for (int64_t row = 0; row < count; ++row) {
    alignas(64) float numbers[kChunk];
    input.read(first + row, number * kChunk, kChunk, inverses[row], numbers);
    int32_t halves[2];
    const float scale = round_chunk(numbers, InputChunk::values(chunk, m) + row * kChunk, halves);
    InputChunk::scales(chunk, m)[row] = scale;
    InputChunk::sums(chunk, m)[row] = scale * static_cast<float>(halves[0] + halves[1]);
    int32_t* counts = InputChunk::counts(chunk, m);
    counts[row] = -(halves[0] + halves[1]);
    counts[m + row] = -halves[0];
    counts[2 * m + row] = -halves[1];
  }
}

}  // namespace yggdrasil
