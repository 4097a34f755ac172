// Linear layers over quantised weights with 256-bit vectors. Without VNNI, products of bytes are summed in 16 bits as
// long as they cannot overflow, then in 32 bits; 8-bit values are multiplied in 16 bits. The integer sums of a group,
// and the order in which they are scaled and added, are those of quantised_linear.h, so results are bitwise the same.
#pragma once

#include "quantised/quantised_group.h"
#include "quantised/quantised_avx2_unpack.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_VNNI)
constexpr int64_t kFetchAhead = 8192;  // bytes of weights; half of this distance made one row on one core a third slower

#ifdef YGG_SHORT_VNNI
inline __m256i add_products_of_bytes(__m256i sums, __m256i values, __m256i inputs) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sums, values, inputs);
#else
  return _mm256_dpbusd_epi32(sums, values, inputs);
#endif
}
#endif

// Returns the number of vectors whose products are accumulated in one sum: those with the same multiple, as many as fit
// in 16 bits without VNNI. A sum starts with the negated contribution of the offset, so its final value is that of
// signed values, and intermediate overflow wraps around harmlessly.
template <typename F>
constexpr int vectors_per_sum() {
  const int same_multiple = F::kScaling == Scaling::halved ? 4 : kChunkVectors<F>, largest = std::max(F::kOffset, F::kMaxValue - F::kOffset);
  return kMultipliesBytes || kIsInWords<F> ? same_multiple : std::min(same_multiple, 32767 / (2 * 127 * largest));
}
template <typename F>
constexpr int kChunkParts = kChunkVectors<F> / vectors_per_sum<F>();  // parts of a chunk

// NOTE: GCC reorders integer additions and computes all products first, which spills registers. An asm barrier on the
// sum keeps the order.
[[gnu::always_inline]] inline __m256i opaque(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

[[gnu::always_inline]] inline __m256i broadcast_four(const int8_t* bytes) {
  int32_t four;
  std::memcpy(&four, bytes, sizeof four);
  return _mm256_set1_epi32(four);
}

// Returns the initial value of a part's sums: the negated contribution of the offset.
template <typename F>
[[gnu::always_inline]] inline __m256i initial_sum(int32_t start) {
  const __m256i all = _mm256_set1_epi32(start);
  if constexpr (F::kOffset == 0) return _mm256_setzero_si256();
  if constexpr (F::kIsNested) return all;
  if constexpr (kMultipliesBytes) return _mm256_slli_epi32(all, F::kOffsetBits);
  return kIsInWords<F> ? _mm256_madd_epi16(all, _mm256_set1_epi16(F::kOffset)) : _mm256_slli_epi16(all, F::kOffsetBits);
}

// Sign-extends rows of bytes to 16-bit words. Vector 2v holds the first and third, vector 2v + 1 the second and fourth
// of inputs 4v to 4v + 3.
inline void write_words(const int8_t* x, int64_t rows, int8_t* words) {
  for (int64_t row = 0; row < rows; ++row, x += kChunk, words += 2 * kChunk) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    const __m256i first = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), second = _mm256_srai_epi16(bytes, 8);
    const __m256i low = _mm256_unpacklo_epi32(first, second), high = _mm256_unpackhi_epi32(first, second);
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(words + 32), _mm256_permute2x128_si256(low, high, 0x31));
  }
}

// Multiplies one part of a chunk, for H halves of a side, with R rows. `x` points to the rows' bytes or words.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void multiply_part(const Side& side, int part, int first_half, const int8_t* x, const int32_t* starts, __m256i (&sums)[H][R]) {
  constexpr int kVectorsPerSum = vectors_per_sum<F>();
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) sums[h][r] = initial_sum<F>(starts[r]);
#pragma GCC unroll 16
  for (int v = part * kVectorsPerSum; v < (part + 1) * kVectorsPerSum; ++v) {
    __m256i unpacked[H];
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) unpacked[h] = side.vector_at(v, first_half + h);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m256i inputs = broadcast_four(x + 4 * (kChunkVectors<F> * r + v));
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
#ifdef YGG_SHORT_VNNI
        sums[h][r] = add_products_of_bytes(sums[h][r], unpacked[h], inputs);
#else
        sums[h][r] = opaque(kIsInWords<F> ? _mm256_add_epi32(sums[h][r], _mm256_madd_epi16(unpacked[h], inputs))
                                           : _mm256_add_epi16(sums[h][r], _mm256_maddubs_epi16(unpacked[h], inputs)));
#endif
      }
    }
  }
}

// Returns the sums of a part as int32.
template <typename F>
[[gnu::always_inline]] inline __m256i whole_sums(__m256i sums) {
  return kMultipliesBytes || kIsInWords<F> ? sums : _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

// Multiplies a chunk of a side with R rows, scales the products and adds them to `out`, for eight (H = 1) or all (H =
// 2) outputs.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void add_outputs(const Side& side, int first_half, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, float* out) {
  const int32_t* starts = InputChunk::counts(input, rows) + row;
  const float *row_scales = InputChunk::scales(input, rows) + row, *row_sums = InputChunk::sums(input, rows) + row;
  __m256i parts[kChunkParts<F>][H][R];
#pragma GCC unroll 2
  for (int part = 0; part < kChunkParts<F>; ++part) multiply_part<F, R, H>(side, part, first_half, x, starts, parts[part]);
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h) {
    const HalfScales scales = side.scales(first_half + h);
    float* sums = out + (first_half + h) * kLanes / 2;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, sums += kLanes) {
      __m256i dot = whole_sums<F>(parts[0][h][r]);
      if constexpr (kChunkParts<F> > 1) dot = _mm256_add_epi32(dot, whole_sums<F>(parts[1][h][r]));
      const __m256 scale = scales.scale * _mm256_broadcast_ss(row_scales + r);
      __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_load_ps(sums));
      if constexpr (F::kHasMinimum) sum = _mm256_fmadd_ps(scales.minimum, _mm256_broadcast_ss(row_sums + r), sum);
      _mm256_store_ps(sums, sum);
    }
  }
}

// As add_outputs for nested formats: adds the products, times their integer multiples, to the sums of a group.
template <typename F, int R, int H, typename Side>
[[gnu::always_inline]] inline void add_multiples(const Side& side, int first_half, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, int32_t* group) {
#pragma GCC unroll 2
  for (int part = 0; part < kChunkParts<F>; ++part) {
    __m256i products[H][R];
    multiply_part<F, R, H>(side, part, first_half, x, InputChunk::half_offsets(input, rows, part) + row, products);
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      const __m256i multiples = side.scales(first_half + h).multiples[part];
      auto* sums = reinterpret_cast<__m256i*>(group) + first_half + h;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r, sums += 2) {
        const __m256i scaled = kMultipliesBytes ? _mm256_mullo_epi32(products[h][r], multiples) : _mm256_madd_epi16(products[h][r], multiples);
        _mm256_store_si256(sums, _mm256_add_epi32(scaled, _mm256_load_si256(sums)));
      }
    }
  }
}

// NOTE: GCC would replace this loop by a call of memset, which takes longer.
inline void clear(void* numbers, int64_t count) {
  __m256i zero = opaque(_mm256_setzero_si256());
  for (int64_t i = 0; i < count; i += 8) _mm256_store_si256(reinterpret_cast<__m256i*>(static_cast<int32_t*>(numbers) + i), zero);
}

// Multiplies a tile of `rows` rows, a multiple of R, with a pair of panels: out [2, rows, lanes].
template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  constexpr int64_t kChunkBytes = F::kGroup / F::kChunks;  // bytes prefetched per chunk
  // Halves of a side per call: both if their sums for R rows and the constants for unpacking fit in registers.
  constexpr int kHalves = kMultipliesBytes || F::kBits == 4 || F::kBits == 8 ? 2 : 1;
  constexpr bool kStoresUnpacked = F::kBits == 5 || F::kBits == 6 || (F::kBits == 4 && F::kIsNested);  // unpacking again takes longer than reloading
  UnpackedSide<F> unpacked;
  alignas(32) int8_t words[kIsInWords<F> ? kMaxTileRows * 2 * kChunk : 1];
  alignas(32) int32_t sums[F::kIsNested ? 2 * kMaxTileRows * kLanes : 1];  // integer sums of a group
  clear(out, 2 * rows * kLanes);
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup) {
    uint8_t* first_chunk = input;
    if constexpr (F::kIsNested) clear(sums, 2 * rows * kLanes);
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += rows * InputChunk::kBytes) {
      for (int64_t line = 0; line < kChunkBytes; line += 64) prefetch_l2(pair + chunk * kChunkBytes + kFetchAhead + line);
      const int8_t* x = InputChunk::values(input, rows);
      if constexpr (kIsInWords<F>) write_words(x, rows, words);
      for (int p = 0; p < 2; ++p) {
        const PackedSide<F> packed{pair + F::header_offset(p), pair + F::values_offset(p, chunk), chunk};
        const auto add_rows = [&]<int H>(const auto& side, int64_t row) __attribute__((always_inline)) {
          const int8_t* values = kIsInWords<F> ? words + 2 * row * kChunk : x + row * kChunk;
          const int64_t offset = (p * rows + row) * kLanes;
#pragma GCC unroll 2
          for (int half = 0; half < 2; half += H) {
            if constexpr (F::kIsNested) {
              add_multiples<F, R, H>(side, half, values, input, rows, row, sums + offset);
            } else {
              add_outputs<F, R, H>(side, half, values, input, rows, row, out + offset);
            }
          }
        };
        if (R < 3 || !kStoresUnpacked || (F::kBits == 4 && rows == R)) {
#pragma GCC unroll 1
          for (int64_t row = 0; row < rows; row += R) add_rows.template operator()<kHalves>(packed, row);
        } else {
          add_rows.template operator()<2>(StoringSide<F>{packed, unpacked}, 0);
          const UnpackedSide<F>* stored = &unpacked;
          // NOTE: GCC would keep the stored vectors in registers and spill sums instead.
          asm("" : "+r"(stored) : : "memory");
#pragma GCC unroll 1
          for (int64_t row = R; row < rows; row += R) add_rows.template operator()<2>(*stored, row);
        }
      }
    }
    if constexpr (F::kIsNested)
      for (int p = 0; p < 2; ++p) add_group<F>(pair + F::header_offset(p), first_chunk, rows, sums + p * rows * kLanes, out + p * rows * kLanes);
  }
}
#endif

}  // namespace yggdrasil
