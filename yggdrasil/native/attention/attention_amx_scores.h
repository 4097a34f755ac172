// Attention scores of a key head's rows with AMX: two tiles of 16 rows share each loaded tile of keys.
#pragma once

#include <algorithm>

#include "attention/attention_amx_paths.h"
#include "common/amx.h"

namespace yggdrasil {

#ifdef YGG_AMX
constexpr int64_t kAmxRows = 2 * kTileRows;  // rows of a unit of work
constexpr int64_t kBlocksAhead = 2;                 // prefetch distance in blocks

struct AmxRows : KeyHeadRows {
  Positions positions;
  float* scores;      // [count, length], whole tiles
  BFloat16* weights;  // [count, length]
  uint32_t* packed;   // queries [tile, D / 2, 16 rows], then a row's tree scores, then values [16 pairs, columns]

  int64_t second_tile_rows() const { return std::max<int64_t>(count - kTileRows, 0); }  // rows of the second tile
};

// Returns the words of scratch memory for the rows of one key head.
inline int64_t amx_words(const AttentionJob& job) {
  const int64_t length = round_up(job.context_stride, kBlockKeys) + 2 * kBlockKeys, tree_slots = job.context_stride - job.context;
  const int64_t packed = std::max({job.head_dim / 2 * kAmxRows, 16 * 64l, tree_slots});
  return kAmxRows * (length + length / 2) + packed + 16;
}

// Prefetches rows of the KV cache some blocks ahead, up to the end of the context: long texts exceed the L2 cache.
inline void fetch_rows_ahead(const AttentionJob& job, const BFloat16* cache, int64_t slot, int64_t count) {
  const int64_t begin = slot + kBlocksAhead * kBlockKeys, end = std::min(begin + count, job.context);
  for (int64_t i = begin * job.head_dim; i < end * job.head_dim; i += 32) prefetch_l2(cache + i);
}

inline void pack_queries(const AmxRows& rows) {
  const int64_t pairs = rows.job.head_dim / 2;
  alignas(64) float lines[16 * 16] = {};
  for (int64_t first = 0; first < rows.count; first += kTileRows)
    for (int64_t p = 0; p < pairs; p += 16) {
      for (int64_t i = 0; i < std::min(kTileRows, rows.count - first); ++i) std::memcpy(lines + 16 * i, rows.query_of(first + i) + p, 64);
      transpose16(lines, 16, reinterpret_cast<float*>(rows.packed + first * pairs + p * 16), 16);
    }
}

// Computes the scores of 16 slots: tile Sum for the first tile of rows, and Sum + 2 for the second. Slots past the
// cache's end are read as zeros from a copy.
template <int Sum, int Tiles>
inline void score_sixteen(const AmxRows& rows, int64_t slot) {
  const int64_t d = rows.job.head_dim, valid = rows.job.capacity - slot;
  const BFloat16* keys = rows.keys + slot * d;
  alignas(64) BFloat16 copy[16 * 32];
  for (int64_t t = 0; t < d; t += 32) {
    if (valid >= 16) {
      load_tile<6 + Sum>(keys + t, 2 * d);
    } else {
      std::memset(copy, 0, sizeof copy);
      for (int64_t i = 0; i < valid; ++i) std::memcpy(copy + 32 * i, keys + i * d + t, 64);
      load_tile<6 + Sum>(copy, 64);
    }
    load_tile<4>(rows.packed + t / 2 * 16, kTileBytes);
    add_bf16_products<Sum, 6 + Sum, 4>();
    if constexpr (Tiles == 2) {
      load_tile<5>(rows.packed + (d + t) / 2 * 16, kTileBytes);
      add_bf16_products<Sum + 2, 6 + Sum, 5>();
    }
  }
}

template <int Tiles>
inline void amx_scores(const AmxRows& rows) {
  const int64_t d = rows.job.head_dim, length = rows.positions.length;
  AmxTiles amx;
  for (const int tile : {0, 1, 4}) amx.shape(tile, kTileRows, std::min(rows.count, kTileRows) * 4);
  for (const int tile : {2, 3, 5}) amx.shape(tile, kTileRows, std::max<int64_t>(rows.second_tile_rows(), 1) * 4);
  for (const int keys : {6, 7}) amx.shape(keys, kTileRows, kTileBytes);
  amx.configure();
  alignas(64) float sums[4][16 * 16] = {};
  for (int64_t slot = rows.positions.start; slot < rows.positions.last_slot; slot += 32) {
    fetch_rows_ahead(rows.job, rows.keys, slot, 32);
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (Tiles == 2) {
      zero_tile<2>();
      zero_tile<3>();
    }
    score_sixteen<0, Tiles>(rows, slot);
    score_sixteen<1, Tiles>(rows, slot + 16);
    float* scores = rows.scores + slot - rows.positions.start;
    store_tile<0>(sums[0], kTileBytes);
    store_tile<1>(sums[1], kTileBytes);
    if constexpr (Tiles == 2) {
      store_tile<2>(sums[2], kTileBytes);
      store_tile<3>(sums[3], kTileBytes);
    }
    transpose16(sums[0], 16, scores, length);
    transpose16(sums[1], 16, scores + 16, length);
    if constexpr (Tiles == 2) {
      transpose16(sums[2], 16, scores + kTileRows * length, length);
      transpose16(sums[3], 16, scores + kTileRows * length + 16, length);
    }
  }
}
#endif

}  // namespace yggdrasil
