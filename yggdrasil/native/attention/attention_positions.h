// Common parts of the bf16 attention kernels: scores and values are ordered by position, independent of cache slots.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention.h"
#include "common/input_rows.h"

namespace yggdrasil {

// Rows of a key head: row i is query head i % group of row i / group of the step. `query` and `out` are those of the
// head's first query head.
struct KeyHeadRows {
  const AttentionJob& job;
  const BFloat16 *query, *keys, *values;
  BFloat16* out;
  int64_t first, count;
  const float* sinks;  // attention sinks of the query heads; null for none

  const float* sink_of(int64_t i) const { return sinks ? sinks + head(i) : nullptr; }
  int64_t step_row(int64_t i) const { return (first + i) / job.group; }
  int64_t head(int64_t i) const { return (first + i) % job.group; }
  const std::vector<int64_t>& slots_of(int64_t i) const { return (*job.slots)[step_row(i)]; }
  // Returns the number of rows from i on that belong to the same row of the step, and so have the same path.
  int64_t rows_of_path(int64_t i) const { return std::min(count - i, job.group - head(i)); }
  const uint32_t* query_of(int64_t i) const {
    return reinterpret_cast<const uint32_t*>(query + step_row(i) * job.query_row_stride + head(i) * job.query_head_stride);
  }
  BFloat16* out_of(int64_t i) const { return out + (step_row(i) * job.query_heads + head(i)) * job.head_dim; }
};

#ifdef YGG_AVX512
inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Transposes [16, 16] words with the row strides `in_stride` and `out_stride`.
inline void transpose16(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(in + in_stride * i);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_ps(out + i * out_stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_ps(out + (i + 4) * out_stride, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_ps(out + (i + 8) * out_stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_ps(out + (i + 12) * out_stride, _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

// Interleaves two rows of values (null for zeros), so that each word holds one column of both. `columns` is a multiple
// of 32.
inline void interleave(const BFloat16* even, const BFloat16* odd, int64_t columns, uint32_t* out) {
  alignas(64) static constexpr int16_t kLow[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t c = 0; c < columns; c += 32) {
    const __m512i a = even ? _mm512_loadu_si512(even + c) : _mm512_setzero_si512();
    const __m512i b = odd ? _mm512_loadu_si512(odd + c) : _mm512_setzero_si512();
    _mm512_storeu_si512(out + c, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(out + c + 16, _mm512_permutex2var_epi16(a, high, b));
  }
}

// Range of the positions that some rows attend to.
struct Positions {
  int64_t start, last_slot, length;  // first position, a multiple of the block; end of the slots that are scored; number of positions, a multiple of the block

  // For the rows [first, last) of a step, in blocks of `block` positions.
  Positions(const AttentionJob& job, int64_t first, int64_t last, int64_t block) : start(job.context), last_slot(job.context) {
    int64_t longest = 0;
    for (int64_t row = first; row < last; ++row) {
      const auto& slots = (*job.slots)[row];
      for (const int64_t slot : slots) last_slot = std::max(last_slot, slot + 1);
      longest = std::max(longest, static_cast<int64_t>(slots.size()));
      start = std::min(start, job.first_key[row]);
    }
    start = start / block * block;
    length = round_up(std::max(last_slot, job.context + longest) - start, block);
  }

  Positions(const KeyHeadRows& rows, int64_t block) : Positions(rows.job, rows.step_row(0), rows.step_row(rows.count - 1) + 1, block) {}
};

// Reorders a row's scores from slots to positions (its path follows the context), masks the slots that it does not
// attend to, and writes softmax weights. Returns one over the sum of the weights before they are rounded. A sink
// (nullable) counts only in the sum.
inline float softmax_positions(const AttentionJob& job, int64_t row, const Positions& positions, float* scores, float* tree_scores, BFloat16* weights,
                             const float* sink) {
  const auto& slots = (*job.slots)[row];
  const int64_t first = job.first_key[row] - positions.start, context = job.context - positions.start;
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  std::copy(scores + context, scores + positions.last_slot - positions.start, tree_scores);
  for (size_t j = 0; j < slots.size(); ++j) scores[context + j] = tree_scores[slots[j] - job.context];
  const int64_t end = context + static_cast<int64_t>(slots.size());
  std::fill(scores, scores + first, minus_infinity);
  std::fill(scores + end, scores + positions.length, minus_infinity);
  if (job.softcap > 0.0f)
    for (int64_t i = first; i < end; ++i) scores[i] = scale_score(job, scores[i]);
  const __m512 scale = _mm512_set1_ps(job.softcap > 0.0f ? 1.0f : job.scale), masked = _mm512_set1_ps(minus_infinity);
  __m512 largest[2] = {masked, masked}, sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < positions.length; i += 32)
    for (int j = 0; j < 2; ++j) largest[j] = _mm512_max_ps(largest[j], _mm512_mul_ps(_mm512_loadu_ps(scores + i + 16 * j), scale));
  const float max_score = std::max(_mm512_reduce_max_ps(_mm512_max_ps(largest[0], largest[1])), sink ? *sink : minus_infinity);
  const __m512 maximum = _mm512_set1_ps(max_score);
  for (int64_t i = 0; i < positions.length; i += 32) {
    for (int j = 0; j < 2; ++j) {
      const __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + i + 16 * j), scale);
      const __mmask16 is_visible = _mm512_cmp_ps_mask(score, masked, _CMP_NEQ_UQ);
      const __m512 weight = _mm512_maskz_mov_ps(is_visible, exp16(_mm512_sub_ps(score, maximum)));
      sums[j] = _mm512_add_ps(sums[j], weight);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i + 16 * j), to_bf16(weight));
    }
  }
  const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
  return 1.0f / (sink ? sum + std::exp(*sink - max_score) : sum);
}
#endif

}  // namespace yggdrasil
