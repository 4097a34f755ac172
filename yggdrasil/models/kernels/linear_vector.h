// Packed linear on the vector unit: up to 8 rows meet up to 4 panels in registers.
#pragma once

#include "linear_job.h"

namespace yggdrasil {

#ifdef YGG_AVX512
constexpr int64_t kLookAhead = 64;  // inputs, or pairs of them, whose weights are fetched before they are needed

inline __m512 fma_pair(__m512 acc, __m512i weights, __m512i x) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)x);
#else
  const __m512i high_mask = _mm512_set1_epi32(0xffff0000);
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_epi32(weights, high_mask)), _mm512_castsi512_ps(_mm512_and_epi32(x, high_mask)), acc);
#endif
}

// Arithmetic of several rows fills the time in which the processor would look ahead by itself.
template <int M>
inline void look_ahead(const uint32_t* weights) {
  if constexpr (M > 1) fetch_ahead(weights + kLookAhead * kPanel);
}

template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t k_steps, bool is_bf16, int64_t panel_words, float* out) {
  __m512 acc[NB][M];
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < M; ++m) acc[n][m] = _mm512_setzero_ps();
  if (is_bf16) {
    for (int64_t k = 0; k < k_steps; ++k) {
      __m512i weights[NB];
      for (int n = 0; n < NB; ++n) {
        const uint32_t* next = packed + n * panel_words + k * kPanel;
        weights[n] = _mm512_loadu_si512(next);
        look_ahead<M>(next);
      }
      for (int m = 0; m < M; ++m) {
        const __m512i broadcast = _mm512_set1_epi32(static_cast<int>(x[m * k_steps + k]));
        for (int n = 0; n < NB; ++n) acc[n][m] = fma_pair(acc[n][m], weights[n], broadcast);
      }
    }
  } else {
    const float* floats = reinterpret_cast<const float*>(x);
    for (int64_t k = 0; k < k_steps; ++k) {
      __m512 weights[NB];
      for (int n = 0; n < NB; ++n) {
        const uint32_t* next = packed + n * panel_words + k * kPanel;
        weights[n] = _mm512_loadu_ps(reinterpret_cast<const float*>(next));
        look_ahead<M>(next);
      }
      for (int m = 0; m < M; ++m) {
        const __m512 broadcast = _mm512_set1_ps(floats[m * k_steps + k]);
        for (int n = 0; n < NB; ++n) acc[n][m] = _mm512_fmadd_ps(weights[n], broadcast, acc[n][m]);
      }
    }
  }
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < M; ++m) _mm512_storeu_ps(out + (n * M + m) * kPanel, acc[n][m]);
}
#else
template <int M, int NB>
void tile(const uint32_t* packed, const uint32_t* x, int64_t k_steps, bool is_bf16, int64_t panel_words, float* out) {
  std::fill(out, out + NB * M * kPanel, 0.0f);
  for (int n = 0; n < NB; ++n) {
    const uint32_t* panel = packed + n * panel_words;
    float* block = out + n * M * kPanel;
    for (int64_t k = 0; k < k_steps; ++k) {
      for (int m = 0; m < M; ++m) {
        const uint32_t word = x[m * k_steps + k];
        float* row = block + m * kPanel;
        if (is_bf16) {
          const float low = from_bits(word << 16), high = from_bits(word & 0xffff0000u);
#pragma omp simd
          for (int j = 0; j < kPanel; ++j) {
            const uint32_t pair = panel[k * kPanel + j];
            row[j] += low * from_bits(pair << 16) + high * from_bits(pair & 0xffff0000u);
          }
        } else {
          const float value = from_bits(word);
#pragma omp simd
          for (int j = 0; j < kPanel; ++j) row[j] += value * from_bits(panel[k * kPanel + j]);
        }
      }
    }
  }
}
#endif

template <int M>
constexpr int panels_at_once() { return M <= 6 ? 4 : 3; }  // at most 24 accumulators

template <int M, int NB>
void run_tile(const LinearJob& job, int64_t row, int64_t panel) {
  alignas(64) float out[NB * M * kPanel];
  tile<M, NB>(job.packed + panel * job.panel_words, job.x + row * job.k_steps, job.k_steps, job.output.is_bf16, job.panel_words, out);
  for (int n = 0; n < NB; ++n)
    for (int m = 0; m < M; ++m) store_row(job.output, row + m, panel + n, out + (n * M + m) * kPanel);
}

template <int M>
void run_panels(const LinearJob& job, int64_t row, int64_t begin, int64_t end) {
  constexpr int NB = panels_at_once<M>();
  int64_t panel = begin;
  for (; panel + NB <= end; panel += NB) run_tile<M, NB>(job, row, panel);
  for (; panel < end; ++panel) run_tile<M, 1>(job, row, panel);
}

using PanelRunner = void (*)(const LinearJob&, int64_t, int64_t, int64_t);
constexpr PanelRunner kRunners[] = {nullptr,       run_panels<1>, run_panels<2>, run_panels<3>, run_panels<4>,
                                    run_panels<5>, run_panels<6>, run_panels<7>, run_panels<8>};

}  // namespace yggdrasil
