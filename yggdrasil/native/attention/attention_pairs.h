// bf16 attention with AVX-512 or AVX2: dot products of pairs, of two channels of a key or two keys of a value column.
//
// All query heads of a key head are rows of one tile and share the rearranged keys (to lanes) and values (to pairs). Pairs
// are formed by position, so a row of a tree has the same arithmetic, bit by bit, as in a plain step; pairs at the end of
// the context and in paths are gathered for each row.
#pragma once

#include <algorithm>

#include "attention/attention_positions.h"

namespace yggdrasil {

#if defined(YGG_AVX512) && defined(__AVX512BF16__)
constexpr int64_t kPairKeys = 64;                 // keys of a block
constexpr int64_t kPairColumns = 64;              // of values that are summed together
constexpr int kPairRows = 6;                      // rows whose sums fill the registers
constexpr int64_t kUnitRows = 48, kFewestRows = 12;  // rows of a unit of work
constexpr int64_t kUnitBytes = 512 * 1024;        // of its scores and weights

inline bool fits_pairs(int64_t head_dim) { return head_dim % 32 == 0; }

// Number of rows that are processed together: few enough that their scores stay in the nearest cache.
inline int64_t pair_rows(const AttentionJob& job) { return std::clamp(kUnitBytes / (6 * job.context_stride + 1), kFewestRows, kUnitRows); }

inline int64_t pair_words(const AttentionJob& job, int64_t rows) {
  const int64_t length = round_up(job.context_stride, kPairKeys) + 2 * kPairKeys;
  return rows * (length + length / 2 + job.head_dim) + kPairKeys / 2 * std::max(kPairColumns, job.head_dim) + job.context_stride - job.context + 16;
}

struct PairedRows : KeyHeadRows {
  Positions at;
  float* scores;      // [count, length]
  BFloat16* weights;  // [count, length]
  float* sums;        // [count, D]
  uint32_t* rearranged;   // [D / 2, block] of keys, or [block / 2, columns] of values
  float* tree_scores;
};

// Calls function with the number of rows, a constant.
template <int Most, typename Function>
inline void with_rows(int64_t rows, const Function& function) {
  if constexpr (Most > 1)
    if (rows < Most) return with_rows<Most - 1>(rows, function);
  function(std::integral_constant<int, Most>{});
}

template <int R>
inline void score_block(const PairedRows& rows, int64_t i, float* scores) {
  const uint32_t* queries[R];
  for (int r = 0; r < R; ++r) queries[r] = rows.query_of(i + r);
  __m512 sums[R][4];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_ps();
  const int64_t pairs = rows.job.head_dim / 2;
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh keys[4];
    for (int v = 0; v < 4; ++v) keys[v] = (__m512bh)_mm512_loadu_si512(rows.rearranged + p * kPairKeys + 16 * v);
    for (int r = 0; r < R; ++r) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(queries[r][p]));
      for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], keys[v], pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(scores + (i + r) * rows.at.length + 16 * v, sums[r][v]);
}

// Prefetches the rows of a cache one block ahead, up to the cache's end: long texts exceed the nearest caches.
inline void fetch_block_ahead(const AttentionJob& job, const BFloat16* cache, int64_t slot, int64_t count) {
  const int64_t begin = slot + kPairKeys, end = std::min(begin + count, job.context);
  for (int64_t i = begin * job.head_dim; i < end * job.head_dim; i += 32) fetch_ahead(cache + i);
}

inline void score_all(const PairedRows& rows) {
  const int64_t d = rows.job.head_dim;
  for (int64_t slot = rows.at.start; slot < rows.at.last_slot; slot += kPairKeys) {
    for (int64_t key = 0; key < kPairKeys && slot + key < rows.at.last_slot; key += 16) {
      fetch_block_ahead(rows.job, rows.keys, slot + key, 16);
      const int64_t there = rows.at.last_slot - slot - key;  // slots behind the last are copies of it: they are hidden later
      for (int64_t p = 0; p < d / 2; p += 16) {
        auto* out = reinterpret_cast<float*>(rows.rearranged + p * kPairKeys + key);
        const auto* in = reinterpret_cast<const float*>(rows.keys + (slot + key) * d + 2 * p);
        if (there >= 16) {
          transpose16(in, d / 2, out, kPairKeys);
        } else {
          alignas(64) float last[16 * 16];
          for (int64_t i = 0; i < 16; ++i) std::memcpy(last + 16 * i, in + std::min(i, there - 1) * (d / 2), 64);
          transpose16(last, 16, out, kPairKeys);
        }
      }
    }
    float* scores = rows.scores + slot - rows.at.start;
    for (int64_t i = 0; i < rows.count; i += kPairRows)
      with_rows<kPairRows>(rows.count - i, [&](auto r) { score_block<r>(rows, i, scores); });
  }
}

// Adds the rearranged values of `count` pairs of keys, times their weights, to R rows' sums.
template <int R, int V>
inline void add_pairs(const uint32_t* values, int64_t pairs, const BFloat16* weights, int64_t weights_stride, float* sums, int64_t sums_stride) {
  __m512 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_loadu_ps(sums + r * sums_stride + 16 * v);
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh value[V];
    for (int v = 0; v < V; ++v) value[v] = (__m512bh)_mm512_loadu_si512(values + p * 16 * V + 16 * v);
    for (int r = 0; r < R; ++r) {
      int32_t two;
      std::memcpy(&two, weights + r * weights_stride + 2 * p, sizeof two);
      const auto pair = (__m512bh)_mm512_set1_epi32(two);
      for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], value[v], pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + r * sums_stride + 16 * v, acc[r][v]);
}

template <int V>
inline void add_values(const PairedRows& rows, int64_t column) {
  const AttentionJob& job = rows.job;
  const int64_t d = job.head_dim, length = rows.at.length, whole = job.context / 2 * 2;  // of the context, in pairs
  const BFloat16* values = rows.values + column;
  const auto add = [&](int64_t i, int64_t count, int64_t position, int64_t pairs) {
    for (int64_t last = i + count; i < last; i += kPairRows)
      with_rows<kPairRows>(last - i, [&](auto r) {
        add_pairs<r, V>(rows.rearranged, pairs, rows.weights + i * length + position - rows.at.start, length, rows.sums + i * d + column, d);
      });
  };
  for (int64_t block = rows.at.start; block < whole; block += kPairKeys) {
    const int64_t pairs = std::min(kPairKeys, whole - block) / 2;
    for (int64_t p = 0; p < pairs; ++p) {
      fetch_block_ahead(job, rows.values, block + 2 * p, 2);
      const BFloat16* even = values + (block + 2 * p) * d;
      interleave(even, even + d, 16 * V, rows.rearranged + p * 16 * V);
    }
    add(0, rows.count, block, pairs);
  }
  for (int64_t i = 0, alike; i < rows.count; i += alike) {  // heads of one row of the step have one path
    const auto& slots = rows.slots_of(i);
    alike = rows.alike(i);
    const int64_t end = job.context + static_cast<int64_t>(slots.size());
    const auto value_at = [&](int64_t position) -> const BFloat16* {
      if (position >= end) return nullptr;
      return values + (position < job.context ? position : slots[position - job.context]) * d;
    };
    for (int64_t block = whole; block < end; block += kPairKeys) {
      const int64_t pairs = (std::min(kPairKeys, end - block) + 1) / 2;
      for (int64_t p = 0; p < pairs; ++p) interleave(value_at(block + 2 * p), value_at(block + 2 * p + 1), 16 * V, rows.rearranged + p * 16 * V);
      add(i, alike, block, pairs);
    }
  }
}

inline void attend_pairs(const KeyHeadRows& some, uint32_t* scratch) {
  const AttentionJob& job = some.job;
  const Positions at(some, kPairKeys);
  const int64_t d = job.head_dim, count = some.count;
  auto* rearranged = reinterpret_cast<uint32_t*>(round_up(reinterpret_cast<int64_t>(scratch), 64));
  auto* scores = reinterpret_cast<float*>(rearranged + kPairKeys / 2 * std::max(kPairColumns, d));
  auto* weights = reinterpret_cast<BFloat16*>(scores + count * at.length);
  auto* sums = reinterpret_cast<float*>(weights + count * at.length);
  const PairedRows rows{some, at, scores, weights, sums, rearranged, sums + count * d};
  score_all(rows);
  float inverse[kUnitRows];
  for (int64_t i = 0; i < count; ++i)
    inverse[i] = weigh_positions(job, rows.step_row(i), at, scores + i * at.length, rows.tree_scores, weights + i * at.length, rows.sink_of(i));
  std::fill(sums, sums + count * d, 0.0f);
  int64_t column = 0;
  for (; column + kPairColumns <= d; column += kPairColumns) add_values<4>(rows, column);
  if (column < d) add_values<2>(rows, column);
  for (int64_t i = 0; i < count; ++i) {
    BFloat16* target = rows.out_of(i);
    const __m512 factor = _mm512_set1_ps(inverse[i]);
    for (int64_t c = 0; c < d; c += 16) store16(target + c, _mm512_mul_ps(_mm512_loadu_ps(sums + i * d + c), factor));
  }
}
#else
inline bool fits_pairs(int64_t) { return false; }
inline int64_t pair_rows(const AttentionJob&) { return 1; }
inline int64_t pair_words(const AttentionJob&, int64_t) { return 0; }
inline void attend_pairs(const KeyHeadRows&, uint32_t*) {}
#endif

}  // namespace yggdrasil
