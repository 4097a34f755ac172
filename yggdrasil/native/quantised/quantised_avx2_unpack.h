// Unpacks a side (panel) of a chunk into 256-bit vectors of unsigned values and of scales.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
// Whether values are multiplied as 16-bit words, two inputs at a time: 16-bit sums of byte products would overflow.
template <typename F>
constexpr bool kIsInWords = F::kBits == 8 && !kMultipliesBytes;
template <typename F>
constexpr int kChunkVectors = kIsInWords<F> ? 16 : 8;  // vectors of half a chunk; as words, even and odd values of 8 bytes alternate

// Returns the unsigned values of vector number `vector` of a chunk for eight outputs: those of side half `half`.
template <typename F>
[[gnu::always_inline]] inline __m256i unpack_vector(const uint8_t* values, int vector, int half) {
  const auto load = [&](int64_t offset) __attribute__((always_inline)) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + offset)); };
  if constexpr (F::kBits == 8) return load(64 * vector + 32 * half);
  if constexpr (F::kBits == 6) {
    const int64_t first = vector / 4 * 192 + 32 * half;
    if (vector % 4 < 3) return _mm256_and_si256(load(first + vector % 4 * 64), _mm256_set1_epi8(63));
    const __m256i low = _mm256_and_si256(_mm256_srli_epi16(load(first), 6), _mm256_set1_epi8(3));
    const __m256i middle = _mm256_and_si256(_mm256_srli_epi16(load(first + 64), 4), _mm256_set1_epi8(12));
    return _mm256_or_si256(_mm256_or_si256(low, middle), _mm256_and_si256(_mm256_srli_epi16(load(first + 128), 2), _mm256_set1_epi8(48)));
  }
  const __m256i nibbles = load(vector % 4 * 64 + 32 * half);
  const __m256i low = _mm256_and_si256(vector < 4 ? nibbles : _mm256_srli_epi16(nibbles, 4), _mm256_set1_epi8(15));
  if constexpr (F::kIsTable) return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kMxfp4Values))), low);
  if constexpr (F::kBits == 5) {
    const __m256i high_bits = load(kNibbleBytes + 32 * half);
    const __m256i shifted = vector < 4 ? _mm256_slli_epi16(high_bits, 4 - vector) : _mm256_srli_epi16(high_bits, vector - 4);
    return _mm256_or_si256(low, _mm256_and_si256(shifted, _mm256_set1_epi8(16)));
  }
  return low;
}

inline __m256 halves_to_floats(const uint8_t* halves) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))); }
inline __m128i load_8(const uint8_t* bytes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)); }

// Scales of a chunk for eight outputs. Nested formats have integer multiples of the group's scale, one for each half of
// the inputs.
struct HalfScales {
  __m256 scale, minimum;
  __m256i multiples[2];
};

// Extends eight bytes to 32 bits each; without VNNI to both 16-bit words of them.
template <bool IsSigned>
[[gnu::always_inline]] inline __m256i load_multiples(const uint8_t* bytes) {
  if constexpr (kMultipliesBytes) return IsSigned ? _mm256_cvtepi8_epi32(load_8(bytes)) : _mm256_cvtepu8_epi32(load_8(bytes));
  const __m256i all = _mm256_broadcastq_epi64(load_8(bytes));
  if constexpr (IsSigned) {  // moves each byte to the high byte of a word, then shifts arithmetically
    const __m256i high = _mm256_setr_epi64x(0x0180018000800080, 0x0380038002800280, 0x0580058004800480, 0x0780078006800680);
    return _mm256_srai_epi16(_mm256_shuffle_epi8(all, high), 8);
  }
  const auto zero_bytes = static_cast<int64_t>(0x8000800080008000);
  const __m256i low = _mm256_setr_epi64x(zero_bytes | 0x0001000100000000, zero_bytes | 0x0003000300020002, zero_bytes | 0x0005000500040004, zero_bytes | 0x0007000700060006);
  return _mm256_shuffle_epi8(all, low);
}

template <typename F>
[[gnu::always_inline]] inline HalfScales half_scales(const uint8_t* header, int64_t chunk, int half) {
  HalfScales scales{};
  const int lane = half * kLanes / 2;
  if constexpr (F::kScaling == Scaling::plain) {
    scales.scale = halves_to_floats(header + 2 * (chunk * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::power) {
    const __m128i powers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(header + 2 * lane));
    scales.scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(powers), 16));
  } else if constexpr (F::kScaling == Scaling::affine) {
    scales.scale = halves_to_floats(header + 2 * (2 * chunk * kLanes + lane));
    scales.minimum = halves_to_floats(header + 2 * ((2 * chunk + 1) * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::nested) {
    scales.multiples[0] = scales.multiples[1] = load_multiples<false>(header + (4 + 2 * chunk) * kLanes + lane);
  } else {
    for (int i = 0; i < 2; ++i) scales.multiples[i] = load_multiples<true>(header + (2 + 2 * chunk + i) * kLanes + lane);
  }
  return scales;
}

// A packed side of a chunk: every use of a vector unpacks it again.
template <typename F>
struct PackedSide {
  const uint8_t *header, *values;
  int64_t chunk;

  [[gnu::always_inline]] __m256i vector_at(int vector, int half) const {
    if constexpr (!kIsInWords<F>) return unpack_vector<F>(values, vector, half);
    const __m256i bytes = unpack_vector<F>(values, vector / 2, half);
    return vector % 2 ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
  }
  [[gnu::always_inline]] HalfScales scales(int half) const { return half_scales<F>(header, chunk, half); }
};

// An unpacked side, stored in memory for all rows of a tile.
template <typename F>
struct UnpackedSide {
  __m256i vectors[kChunkVectors<F>][2];
  HalfScales half_scales[2];

  [[gnu::always_inline]] __m256i vector_at(int vector, int half) const { return vectors[vector][half]; }
  [[gnu::always_inline]] HalfScales scales(int half) const {  // NOTE: member by member: GCC copies a struct in pieces of other sizes, which breaks store forwarding
    const HalfScales& stored_scales = half_scales[half];
    return {stored_scales.scale, stored_scales.minimum, {stored_scales.multiples[0], stored_scales.multiples[F::kScaling == Scaling::halved]}};
  }
};

// Unpacks a packed side for the first rows of a tile, and stores it for the others. The stores are interleaved with the
// multiplications.
template <typename F>
struct StoringSide {
  const PackedSide<F>& packed;
  UnpackedSide<F>& stored;

  [[gnu::always_inline]] __m256i vector_at(int vector, int half) const { return stored.vectors[vector][half] = packed.vector_at(vector, half); }
  [[gnu::always_inline]] HalfScales scales(int half) const {
    const HalfScales scales = packed.scales(half);
    HalfScales& stored_scales = stored.half_scales[half];
    if constexpr (F::kIsNested) {
      stored_scales.multiples[0] = scales.multiples[0];
      if constexpr (F::kScaling == Scaling::halved) stored_scales.multiples[1] = scales.multiples[1];
    } else {
      stored_scales.scale = scales.scale;
      if constexpr (F::kHasMinimum) stored_scales.minimum = scales.minimum;
    }
    return scales;
  }
};
#endif

}  // namespace yggdrasil
