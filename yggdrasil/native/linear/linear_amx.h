// Linear layers over packed weights with AMX: up to 16 rows take the time of one.
#pragma once

#include "linear/linear_job.h"
#include "common/amx.h"

namespace yggdrasil {

constexpr int64_t kAmxPanels = 4;  // panels multiplied with a block of rows at a time, limited by the eight tile registers

#ifdef YGG_AMX
// Tiles 0 and 1 hold inputs, 2 and 3 weights, 4 to 7 sums. One block of up to 16 rows is multiplied with four panels at
// a time, two blocks with two.
inline void configure_for_linear(AmxTiles& amx, int64_t rows) {
  const int64_t first_rows = std::min(rows, kTileRows), second_rows = rows > kTileRows ? rows - kTileRows : first_rows;
  const int64_t heights[8] = {first_rows, second_rows, kTilePairs, kTilePairs, first_rows, first_rows, second_rows, second_rows};
  for (int i = 0; i < 8; ++i) amx.shape(i, heights[i], kTileBytes);
  amx.configure();
}

// Writes a row's inputs as row number `row` of tiles [block of 16 rows, tile along K, 16, 16 words], with zeros at the
// end. Rows of the input are a power of two apart, and a few dozen of them would compete for the same cache sets.
inline void tile_row(const uint32_t* inputs, int64_t row, int64_t k_steps, uint32_t* tiled) {
  const int64_t tiles = (k_steps + kTilePairs - 1) / kTilePairs;
  uint32_t* target = tiled + (row / kTileRows * tiles * kTileRows + row % kTileRows) * kTilePairs;
  for (int64_t k = 0; k < k_steps; k += kTilePairs, target += kTileRows * kTilePairs) {
    const int64_t count = std::min<int64_t>(kTilePairs, k_steps - k);
    std::memcpy(target, inputs + k, count * sizeof(uint32_t));
    std::fill(target + count, target + kTilePairs, 0u);
  }
}

inline int64_t tiled_words(int64_t rows, int64_t k_steps) {
  return (rows + kTileRows - 1) / kTileRows * ((k_steps + kTilePairs - 1) / kTilePairs) * kTileRows * kTilePairs;
}

template <int NB>
void store_tiles(const LinearJob& job, int64_t row, int64_t rows, int64_t panel, const float (*sums)[kTileRows * kPanel]) {
  for (int n = 0; n < NB; ++n)
    for (int64_t m = 0; m < rows; ++m) store_row(job.output, row + m, panel + n, sums[n] + m * kPanel);
}

// Returns tile number `tile` (16 input pairs) of a panel.
inline const uint32_t* weight_tile(const LinearJob& job, int64_t panel, int64_t tile) {
  return job.packed + panel * job.panel_words + tile * kTilePairs * kPanel;
}

template <int NB>
void amx_one_block(const LinearJob& job, int64_t row, int64_t rows, int64_t panel) {
  const int64_t tiles = (job.k_steps + kTilePairs - 1) / kTilePairs;
  const uint32_t* x = job.tiled + row * tiles * kTilePairs;
  zero_tile<4>();
  if constexpr (NB == 4) {
    zero_tile<5>();
    zero_tile<6>();
    zero_tile<7>();
  }
  for (int64_t t = 0; t < tiles; ++t, x += kTileRows * kTilePairs) {
    load_tile<0>(x, kTileBytes);
    load_tile<2>(weight_tile(job, panel, t), kTileBytes);
    add_bf16_products<4, 0, 2>();
    if constexpr (NB == 4) {
      load_tile<3>(weight_tile(job, panel + 1, t), kTileBytes);
      add_bf16_products<5, 0, 3>();
      load_tile<2>(weight_tile(job, panel + 2, t), kTileBytes);
      add_bf16_products<6, 0, 2>();
      load_tile<3>(weight_tile(job, panel + 3, t), kTileBytes);
      add_bf16_products<7, 0, 3>();
    }
  }
  alignas(64) float sums[NB][kTileRows * kPanel];
  store_tile<4>(sums[0], kTileBytes);
  if constexpr (NB == 4) {
    store_tile<5>(sums[1], kTileBytes);
    store_tile<6>(sums[2], kTileBytes);
    store_tile<7>(sums[3], kTileBytes);
  }
  store_tiles<NB>(job, row, rows, panel, sums);
}

template <int NB>
void amx_two_blocks(const LinearJob& job, int64_t row, int64_t rows, int64_t panel) {
  const int64_t tiles = (job.k_steps + kTilePairs - 1) / kTilePairs;
  const uint32_t* x = job.tiled + row * tiles * kTilePairs;
  const uint32_t* y = x + tiles * kTileRows * kTilePairs;
  zero_tile<4>();
  zero_tile<6>();
  if constexpr (NB == 2) {
    zero_tile<5>();
    zero_tile<7>();
  }
  for (int64_t t = 0; t < tiles; ++t) {
    load_tile<0>(x + t * kTileRows * kTilePairs, kTileBytes);
    load_tile<2>(weight_tile(job, panel, t), kTileBytes);
    add_bf16_products<4, 0, 2>();
    load_tile<1>(y + t * kTileRows * kTilePairs, kTileBytes);
    add_bf16_products<6, 1, 2>();
    if constexpr (NB == 2) {
      load_tile<3>(weight_tile(job, panel + 1, t), kTileBytes);
      add_bf16_products<5, 0, 3>();
      add_bf16_products<7, 1, 3>();
    }
  }
  alignas(64) float sums[2][NB][kTileRows * kPanel];
  store_tile<4>(sums[0][0], kTileBytes);
  store_tile<6>(sums[1][0], kTileBytes);
  if constexpr (NB == 2) {
    store_tile<5>(sums[0][1], kTileBytes);
    store_tile<7>(sums[1][1], kTileBytes);
  }
  store_tiles<NB>(job, row, kTileRows, panel, sums[0]);
  store_tiles<NB>(job, row + kTileRows, rows - kTileRows, panel, sums[1]);
}

inline void run_amx_panels(const LinearJob& job, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  AmxTiles amx;
  configure_for_linear(amx, rows);
  int64_t panel = begin;
  if (rows <= kTileRows) {
    for (; panel + kAmxPanels <= end; panel += kAmxPanels) amx_one_block<kAmxPanels>(job, row, rows, panel);
    for (; panel < end; ++panel) amx_one_block<1>(job, row, rows, panel);
  } else {
    for (; panel + 2 <= end; panel += 2) amx_two_blocks<2>(job, row, rows, panel);
    for (; panel < end; ++panel) amx_two_blocks<1>(job, row, rows, panel);
  }
}
#else
inline int64_t tiled_words(int64_t, int64_t) { return 0; }
inline void tile_row(const uint32_t*, int64_t, int64_t, uint32_t*) {}
#endif

}  // namespace yggdrasil
