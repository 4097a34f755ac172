// A side (panel) of a chunk in 256-bit vectors: its unsigned values, and its scales.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
// Whether values are multiplied as words, two inputs at a time: sums of products of bytes would not fit words.
template <typename F>
constexpr bool kIsInWords = F::kBits == 8 && !kMultipliesBytes;
template <typename F>
constexpr int kVectors = kIsInWords<F> ? 16 : 8;  // of a chunk; in words, the even and the odd values of eight bytes in turn

// Vector `vector` of a chunk, of eight outputs: its values from 0 on.
template <typename F>
[[gnu::always_inline]] inline __m256i widened(const uint8_t* values, int vector, int half) {
  const auto at = [&](int64_t place) __attribute__((always_inline)) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + place)); };
  if constexpr (F::kBits == 8) return at(64 * vector + 32 * half);
  if constexpr (F::kBits == 6) {
    const int64_t first = vector / 4 * 192 + 32 * half;
    if (vector % 4 < 3) return _mm256_and_si256(at(first + vector % 4 * 64), _mm256_set1_epi8(63));
    const __m256i low = _mm256_and_si256(_mm256_srli_epi16(at(first), 6), _mm256_set1_epi8(3));
    const __m256i middle = _mm256_and_si256(_mm256_srli_epi16(at(first + 64), 4), _mm256_set1_epi8(12));
    return _mm256_or_si256(_mm256_or_si256(low, middle), _mm256_and_si256(_mm256_srli_epi16(at(first + 128), 2), _mm256_set1_epi8(48)));
  }
  const __m256i nibbles = at(vector % 4 * 64 + 32 * half);
  const __m256i low = _mm256_and_si256(vector < 4 ? nibbles : _mm256_srli_epi16(nibbles, 4), _mm256_set1_epi8(15));
  if constexpr (F::kIsTable) return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kCodes))), low);
  if constexpr (F::kBits == 5) {
    const __m256i fifths = at(kNibbleBytes + 32 * half);
    const __m256i moved = vector < 4 ? _mm256_slli_epi16(fifths, 4 - vector) : _mm256_srli_epi16(fifths, vector - 4);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
  }
  return low;
}

inline __m256 halves_to_floats(const uint8_t* halves) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))); }
inline __m128i load_8(const uint8_t* bytes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)); }

// Of eight outputs of a chunk. Nested formats have multiples of the group's scale, for each half of the inputs.
struct HalfScales {
  __m256 scale, minimum;
  __m256i multiples[2];
};

// Eight numbers of a byte in 32 bits each, without VNNI in both words of them.
template <bool IsSigned>
[[gnu::always_inline]] inline __m256i load_multiples(const uint8_t* bytes) {
  if constexpr (kMultipliesBytes) return IsSigned ? _mm256_cvtepi8_epi32(load_8(bytes)) : _mm256_cvtepu8_epi32(load_8(bytes));
  const __m256i all = _mm256_broadcastq_epi64(load_8(bytes));
  if constexpr (IsSigned) {  // each first comes to the high byte of a word
    const __m256i high = _mm256_setr_epi64x(0x0180018000800080, 0x0380038002800280, 0x0580058004800480, 0x0780078006800680);
    return _mm256_srai_epi16(_mm256_shuffle_epi8(all, high), 8);
  }
  const auto unset = static_cast<int64_t>(0x8000800080008000);
  const __m256i low = _mm256_setr_epi64x(unset | 0x0001000100000000, unset | 0x0003000300020002, unset | 0x0005000500040004, unset | 0x0007000700060006);
  return _mm256_shuffle_epi8(all, low);
}

template <typename F>
[[gnu::always_inline]] inline HalfScales half_scales(const uint8_t* header, int64_t chunk, int half) {
  HalfScales found{};
  const int lane = half * kLanes / 2;
  if constexpr (F::kScaling == Scaling::plain) {
    found.scale = halves_to_floats(header + 2 * (chunk * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::power) {
    const __m128i powers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(header + 2 * lane));
    found.scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(powers), 16));
  } else if constexpr (F::kScaling == Scaling::affine) {
    found.scale = halves_to_floats(header + 2 * (2 * chunk * kLanes + lane));
    found.minimum = halves_to_floats(header + 2 * ((2 * chunk + 1) * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::nested) {
    found.multiples[0] = found.multiples[1] = load_multiples<false>(header + (4 + 2 * chunk) * kLanes + lane);
  } else {
    for (int i = 0; i < 2; ++i) found.multiples[i] = load_multiples<true>(header + (2 + 2 * chunk + i) * kLanes + lane);
  }
  return found;
}

// A side of a chunk as it lies in memory: every use of a vector widens it.
template <typename F>
struct PackedSide {
  const uint8_t *header, *values;
  int64_t chunk;

  [[gnu::always_inline]] __m256i wide(int vector, int half) const {
    if constexpr (!kIsInWords<F>) return widened<F>(values, vector, half);
    const __m256i bytes = widened<F>(values, vector / 2, half);
    return vector % 2 ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  }
  [[gnu::always_inline]] HalfScales scales(int half) const { return half_scales<F>(header, chunk, half); }
};

// A side widened for all rows of a tile.
template <typename F>
struct WideSide {
  __m256i vectors[kVectors<F>][2];
  HalfScales half_scales[2];

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return vectors[vector][half]; }
  [[gnu::always_inline]] HalfScales scales(int half) const {  // NOTE: one by one; GCC copies a struct in pieces that it then waits for
    const HalfScales& kept = half_scales[half];
    return {kept.scale, kept.minimum, {kept.multiples[0], kept.multiples[F::kScaling == Scaling::halved]}};
  }
};

// A packed side that the first rows of a tile widen and keep for the others: the stores take turns with their products.
template <typename F>
struct WidenedSide {
  const PackedSide<F>& packed;
  WideSide<F>& wide_side;

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return wide_side.vectors[vector][half] = packed.wide(vector, half); }
  [[gnu::always_inline]] HalfScales scales(int half) const {
    const HalfScales scales = packed.scales(half);
    HalfScales& kept = wide_side.half_scales[half];
    if constexpr (F::kIsNested) {
      kept.multiples[0] = scales.multiples[0];
      if constexpr (F::kScaling == Scaling::halved) kept.multiples[1] = scales.multiples[1];
    } else {
      kept.scale = scales.scale;
      if constexpr (F::kHasMinimum) kept.minimum = scales.minimum;
    }
    return scales;
  }
};
#endif

}  // namespace yggdrasil
