// Linear layers over packed weights with AVX-512 or AVX2: a tile of a few rows is multiplied with up to 4 panels, with
// the sums in registers. Several tiles are multiplied with a stretch of the panels along K before the next stretch, so
// that weights are read from memory once.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "linear/linear_job.h"

namespace yggdrasil {

#ifdef YGG_AVX2
// Software prefetch of weights. With many rows the arithmetic keeps the hardware prefetcher from running far enough
// ahead. Each tile that is multiplied with a stretch prefetches an equal part of the next stretch, so that memory is
// evenly busy.
struct WeightPrefetch {
  const uint32_t* next;  // next stretch of the first panel
  int64_t every, wait;   // steps between prefetches, and until the first

  template <int NB>
  [[gnu::always_inline]] void prefetch_step(int64_t k, int64_t panel_words) {
    if (wait-- != 0) return;
    wait = every - 1;
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n) prefetch_l2(next + n * panel_words + k * kPanel);
  }
};
#endif

#ifdef YGG_AVX512
constexpr int64_t kVectorRows = 8;  // largest number of rows of a tile
constexpr int panels_at_once(int64_t rows) { return rows <= 6 ? 4 : 3; }  // at most 24 sums, which fit in registers

// Accumulates the products of pairs of bf16 weights and inputs 2k and 2k + 1 of a row.
inline __m512 fma_pair(__m512 acc, __m512i weights, const uint32_t* row, int64_t k) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(row[k])));
#else
  const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
  const __m512 high = _mm512_castsi512_ps(_mm512_and_epi32(weights, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  acc = _mm512_fmadd_ps(low, _mm512_set1_ps(from_bits(row[2 * k])), acc);
  return _mm512_fmadd_ps(high, _mm512_set1_ps(from_bits(row[2 * k + 1])), acc);
#endif
}

// Multiplies `steps` inputs of M rows with NB panels, and adds to sums[NB][M][kPanel]; `is_first`: overwrites them.
template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t row_words, int64_t steps, bool is_bf16, int64_t panel_words, bool is_first,
          WeightPrefetch prefetch, float* sums) {
  // NOTE: a pointer for each of eight rows would spill registers. The asm barrier hides that these three pointers are
  // related, so the compiler addresses all rows relative to them with one common stride.
  const uint32_t *x3 = x + 3 * row_words, *x6 = x + 6 * row_words;
  asm("" : "+r"(x3), "+r"(x6));
  const auto row = [&](int m) { return (m < 3 ? x : m < 6 ? x3 : x6) + m % 3 * row_words; };
  __m512 acc[NB][M];  // NOTE: in registers only if every loop over it is unrolled early, hence the pragmas
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[n][m] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + (n * M + m) * kPanel);
  if (is_bf16) {
    for (int64_t k = 0; k < steps; ++k, packed += kPanel) {
      __m512i weights[NB];
#pragma GCC unroll 8
      for (int n = 0; n < NB; ++n) weights[n] = _mm512_loadu_si512(packed + n * panel_words);
      if constexpr (M > 1) prefetch.prefetch_step<NB>(k, panel_words);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < NB; ++n) acc[n][m] = fma_pair(acc[n][m], weights[n], row(m), k);
      }
    }
  } else {
    for (int64_t k = 0; k < steps; ++k, packed += kPanel) {
      __m512 weights[NB];
#pragma GCC unroll 8
      for (int n = 0; n < NB; ++n) weights[n] = _mm512_loadu_ps(reinterpret_cast<const float*>(packed + n * panel_words));
      if constexpr (M > 1) prefetch.prefetch_step<NB>(k, panel_words);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512 broadcast = _mm512_set1_ps(from_bits(row(m)[k]));
#pragma GCC unroll 8
        for (int n = 0; n < NB; ++n) acc[n][m] = _mm512_fmadd_ps(weights[n], broadcast, acc[n][m]);
      }
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) _mm512_store_ps(sums + (n * M + m) * kPanel, acc[n][m]);
}
#elif defined(YGG_AVX2)
constexpr int64_t kVectorRows = 6;  // 16 registers: up to 12 sums of half a panel, weights and an input
constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t row_words, int64_t steps, bool is_bf16, int64_t panel_words, bool is_first,
          WeightPrefetch prefetch, float* sums) {
  constexpr int kHalf = kPanel / 2;
  __m256 acc[NB][M][2];  // NOTE: as above
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        acc[n][m][half] = is_first ? _mm256_setzero_ps() : _mm256_load_ps(sums + (n * M + m) * kPanel + half * kHalf);
  const auto* input = reinterpret_cast<const float*>(x);
  const auto add = [&](int n, int half, __m256 weights, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[n][m][half] = _mm256_fmadd_ps(weights, _mm256_broadcast_ss(input + m * row_words + k), acc[n][m][half]);
  };
  const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  for (int64_t k = 0; k < steps; ++k, packed += kPanel) {
    if constexpr (M > 1) prefetch.prefetch_step<NB>(k, panel_words);
#pragma GCC unroll 8
    for (int n = 0; n < NB; ++n)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256 words = _mm256_loadu_ps(reinterpret_cast<const float*>(packed + n * panel_words + half * kHalf));
        if (is_bf16) {
          add(n, half, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16)), 2 * k);
          add(n, half, _mm256_and_ps(words, upper), 2 * k + 1);
        } else {
          add(n, half, words, k);
        }
      }
  }
#pragma GCC unroll 8
  for (int n = 0; n < NB; ++n)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) _mm256_store_ps(sums + (n * M + m) * kPanel + half * kHalf, acc[n][m][half]);
}
#else
constexpr int64_t kVectorRows = 8;
constexpr int panels_at_once(int64_t) { return 4; }

struct WeightPrefetch {
  const uint32_t* next;
  int64_t every, wait;
};

template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t row_words, int64_t steps, bool is_bf16, int64_t panel_words, bool is_first, WeightPrefetch,
          float* sums) {
  if (is_first) std::fill(sums, sums + NB * M * kPanel, 0.0f);
  for (int n = 0; n < NB; ++n) {
    const uint32_t* panel = packed + n * panel_words;
    float* block = sums + n * M * kPanel;
    for (int64_t k = 0; k < steps; ++k) {
      for (int m = 0; m < M; ++m) {
        const uint32_t* words = x + m * row_words;
        float* row = block + m * kPanel;
        if (is_bf16) {
          const float low = from_bits(words[2 * k]), high = from_bits(words[2 * k + 1]);
#pragma omp simd
          for (int j = 0; j < kPanel; ++j) {
            const uint32_t pair = panel[k * kPanel + j];
            row[j] += low * from_bits(pair << 16) + high * from_bits(pair & 0xffff0000u);
          }
        } else {
          const float value = from_bits(words[k]);
#pragma omp simd
          for (int j = 0; j < kPanel; ++j) row[j] += value * from_bits(panel[k * kPanel + j]);
        }
      }
    }
  }
}
#endif

constexpr int64_t kMaxTiles = 8;  // tiles that are multiplied with a stretch of weights while it is in cache
constexpr int64_t kMaxStretchSteps = 256;    // longest stretch, in steps along K
constexpr int64_t kMinPrefetchRows = 6;  // smallest tile that prefetches: with fewer rows it reduces memory throughput by 20 %

using Tile = void (*)(const uint32_t*, const uint32_t*, int64_t, int64_t, bool, int64_t, bool, WeightPrefetch, float*);
template <int M, int NB>
constexpr Tile tile_of() {
  if constexpr (M > 0 && NB <= panels_at_once(M)) return tile<M, NB>;
  return nullptr;
}
template <int NB>
constexpr auto kTiles = []<int... M>(std::integer_sequence<int, M...>) { return std::array<Tile, sizeof...(M)>{tile_of<M, NB>()...}; }(
    std::make_integer_sequence<int, kVectorRows + 1>{});

// Multiplies consecutive tiles of rows, from `row` on, with NB panels from `panel` on.
template <int NB>
void run_tiles(const LinearJob& job, int64_t row, std::span<const int64_t> tile_sizes, int64_t panel) {
  alignas(64) float sums[kMaxTiles * kVectorRows * NB * kPanel];
  const auto count = static_cast<int64_t>(tile_sizes.size()), stretches = std::max<int64_t>((job.k_steps + kMaxStretchSteps - 1) / kMaxStretchSteps, 1);
  const int64_t words_per_step = job.row_words / std::max<int64_t>(job.k_steps, 1);
  const int64_t skipped = count == 1 && tile_sizes[0] < kMinPrefetchRows ? job.k_steps : 0;  // past the last step: no prefetching
  const uint32_t *panels = job.packed + panel * job.panel_words, *next_panels = panels + NB * job.panel_words;
  for (int64_t stretch = 0, begin = 0, end = 0; stretch < stretches; ++stretch, begin = end) {
    end = job.k_steps * (stretch + 1) / stretches;
    const uint32_t *x = job.x + row * job.row_words + begin * words_per_step, *next = end < job.k_steps ? panels + end * kPanel : next_panels;
    float* tile_sums = sums;
    for (int64_t i = 0; i < count; ++i) {
      kTiles<NB>[tile_sizes[i]](panels + begin * kPanel, x, job.row_words, end - begin, job.output.is_bf16, job.panel_words, begin == 0, {next, count, i + skipped}, tile_sums);
      x += tile_sizes[i] * job.row_words;
      tile_sums += tile_sizes[i] * NB * kPanel;
    }
  }
  const float* tile_sums = sums;
  for (const int64_t rows : tile_sizes) {
    for (int n = 0; n < NB; ++n)
      for (int64_t m = 0; m < rows; ++m, tile_sums += kPanel) store_row(job.output, row + m, panel + n, tile_sums);
    row += rows;
  }
}

template <int NB>
int64_t run_panel_groups(const LinearJob& job, int64_t row, std::span<const int64_t> tile_sizes, int64_t begin, int64_t end) {
  for (; begin + NB <= end; begin += NB) run_tiles<NB>(job, row, tile_sizes, begin);
  return begin;
}

// Multiplies consecutive tiles of rows, from `row` on, with the panels [begin, end).
inline void run_panels(const LinearJob& job, int64_t row, std::span<const int64_t> tile_sizes, int64_t begin, int64_t end) {
  switch (panels_at_once(*std::max_element(tile_sizes.begin(), tile_sizes.end()))) {
    case 4: begin = run_panel_groups<4>(job, row, tile_sizes, begin, end); break;
    case 3: begin = run_panel_groups<3>(job, row, tile_sizes, begin, end); break;
    case 2: begin = run_panel_groups<2>(job, row, tile_sizes, begin, end); break;
  }
  run_panel_groups<1>(job, row, tile_sizes, begin, end);
}

}  // namespace yggdrasil
