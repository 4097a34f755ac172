// bf16 attention with AVX-512 or AVX2: dot products of bf16 pairs: two channels of a key, or two keys of a value
// column.
//
// All query heads of a key head are rows of one tile and share the transposed keys and the interleaved pairs of values.
// Pairs are formed by position, so a row of a tree has bitwise the same results as in a plain step. Pairs at the end of
// the context and in paths are gathered for each row.
#pragma once

#include <algorithm>

#include "attention/attention_positions.h"

namespace yggdrasil {

#if defined(YGG_AVX512) && defined(__AVX512BF16__)
constexpr int64_t kKeysPerBlock = 64;                 // keys per block
constexpr int64_t kColumnsPerBlock = 64;              // columns of values that are accumulated together
constexpr int kRegisterRows = 6;                      // rows whose sums fit in registers
constexpr int64_t kMaxUnitRows = 48, kMinUnitRows = 12;  // limits of the rows per unit of work
constexpr int64_t kUnitBytes = 512 * 1024;        // bytes of the scores and weights of a unit of work

inline bool fits_avx512(int64_t head_dim) { return head_dim % 32 == 0; }

// Returns the rows per unit of work: few enough that their scores stay in the L2 cache.
inline int64_t avx512_rows(const AttentionJob& job) { return std::clamp(kUnitBytes / (6 * job.context_stride + 1), kMinUnitRows, kMaxUnitRows); }

inline int64_t avx512_words(const AttentionJob& job, int64_t rows) {
  const int64_t length = round_up(job.context_stride, kKeysPerBlock) + 2 * kKeysPerBlock;
  return rows * (length + length / 2 + job.head_dim) + kKeysPerBlock / 2 * std::max(kColumnsPerBlock, job.head_dim) + job.context_stride - job.context + 16;
}

struct Avx512Rows : KeyHeadRows {
  Positions positions;
  float* scores;      // [count, length]
  BFloat16* weights;  // [count, length]
  float* sums;        // [count, D]
  uint32_t* rearranged;   // transposed keys [D / 2, block], or pairs of values [block / 2, columns]
  float* tree_scores;
};

// Calls function with min(rows, Most) as a compile-time constant.
template <int Most, typename Function>
inline void with_rows(int64_t rows, const Function& function) {
  if constexpr (Most > 1)
    if (rows < Most) return with_rows<Most - 1>(rows, function);
  function(std::integral_constant<int, Most>{});
}

template <int R>
inline void score_block(const Avx512Rows& rows, int64_t i, float* scores) {
  const uint32_t* queries[R];
  for (int r = 0; r < R; ++r) queries[r] = rows.query_of(i + r);
  __m512 sums[R][4];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_ps();
  const int64_t pairs = rows.job.head_dim / 2;
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh keys[4];
    for (int v = 0; v < 4; ++v) keys[v] = (__m512bh)_mm512_loadu_si512(rows.rearranged + p * kKeysPerBlock + 16 * v);
    for (int r = 0; r < R; ++r) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(queries[r][p]));
      for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], keys[v], pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(scores + (i + r) * rows.positions.length + 16 * v, sums[r][v]);
}

// Prefetches rows of the KV cache one block ahead, up to the end of the context: long texts exceed the L2 cache.
inline void fetch_block_ahead(const AttentionJob& job, const BFloat16* cache, int64_t slot, int64_t count) {
  const int64_t begin = slot + kKeysPerBlock, end = std::min(begin + count, job.context);
  for (int64_t i = begin * job.head_dim; i < end * job.head_dim; i += 32) prefetch_l2(cache + i);
}

inline void score_all(const Avx512Rows& rows) {
  const int64_t d = rows.job.head_dim;
  for (int64_t slot = rows.positions.start; slot < rows.positions.last_slot; slot += kKeysPerBlock) {
    for (int64_t key = 0; key < kKeysPerBlock && slot + key < rows.positions.last_slot; key += 16) {
      fetch_block_ahead(rows.job, rows.keys, slot + key, 16);
      const int64_t valid = rows.positions.last_slot - slot - key;  // slots past the last are copies of it, and are masked later
      for (int64_t p = 0; p < d / 2; p += 16) {
        auto* out = reinterpret_cast<float*>(rows.rearranged + p * kKeysPerBlock + key);
        const auto* in = reinterpret_cast<const float*>(rows.keys + (slot + key) * d + 2 * p);
        if (valid >= 16) {
          transpose16(in, d / 2, out, kKeysPerBlock);
        } else {
          alignas(64) float last[16 * 16];
          for (int64_t i = 0; i < 16; ++i) std::memcpy(last + 16 * i, in + std::min(i, valid - 1) * (d / 2), 64);
          transpose16(last, 16, out, kKeysPerBlock);
        }
      }
    }
    float* scores = rows.scores + slot - rows.positions.start;
    for (int64_t i = 0; i < rows.count; i += kRegisterRows)
      with_rows<kRegisterRows>(rows.count - i, [&](auto r) { score_block<r>(rows, i, scores); });
  }
}

// Accumulates the values of pairs of keys, times their weights, in the sums of R rows.
template <int R, int V>
inline void add_pairs(const uint32_t* values, int64_t pairs, const BFloat16* weights, int64_t weights_stride, float* sums, int64_t sums_stride) {
  __m512 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_loadu_ps(sums + r * sums_stride + 16 * v);
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh value[V];
    for (int v = 0; v < V; ++v) value[v] = (__m512bh)_mm512_loadu_si512(values + p * 16 * V + 16 * v);
    for (int r = 0; r < R; ++r) {
      int32_t pair_word;
      std::memcpy(&pair_word, weights + r * weights_stride + 2 * p, sizeof pair_word);
      const auto pair = (__m512bh)_mm512_set1_epi32(pair_word);
      for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], value[v], pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + r * sums_stride + 16 * v, acc[r][v]);
}

template <int V>
inline void add_values(const Avx512Rows& rows, int64_t column) {
  const AttentionJob& job = rows.job;
  const int64_t d = job.head_dim, length = rows.positions.length, even_context = job.context / 2 * 2;  // context length rounded down to whole pairs
  const BFloat16* values = rows.values + column;
  const auto add = [&](int64_t i, int64_t count, int64_t position, int64_t pairs) {
    for (int64_t last = i + count; i < last; i += kRegisterRows)
      with_rows<kRegisterRows>(last - i, [&](auto r) {
        add_pairs<r, V>(rows.rearranged, pairs, rows.weights + i * length + position - rows.positions.start, length, rows.sums + i * d + column, d);
      });
  };
  for (int64_t block = rows.positions.start; block < even_context; block += kKeysPerBlock) {
    const int64_t pairs = std::min(kKeysPerBlock, even_context - block) / 2;
    for (int64_t p = 0; p < pairs; ++p) {
      fetch_block_ahead(job, rows.values, block + 2 * p, 2);
      const BFloat16* even = values + (block + 2 * p) * d;
      interleave(even, even + d, 16 * V, rows.rearranged + p * 16 * V);
    }
    add(0, rows.count, block, pairs);
  }
  for (int64_t i = 0, rows_of_path; i < rows.count; i += rows_of_path) {  // all heads of a row of the step have the same path
    const auto& slots = rows.slots_of(i);
    rows_of_path = rows.rows_of_path(i);
    const int64_t end = job.context + static_cast<int64_t>(slots.size());
    const auto value_at = [&](int64_t position) -> const BFloat16* {
      if (position >= end) return nullptr;
      return values + (position < job.context ? position : slots[position - job.context]) * d;
    };
    for (int64_t block = even_context; block < end; block += kKeysPerBlock) {
      const int64_t pairs = (std::min(kKeysPerBlock, end - block) + 1) / 2;
      for (int64_t p = 0; p < pairs; ++p) interleave(value_at(block + 2 * p), value_at(block + 2 * p + 1), 16 * V, rows.rearranged + p * 16 * V);
      add(i, rows_of_path, block, pairs);
    }
  }
}

inline void attend_avx512(const KeyHeadRows& some, uint32_t* scratch) {
  const AttentionJob& job = some.job;
  const Positions positions(some, kKeysPerBlock);
  const int64_t d = job.head_dim, count = some.count;
  auto* rearranged = reinterpret_cast<uint32_t*>(round_up(reinterpret_cast<int64_t>(scratch), 64));
  auto* scores = reinterpret_cast<float*>(rearranged + kKeysPerBlock / 2 * std::max(kColumnsPerBlock, d));
  auto* weights = reinterpret_cast<BFloat16*>(scores + count * positions.length);
  auto* sums = reinterpret_cast<float*>(weights + count * positions.length);
  const Avx512Rows rows{some, positions, scores, weights, sums, rearranged, sums + count * d};
  score_all(rows);
  float inverse[kMaxUnitRows];
  for (int64_t i = 0; i < count; ++i)
    inverse[i] = softmax_positions(job, rows.step_row(i), positions, scores + i * positions.length, rows.tree_scores, weights + i * positions.length, rows.sink_of(i));
  std::fill(sums, sums + count * d, 0.0f);
  int64_t column = 0;
  for (; column + kColumnsPerBlock <= d; column += kColumnsPerBlock) add_values<4>(rows, column);
  if (column < d) add_values<2>(rows, column);
  for (int64_t i = 0; i < count; ++i) {
    BFloat16* target = rows.out_of(i);
    const __m512 factor = _mm512_set1_ps(inverse[i]);
    for (int64_t c = 0; c < d; c += 16) store16(target + c, _mm512_mul_ps(_mm512_loadu_ps(sums + i * d + c), factor));
  }
}
#else
inline bool fits_avx512(int64_t) { return false; }
inline int64_t avx512_rows(const AttentionJob&) { return 1; }
inline int64_t avx512_words(const AttentionJob&, int64_t) { return 0; }
inline void attend_avx512(const KeyHeadRows&, uint32_t*) {}
#endif

}  // namespace yggdrasil
