// Attention of a few rows to a cache and to their paths in a tree.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace yggdrasil {

constexpr int kKeyBlock = 64;  // keys that stay in the first-level cache while all rows visit them

#ifdef YGG_AVX512
inline __m512 exp16(__m512 x) {  // Cephes polynomial; x <= 0 after the maximum is subtracted
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.3f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const BFloat16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#endif

// Dot products of one query with four keys. One and the same order of additions for every key, wherever it lies.
#ifdef YGG_AVX512
inline __m128 reduce4(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 quads = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

inline __m512 dot_step(__m512 acc, const float* query, const float* key) {
  return _mm512_fmadd_ps(_mm512_loadu_ps(query), _mm512_loadu_ps(key), acc);
}
constexpr int64_t dot_width(const float*) { return 16; }
#ifdef __AVX512BF16__
inline __m512 dot_step(__m512 acc, const BFloat16* query, const BFloat16* key) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(query), (__m512bh)_mm512_loadu_si512(key));
}
constexpr int64_t dot_width(const BFloat16*) { return 32; }
#else
inline __m512 dot_step(__m512 acc, const BFloat16* query, const BFloat16* key) {
  return _mm512_fmadd_ps(load16(query), load16(key), acc);
}
constexpr int64_t dot_width(const BFloat16*) { return 16; }
#endif
#endif

template <typename T>
inline void dot4(const T* query, const T* const keys[4], int64_t size, float* out) {
  int64_t d = 0;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#ifdef YGG_AVX512
  const int64_t width = dot_width(query);
  __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (; d + width <= size; d += width)
    for (int j = 0; j < 4; ++j) acc[j] = dot_step(acc[j], query + d, keys[j] + d);
  _mm_storeu_ps(sums, reduce4(acc[0], acc[1], acc[2], acc[3]));
#endif
  for (int j = 0; j < 4; ++j) {
    for (int64_t i = d; i < size; ++i) sums[j] += widen(query[i]) * widen(keys[j][i]);
    out[j] = sums[j];
  }
}

template <typename T>
inline void accumulate(float* acc, float weight, const T* value, int64_t size) {
  int64_t d = 0;
#ifdef YGG_AVX512
  const __m512 w = _mm512_set1_ps(weight);
  for (; d + 16 <= size; d += 16) _mm512_storeu_ps(acc + d, _mm512_fmadd_ps(w, load16(value + d), _mm512_loadu_ps(acc + d)));
#endif
  for (; d < size; ++d) acc[d] += weight * widen(value[d]);
}

#ifdef YGG_AVX512
// The common head sizes keep their accumulators in registers over a whole block of keys.
template <typename T, int R>
inline void accumulate_block(float* acc, const float* weights, const T* values, int64_t count) {
  __m512 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm512_loadu_ps(acc + 16 * r);
  for (int64_t i = 0; i < count; ++i) {
    const __m512 w = _mm512_set1_ps(weights[i]);
    for (int r = 0; r < R; ++r) sums[r] = _mm512_fmadd_ps(w, load16(values + i * R * 16 + 16 * r), sums[r]);
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(acc + 16 * r, sums[r]);
}
#endif

template <typename T>
inline void accumulate_keys(float* acc, const float* weights, const T* values, int64_t count, int64_t size) {
#ifdef YGG_AVX512
  if (size == 64) return accumulate_block<T, 4>(acc, weights, values, count);
  if (size == 128) return accumulate_block<T, 8>(acc, weights, values, count);
#endif
  for (int64_t i = 0; i < count; ++i) accumulate(acc, weights[i], values + i * size, size);
}

// Turns scores into weights in place and returns their sum. Lanes are fixed by the index alone.
inline float softmax_weights(float* scores, int64_t count) {
  float maximum = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
  int64_t i = 0;
#ifdef YGG_AVX512
  __m512 largest = _mm512_set1_ps(maximum);
  for (; i + 16 <= count; i += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
  maximum = _mm512_reduce_max_ps(largest);
#endif
  for (; i < count; ++i) maximum = std::max(maximum, scores[i]);
  i = 0;
#ifdef YGG_AVX512
  __m512 lanes = _mm512_setzero_ps();
  for (; i < count; i += 16) {
    const __mmask16 mask = count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
    const __m512 weight = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + i), _mm512_set1_ps(maximum))));
    _mm512_mask_storeu_ps(scores + i, mask, weight);
    lanes = _mm512_add_ps(lanes, weight);
  }
  sum = _mm512_reduce_add_ps(lanes);
#else
  for (; i < count; ++i) sum += scores[i] = std::exp(scores[i] - maximum);
#endif
  return sum;
}

struct AttentionJob {
  int64_t rows, query_heads, group, head_dim, capacity, context, context_stride;
  int64_t query_head_stride, query_row_stride;
  float scale, softcap;
  const int64_t* first_key;                        // [W] first context key each row sees (its window)
  const std::vector<std::vector<int64_t>>* slots;  // [W] tree slots each row sees, in order of depth
};

inline float finish_score(const AttentionJob& job, float score) {
  score *= job.scale;
  return job.softcap > 0.0f ? job.softcap * std::tanh(score / job.softcap) : score;
}

// Scores of ``count`` keys, in fours; a last group repeats its last key.
template <typename T, typename SlotOf>
inline void score_keys(const AttentionJob& job, const T* query, const T* keys, int64_t count, const SlotOf& slot_of, float* scores) {
  for (int64_t i = 0; i < count; i += 4) {
    const T* four[4];
    float out[4];
    for (int64_t j = 0; j < 4; ++j) four[j] = keys + slot_of(std::min(i + j, count - 1)) * job.head_dim;
    dot4(query, four, job.head_dim, out);
    for (int64_t j = 0; j < std::min<int64_t>(4, count - i); ++j) scores[i + j] = finish_score(job, out[j]);
  }
}

template <typename T>
void attend_head(const AttentionJob& job, const T* query, const T* keys, const T* values, T* out, float* scratch) {
  const int64_t d = job.head_dim;
  float* sums = scratch;                          // [W, D]
  float* inverse = sums + job.rows * d;           // [W] one over the sum of weights
  float* widened = inverse + job.rows;            // [kKeyBlock, D] values of a block, for all rows
  float* weights = widened + kKeyBlock * d;       // [W, context + T], compact: context keys seen, then tree keys seen
  std::fill(sums, sums + job.rows * d, 0.0f);

  for (int64_t begin = 0; begin < job.context; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, job.context);
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t first = std::max(begin, job.first_key[row]);
      float* scores = weights + row * job.context_stride - job.first_key[row];
      if (first < end)
        score_keys(job, query + row * job.query_row_stride, keys, end - first, [&](int64_t i) { return first + i; }, scores + first);
    }
  }
  for (int64_t row = 0; row < job.rows; ++row) {
    const auto& slots = (*job.slots)[row];
    const int64_t seen = job.context - job.first_key[row], count = static_cast<int64_t>(slots.size());
    float* scores = weights + row * job.context_stride;
    score_keys(job, query + row * job.query_row_stride, keys, count, [&](int64_t i) { return slots[i]; }, scores + seen);
    inverse[row] = 1.0f / softmax_weights(scores, seen + count);
  }
  for (int64_t begin = 0; begin < job.context; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, job.context);
    const bool is_shared = job.rows > 1;  // widening the values once pays from the second row on; the numbers are the same
    if (is_shared)
      for (int64_t i = 0; i < (end - begin) * d; ++i) widened[i] = widen(values[begin * d + i]);
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t first = std::max(begin, job.first_key[row]);
      if (first >= end) continue;
      const float* seen_weights = weights + row * job.context_stride + first - job.first_key[row];
      if (is_shared)
        accumulate_keys(sums + row * d, seen_weights, widened + (first - begin) * d, end - first, d);
      else
        accumulate_keys(sums + row * d, seen_weights, values + first * d, end - first, d);
    }
  }
  for (int64_t row = 0; row < job.rows; ++row) {
    const auto& slots = (*job.slots)[row];
    const float* tail = weights + row * job.context_stride + job.context - job.first_key[row];
    for (size_t t = 0; t < slots.size(); ++t) accumulate_keys(sums + row * d, tail + t, values + slots[t] * d, 1, d);
    T* target = out + row * job.query_heads * d;
    for (int64_t j = 0; j < d; ++j) target[j] = static_cast<T>(sums[row * d + j] * inverse[row]);
  }
}

template <typename T>
void write_rows(const Tensor& rows, Tensor& cache, int64_t start) {  // rows [1, H, W, D] -> cache [H, S, D]
  const int64_t heads = rows.size(1), width = rows.size(2), d = rows.size(3), capacity = cache.size(1);
  const T* source = rows.const_data_ptr<T>();
  T* target = cache.mutable_data_ptr<T>();
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t w = 0; w < width; ++w)
      std::memcpy(target + (h * capacity + start + w) * d, source + h * rows.stride(1) + w * rows.stride(2), d * sizeof(T));
}

}  // namespace yggdrasil
