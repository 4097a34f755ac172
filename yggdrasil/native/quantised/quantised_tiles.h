// Multiply tiles of rows with pairs of panels, by AMX or vector kernels, whichever is faster for the number of rows.
#pragma once

#include <iterator>

#include "quantised/quantised_matrix.h"

namespace yggdrasil {

// The first `count` rows of a tile, which are those of the layer from `row` on, meet pairs of panels [begin, end).
template <int R>
void run_quantised_pairs(const QuantisedJob& job, uint8_t* tile, int64_t rows, int64_t row, int64_t count, int64_t begin, int64_t end) {
  with_format(job.format, [&](auto format) {
    using F = decltype(format);
#ifdef YGG_AMX_INT8
    if constexpr (kFitsAmx<F> && R >= 3) {
      if (rows >= kMatrixRows && has_amx()) return MatrixSteps<F, R>(job, tile, rows, row, count).run(begin, end);
    }
#endif
    const int64_t groups = F::groups(job.inputs);
    alignas(64) float out[2 * kMostRows * kLanes];
    for (int64_t pair = begin; pair < end; ++pair) {
      quantised_tile<F, R>(job.packed + pair * groups * F::kGroup, tile, groups, rows, out);
      store_pair(job, row, count, rows, pair, out);
    }
  });
}

using QuantisedRunner = void (*)(const QuantisedJob&, uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t);

struct TileSize {
  int64_t rows;
  QuantisedRunner run;
};
constexpr TileSize kTileSizes[] = {{1, run_quantised_pairs<1>}, {2, run_quantised_pairs<2>},  {3, run_quantised_pairs<3>},
                                   {4, run_quantised_pairs<4>}, {6, run_quantised_pairs<3>},  {8, run_quantised_pairs<4>},
                                   {9, run_quantised_pairs<3>}, {12, run_quantised_pairs<4>}, {16, run_quantised_pairs<4>}};

inline const TileSize& tile_size(int64_t rows) {
  return *std::find_if(std::begin(kTileSizes), std::end(kTileSizes), [rows](const TileSize& size) { return size.rows >= rows; });
}

}  // namespace yggdrasil
