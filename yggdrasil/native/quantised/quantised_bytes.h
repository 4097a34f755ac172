// Quantised linears with vectors of 256 bits. Without VNNI, products of bytes are added up in 16 bits as long as they
// cannot overflow, then in 32; values of 8 bits are multiplied in 16. Sums of a chunk are the same integers, and are
// weighed in the same order, as in quantised_linear.h: to the same bits.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
constexpr int64_t kFetchAhead = 8192;  // bytes of the stream of weights; half of that made a row of one core a third slower

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

// Of eight outputs of a chunk.
struct HalfScales {
  __m256 scale, minimum;
  __m256i multiples[2], offsets;  // halved: of the scale, for each half of the inputs; and both, times the offset, in words
};

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
    const uint8_t* multiples = header + (4 + 2 * chunk) * kLanes + lane;
    found.scale = halves_to_floats(header + 2 * lane) * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(multiples)));
    const __m256 whole = _mm256_setzero_ps() - halves_to_floats(header + 2 * (kLanes + lane));
    found.minimum = whole * _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(multiples + kLanes)));
  } else {
    const uint8_t* multiples = header + (2 + 2 * chunk) * kLanes + lane;
    found.scale = halves_to_floats(header + 2 * lane);
    __m256i low[2], high[2];
    for (int i = 0; i < 2; ++i) {
      const __m256i numbers = _mm256_cvtepi8_epi32(load_8(multiples + i * kLanes));
      high[i] = _mm256_slli_epi32(numbers, 16), low[i] = _mm256_srli_epi32(high[i], 16);
      found.multiples[i] = kMultipliesBytes ? numbers : _mm256_or_si256(low[i], high[i]);
    }
    found.offsets = _mm256_slli_epi16(_mm256_or_si256(low[0], high[1]), F::kOffsetBits);
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
      kept.scale = scales.scale;
      if constexpr (F::kHasMinimum) kept.minimum = scales.minimum;
      if constexpr (F::kScaling == Scaling::halved)
        kept.multiples[0] = scales.multiples[0], kept.multiples[1] = scales.multiples[1], kept.offsets = scales.offsets;
    }
    // NOTE: GCC would keep in registers what it has just stored, and spill it in turn with the sums.
    asm("" : "+r"(memory_) : : "memory");
  }

  [[gnu::always_inline]] __m256i wide(int vector, int half) const { return memory_->vectors[vector][half]; }
  [[gnu::always_inline]] HalfScales scales(int half) const {
    const HalfScales& kept = memory_->scales[half];
    return {kept.scale, kept.minimum, {kept.multiples[0], kept.multiples[1]}, kept.offsets};
  }

 private:
  const Memory* memory_;
};

#ifdef YGG_SHORT_VNNI
inline __m256i add_products_of_bytes(__m256i sums, __m256i values, __m256i inputs) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sums, values, inputs);
#else
  return _mm256_dpbusd_epi32(sums, values, inputs);
#endif
}
#endif

// Vectors whose products, two of them in each sum of 16 bits, cannot overflow.
template <typename F>
constexpr int kAddedInWords = std::min(8, 32767 / (2 * 127 * F::kMost));

// Whether bytes are multiplied as signed ones, four at a time.
template <typename F, typename Side>
constexpr bool kIsSigned = F::kBits == 8 && !kMultipliesBytes && !Side::kIsInWords;

// NOTE: additions of integers may come in any order, and GCC takes all products first, which leave the registers. A sum
// that it cannot see through keeps them in turn.
[[gnu::always_inline]] inline __m256i in_turn(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Products of H halves of a side with R rows, those of halved formats times their multiples.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void multiply_chunk(const Side& side, int first_half, const int8_t* x, __m256i (&dots)[H][R]) {
  constexpr bool kIsHalved = F::kScaling == Scaling::halved;
  constexpr int kVectors = Side::kIsInWords ? 16 : 8;
  if constexpr (F::kBits < 8) static_assert(8 % kAddedInWords<F> == 0, "the last products of a chunk are added up, too");
  const __m256i zero = _mm256_setzero_si256();
  __m256i partial[H][R];  // sums of a part of the chunk, of 32 bits with VNNI, else of 16
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) partial[h][r] = dots[h][r] = zero;
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    __m256i wide[H], size[H];
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) {
      wide[h] = side.wide(v, first_half + h);
      if constexpr (kIsSigned<F, Side>) {  // a byte of each sign: the product takes the size of one, the other its sign
        wide[h] = _mm256_xor_si256(wide[h], _mm256_set1_epi8(-128));
        size[h] = _mm256_abs_epi8(wide[h]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + 4 * (r * kVectors + v), sizeof four);
      const __m256i inputs = _mm256_set1_epi32(four);
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) {
        const auto multiples = [&]() __attribute__((always_inline)) { return kIsHalved ? side.scales(first_half + h).multiples[v / 4] : _mm256_set1_epi16(1); };
#ifdef YGG_SHORT_VNNI
        __m256i& sums = kIsHalved ? partial[h][r] : dots[h][r];
        sums = add_products_of_bytes(sums, wide[h], inputs);
        if (kIsHalved && v % 4 == 3) dots[h][r] = _mm256_add_epi32(dots[h][r], _mm256_mullo_epi32(sums, multiples())), sums = zero;
#else
        if constexpr (kIsSigned<F, Side>) {
          const __m256i products = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(inputs, wide[h]));
          dots[h][r] = in_turn(_mm256_add_epi32(dots[h][r], _mm256_madd_epi16(products, multiples())));
        } else if constexpr (Side::kIsInWords) {
          dots[h][r] = in_turn(_mm256_add_epi32(dots[h][r], _mm256_madd_epi16(wide[h], inputs)));
        } else {
          partial[h][r] = in_turn(_mm256_add_epi16(partial[h][r], _mm256_maddubs_epi16(wide[h], inputs)));
          if ((v + 1) % kAddedInWords<F> == 0)
            dots[h][r] = in_turn(_mm256_add_epi32(dots[h][r], _mm256_madd_epi16(partial[h][r], multiples()))), partial[h][r] = zero;
        }
#endif
      }
    }
  }
}

// Adds a chunk of a side to the sums of R rows, [R, lanes], eight or all of its outputs at a time; x are the rows' values.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void add_outputs(const Side& side, int first_half, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, float* out) {
  constexpr bool kIsHalved = F::kScaling == Scaling::halved;
  const int32_t* counts = (kIsHalved ? InputChunk::half_counts(input, rows) : InputChunk::counts(input, rows)) + row;
  const float *row_scales = InputChunk::scales(input, rows) + row, *row_sums = InputChunk::sums(input, rows) + row;
  __m256i dots[H][R];
  multiply_chunk<F, R, H>(side, first_half, x, dots);
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) {
    const HalfScales scales = side.scales(first_half + h);
    float* sums = out + (first_half + h) * kLanes / 2;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, sums += kLanes) {
      __m256i dot = dots[h][r];
      if constexpr (kIsHalved) {
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(scales.offsets, _mm256_set1_epi32(counts[r])));
      } else if constexpr (F::kOffset != 0 && !kKeepsWords<F>) {
        dot = _mm256_add_epi32(dot, _mm256_set1_epi32(counts[r] << F::kOffsetBits));
      }
      const __m256 scale = scales.scale * _mm256_broadcast_ss(row_scales + r);
      __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_load_ps(sums));
      if constexpr (F::kHasMinimum) sum = _mm256_fmadd_ps(scales.minimum, _mm256_broadcast_ss(row_sums + r), sum);
      _mm256_store_ps(sums, sum);
    }
  }
}

// A tile of `rows` rows, a multiple of R, meets a pair of panels: out [2, rows, lanes].
template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  constexpr int64_t kShare = F::kGroup / F::kChunks;  // of the stream, fetched with every chunk
  // Registers hold the sums of all outputs of R rows where they are of one kind, beside constants that widen values.
  constexpr int kHalves = kMultipliesBytes || F::kBits == 4 ? 2 : 1;
  constexpr bool kKeeps = F::kBits > 4 || F::kIsNested;  // GCC itself keeps what little there is else
  typename KeptSide<F>::Memory memory;
  alignas(32) int8_t words[kKeepsWords<F> ? kMostRows * 2 * kChunk : 1];
  std::fill(out, out + 2 * rows * kLanes, 0.0f);
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup) {
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += rows * InputChunk::kBytes) {
      for (int64_t line = 0; line < kShare; line += 64) fetch_ahead(pair + chunk * kShare + kFetchAhead + line);
      const int8_t* x = InputChunk::values(input, rows);
      if (kKeepsWords<F> && rows > R) write_words(x, rows, words);
      for (int p = 0; p < 2; ++p) {
        const PackedSide<F> packed{pair + F::header_place(p), pair + F::values_place(p, chunk), chunk};
        const auto add_rows = [&]<int H>(const auto& side, const int8_t* values, int64_t row) __attribute__((always_inline)) {
#pragma GCC unroll 2
          for (int half = 0; half < 2; half += H) add_outputs<F, R, H>(side, half, values, input, rows, row, out + (p * rows + row) * kLanes);
        };
        if (kKeeps && rows > R) {
          const KeptSide<F> kept(packed, memory);
#pragma GCC unroll 1
          for (int64_t row = 0; row < rows; row += R) add_rows.template operator()<2>(kept, kKeepsWords<F> ? words + 2 * row * kChunk : x + row * kChunk, row);
        } else {
#pragma GCC unroll 1
          for (int64_t row = 0; row < rows; row += R) add_rows.template operator()<kHalves>(packed, x + row * kChunk, row);
        }
      }
    }
  }
}
#endif

}  // namespace yggdrasil
