// Attention of a few rows to a KV cache and to the rows' paths in a tree; the portable kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/lanes.h"

namespace yggdrasil {

constexpr int kKeyBlock = 64;               // keys per block, which stay in the L1 cache while all rows read them
constexpr int64_t kRowGroup = 4;            // rows that are accumulated together, with sums and values in registers
constexpr int64_t kRowGroups = 16;          // groups of rows that read a block of keys one after another
constexpr int64_t kCoreCacheBytes = 512 * 1024;  // bytes of keys and values that stay in a core's own L2 cache

// Dot products of one query with four or sixteen keys. The additions have the same order for every key, independent of
// its position and of the other keys.
#ifdef YGG_AVX512
inline __m512 reduce16(const __m512 quads[4]) {
  const auto halves = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); };
  const __m512 low = halves(quads[0], quads[1]), high = halves(quads[2], quads[3]);
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
#endif

#ifdef YGG_AVX2
inline Lanes dot_step(Lanes acc, const float* query, const float* key) { return fmadd(load16(query), load16(key), acc); }
constexpr int64_t dot_width(const float*) { return 16; }
#ifdef __AVX512BF16__
inline Lanes dot_step(Lanes acc, const BFloat16* query, const BFloat16* key) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(query), (__m512bh)_mm512_loadu_si512(key));
}
constexpr int64_t dot_width(const BFloat16*) { return 32; }
#else
inline Lanes dot_step(Lanes acc, const BFloat16* query, const BFloat16* key) { return fmadd(load16(query), load16(key), acc); }
constexpr int64_t dot_width(const BFloat16*) { return 16; }
#endif

template <typename T>
inline Lanes quads_of_keys(const T* query, const T* const keys[4], int64_t vectors) {
  Lanes acc[4] = {zeros(), zeros(), zeros(), zeros()};
  for (int64_t v = 0, d = 0; v < vectors; ++v, d += dot_width(query))
    for (int j = 0; j < 4; ++j) acc[j] = dot_step(acc[j], query + d, keys[j] + d);
  return reduce_quads(acc[0], acc[1], acc[2], acc[3], Sum{});
}
#endif

template <typename T>
inline void dot4(const T* query, const T* const keys[4], int64_t size, float* out) {
  int64_t d = 0;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#ifdef YGG_AVX2
  const int64_t vectors = size / dot_width(query);
  d = vectors * dot_width(query);
  _mm_storeu_ps(sums, reduce4(quads_of_keys(query, keys, vectors), Sum{}));
#endif
  for (int j = 0; j < 4; ++j) {
    for (int64_t i = d; i < size; ++i) sums[j] += to_float(query[i]) * to_float(keys[j][i]);
    out[j] = sums[j];
  }
}

// Accumulates the values of `count` keys, times each row's weights, in the columns [begin, end) of the rows' sums. A
// row's additions are in the order of keys; rows computed together share only the loads.
template <typename T, int Rows>
inline void accumulate(float* const* sums, const float* const* weights, const T* values, int64_t count, int64_t stride, int64_t begin, int64_t end) {
  int64_t d = begin;
#ifdef YGG_AVX2
  const auto add_columns = [&]<int Vectors>() {
    Lanes acc[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) acc[r][v] = load16(sums[r] + d + 16 * v);
    const T* row = values + d;
    for (int64_t i = 0; i < count; ++i, row += stride) {
      Lanes value[Vectors];
      for (int v = 0; v < Vectors; ++v) value[v] = load16(row + 16 * v);
      for (int r = 0; r < Rows; ++r) {
        const Lanes weight = broadcast(weights[r][i]);
        for (int v = 0; v < Vectors; ++v) acc[r][v] = fmadd(weight, value[v], acc[r][v]);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) store16(sums[r] + d + 16 * v, acc[r][v]);
    d += 16 * Vectors;
  };
  constexpr int kVectors = kLaneRegisters >= 32 ? 4 : std::max(1, 4 / Rows);
  while (d + 16 * kVectors <= end) add_columns.template operator()<kVectors>();
  while (d + 16 <= end) add_columns.template operator()<1>();
#endif
  for (int r = 0; r < Rows; ++r)
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = d; j < end; ++j) sums[r][j] += weights[r][i] * to_float(values[i * stride + j]);
}

// Replaces scores by unnormalised softmax weights in place, and returns their sum. The order of additions depends on
// `count` alone. An attention sink (nullable) is a further score, whose weight counts only in the sum.
inline float softmax_weights(float* scores, int64_t count, const float* sink) {
  float maximum = -std::numeric_limits<float>::infinity();
  float sum = 0.0f;
  int64_t i = 0;
#ifdef YGG_AVX2
  Lanes largest = broadcast(maximum);
  for (; i + 16 <= count; i += 16) largest = lane_max(largest, load16(scores + i));
  maximum = reduce_max(largest);
#endif
  for (; i < count; ++i) maximum = std::max(maximum, scores[i]);
  if (sink) maximum = std::max(maximum, *sink);
  i = 0;
#ifdef YGG_AVX2
  const Lanes max_score = broadcast(maximum);
  Lanes lanes = zeros();
  for (; i < count; i += 16) {
    const int64_t valid = std::min<int64_t>(16, count - i);
    const Lanes weight = keep_first(exp16(load_first(scores + i, valid) - max_score), valid);
    store_first(scores + i, weight, valid);
    lanes = lanes + weight;
  }
  sum = reduce_add(lanes);
#else
  for (; i < count; ++i) sum += scores[i] = std::exp(scores[i] - maximum);
#endif
  return sink ? sum + std::exp(*sink - maximum) : sum;
}

struct AttentionJob {
  int64_t rows, query_heads, group, head_dim, capacity, context, context_stride;
  int64_t query_head_stride, query_row_stride;
  float scale, softcap;
  const int64_t* first_key;                        // [W] first context key that each row attends to (its window)
  const std::vector<std::vector<int64_t>>* slots;  // [W] tree slots that each row attends to, in order of depth
};

inline float scale_score(const AttentionJob& job, float score) {
  score *= job.scale;
  return job.softcap > 0.0f ? job.softcap * std::tanh(score / job.softcap) : score;
}

// Computes the scores of `count` keys, four at a time; an incomplete last group is padded with its last key.
template <typename T, typename SlotOf>
inline void score_keys(const AttentionJob& job, const T* query, const T* keys, int64_t count, const SlotOf& slot_of, float* scores) {
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t last = std::min<int64_t>(3, count - 1 - i);
    const T* four[4];
    float out[4];
    for (int64_t j = 0; j < 4; ++j) four[j] = keys + slot_of(i + std::min(j, last)) * job.head_dim;
    dot4(query, four, job.head_dim, out);
    for (float& score : out) score = scale_score(job, score);
    if (last == 3) {
      std::memcpy(scores + i, out, sizeof out);
    } else {
      for (int64_t j = 0; j <= last; ++j) scores[i + j] = out[j];
    }
  }
}

// Rows of one head, from `first_row` on.
template <typename T>
struct HeadRows {
  const AttentionJob& job;
  const T *query, *keys, *values;
  int64_t first_row, rows;
  float* sums;     // [rows, D]
  float* weights;  // [rows, context + T]: weights of the visible context keys, then of the visible tree keys
  const float* sink = nullptr;  // attention sink of the head; null for none

  int64_t first_key(int64_t r) const { return job.first_key[first_row + r]; }
  const std::vector<int64_t>& slots(int64_t r) const { return (*job.slots)[first_row + r]; }
  const T* query_of(int64_t r) const { return query + (first_row + r) * job.query_row_stride; }
  float* weights_of(int64_t r) const { return weights + r * job.context_stride; }
};

// Adds the values of context keys ``begin`` to ``end`` to ``Rows`` rows.
template <int Rows, typename T>
inline void add_context(const HeadRows<T>& head, int64_t r, int64_t begin, int64_t end) {
  const int64_t d = head.job.head_dim;
  float* sums[Rows];
  const float* weights[Rows];
  for (int j = 0; j < Rows; ++j) {
    sums[j] = head.sums + (r + j) * d;
    weights[j] = head.weights_of(r + j) + begin - head.first_key(r + j);
  }
  accumulate<T, Rows>(sums, weights, head.values + begin * d, end - begin, d, 0, d);
}

// Computes scores of `count` consecutive keys.
template <typename T>
inline void score_context(const AttentionJob& job, const T* query, const T* keys, int64_t count, float* scores) {
  int64_t i = 0;
#ifdef YGG_AVX512
  const int64_t d = job.head_dim, vectors = d / dot_width(query);
  const __m512 scale = _mm512_set1_ps(job.scale);
  const auto score_sixteens = [&](auto known_vectors) {
    const int64_t vectors = known_vectors, d = vectors * dot_width(query);
    for (; i + 16 <= count; i += 16) {
      __m512 quads[4];
      for (int q = 0; q < 4; ++q) {
        const T* first = keys + (i + 4 * q) * d;
        const T* const four[4] = {first, first + d, first + 2 * d, first + 3 * d};
        quads[q] = quads_of_keys(query, four, vectors);
      }
      _mm512_storeu_ps(scores + i, _mm512_mul_ps(reduce16(quads), scale));
    }
  };
  if (vectors * dot_width(query) == d && job.softcap <= 0.0f) {
    if (vectors == 2) score_sixteens(std::integral_constant<int64_t, 2>{});
    else if (vectors == 4) score_sixteens(std::integral_constant<int64_t, 4>{});
    else score_sixteens(vectors);
  }
#endif
  score_keys(job, query, keys, count - i, [&](int64_t j) { return i + j; }, scores + i);
}

template <typename T>
void attend_rows(const HeadRows<T>& head, T* out) {
  const AttentionJob& job = head.job;
  const int64_t d = job.head_dim;
  std::fill(head.sums, head.sums + head.rows * d, 0.0f);

  for (int64_t begin = 0; begin < job.context; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, job.context);
    for (int64_t r = 0; r < head.rows; ++r) {
      const int64_t first = std::max(begin, head.first_key(r));
      float* scores = head.weights_of(r) - head.first_key(r);
      if (first < end) score_context(job, head.query_of(r), head.keys + first * d, end - first, scores + first);
    }
  }
  float inverse[kRowGroup * kRowGroups];  // one over the sum of weights
  for (int64_t r = 0; r < head.rows; ++r) {
    const auto& slots = head.slots(r);
    const int64_t num_context = job.context - head.first_key(r), count = static_cast<int64_t>(slots.size());
    score_keys(job, head.query_of(r), head.keys, count, [&](int64_t i) { return slots[i]; }, head.weights_of(r) + num_context);
    inverse[r] = 1.0f / softmax_weights(head.weights_of(r), num_context + count, head.sink);
  }
  for (int64_t begin = 0; begin < job.context; begin += kKeyBlock) {
    const int64_t end = std::min(begin + kKeyBlock, job.context);
    for (int64_t r = 0; r < head.rows;) {
      const int64_t group = std::min(kRowGroup, head.rows - r);
      bool sees_all = true;
      for (int64_t j = 0; j < group; ++j) sees_all = sees_all && head.first_key(r + j) <= begin;
      if (group == kRowGroup && sees_all) {
        add_context<kRowGroup>(head, r, begin, end);
        r += kRowGroup;
      } else if (group >= 2 && sees_all) {
        add_context<2>(head, r, begin, end);
        r += 2;
      } else {
        const int64_t first = std::max(begin, head.first_key(r));
        if (first < end) add_context<1>(head, r, first, end);
        ++r;
      }
    }
  }
  for (int64_t r = 0; r < head.rows; ++r) {
    float* sums = head.sums + r * d;
    const float* tree_weights = head.weights_of(r) + job.context - head.first_key(r);
    for (const int64_t slot : head.slots(r)) {
      accumulate<T, 1>(&sums, &tree_weights, head.values + slot * d, 1, d, 0, d);
      ++tree_weights;
    }
    T* target = out + (head.first_row + r) * job.query_heads * d;
    for (int64_t j = 0; j < d; ++j) target[j] = static_cast<T>(sums[j] * inverse[r]);
  }
}

template <typename T>
void write_rows(const Tensor& rows, const Tensor& cache, int64_t start) {  // rows [1, H, W, D] -> cache [H, S, D]
  const int64_t heads = rows.size(1), width = rows.size(2), d = rows.size(3), capacity = cache.size(1);
  const T* source = rows.const_data_ptr<T>();
  T* target = cache.mutable_data_ptr<T>();
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t w = 0; w < width; ++w)
      std::memcpy(target + (h * capacity + start + w) * d, source + h * rows.stride(1) + w * rows.stride(2), d * sizeof(T));
}

}  // namespace yggdrasil
