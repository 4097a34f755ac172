// A side (panel) of a chunk in 256-bit vectors: its unsigned values, and its scales.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
#ifdef YGG_SHORT_VNNI
constexpr bool kMultipliesBytes = true;  // of any size, four at a time
#else
constexpr bool kMultipliesBytes = false;
#endif

// What is kept of a side for all rows of a tile: scales and values, those of eight bits as words, two inputs in a vector
// where there were four.
template <typename F>
constexpr bool kKeepsWords = F::kBits == 8 && !kMultipliesBytes;
template <typename F>
constexpr int kKeptVectors = kKeepsWords<F> ? 16 : 8;

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

// Of eight outputs of a chunk. Nested formats have multiples of the group's scale, for each half of the inputs; halved ones
// both times the offset, in words.
struct HalfScales {
  __m256 scale, minimum;
  __m256i multiples[2], offsets;
};

// The same numbers as 32-bit ones, or in both words of them.
[[gnu::always_inline]] inline __m256i in_both_words(__m256i numbers) {
  const __m256i high = _mm256_slli_epi32(numbers, 16);
  return kMultipliesBytes ? numbers : _mm256_or_si256(_mm256_srli_epi32(high, 16), high);
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
    const __m256i numbers = _mm256_cvtepu8_epi32(load_8(header + (4 + 2 * chunk) * kLanes + lane));
    found.multiples[0] = found.multiples[1] = in_both_words(numbers);
  } else {
    __m256i numbers[2];
    for (int i = 0; i < 2; ++i) {
      numbers[i] = _mm256_cvtepi8_epi32(load_8(header + (2 + 2 * chunk + i) * kLanes + lane));
      found.multiples[i] = in_both_words(numbers[i]);
    }
    found.offsets = _mm256_slli_epi16(_mm256_blend_epi16(numbers[0], _mm256_slli_epi32(numbers[1], 16), 0xaa), F::kOffsetBits);
  }
  return found;
}

// The first and third, or the second and fourth, of every four signed bytes.
[[gnu::always_inline]] inline __m256i words_of(__m256i bytes, int second) {
  return _mm256_srai_epi16(second ? bytes : _mm256_slli_epi16(bytes, 8), 8);
}

// Rows of bytes as words, vector 2v holding the first and third, 2v + 1 the second and fourth of inputs 4v to 4v + 3.
inline void write_words(const int8_t* x, int64_t rows, int8_t* words) {
  for (int64_t row = 0; row < rows; ++row, x += kChunk, words += 2 * kChunk) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), first = words_of(bytes, 0), second = words_of(bytes, 1);
    const __m256i low = _mm256_unpacklo_epi32(first, second), high = _mm256_unpackhi_epi32(first, second);
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + 32), _mm256_permute2x128_si256(low, high, 0x31));
  }
}

// A side of a chunk as it lies in memory: every use of a vector widens it.
template <typename F>
struct PackedSide {
  static constexpr bool kIsInWords = false;
  const uint8_t *header, *values;
  int64_t chunk;

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return widened<F>(values, vector, half); }
  [[gnu::always_inline]] HalfScales scales(int half) const { return half_scales<F>(header, chunk, half); }
};

// The same, widened once for all rows of a tile.
template <typename F>
class KeptSide {
 public:
  static constexpr bool kIsInWords = kKeepsWords<F>;
  struct Memory {
    __m256i vectors[kKeptVectors<F>][2];
    HalfScales scales[2];
  };

  [[gnu::always_inline]] KeptSide(const PackedSide<F>& side, Memory& memory) : memory_(&memory) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 16
      for (int vector = 0; vector < kKeptVectors<F>; ++vector) {
        const __m256i wide = side.wide(kIsInWords ? vector / 2 : vector, half);
        memory.vectors[vector][half] = kIsInWords ? words_of(_mm256_xor_si256(wide, _mm256_set1_epi8(-128)), vector % 2) : wide;
      }
      const HalfScales scales = side.scales(half);
      HalfScales& kept = memory.scales[half];
      if constexpr (F::kIsNested) {
        kept.multiples[0] = scales.multiples[0];
        if constexpr (F::kScaling == Scaling::halved) kept.multiples[1] = scales.multiples[1], kept.offsets = scales.offsets;
      } else {
        kept.scale = scales.scale;
        if constexpr (F::kHasMinimum) kept.minimum = scales.minimum;
      }
    }
    // NOTE: GCC would keep in registers what it has just stored, and spill it in turn with the sums.
    asm("" : "+r"(memory_) : : "memory");
  }

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return memory_->vectors[vector][half]; }
  [[gnu::always_inline]] HalfScales scales(int half) const {
    const HalfScales& kept = memory_->scales[half];
    return {kept.scale, kept.minimum, {kept.multiples[0], kept.multiples[F::kScaling == Scaling::halved]}, kept.offsets};
  }

 private:
  const Memory* memory_;
};
#endif

}  // namespace yggdrasil
