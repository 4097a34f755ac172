// Packed linear on the matrix unit (AMX): up to 16 rows cost what one does.
#pragma once

#include "linear_job.h"
#include "scratch.h"

namespace yggdrasil {

#ifdef YGG_AMX
// A tile of 16 input pairs by 16 outputs is 1 KiB of a panel as packed, and up to 16 rows cost what one does.
constexpr int64_t kTileRows = 16, kTileBytes = 64;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The operating system grants the matrix unit's state to a process that asks.
inline bool has_matrix_unit() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Registers: 0 and 1 hold inputs, 2 and 3 weights, 4 to 7 sums. One block of up to 16 rows meets four panels at a time,
// two blocks meet two.
inline void configure_tiles(int64_t rows) {
  TileShapes shapes;
  const auto first = static_cast<uint8_t>(std::min(rows, kTileRows));
  const auto second = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : first);
  const uint8_t heights[8] = {first, second, kTilePairs, kTilePairs, first, first, second, second};
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = heights[i];
    shapes.row_bytes[i] = kTileBytes;
  }
  _tile_loadconfig(&shapes);
}

// Input rows as tiles, [block of 16 rows, tile along K, 16, 16 words], ends filled with zeros. Rows as they come lie a
// power of two apart, and a few dozen of them fight for the same sets of the cache.
inline void tile_input(const uint32_t* x, int64_t rows, int64_t k_steps, uint32_t* tiled) {
  const int64_t tiles = (k_steps + kTilePairs - 1) / kTilePairs;
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t* target = tiled + (row / kTileRows * tiles * kTileRows + row % kTileRows) * kTilePairs;
    for (int64_t k = 0; k < k_steps; k += kTilePairs, target += kTileRows * kTilePairs) {
      const int64_t count = std::min<int64_t>(kTilePairs, k_steps - k);
      std::memcpy(target, x + row * k_steps + k, count * sizeof(uint32_t));
      std::fill(target + count, target + kTilePairs, 0u);
    }
  }
}

inline const uint32_t* tiled_copy(const uint32_t* x, int64_t rows, int64_t k_steps) {
  const int64_t blocks = (rows + kTileRows - 1) / kTileRows, tiles = (k_steps + kTilePairs - 1) / kTilePairs;
  uint32_t* tiled = scratch_words(blocks * tiles * kTileRows * kTilePairs);
  tile_input(x, rows, k_steps, tiled);
  return tiled;
}

template <int NB>
void store_tiles(const LinearJob& job, int64_t row, int64_t rows, int64_t panel, const float (*sums)[kTileRows * kPanel]) {
  for (int n = 0; n < NB; ++n)
    for (int64_t m = 0; m < rows; ++m) store_row(job.output, row + m, panel + n, sums[n] + m * kPanel);
}

// The tile-th 16 input pairs of a panel.
inline const uint32_t* weight_tile(const LinearJob& job, int64_t panel, int64_t tile) {
  return job.packed + panel * job.panel_words + tile * kTilePairs * kPanel;
}

template <int NB>
void matrix_one_block(const LinearJob& job, int64_t row, int64_t rows, int64_t panel) {
  const int64_t tiles = (job.k_steps + kTilePairs - 1) / kTilePairs;
  const uint32_t* x = job.tiled + row * tiles * kTilePairs;
  _tile_zero(4);
  if constexpr (NB == 4) {
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
  for (int64_t t = 0; t < tiles; ++t, x += kTileRows * kTilePairs) {
    _tile_loadd(0, x, kTileBytes);
    _tile_loadd(2, weight_tile(job, panel, t), kTileBytes);
    _tile_dpbf16ps(4, 0, 2);
    if constexpr (NB == 4) {
      _tile_loadd(3, weight_tile(job, panel + 1, t), kTileBytes);
      _tile_dpbf16ps(5, 0, 3);
      _tile_loadd(2, weight_tile(job, panel + 2, t), kTileBytes);
      _tile_dpbf16ps(6, 0, 2);
      _tile_loadd(3, weight_tile(job, panel + 3, t), kTileBytes);
      _tile_dpbf16ps(7, 0, 3);
    }
  }
  alignas(64) float sums[NB][kTileRows * kPanel];
  _tile_stored(4, sums[0], kTileBytes);
  if constexpr (NB == 4) {
    _tile_stored(5, sums[1], kTileBytes);
    _tile_stored(6, sums[2], kTileBytes);
    _tile_stored(7, sums[3], kTileBytes);
  }
  store_tiles<NB>(job, row, rows, panel, sums);
}

template <int NB>
void matrix_two_blocks(const LinearJob& job, int64_t row, int64_t rows, int64_t panel) {
  const int64_t tiles = (job.k_steps + kTilePairs - 1) / kTilePairs;
  const uint32_t* x = job.tiled + row * tiles * kTilePairs;
  const uint32_t* y = x + tiles * kTileRows * kTilePairs;
  _tile_zero(4);
  _tile_zero(6);
  if constexpr (NB == 2) {
    _tile_zero(5);
    _tile_zero(7);
  }
  for (int64_t t = 0; t < tiles; ++t) {
    _tile_loadd(0, x + t * kTileRows * kTilePairs, kTileBytes);
    _tile_loadd(2, weight_tile(job, panel, t), kTileBytes);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(1, y + t * kTileRows * kTilePairs, kTileBytes);
    _tile_dpbf16ps(6, 1, 2);
    if constexpr (NB == 2) {
      _tile_loadd(3, weight_tile(job, panel + 1, t), kTileBytes);
      _tile_dpbf16ps(5, 0, 3);
      _tile_dpbf16ps(7, 1, 3);
    }
  }
  alignas(64) float sums[2][NB][kTileRows * kPanel];
  _tile_stored(4, sums[0][0], kTileBytes);
  _tile_stored(6, sums[1][0], kTileBytes);
  if constexpr (NB == 2) {
    _tile_stored(5, sums[0][1], kTileBytes);
    _tile_stored(7, sums[1][1], kTileBytes);
  }
  store_tiles<NB>(job, row, kTileRows, panel, sums[0]);
  store_tiles<NB>(job, row + kTileRows, rows - kTileRows, panel, sums[1]);
}

inline void run_matrix_panels(const LinearJob& job, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  configure_tiles(rows);
  int64_t panel = begin;
  if (rows <= kTileRows) {
    for (; panel + 4 <= end; panel += 4) matrix_one_block<4>(job, row, rows, panel);
    for (; panel < end; ++panel) matrix_one_block<1>(job, row, rows, panel);
  } else {
    for (; panel + 2 <= end; panel += 2) matrix_two_blocks<2>(job, row, rows, panel);
    for (; panel < end; ++panel) matrix_two_blocks<1>(job, row, rows, panel);
  }
  _tile_release();
}
#else
constexpr bool has_matrix_unit() { return false; }
inline const uint32_t* tiled_copy(const uint32_t*, int64_t, int64_t) { return nullptr; }
#endif

}  // namespace yggdrasil
