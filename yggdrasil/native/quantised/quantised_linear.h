// Linear layers over quantised weights: a chunk of a pair of panels is unpacked in registers once and multiplied with
// all rows of a tile, a few at a time.
//
// Products within a group, for which a row has one scale, are accumulated exactly as integers. Groups are accumulated
// in float32 in the order of the inputs. A row's result is therefore bitwise independent of the number of rows.
#pragma once

#include "linear/linear_output.h"
#include "quantised/quantised_vector.h"

namespace yggdrasil {

struct QuantisedJob {
  const uint8_t* packed;  // [pairs of panels, bytes]
  int64_t format, inputs;
  LinearOutput output;
};

// Stores the outputs `sums` [2, rows, lanes] of a tile and a pair of panels. The first `count` rows of the tile are the
// layer's rows from `row` on.
inline void store_pair(const QuantisedJob& job, int64_t row, int64_t count, int64_t rows, int64_t pair, const float* sums) {
  for (int64_t m = 0; m < count; ++m) store_pair_of_panels(job.output, row + m, 2 * pair, sums + m * kLanes, sums + (rows + m) * kLanes);
}

#ifdef YGG_VNNI
// Prefetch distance in bytes of weights, measured: with 2 KB, eight rows of Q8_0 took 50 % longer on Zen 4, and one row
// of Q4_0 20 % longer on Sapphire Rapids, where 8 KB is best for all formats.
#ifdef YGG_AMX
template <typename F, int R>
constexpr int64_t kFetchAhead = 8192;
#else
template <typename F, int R>
constexpr int64_t kFetchAhead = F::kIsNested ? 8192 : R <= 2 ? 2048 : 16384;
#endif

// Prefetches the weights of one chunk, from memory into L2 at a long distance, and from L2 into L1 at a short one. On
// Sapphire Rapids the latter makes 1, 2, 4 and 8 rows of a Q4_K_M file 7 to 15 % faster, but 8 rows of Q4_1 slower.
template <typename F, int R>
[[gnu::always_inline]] inline void prefetch_chunk(const uint8_t* chunk) {
  for (int64_t line = 0; line < F::kGroup / F::kChunks; line += 64) {
    prefetch_l2(chunk + kFetchAhead<F, R> + line);
#ifdef YGG_AMX
    if constexpr (F::kChunks > 1 || F::kBits > 4) __builtin_prefetch(chunk + std::max<int64_t>(F::kGroup, 2048) + line, 0, 3);
#endif
  }
}

template <typename F>
inline void unpack_chunk(const uint8_t* values, __m512i (&unpacked)[8]) {
  const __m512i low_bits = _mm512_set1_epi8(15);
  if constexpr (F::kBits == 8) {
#pragma GCC unroll 16
    for (int v = 0; v < 8; ++v) unpacked[v] = _mm512_loadu_si512(values + 64 * v);
    return;
  }
  if constexpr (F::kBits == 6) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m512i *four = unpacked + 4 * i, three[3];
#pragma GCC unroll 4
      for (int v = 0; v < 3; ++v) {
        three[v] = _mm512_loadu_si512(values + 192 * i + 64 * v);
        four[v] = _mm512_and_si512(three[v], _mm512_set1_epi8(63));
      }
      const __m512i low = _mm512_and_si512(_mm512_srli_epi16(three[0], 6), _mm512_set1_epi8(3));
      const __m512i middle = _mm512_and_si512(_mm512_srli_epi16(three[1], 4), _mm512_set1_epi8(12));
      four[3] = _mm512_or_si512(_mm512_or_si512(low, middle), _mm512_and_si512(_mm512_srli_epi16(three[2], 2), _mm512_set1_epi8(48)));
    }
    return;
  }
#pragma GCC unroll 16
  for (int v = 0; v < 4; ++v) {
    const __m512i nibbles = _mm512_loadu_si512(values + 64 * v);
    unpacked[v] = _mm512_and_si512(nibbles, low_bits);
    unpacked[v + 4] = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low_bits);
  }
  if constexpr (F::kIsTable) {
    const __m512i codes = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kMxfp4Values)));
#pragma GCC unroll 16
    for (int v = 0; v < 8; ++v) unpacked[v] = _mm512_shuffle_epi8(codes, unpacked[v]);
  }
  if constexpr (F::kBits == 5) {
    const __m512i high_bit = _mm512_set1_epi8(16), high_bits = _mm512_loadu_si512(values + kNibbleBytes);
#pragma GCC unroll 16
    for (int v = 0; v < 8; ++v)
      unpacked[v] = _mm512_mask_add_epi8(unpacked[v], _mm512_test_epi8_mask(high_bits, _mm512_set1_epi8(static_cast<char>(1 << v))), unpacked[v], high_bit);
  }
}

inline __m128i load_16(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }

// Scales of a chunk for 16 outputs. Nested formats have integer multiples of the group's scale, one for each half of
// the inputs.
struct ChunkScales {
  __m512 scale, minimum;
  __m512i multiples[2];
};

template <typename F>
inline ChunkScales load_chunk_scales(const uint8_t* header, int64_t chunk) {
  ChunkScales unpacked{};
  if constexpr (F::kScaling == Scaling::plain) {
    unpacked.scale = load16_float16(header + 2 * chunk * kLanes);
  } else if constexpr (F::kScaling == Scaling::power) {
    unpacked.scale = load16(reinterpret_cast<const BFloat16*>(header));
  } else if constexpr (F::kScaling == Scaling::affine) {
    unpacked.scale = load16_float16(header + 4 * chunk * kLanes);
    unpacked.minimum = load16_float16(header + (4 * chunk + 2) * kLanes);
  } else if constexpr (F::kScaling == Scaling::nested) {
    unpacked.multiples[0] = unpacked.multiples[1] = _mm512_cvtepu8_epi32(load_16(header + (4 + 2 * chunk) * kLanes));
  } else {
    for (int i = 0; i < 2; ++i) unpacked.multiples[i] = _mm512_cvtepi8_epi32(load_16(header + (2 + 2 * chunk + i) * kLanes));
  }
  return unpacked;
}

struct UnpackedPair {
  __m512i values[2][8];
  ChunkScales scales[2];
};

// Multiplies the vectors [First, Last) of both sides with R rows. `counts` are the negated sums of the rows' values, by
// which the offset is subtracted.
template <typename F, int R, int First, int Last>
[[gnu::always_inline]] inline void multiply_chunk(const UnpackedPair& unpacked, const int8_t* x, const int32_t* counts, __m512i (&dots)[2][R]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    __m512i count = _mm512_setzero_si512();
    if constexpr (F::kOffset != 0) {
      count = _mm512_set1_epi32(counts[r]);
      if constexpr (F::kScaling == Scaling::halved) count = First == 0 ? _mm512_slli_epi32(count, 16) : _mm512_and_si512(count, _mm512_set1_epi32(~0xffff));
      count = F::kScaling == Scaling::halved ? _mm512_srai_epi32(count, 16 - F::kOffsetBits) : _mm512_slli_epi32(count, F::kOffsetBits);
    }
    dots[0][r] = dots[1][r] = count;
  }
#pragma GCC unroll 16
  for (int v = First; v < Last; ++v) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * kChunk + 4 * v, sizeof four);
      const __m512i inputs = _mm512_set1_epi32(four);
      dots[0][r] = _mm512_dpbusd_epi32(dots[0][r], unpacked.values[0][v], inputs);
      dots[1][r] = _mm512_dpbusd_epi32(dots[1][r], unpacked.values[1][v], inputs);
    }
  }
}

// Multiplies a chunk with R rows, scales the products and adds them to `out`. The minimum's contribution is added in
// the same pass: storing and reloading the sums in between takes 20 % longer.
template <typename F, int R>
[[gnu::always_inline]] inline void add_chunk(const UnpackedPair& unpacked, uint8_t* input, int64_t rows, int64_t row, float* const (&out)[2]) {
  const float *row_scales = InputChunk::scales(input, rows) + row, *row_sums = InputChunk::sums(input, rows) + row;
  __m512i dots[2][R];
  multiply_chunk<F, R, 0, 8>(unpacked, InputChunk::values(input, rows) + row * kChunk, InputChunk::counts(input, rows) + row, dots);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const __m512 row_scale = _mm512_set1_ps(row_scales[r]);
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      float* sums = out[p] + r * kLanes;
      __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), _mm512_mul_ps(unpacked.scales[p].scale, row_scale), _mm512_load_ps(sums));
      if constexpr (F::kHasMinimum) sum = _mm512_fmadd_ps(unpacked.scales[p].minimum, _mm512_set1_ps(row_sums[r]), sum);
      _mm512_store_ps(sums, sum);
    }
  }
}

// As add_chunk for nested formats: adds the products, times their integer multiples, to the sums of a group. With the
// mask `accumulates` 0 (first chunk) the previous sums are ignored.
template <typename F, int R>
[[gnu::always_inline]] inline void add_multiples(const UnpackedPair& unpacked, uint8_t* input, int64_t rows, int64_t row, __mmask16 accumulates, int32_t* const (&group)[2]) {
  const int8_t* x = InputChunk::values(input, rows) + row * kChunk;
  const int32_t* counts = InputChunk::half_counts(input, rows) + row;
  __m512i dots[2][R], first[2][R];
  if constexpr (F::kScaling == Scaling::halved) {
    multiply_chunk<F, R, 0, 4>(unpacked, x, counts, first);
#pragma GCC unroll 16
    for (int i = 0; i < 2 * R; ++i) first[i / R][i % R] = _mm512_mullo_epi32(first[i / R][i % R], unpacked.scales[i / R].multiples[0]);
    multiply_chunk<F, R, 4, 8>(unpacked, x, counts, dots);
  } else {
    multiply_chunk<F, R, 0, 8>(unpacked, x, counts, dots);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * R; ++i) {
    const int p = i / R, r = i % R;
    int32_t* sums = group[p] + r * kLanes;
    __m512i sum = _mm512_add_epi32(_mm512_mullo_epi32(dots[p][r], unpacked.scales[p].multiples[1]), _mm512_maskz_load_epi32(accumulates, sums));
    if constexpr (F::kScaling == Scaling::halved) sum = _mm512_add_epi32(sum, first[p][r]);
    _mm512_store_si512(sums, sum);
  }
}

// Multiplies a tile of `rows` rows, a multiple of R, with a pair of panels: out [2, rows, lanes]. R rows at a time have
// 2R independent integer sums, which hides the latency of VNNI; the chunk's values stay in registers for all rows.
template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  // NOTE: GCC would replace this loop by a call of memset, which takes longer.
  __m512 zero = _mm512_setzero_ps();
  asm("" : "+v"(zero));
  for (int64_t i = 0; i < 2 * rows; ++i) _mm512_store_ps(out + i * kLanes, zero);
  alignas(64) int32_t sums[F::kIsNested ? 2 * kMaxTileRows * kLanes : 1];  // integer sums of a group
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup) {
    uint8_t* first_chunk = input;
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += rows * InputChunk::kBytes) {
      prefetch_chunk<F, R>(pair + chunk * (F::kGroup / F::kChunks));
      UnpackedPair unpacked;
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        unpack_chunk<F>(pair + F::values_offset(p, chunk), unpacked.values[p]);
        unpacked.scales[p] = load_chunk_scales<F>(pair + F::header_offset(p), chunk);
      }
#pragma GCC unroll 1
      for (int64_t row = 0; row < rows; row += R) {
        const int64_t places[] = {row * kLanes, (rows + row) * kLanes};
        if constexpr (F::kIsNested) {
          add_multiples<F, R>(unpacked, input, rows, row, chunk > 0 ? 0xffff : 0, {sums + places[0], sums + places[1]});
        } else {
          add_chunk<F, R>(unpacked, input, rows, row, {out + places[0], out + places[1]});
        }
      }
    }
    if constexpr (F::kIsNested)
      for (int p = 0; p < 2; ++p) add_group<F>(pair + F::header_offset(p), first_chunk, rows, sums + p * rows * kLanes, out + p * rows * kLanes);
  }
}
#elif !defined(YGG_AVX2)
template <typename F>
void panel_tile(const uint8_t* pair, int64_t side, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  std::fill(out, out + rows * kLanes, 0.0f);
  for (int64_t group = 0; group < groups; ++group, pair += F::kGroup, input += F::kChunks * rows * InputChunk::kBytes) {
    int32_t dots[kMaxTileRows][kLanes] = {}, minima[kMaxTileRows][kLanes] = {};
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk) {
      uint8_t* rounded = input + chunk * rows * InputChunk::kBytes;
      int16_t values[kChunk][kLanes];
      for (int j = 0; j < kLanes; ++j)
        for (int i = 0; i < kChunk; ++i) values[i][j] = value_at<F>(pair + F::values_offset(side, chunk), j, i) - F::kOffset;
      for (int64_t m = 0; m < rows; ++m) {
        const int8_t* x = InputChunk::values(rounded, rows) + m * kChunk;
        int32_t halves[2][kLanes] = {}, count = 0;
        for (int i = 0; i < kChunk; ++i) {
          for (int j = 0; j < kLanes; ++j) halves[i / 16][j] += values[i][j] * x[i];
          count += x[i];
        }
        for (int j = 0; j < kLanes; ++j) {
          const ChunkMultiples multiples = chunk_multiples<F>(pair + F::header_offset(side), chunk, j);
          dots[m][j] += multiples.scale[0] * halves[0][j] + multiples.scale[1] * halves[1][j];
          minima[m][j] += multiples.minimum * count;
        }
      }
    }
    for (int j = 0; j < kLanes; ++j) {
      const GroupScales scales = group_scales<F>(pair + F::header_offset(side), j);
      for (int64_t m = 0; m < rows; ++m) {
        const float row_scale = InputChunk::scales(input, rows)[m];
        float& sum = out[m * kLanes + j];
        if constexpr (F::kIsNested) {
          float scaled = static_cast<float>(dots[m][j]) * scales.scale;
          if constexpr (F::kHasMinimum) scaled = std::fma(static_cast<float>(minima[m][j]), scales.minimum, scaled);
          sum = std::fma(scaled, row_scale, sum);
        } else {
          sum = std::fma(static_cast<float>(dots[m][j]), scales.scale * row_scale, sum);
          if constexpr (F::kHasMinimum) sum = std::fma(scales.minimum, InputChunk::sums(input, rows)[m], sum);
        }
      }
    }
  }
}

template <typename F, int R>
void quantised_tile(const uint8_t* pair, uint8_t* input, int64_t groups, int64_t rows, float* out) {
  for (int p = 0; p < 2; ++p) panel_tile<F>(pair, p, input, groups, rows, out + p * rows * kLanes);
}
#endif

}  // namespace yggdrasil
