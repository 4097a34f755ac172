// bf16 attention with AMX: up to 16 rows take about the time of one.
//
// All query heads of a key head are rows of one tile, and two tiles share the loaded or packed keys and values. Sums
// are accumulated over blocks of 32 positions. Blocks within the context are the same for all rows. Later blocks, where
// each row has its own path, are arranged so that a row of a tree has bitwise the same results as in a plain step.
#pragma once

#include <algorithm>

#include "attention/attention_amx_scores.h"

namespace yggdrasil {

#ifdef YGG_AMX
inline bool fits_amx(int64_t head_dim) { return head_dim % 32 == 0 && has_amx(); }

// Accumulates a block's packed values, times their weights, in the sums [16 rows, 16 columns] of the row tiles [First,
// Last).
template <int First, int Last, int Columns>
inline void add_block(const BFloat16* weights, int64_t stride, const uint32_t* packed) {
  constexpr int64_t row = Columns * 64;
  constexpr bool first = First == 0, second_tile_rows = Last == 2;
  if constexpr (first) load_tile<4>(weights, 2 * stride);
  if constexpr (second_tile_rows) load_tile<5>(weights + kTileRows * stride, 2 * stride);
  load_tile<6>(packed, row);
  if constexpr (first) add_bf16_products<0, 4, 6>();
  if constexpr (second_tile_rows) add_bf16_products<Columns, 5, 6>();
  load_tile<7>(packed + 16, row);
  if constexpr (first) add_bf16_products<1, 4, 7>();
  if constexpr (second_tile_rows) add_bf16_products<Columns + 1, 5, 7>();
  if constexpr (Columns == 4) {
    load_tile<6>(packed + 32, row);
    add_bf16_products<2, 4, 6>();
    load_tile<7>(packed + 48, row);
    add_bf16_products<3, 4, 7>();
  }
}

// As add_block for blocks of paths, with zero weights for rows that do not use the block.
template <int Tiles, int Columns>
inline void add_path(const AmxRows& rows, const PathBlock& path, const BFloat16* weights) {
  const int64_t length = rows.positions.length;
  if (path.first == 0 && path.last == rows.count) return add_block<0, Tiles, Columns>(weights, length, rows.packed);
  alignas(64) BFloat16 copied[Tiles * kTileRows * kBlockKeys];
  std::memset(copied, 0, sizeof copied);
  for (int64_t i = path.first; i < path.last; ++i) std::memcpy(copied + i * kBlockKeys, weights + i * length, 64);
  if (Tiles == 1 || path.last <= kTileRows) {
    add_block<0, 1, Columns>(copied, kBlockKeys, rows.packed);
  } else if (path.first >= kTileRows) {
    add_block<Tiles - 1, Tiles, Columns>(copied, kBlockKeys, rows.packed);
  } else {
    add_block<0, Tiles, Columns>(copied, kBlockKeys, rows.packed);
  }
}

// Computes 16 * Columns columns of the outputs of all rows, from `column` on.
template <int Tiles, int Columns>
inline void amx_values(const AmxRows& rows, const std::vector<PathBlock>& paths, int64_t column, const float* inverse) {
  const AttentionJob& job = rows.job;
  const int64_t d = job.head_dim, length = rows.positions.length;
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (Tiles * Columns == 4) {
    zero_tile<2>();
    zero_tile<3>();
  }
  const BFloat16* values = rows.values + column;
  const BFloat16* weights = rows.weights;
  int64_t block = rows.positions.start;
  for (; block + kBlockKeys <= job.context; block += kBlockKeys, weights += kBlockKeys) {
    for (int64_t p = 0; p < 16; ++p) {
      if (column == 0) fetch_rows_ahead(job, rows.values, block + 2 * p, 2);
      const BFloat16* even = values + (block + 2 * p) * d;
      interleave(even, even + d, Columns * 16, rows.packed + p * Columns * 16);
    }
    add_block<0, Tiles, Columns>(weights, length, rows.packed);
  }
  for (const PathBlock& path : paths) {
    const auto value_in = [&](int64_t lane) { return path.slots[lane] < 0 ? nullptr : values + path.slots[lane] * d; };
    for (int64_t p = 0; p < 16; ++p) interleave(value_in(2 * p), value_in(2 * p + 1), Columns * 16, rows.packed + p * Columns * 16);
    add_path<Tiles, Columns>(rows, path, weights);
    if (path.last == rows.count) weights += kBlockKeys;
  }
  alignas(64) float sums[Tiles * Columns][16 * 16];
  store_tile<0>(sums[0], 64);
  store_tile<1>(sums[1], 64);
  if constexpr (Tiles * Columns == 4) {
    store_tile<2>(sums[2], 64);
    store_tile<3>(sums[3], 64);
  }
  for (int64_t i = 0; i < rows.count; ++i)
    for (int c = 0; c < Columns; ++c) {
      const float* sum = sums[i / kTileRows * Columns + c] + i % kTileRows * 16;
      store16(rows.out_of(i) + column + 16 * c, _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(inverse[i])));
    }
}

template <int Tiles>
inline void attend_tiles(const AmxRows& rows) {
  pack_queries(rows);
  amx_scores<Tiles>(rows);
  float inverse[kAmxRows];
  for (int64_t i = 0; i < rows.count; ++i)
    inverse[i] = softmax_positions(rows.job, rows.step_row(i), rows.positions, rows.scores + i * rows.positions.length,
                                 reinterpret_cast<float*>(rows.packed), rows.weights + i * rows.positions.length, rows.sink_of(i));
  static thread_local std::vector<PathBlock> paths;  // reused by every layer of every step
  pack_paths(rows, rows.positions, rows.weights, paths);
  AmxTiles amx;
  constexpr int kColumns = 4 / Tiles;
  for (int tile = 0; tile < 4; ++tile) amx.shape(tile, tile < kColumns ? std::min(rows.count, kTileRows) : rows.second_tile_rows(), kTileBytes);
  amx.shape(4, std::min(rows.count, kTileRows), kTileBytes);
  if constexpr (Tiles == 2) amx.shape(5, rows.second_tile_rows(), kTileBytes);
  for (const int values : {6, 7}) amx.shape(values, kTileRows, kTileBytes);
  amx.configure();
  int64_t column = 0;
  for (; column + 16 * kColumns <= rows.job.head_dim; column += 16 * kColumns) amx_values<Tiles, kColumns>(rows, paths, column, inverse);
  if (column < rows.job.head_dim) amx_values<Tiles, 2>(rows, paths, column, inverse);
}

inline void attend_amx(const KeyHeadRows& copied, uint32_t* scratch) {
  const Positions positions(copied, kBlockKeys);
  auto* aligned = reinterpret_cast<uint32_t*>(round_up(reinterpret_cast<int64_t>(scratch), 64));
  auto* scores = reinterpret_cast<float*>(aligned);
  auto* weights = reinterpret_cast<BFloat16*>(scores + kAmxRows * positions.length);
  auto* packed = reinterpret_cast<uint32_t*>(weights + kAmxRows * positions.length);
  const AmxRows rows{copied, positions, scores, weights, packed};
  if (rows.count <= kTileRows) attend_tiles<1>(rows);
  else attend_tiles<2>(rows);
}
#else
inline constexpr int64_t kAmxRows = 1;
inline bool fits_amx(int64_t) { return false; }
inline int64_t amx_words(const AttentionJob&) { return 0; }
inline void attend_amx(const KeyHeadRows&, uint32_t*) {}
#endif

}  // namespace yggdrasil
