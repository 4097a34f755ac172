// Unpacks a side (panel) of a chunk into vectors of unsigned values and of scales. A vector has 512 bits, all 16 outputs
// of a side, or 256 bits, a half of them.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
#ifdef YGG_WIDE_WORDS
#define YGG_VECTOR(operation) _mm512_##operation
using IntVector = __m512i;
using FloatVector = __m512;
using HalfVector = __m256i;
#else
#define YGG_VECTOR(operation) _mm256_##operation
using IntVector = __m256i;
using FloatVector = __m256;
using HalfVector = __m128i;
#endif
constexpr int kVectorLanes = sizeof(FloatVector) / sizeof(float);  // outputs of a vector
constexpr int kSideVectors = kLanes / kVectorLanes;                // vectors of a side

[[gnu::always_inline]] inline IntVector load_vector(const void* from) {
  IntVector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
[[gnu::always_inline]] inline IntVector repeat_128(__m128i bytes) {  // copies 128 bits to the whole vector
#ifdef YGG_WIDE_WORDS
  return _mm512_broadcast_i32x4(bytes);
#else
  return _mm256_broadcastsi128_si256(bytes);
#endif
}

// Whether values are multiplied as 16-bit words, two inputs at a time: 16-bit sums of byte products would overflow.
template <typename F>
constexpr bool kIsInWords = F::kBits == 8 && !kMultipliesBytes;
template <typename F>
constexpr int kChunkVectors = kIsInWords<F> ? 16 : 8;  // vectors of half a chunk; as words, even and odd values of 8 bytes alternate

// Returns the unsigned values of vector number `vector` of a chunk for the outputs of part `part` of a side.
template <typename F>
[[gnu::always_inline]] inline IntVector unpack_vector(const uint8_t* values, int vector, int part) {
  const auto load = [&](int64_t offset) __attribute__((always_inline)) { return load_vector(values + offset + part * static_cast<int64_t>(sizeof(IntVector))); };
  const auto masked = [](IntVector bytes, int mask) __attribute__((always_inline)) { return bytes & YGG_VECTOR(set1_epi8)(static_cast<char>(mask)); };
  if constexpr (F::kBits == 8) return load(64 * vector);
  if constexpr (F::kBits == 6) {
    const int64_t first = vector / 4 * 192;
    if (vector % 4 < 3) return masked(load(first + vector % 4 * 64), 63);
    const IntVector low = masked(YGG_VECTOR(srli_epi16)(load(first), 6), 3), middle = masked(YGG_VECTOR(srli_epi16)(load(first + 64), 4), 12);
    return low | middle | masked(YGG_VECTOR(srli_epi16)(load(first + 128), 2), 48);
  }
  const IntVector nibbles = load(vector % 4 * 64), low = masked(vector < 4 ? nibbles : YGG_VECTOR(srli_epi16)(nibbles, 4), 15);
  if constexpr (F::kIsTable) return YGG_VECTOR(shuffle_epi8)(repeat_128(_mm_load_si128(reinterpret_cast<const __m128i*>(kMxfp4Values))), low);
  if constexpr (F::kBits == 5) {
    const IntVector high_bits = load(kNibbleBytes);
    return low | masked(vector < 4 ? YGG_VECTOR(slli_epi16)(high_bits, 4 - vector) : YGG_VECTOR(srli_epi16)(high_bits, vector - 4), 16);
  }
  return low;
}

inline HalfVector load_half(const uint8_t* from) {
  HalfVector half;
  std::memcpy(&half, from, sizeof half);
  return half;
}
inline FloatVector halves_to_floats(const uint8_t* halves) { return YGG_VECTOR(cvtph_ps)(load_half(halves)); }

// Scales of a chunk for the outputs of a vector. Nested formats have integer multiples of the group's scale, one for
// each half of the inputs.
struct VectorScales {
  FloatVector scale, minimum;
  IntVector multiples[2];
};

// Extends a byte for each output of a vector to 32 bits; without VNNI to both 16-bit words of them.
template <bool IsSigned>
[[gnu::always_inline]] inline IntVector load_multiples(const uint8_t* bytes) {
#ifdef YGG_WIDE_WORDS
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  const __m512i words = IsSigned ? _mm512_cvtepi8_epi32(all) : _mm512_cvtepu8_epi32(all);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, words, _mm512_slli_epi32(words, 16));
#else
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  if constexpr (kMultipliesBytes) return IsSigned ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight);
  const __m256i all = _mm256_broadcastq_epi64(eight);
  if constexpr (IsSigned) {  // moves each byte to the high byte of a word, then shifts arithmetically
    const __m256i high = _mm256_setr_epi64x(0x0180018000800080, 0x0380038002800280, 0x0580058004800480, 0x0780078006800680);
    return _mm256_srai_epi16(_mm256_shuffle_epi8(all, high), 8);
  }
  const auto zero_bytes = static_cast<int64_t>(0x8000800080008000);
  const __m256i low = _mm256_setr_epi64x(zero_bytes | 0x0001000100000000, zero_bytes | 0x0003000300020002, zero_bytes | 0x0005000500040004, zero_bytes | 0x0007000700060006);
  return _mm256_shuffle_epi8(all, low);
#endif
}

template <typename F>
[[gnu::always_inline]] inline VectorScales vector_scales(const uint8_t* header, int64_t chunk, int part) {
  VectorScales scales{};
  const int lane = part * kVectorLanes;
  if constexpr (F::kScaling == Scaling::plain) {
    scales.scale = halves_to_floats(header + 2 * (chunk * kLanes + lane));
  } else if constexpr (F::kScaling == Scaling::power) {
    scales.scale = (FloatVector)YGG_VECTOR(slli_epi32)(YGG_VECTOR(cvtepu16_epi32)(load_half(header + 2 * lane)), 16);
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

// Vectors of a chunk that are multiplied at once share the broadcast inputs: both halves of a side with 256 bits, both
// sides of a pair with 512 bits.
constexpr int kSharing = 2;

// Both vectors, number `vector`, of a packed chunk: every use unpacks them again.
template <typename F>
struct PackedChunk {
  const uint8_t* pair;
  int64_t chunk;
  int first;  // vector of the pair: its side and part

  [[gnu::always_inline]] int64_t side_of(int index) const { return (first + index) / kSideVectors; }
  [[gnu::always_inline]] int part_of(int index) const { return (first + index) % kSideVectors; }
  [[gnu::always_inline]] IntVector vector_at(int vector, int index) const {
    const uint8_t* values = pair + F::values_offset(side_of(index), chunk);
    if constexpr (!kIsInWords<F>) return unpack_vector<F>(values, vector, part_of(index));
    const IntVector bytes = unpack_vector<F>(values, vector / 2, part_of(index));
    return vector % 2 ? YGG_VECTOR(srli_epi16)(bytes, 8) : bytes & YGG_VECTOR(set1_epi16)(255);
  }
  [[gnu::always_inline]] VectorScales scales(int index) const { return vector_scales<F>(pair + F::header_offset(side_of(index)), chunk, part_of(index)); }
};

// A packed chunk that is multiplied first: prefetches `kBytes` of weights at `ahead`, a few lines with each vector. Issued
// all at once, prefetches wait for each other's line fill buffers, and the processor for them: 1 to 8 rows took up to
// 8 % longer on Skylake.
template <typename F, int64_t kBytes>
struct FetchingChunk {
  const PackedChunk<F>& packed;
  const uint8_t* ahead;

  [[gnu::always_inline]] IntVector vector_at(int vector, int index) const {
    constexpr int64_t kLines = (kBytes + 63) / 64, kVectors = kChunkVectors<F>;
    if (index == 0)
#pragma GCC unroll 8
      for (int64_t line = vector * kLines / kVectors; line < (vector + 1) * kLines / kVectors; ++line) prefetch_l2(ahead + 64 * line);
    return packed.vector_at(vector, index);
  }
  [[gnu::always_inline]] VectorScales scales(int index) const { return packed.scales(index); }
};

// Unpacked vectors and their scales, stored in memory for all rows of a tile.
template <typename F>
struct UnpackedChunk {
  IntVector vectors[kChunkVectors<F>][kSharing];
  VectorScales stored_scales[kSharing];

  [[gnu::always_inline]] IntVector vector_at(int vector, int index) const { return vectors[vector][index]; }
  [[gnu::always_inline]] VectorScales scales(int index) const {  // NOTE: member by member: GCC copies a struct in pieces of other sizes, which breaks store forwarding
    const VectorScales& stored = stored_scales[index];
    return {stored.scale, stored.minimum, {stored.multiples[0], stored.multiples[F::kScaling == Scaling::halved]}};
  }
};

// Unpacks packed vectors for the first rows of a tile, and stores them for the others. The stores are interleaved with
// the multiplications.
template <typename F, typename Packed>
struct StoringChunk {
  const Packed& packed;
  UnpackedChunk<F>& stored;

  [[gnu::always_inline]] IntVector vector_at(int vector, int index) const { return stored.vectors[vector][index] = packed.vector_at(vector, index); }
  [[gnu::always_inline]] VectorScales scales(int index) const {
    const VectorScales scales = packed.scales(index);
    VectorScales& kept = stored.stored_scales[index];
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
