// bf16 attention with AVX2: keys and values are converted to float32 once for all query heads that read them, and keys
// are transposed to [channels, keys].
//
// A row's products are accumulated in the order of channels, then of keys, independent of the other rows. A row of a
// tree therefore has bitwise the same results as in a plain step.
#pragma once

#include <algorithm>

#include "attention/attention_positions.h"

namespace yggdrasil {

#if defined(YGG_AVX2) && !defined(YGG_AVX512)
constexpr int64_t kKeysPerBlock = 16, kValuesPerBlock = 32;  // keys and values per block
constexpr int kRegisterRows = 6;                         // rows whose sums fit in registers
constexpr int64_t kMaxUnitRows = 48, kMinUnitRows = 12;  // limits of the rows per unit of work
constexpr int64_t kScoreBytes = 256 * 1024;          // bytes of the scores of a unit of work

inline bool fits_avx2(int64_t head_dim) { return head_dim % 16 == 0; }
inline int64_t avx2_rows(const AttentionJob& job) { return std::clamp(kScoreBytes / (4 * job.context_stride + 1), kMinUnitRows, kMaxUnitRows); }
inline int64_t avx2_words(const AttentionJob& job, int64_t rows) {
  return rows * (job.context_stride + kKeysPerBlock + 2 * job.head_dim) + kValuesPerBlock * job.head_dim + 16;
}

struct Avx2Rows : KeyHeadRows {
  int64_t start, last_slot, length;  // slots [start, last_slot) are scored; `length` is the row stride of `scores`
  float *block, *queries, *sums, *scores;  // [32, D] or [D, 16], [count, D] each, [count, length]
};

// Writes 16 keys as [D, 16] float32. Only the first `valid` keys exist; the last one is repeated.
inline void transpose_keys(const BFloat16* keys, int64_t valid, int64_t d, float* to) {
  for (int64_t half = 0; half < kKeysPerBlock; half += 8)
    for (int64_t c = 0; c < d; c += 16) {
      __m256 rows[8];  // pairs of bf16 channels
      for (int64_t i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(keys + std::min(half + i, valid - 1) * d + c));
      for (int64_t i = 0; i < 8; i += 4) {
        const __m256 low[2] = {_mm256_unpacklo_ps(rows[i], rows[i + 1]), _mm256_unpacklo_ps(rows[i + 2], rows[i + 3])};
        const __m256 high[2] = {_mm256_unpackhi_ps(rows[i], rows[i + 1]), _mm256_unpackhi_ps(rows[i + 2], rows[i + 3])};
        rows[i] = _mm256_shuffle_ps(low[0], low[1], 0x44), rows[i + 1] = _mm256_shuffle_ps(low[0], low[1], 0xee);
        rows[i + 2] = _mm256_shuffle_ps(high[0], high[1], 0x44), rows[i + 3] = _mm256_shuffle_ps(high[0], high[1], 0xee);
      }
      for (int64_t pair = 0; pair < 8; ++pair) {
        const __m256 four = rows[pair % 4], others = rows[pair % 4 + 4];
        const __m256i channels = _mm256_castps_si256(pair < 4 ? _mm256_permute2f128_ps(four, others, 0x20) : _mm256_permute2f128_ps(four, others, 0x31));
        auto* target = reinterpret_cast<__m256i*>(to + (c + 2 * pair) * kKeysPerBlock + half);
        _mm256_storeu_si256(target, _mm256_slli_epi32(channels, 16));
        _mm256_storeu_si256(target + kKeysPerBlock / 8, _mm256_and_si256(channels, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
      }
    }
}

// Accumulates `count` vectors with a stride of `stride` floats, each times the row's factor for it, in the sums of R
// rows.
template <int R>
inline void add_vectors(const float* vectors, int64_t count, int64_t stride, const float* factors, int64_t factors_stride, float* sums, int64_t sums_stride) {
  Lanes acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = load16(sums + r * sums_stride);
  for (int64_t i = 0; i < count; ++i, vectors += stride) {
    const Lanes vector = load16(vectors);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = fmadd(broadcast(factors[r * factors_stride + i]), vector, acc[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store16(sums + r * sums_stride, acc[r]);
}

// Calls add_vectors for `rows` rows, as many at a time as registers hold.
template <int R = kRegisterRows>
inline void add_to_rows(int64_t rows, const float* vectors, int64_t count, int64_t stride, const float* factors, int64_t factors_stride, float* sums,
                        int64_t sums_stride) {
  for (; rows >= R; rows -= R, factors += R * factors_stride, sums += R * sums_stride)
    add_vectors<R>(vectors, count, stride, factors, factors_stride, sums, sums_stride);
  if constexpr (R > 1)
    if (rows > 0) add_to_rows<R - 1>(rows, vectors, count, stride, factors, factors_stride, sums, sums_stride);
}

// Replaces the scores of row i by softmax weights, and returns the reciprocal of their sum. The scores of the row's
// path in the tree are moved behind those of the context, and slots that the row does not attend to get the weight 0.
inline float softmax_row(const Avx2Rows& rows, int64_t i) {
  const AttentionJob& job = rows.job;
  float* scores = rows.scores + i * rows.length;
  const int64_t first = job.first_key[rows.step_row(i)] - rows.start;
  int64_t end = job.context - rows.start;
  for (const int64_t slot : rows.slots_of(i)) scores[end++] = scores[slot - rows.start];  // slots ascend, so none is overwritten before it is read
  for (int64_t j = first; j < end; ++j) scores[j] *= job.scale;
  if (job.softcap > 0.0f)
    for (int64_t j = first; j < end; ++j) scores[j] = job.softcap * std::tanh(scores[j] / job.softcap);
  std::fill(scores, scores + first, 0.0f);
  return 1.0f / softmax_weights(scores + first, end - first, rows.sink_of(i));
}

// Accumulates the weighted values of the slots slot_of(i), i < count, in the rows [first, first + num_rows). Their
// weights start at `position`.
template <typename SlotOf>
inline void add_values(const Avx2Rows& rows, int64_t first, int64_t num_rows, int64_t position, int64_t count, const SlotOf& slot_of) {
  const int64_t d = rows.job.head_dim;
  for (int64_t begin = 0; begin < count; begin += kValuesPerBlock) {
    const int64_t valid = std::min(kValuesPerBlock, count - begin);
    for (int64_t i = 0; i < valid; ++i) {
      const BFloat16* value = rows.values + slot_of(begin + i) * d;
      for (int64_t c = 0; c < d; c += 16) store16(rows.block + i * d + c, load16(value + c));
    }
    const float* weights = rows.scores + first * rows.length + position + begin - rows.start;
    for (int64_t c = 0; c < d; c += 16) add_to_rows(num_rows, rows.block + c, valid, d, weights, rows.length, rows.sums + first * d + c, d);
  }
}

inline void attend_avx2(const KeyHeadRows& num_rows, uint32_t* scratch) {
  const AttentionJob& job = num_rows.job;
  const int64_t d = job.head_dim, count = num_rows.count;
  int64_t start = job.context, last_slot = job.context;
  for (int64_t i = 0; i < count; i += num_rows.rows_of_path(i)) {
    start = std::min(start, job.first_key[num_rows.step_row(i)]);
    if (!num_rows.slots_of(i).empty()) last_slot = std::max(last_slot, num_rows.slots_of(i).back() + 1);
  }
  const int64_t length = (last_slot - start + kKeysPerBlock - 1) / kKeysPerBlock * kKeysPerBlock;
  auto* block = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  float *queries = block + kValuesPerBlock * d, *sums = queries + count * d;
  const Avx2Rows rows{num_rows, start, last_slot, length, block, queries, sums, sums + count * d};
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < d; c += 16) store16(queries + i * d + c, load16(reinterpret_cast<const BFloat16*>(num_rows.query_of(i)) + c));
  std::fill(rows.scores, rows.scores + count * length, 0.0f);
  for (int64_t slot = start; slot < last_slot; slot += kKeysPerBlock) {
    transpose_keys(num_rows.keys + slot * d, std::min(kKeysPerBlock, last_slot - slot), d, block);
    add_to_rows(count, block, d, kKeysPerBlock, queries, d, rows.scores + slot - start, length);
  }
  float inverse[kMaxUnitRows];
  for (int64_t i = 0; i < count; ++i) inverse[i] = softmax_row(rows, i);
  std::fill(sums, sums + count * d, 0.0f);
  add_values(rows, 0, count, start, job.context - start, [&](int64_t i) { return start + i; });
  for (int64_t i = 0, rows_of_path; i < count; i += rows_of_path) {  // all heads of a row of the step have the same path
    rows_of_path = num_rows.rows_of_path(i);
    const auto& slots = num_rows.slots_of(i);
    add_values(rows, i, rows_of_path, job.context, static_cast<int64_t>(slots.size()), [&](int64_t j) { return slots[j]; });
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < d; c += 16) store16(num_rows.out_of(i) + c, load16(sums + i * d + c) * broadcast(inverse[i]));
}
#else
inline bool fits_avx2(int64_t) { return false; }
inline int64_t avx2_rows(const AttentionJob&) { return 1; }
inline int64_t avx2_words(const AttentionJob&, int64_t) { return 0; }
inline void attend_avx2(const KeyHeadRows&, uint32_t*) {}
#endif

}  // namespace yggdrasil
