// Linear layers over quantised weights: a chunk of weights is widened in registers once and meets all rows of a tile.
//
// Products of a chunk are summed exactly, as integers; sums of chunks are float32, in the order of the inputs, whatever
// the number of rows. A row therefore has the same bits in any company.
#pragma once

#include "linear_job.h"
#include "quantised_input.h"

namespace yggdrasil {

struct QuantisedJob {
  const uint8_t* packed;  // [P, panel bytes]
  int64_t format, inputs;
  LinearOutput output;
};

#if defined(YGG_AVX512) && defined(__AVX512VNNI__)
constexpr int64_t kFetchAhead = 2048;  // bytes of the stream of weights

template <typename F>
inline void widen_chunk(const uint8_t* values, __m512i (&wide)[8]) {
  const __m512i low_bits = _mm512_set1_epi8(15);
  if constexpr (F::kBits == 8) {
#pragma GCC unroll 16
    for (int v = 0; v < 8; ++v) wide[v] = _mm512_loadu_si512(values + 64 * v);
    return;
  }
#pragma GCC unroll 16
  for (int v = 0; v < 4; ++v) {
    const __m512i nibbles = _mm512_loadu_si512(values + 64 * v);
    wide[v] = _mm512_and_si512(nibbles, low_bits);
    wide[v + 4] = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), low_bits);
  }
  if constexpr (F::kBits == 5) {
    const __m512i fifth = _mm512_set1_epi8(16);
#pragma GCC unroll 16
    for (int v = 0; v < 8; ++v) {
      uint64_t bits;
      std::memcpy(&bits, values + kNibbleBytes + 8 * v, sizeof bits);
      wide[v] = _mm512_mask_add_epi8(wide[v], _cvtu64_mask64(bits), wide[v], fifth);
    }
  }
  if constexpr (F::kBits == 6) {
    const __m512i highest = _mm512_set1_epi8(48);
#pragma GCC unroll 16
    for (int i = 0; i < 2; ++i) {
      const __m512i pairs = _mm512_loadu_si512(values + kNibbleBytes + 64 * i);
      const __m512i moved[4] = {_mm512_slli_epi16(pairs, 4), _mm512_slli_epi16(pairs, 2), pairs, _mm512_srli_epi16(pairs, 2)};
#pragma GCC unroll 16
      for (int v = 0; v < 4; ++v) wide[4 * i + v] = _mm512_or_si512(wide[4 * i + v], _mm512_and_si512(moved[v], highest));
    }
  }
}

inline __m512 halves_to_floats(const uint8_t* halves) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))); }
inline __m128i load_16(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }

struct WideScales {
  __m512 scale[2], minimum;
};

template <typename F>
inline WideScales wide_scales(const uint8_t* header, int64_t chunk) {
  WideScales wide{};
  if constexpr (F::kScaling == Scaling::plain) {
    wide.scale[0] = halves_to_floats(header + 2 * chunk * kLanes);
  } else if constexpr (F::kScaling == Scaling::affine) {
    wide.scale[0] = halves_to_floats(header + 4 * chunk * kLanes);
    wide.minimum = halves_to_floats(header + (4 * chunk + 2) * kLanes);
  } else if constexpr (F::kScaling == Scaling::nested) {
    const uint8_t* multiples = header + (4 + 2 * chunk) * kLanes;
    wide.scale[0] = _mm512_mul_ps(halves_to_floats(header), _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_16(multiples))));
    const __m512 whole = _mm512_sub_ps(_mm512_setzero_ps(), halves_to_floats(header + 2 * kLanes));
    wide.minimum = _mm512_mul_ps(whole, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_16(multiples + kLanes))));
  } else {
    const uint8_t* multiples = header + (2 + 2 * chunk) * kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < 2; ++i)
      wide.scale[i] = _mm512_mul_ps(halves_to_floats(header), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(multiples + i * kLanes))));
  }
  return wide;
}

// Adds the products of vectors [First, Last) with one row's values to sum; count is minus the sum of those values.
template <typename F, int First, int Last>
inline __m512 add_products(const __m512i (&wide)[8], const int8_t* values, int32_t count, __m512 scale, __m512 sum) {
  __m512i dot = F::kOffset == 0 ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_set1_epi32(count), F::kOffsetBits);
#pragma GCC unroll 16
  for (int v = First; v < Last; ++v) {
    int32_t four;
    std::memcpy(&four, values + 4 * v, sizeof four);
    dot = _mm512_dpbusd_epi32(dot, wide[v], _mm512_set1_epi32(four));
  }
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
}

template <typename F, int M>
void quantised_tile(const uint8_t* panel, uint8_t* input, int64_t groups, float* out) {
  __m512 sums[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) sums[m] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; ++group, panel += F::kGroup) {
    for (int64_t line = 0; line < F::kHeader; line += 64) _mm_prefetch(panel + kFetchAhead + line, _MM_HINT_T0);
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += M * InputChunk::kBytes) {
      const uint8_t* values = panel + F::kHeader + chunk * F::kValues;
      for (int64_t line = 0; line < F::kValues; line += 64) _mm_prefetch(values + kFetchAhead + line, _MM_HINT_T0);
      __m512i wide[8];
      widen_chunk<F>(values, wide);
      const WideScales scales = wide_scales<F>(panel, chunk);
      const int8_t* x = InputChunk::values(input, M);
      const int32_t* counts = InputChunk::counts(input, M);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 row_scale = _mm512_set1_ps(InputChunk::scales(input, M)[m]);
        const __m512 scale = _mm512_mul_ps(scales.scale[0], row_scale);
        if constexpr (F::kScaling == Scaling::halved) {
          sums[m] = add_products<F, 0, 4>(wide, x + m * kChunk, counts[M + m], scale, sums[m]);
          sums[m] = add_products<F, 4, 8>(wide, x + m * kChunk, counts[2 * M + m], _mm512_mul_ps(scales.scale[1], row_scale), sums[m]);
        } else {
          sums[m] = add_products<F, 0, 8>(wide, x + m * kChunk, counts[m], scale, sums[m]);
        }
        if constexpr (F::kHasMinimum) sums[m] = _mm512_fmadd_ps(scales.minimum, _mm512_set1_ps(InputChunk::sums(input, M)[m]), sums[m]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(out + m * kLanes, sums[m]);
}
#else
template <typename F, int M>
void quantised_tile(const uint8_t* panel, uint8_t* input, int64_t groups, float* out) {
  std::fill(out, out + M * kLanes, 0.0f);
  for (int64_t group = 0; group < groups; ++group, panel += F::kGroup) {
    for (int64_t chunk = 0; chunk < F::kChunks; ++chunk, input += M * InputChunk::kBytes) {
      int16_t values[kChunk][kLanes];
      ChunkScales scales[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        scales[j] = chunk_scales<F>(panel, chunk, j);
        for (int i = 0; i < kChunk; ++i) values[i][j] = value_at<F>(panel + F::kHeader + chunk * F::kValues, j, i) - F::kOffset;
      }
      for (int m = 0; m < M; ++m) {
        const int8_t* x = InputChunk::values(input, M) + m * kChunk;
        const float row_scale = InputChunk::scales(input, M)[m], row_sum = InputChunk::sums(input, M)[m];
        int32_t dots[2][kLanes] = {};
        for (int i = 0; i < kChunk; ++i)
          for (int j = 0; j < kLanes; ++j) dots[i / 16][j] += values[i][j] * x[i];
        for (int j = 0; j < kLanes; ++j) {
          float& sum = out[m * kLanes + j];
          sum = std::fma(static_cast<float>(dots[0][j]), scales[j].scale[0] * row_scale, sum);
          sum = std::fma(static_cast<float>(dots[1][j]), scales[j].scale[1] * row_scale, sum);
          if constexpr (F::kHasMinimum) sum = std::fma(scales[j].minimum, row_sum, sum);
        }
      }
    }
  }
}
#endif

// Rows [row, row + rows), a tile of M with rows of zeros behind them, meet panels [begin, end).
template <int M>
void run_quantised_panels(const QuantisedJob& job, uint8_t* tile, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  with_format(job.format, [&](auto format) {
    using F = decltype(format);
    const int64_t groups = F::groups(job.inputs);
    for (int64_t panel = begin; panel < end; ++panel) {
      alignas(64) float out[M * kLanes];
      quantised_tile<F, M>(job.packed + panel * groups * F::kGroup, tile, groups, out);
      for (int64_t m = 0; m < rows; ++m) store_row(job.output, row + m, panel, out + m * kLanes);
    }
  });
}

using QuantisedRunner = void (*)(const QuantisedJob&, uint8_t*, int64_t, int64_t, int64_t, int64_t);

struct TileSize {
  int64_t rows;
  QuantisedRunner run;
};
constexpr TileSize kTileSizes[] = {{1, run_quantised_panels<1>},   {2, run_quantised_panels<2>},  {4, run_quantised_panels<4>},
                                   {6, run_quantised_panels<6>},   {8, run_quantised_panels<8>},  {12, run_quantised_panels<12>},
                                   {16, run_quantised_panels<16>}};

inline const TileSize& tile_size(int64_t rows) {
  return *std::find_if(std::begin(kTileSizes), std::end(kTileSizes), [rows](const TileSize& size) { return size.rows >= rows; });
}

}  // namespace yggdrasil
