// Attention on the matrix unit (AMX) for bf16: up to 16 rows of a head cost about what one does.
//
// Keys are summed in blocks of 32 positions. Blocks that lie whole in the context serve all rows at once. The last ones,
// where the context ends and each row follows its own path, are put together for every row in order of position, so
// that a row in a tree does the arithmetic of a plain step, number by number.
#pragma once

#include <algorithm>

#include "attention_positions.h"
#include "matrix_unit.h"

namespace yggdrasil {

#ifdef YGG_AMX
constexpr int64_t kBlockKeys = 32;  // positions that one tile of weights covers
constexpr int64_t kSums = 4;        // tiles of 16 outputs that are summed together

inline bool fits_matrix_unit(int64_t head_dim) { return head_dim % 32 == 0 && has_matrix_unit(); }

// One head of up to 16 rows: where its numbers lie.
struct MatrixHead {
  const AttentionJob& job;
  const BFloat16 *query, *keys, *values;
  int64_t first_row, rows;
  Positions at;
  float* scores;      // [16, length]
  BFloat16* weights;  // [16, length]
  uint32_t* packed;   // [D/32, 16 pairs, rows] queries, then a row's tree scores, then [16 pairs, 64] values
};

// Scratch words of one head.
inline int64_t matrix_words(int64_t positions, int64_t tree_slots, int64_t head_dim) {
  const int64_t packed = std::max({head_dim / 2 * 16, 16 * 16 * kSums, tree_slots});
  return 24 * (round_up(positions, kBlockKeys) + 2 * kBlockKeys) + packed + 16;
}

// Scores of 16 slots against all rows, as [16 slots, rows]; slots past the cache's end are read from a copy.
inline void score_slots(const MatrixHead& head, int64_t slot, float* out) {
  const int64_t d = head.job.head_dim;
  const BFloat16* keys = head.keys + slot * d;
  alignas(64) BFloat16 copy[16 * 32];
  const bool is_cut = slot + 16 > head.job.capacity;
  zero_tile<4>();
  for (int64_t t = 0; t < d; t += 32) {
    if (is_cut) {
      std::memset(copy, 0, sizeof copy);
      for (int64_t i = 0; slot + i < head.job.capacity; ++i) std::memcpy(copy + 32 * i, keys + i * d + t, 64);
      load_tile<0>(copy, 64);
    } else {
      load_tile<0>(keys + t, d * 2);
    }
    load_tile<2>(head.packed + t / 2 * head.rows, head.rows * 4);
    add_bf16_products<4, 0, 2>();
  }
  store_tile<4>(out, 64);
}

inline void matrix_scores(const MatrixHead& head) {
  const int64_t d = head.job.head_dim, pairs = d / 2;
  for (int64_t row = 0; row < head.rows; ++row) {
    const auto* source = reinterpret_cast<const uint32_t*>(head.query + (head.first_row + row) * head.job.query_row_stride);
    for (int64_t p = 0; p < pairs; ++p) head.packed[p * head.rows + row] = source[p];
  }
  MatrixUnit unit;
  unit.shape(0, kTileRows, kTileBytes);
  for (const int tile : {2, 4}) unit.shape(tile, kTileRows, head.rows * 4);
  unit.take_shapes();
  alignas(64) float block[256] = {};
  for (int64_t slot = head.at.start; slot < head.at.last_slot; slot += 16) {
    score_slots(head, slot, block);
    transpose16(block, 16, head.scores + slot - head.at.start, head.at.length);
  }
}

template <int Tiles>
inline void add_block(const BFloat16* weights, int64_t weights_stride, const uint32_t* packed) {
  constexpr int64_t stride = Tiles * 64;
  load_tile<0>(weights, weights_stride);
  load_tile<1>(packed, stride);
  add_bf16_products<2, 0, 1>();
  load_tile<1>(packed + 16, stride);
  add_bf16_products<3, 0, 1>();
  if constexpr (Tiles == 4) {
    load_tile<1>(packed + 32, stride);
    add_bf16_products<4, 0, 1>();
    load_tile<1>(packed + 48, stride);
    add_bf16_products<5, 0, 1>();
  }
}

// The blocks where the context ends and a row's path begins, for one row; the other rows' weights are zero there.
template <int Tiles>
inline void add_path(const MatrixHead& head, int64_t row, int64_t column, const BFloat16* rows_of_zeros) {
  const AttentionJob& job = head.job;
  const auto& slots = (*job.slots)[head.first_row + row];
  const int64_t end = job.context + static_cast<int64_t>(slots.size());
  const auto value_at = [&](int64_t position) -> const BFloat16* {
    if (position >= end) return nullptr;
    return head.values + (position < job.context ? position : slots[position - job.context]) * job.head_dim + column;
  };
  alignas(64) BFloat16 weights[16 * kBlockKeys];
  std::memcpy(weights, rows_of_zeros, sizeof weights);
  for (int64_t block = job.context / kBlockKeys * kBlockKeys; block < end; block += kBlockKeys) {
    for (int64_t p = 0; p < 16; ++p)
      interleave(value_at(block + 2 * p), value_at(block + 2 * p + 1), Tiles * 16, head.packed + p * Tiles * 16);
    std::memcpy(weights + row * kBlockKeys, head.weights + row * head.at.length + block - head.at.start, 64);
    add_block<Tiles>(weights, 64, head.packed);
  }
}

// Outputs ``column`` to ``column + 16 * Tiles`` of all rows.
template <int Tiles>
inline void matrix_values(const MatrixHead& head, int64_t column, const float* inverse, BFloat16* out) {
  const AttentionJob& job = head.job;
  static constexpr BFloat16 kZeros[16 * kBlockKeys] = {};
  zero_tile<2>();
  zero_tile<3>();
  if constexpr (Tiles == 4) {
    zero_tile<4>();
    zero_tile<5>();
  }
  const BFloat16* values = head.values + column;
  for (int64_t block = head.at.start; block + kBlockKeys <= job.context; block += kBlockKeys) {
    for (int64_t p = 0; p < 16; ++p) {
      const BFloat16* even = values + (block + 2 * p) * job.head_dim;
      interleave(even, even + job.head_dim, Tiles * 16, head.packed + p * Tiles * 16);
    }
    add_block<Tiles>(head.weights + block - head.at.start, head.at.length * 2, head.packed);
  }
  for (int64_t row = 0; row < head.rows; ++row) add_path<Tiles>(head, row, column, kZeros);
  alignas(64) float sums[Tiles][256];
  store_tile<2>(sums[0], 64);
  store_tile<3>(sums[1], 64);
  if constexpr (Tiles == 4) {
    store_tile<4>(sums[2], 64);
    store_tile<5>(sums[3], 64);
  }
  for (int64_t row = 0; row < head.rows; ++row)
    for (int t = 0; t < Tiles; ++t) {
      const __m512 sum = _mm512_mul_ps(_mm512_load_ps(sums[t] + 16 * row), _mm512_set1_ps(inverse[row]));
      BFloat16* target = out + (head.first_row + row) * job.query_heads * job.head_dim + column + 16 * t;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

inline void attend_head_matrix(
    const AttentionJob& job, const BFloat16* query, const BFloat16* keys, const BFloat16* values, BFloat16* out, uint32_t* scratch) {
  const Positions at(job, 0, job.rows, kBlockKeys);
  auto* aligned = reinterpret_cast<uint32_t*>(round_up(reinterpret_cast<int64_t>(scratch), 64));
  for (int64_t row = 0; row < job.rows; row += 16) {
    const MatrixHead head{job, query, keys, values, row, std::min<int64_t>(16, job.rows - row), at,
                          reinterpret_cast<float*>(aligned), reinterpret_cast<BFloat16*>(aligned + 16 * at.length),
                          aligned + 24 * at.length};
    matrix_scores(head);
    float inverse[16];
    for (int64_t r = 0; r < head.rows; ++r)
      inverse[r] = weigh_positions(job, row + r, at, head.scores + r * at.length, reinterpret_cast<float*>(head.packed), head.weights + r * at.length);
    MatrixUnit unit;
    for (int i = 0; i < 6; ++i) unit.shape(i, i == 1 ? kTileRows : head.rows, kTileBytes);
    unit.take_shapes();
    int64_t column = 0;
    for (; column + 64 <= job.head_dim; column += 64) matrix_values<4>(head, column, inverse, out);
    if (column < job.head_dim) matrix_values<2>(head, column, inverse, out);
  }
}
#else
inline bool fits_matrix_unit(int64_t) { return false; }
inline int64_t matrix_words(int64_t, int64_t, int64_t) { return 0; }
inline void attend_head_matrix(const AttentionJob&, const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, uint32_t*) {}
#endif

}  // namespace yggdrasil
