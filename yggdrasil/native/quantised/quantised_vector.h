// Linear layers over quantised weights with 256-bit vectors, or with 512-bit vectors where the processor has no VNNI.
// Without VNNI, products of bytes are summed in 16 bits as long as they cannot overflow, then in 32 bits; 8-bit values
// are multiplied in 16 bits. The integer sums of a group, and the order in which they are scaled and added, are those of
// quantised_linear.h, so results are bitwise the same.
#pragma once

#include "quantised/quantised_group.h"
#include "quantised/quantised_unpack.h"

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
[[gnu::always_inline]] inline IntVector opaque(IntVector sum) {
  asm("" : "+v"(sum));
  return sum;
}

[[gnu::always_inline]] inline IntVector broadcast_four(const int8_t* bytes) {
  int32_t four;
  std::memcpy(&four, bytes, sizeof four);
  return YGG_VECTOR(set1_epi32)(four);
}

// Returns the initial value of a part's sums: the negated contribution of the offset.
template <typename F>
[[gnu::always_inline]] inline IntVector initial_sum(int32_t start) {
  const IntVector all = YGG_VECTOR(set1_epi32)(start);
  if constexpr (F::kOffset == 0) return IntVector{};
  if constexpr (F::kIsNested) return all;
  if constexpr (kMultipliesBytes) return YGG_VECTOR(slli_epi32)(all, F::kOffsetBits);
  return kIsInWords<F> ? YGG_VECTOR(madd_epi16)(all, YGG_VECTOR(set1_epi16)(F::kOffset)) : YGG_VECTOR(slli_epi16)(all, F::kOffsetBits);
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

// Multiplies one part of a chunk with R rows, for H vectors from number `first` on. `x` points to the rows' bytes or
// words.
template <typename F, int R, int H, typename Vectors>
[[gnu::always_inline]] inline void multiply_part(const Vectors& weights, int part, int first, const int8_t* x, const int32_t* starts, IntVector (&sums)[H][R]) {
  constexpr int kVectorsPerSum = vectors_per_sum<F>();
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) sums[h][r] = initial_sum<F>(starts[r]);
#pragma GCC unroll 16
  for (int v = part * kVectorsPerSum; v < (part + 1) * kVectorsPerSum; ++v) {
    IntVector unpacked[H];
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) unpacked[h] = weights.vector_at(v, first + h);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const IntVector inputs = broadcast_four(x + 4 * (kChunkVectors<F> * r + v));
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
#ifdef YGG_SHORT_VNNI
        sums[h][r] = add_products_of_bytes(sums[h][r], unpacked[h], inputs);
#else
        sums[h][r] = opaque(kIsInWords<F> ? YGG_VECTOR(add_epi32)(sums[h][r], YGG_VECTOR(madd_epi16)(unpacked[h], inputs))
                                           : YGG_VECTOR(add_epi16)(sums[h][r], YGG_VECTOR(maddubs_epi16)(unpacked[h], inputs)));
#endif
      }
    }
  }
}

// Returns the sums of a part as int32.
template <typename F>
[[gnu::always_inline]] inline IntVector whole_sums(IntVector sums) {
  return kMultipliesBytes || kIsInWords<F> ? sums : YGG_VECTOR(madd_epi16)(sums, YGG_VECTOR(set1_epi16)(1));
}

// Multiplies a chunk with R rows, scales the products and adds them to `out`, for H vectors from number `first` on. The
// outputs of a vector lie `stride` after those of the vector before.
template <typename F, int R, int H, typename Vectors>
[[gnu::always_inline]] inline void add_outputs(const Vectors& weights, int first, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, float* out, int64_t stride) {
  const int32_t* starts = InputChunk::counts(input, rows) + row;
  const float *row_scales = InputChunk::scales(input, rows) + row, *row_sums = InputChunk::sums(input, rows) + row;
  IntVector parts[kChunkParts<F>][H][R];
#pragma GCC unroll 2
  for (int part = 0; part < kChunkParts<F>; ++part) multiply_part<F, R, H>(weights, part, first, x, starts, parts[part]);
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h) {
    const VectorScales scales = weights.scales(first + h);
    float* sums = out + (first + h) * stride;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, sums += kLanes) {
      IntVector dot = whole_sums<F>(parts[0][h][r]);
      if constexpr (kChunkParts<F> > 1) dot = YGG_VECTOR(add_epi32)(dot, whole_sums<F>(parts[1][h][r]));
      const FloatVector scale = scales.scale * YGG_VECTOR(set1_ps)(row_scales[r]);
      FloatVector sum = YGG_VECTOR(fmadd_ps)(YGG_VECTOR(cvtepi32_ps)(dot), scale, YGG_VECTOR(load_ps)(sums));
      if constexpr (F::kHasMinimum) sum = YGG_VECTOR(fmadd_ps)(scales.minimum, YGG_VECTOR(set1_ps)(row_sums[r]), sum);
      YGG_VECTOR(store_ps)(sums, sum);
    }
  }
}

// As add_outputs for nested formats: adds the products, times their integer multiples, to the sums of a group.
template <typename F, int R, int H, typename Vectors>
[[gnu::always_inline]] inline void add_multiples(const Vectors& weights, int first, const int8_t* x, uint8_t* input, int64_t rows, int64_t row, int32_t* group, int64_t stride) {
#pragma GCC unroll 2
  for (int part = 0; part < kChunkParts<F>; ++part) {
    IntVector products[H][R];
    multiply_part<F, R, H>(weights, part, first, x, InputChunk::half_offsets(input, rows, part) + row, products);
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h) {
      const IntVector multiples = weights.scales(first + h).multiples[part];
      auto* sums = reinterpret_cast<IntVector*>(group + (first + h) * stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r, sums += kSideVectors) {
        const IntVector scaled = kMultipliesBytes ? YGG_VECTOR(mullo_epi32)(products[h][r], multiples) : YGG_VECTOR(madd_epi16)(products[h][r], multiples);
        *sums = YGG_VECTOR(add_epi32)(scaled, *sums);
      }
    }
  }
}

// NOTE: GCC would replace this loop by a call of memset, which takes longer.
inline void clear(void* numbers, int64_t count) {
  const IntVector zero = opaque(IntVector{});
  for (int64_t i = 0; i < count; i += kVectorLanes) *reinterpret_cast<IntVector*>(static_cast<int32_t*>(numbers) + i) = zero;
}

// Multiplies a tile of `rows` rows, a multiple of R, with a pair of panels: out [2, rows, lanes].
template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  constexpr int64_t kChunkBytes = F::kGroup / F::kChunks, kFetched = kChunkBytes / kSideVectors;  // bytes prefetched per chunk, and with its vectors
  // Vectors multiplied at once: all that share inputs, if their sums for R rows and the constants for unpacking fit in
  // registers.
  constexpr int kAtOnce = kSideVectors == 1 || kMultipliesBytes || F::kBits == 4 || F::kBits == 8 ? kSharing : 1;
  constexpr bool kStoresUnpacked = F::kBits == 5 || F::kBits == 6 || (F::kBits == 4 && F::kIsNested);  // unpacking again takes longer than reloading
  const int64_t stride = kSideVectors == 1 ? rows * kLanes : kVectorLanes;
  UnpackedChunk<F> unpacked;
  alignas(64) int8_t words[kIsInWords<F> ? kMaxTileRows * 2 * kChunk : 1];
  alignas(64) int32_t sums[F::kIsNested ? 2 * kMaxTileRows * kLanes : 1];  // integer sums of a group
  clear(out, 2 * rows * kLanes);
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup) {
    uint8_t* first_chunk = input;
    if constexpr (F::kIsNested) clear(sums, 2 * rows * kLanes);
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += rows * InputChunk::kBytes) {
      const int8_t* x = InputChunk::values(input, rows);
      if constexpr (kIsInWords<F>) write_words(x, rows, words);
      for (int p = 0; p < kSideVectors; ++p) {
        const PackedChunk<F> packed{pair, chunk, p * kSharing};
        const FetchingChunk<F, kFetched> fetching{packed, pair + chunk * kChunkBytes + p * kFetched + kFetchAhead};
        const auto add_rows = [&]<int H>(const auto& weights, int64_t row) __attribute__((always_inline)) {
          const int8_t* values = kIsInWords<F> ? words + 2 * row * kChunk : x + row * kChunk;
          const int64_t offset = (p * rows + row) * kLanes;
#pragma GCC unroll 2
          for (int first = 0; first < kSharing; first += H) {
            if constexpr (F::kIsNested) {
              add_multiples<F, R, H>(weights, first, values, input, rows, row, sums + offset, stride);
            } else {
              add_outputs<F, R, H>(weights, first, values, input, rows, row, out + offset, stride);
            }
          }
        };
        if (R < 3 || !kStoresUnpacked || (F::kBits == 4 && rows == R)) {
          add_rows.template operator()<kAtOnce>(fetching, 0);
#pragma GCC unroll 1
          for (int64_t row = R; row < rows; row += R) add_rows.template operator()<kAtOnce>(packed, row);
        } else {
          add_rows.template operator()<kSharing>(StoringChunk<F, FetchingChunk<F, kFetched>>{fetching, unpacked}, 0);
          const UnpackedChunk<F>* stored = &unpacked;
          // NOTE: GCC would keep the stored vectors in registers and spill sums instead.
          asm("" : "+r"(stored) : : "memory");
#pragma GCC unroll 1
          for (int64_t row = R; row < rows; row += R) add_rows.template operator()<kSharing>(*stored, row);
        }
      }
    }
    if constexpr (F::kIsNested)
      for (int p = 0; p < 2; ++p) add_group<F>(pair + F::header_offset(p), first_chunk, rows, sums + p * rows * kLanes, out + p * rows * kLanes);
  }
}
#endif

}  // namespace yggdrasil
