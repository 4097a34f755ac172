// Linear layers over quantised weights with 256-bit vectors. Without VNNI, products of bytes are summed in 16 bits as long
// as they cannot overflow, then in 32 bits; 8-bit values are multiplied in 16 bits. The integer sums of a group, and the
// order in which they are scaled and added, are those of quantised_linear.h, so results are bitwise the same.
#pragma once

#include "quantised/quantised_group.h"
#include "quantised/quantised_sides.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
constexpr int64_t kFetchAhead = 8192;  // bytes of the stream of weights; half of that made a row of one core a third slower

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

// Products of H halves of a side with R rows, those of nested formats times their multiples.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void multiply_chunk(const Side& side, int first_half, const int8_t* x, __m256i (&dots)[H][R]) {
  constexpr int kVectors = Side::kIsInWords ? 16 : 8, kOfOneMultiple = F::kScaling == Scaling::halved ? 4 : 8;
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
        const auto multiples = [&]() __attribute__((always_inline)) { return F::kIsNested ? side.scales(first_half + h).multiples[v / 4] : _mm256_set1_epi16(1); };
#ifdef YGG_SHORT_VNNI
        __m256i& sums = F::kIsNested ? partial[h][r] : dots[h][r];
        sums = add_products_of_bytes(sums, wide[h], inputs);
        if (F::kIsNested && (v + 1) % kOfOneMultiple == 0)
          dots[h][r] = _mm256_add_epi32(dots[h][r], _mm256_mullo_epi32(sums, multiples())), sums = zero;
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

// Adds a chunk of a side to the sums of R rows, eight or all of its outputs at a time; x are the rows' values.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void add_outputs(const Side& side, int first_half, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, float* out) {
  const int32_t* counts = InputChunk::counts(input, rows) + row;
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
      if constexpr (F::kOffset != 0 && !kKeepsWords<F>) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(counts[r] << F::kOffsetBits));
      const __m256 scale = scales.scale * _mm256_broadcast_ss(row_scales + r);
      __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_load_ps(sums));
      if constexpr (F::kHasMinimum) sum = _mm256_fmadd_ps(scales.minimum, _mm256_broadcast_ss(row_sums + r), sum);
      _mm256_store_ps(sums, sum);
    }
  }
}

// The same of a chunk's products, times their multiples, and the sums of a group.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void add_multiples(const Side& side, int first_half, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, int32_t* group) {
  const int32_t* counts = InputChunk::half_counts(input, rows) + row;
  __m256i dots[H][R];
  multiply_chunk<F, R, H>(side, first_half, x, dots);
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) {
    const HalfScales scales = side.scales(first_half + h);
    auto* sums = reinterpret_cast<__m256i*>(group) + first_half + h;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, sums += 2) {
      __m256i sum = _mm256_add_epi32(dots[h][r], _mm256_load_si256(sums));
      if constexpr (F::kOffset != 0) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(scales.offsets, _mm256_set1_epi32(counts[r])));
      _mm256_store_si256(sums, sum);
    }
  }
}

// A tile of `rows` rows, a multiple of R, meets a pair of panels: out [2, rows, lanes].
template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  constexpr int64_t kShare = F::kGroup / F::kChunks;  // of the stream, fetched with every chunk
  // Registers hold the sums of all outputs of R rows where they are of one kind, beside constants that widen values.
  constexpr int kHalves = kMultipliesBytes || F::kBits == 4 ? 2 : 1;
  constexpr int kKeptFrom = F::kBits == 6 ? 3 : 5;  // multiples of both halves leave too few registers to widen at each use
  constexpr bool kKeeps = F::kBits > 4 || F::kIsNested;  // GCC itself keeps what little there is else
  typename KeptSide<F>::Memory memory;
  alignas(32) int8_t words[kKeepsWords<F> ? kMostRows * 2 * kChunk : 1];
  alignas(32) int32_t sums[F::kIsNested ? 2 * kMostRows * kLanes : 1];  // of a group
  std::fill(out, out + 2 * rows * kLanes, 0.0f);
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup) {
    uint8_t* first_chunk = input;
    if constexpr (F::kIsNested) std::fill(sums, sums + 2 * rows * kLanes, 0);
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += rows * InputChunk::kBytes) {
      for (int64_t line = 0; line < kShare; line += 64) fetch_ahead(pair + chunk * kShare + kFetchAhead + line);
      const int8_t* x = InputChunk::values(input, rows);
      if (kKeepsWords<F> && rows > R) write_words(x, rows, words);
      for (int p = 0; p < 2; ++p) {
        const PackedSide<F> packed{pair + F::header_place(p), pair + F::values_place(p, chunk), chunk};
        const auto add_rows = [&]<int H>(const auto& side, const int8_t* values, int64_t row) __attribute__((always_inline)) {
          const int64_t place = (p * rows + row) * kLanes;
#pragma GCC unroll 2
          for (int half = 0; half < 2; half += H) {
            if constexpr (F::kIsNested) {
              add_multiples<F, R, H>(side, half, values, input, rows, row, sums + place);
            } else {
              add_outputs<F, R, H>(side, half, values, input, rows, row, out + place);
            }
          }
        };
        if (kKeeps && (rows > R || R >= kKeptFrom)) {
          const KeptSide<F> kept(packed, memory);
#pragma GCC unroll 1
          for (int64_t row = 0; row < rows; row += R) add_rows.template operator()<2>(kept, kKeepsWords<F> ? words + 2 * row * kChunk : x + row * kChunk, row);
        } else {
#pragma GCC unroll 1
          for (int64_t row = 0; row < rows; row += R) add_rows.template operator()<kHalves>(packed, x + row * kChunk, row);
        }
      }
    }
    if constexpr (F::kIsNested)
      for (int p = 0; p < 2; ++p) add_group<F>(pair + F::header_place(p), first_chunk, rows, sums + p * rows * kLanes, out + p * rows * kLanes);
  }
}
#endif

}  // namespace yggdrasil
