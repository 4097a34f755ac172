// Multiplies tiles of rows with pairs of panels, with the AMX or the vector kernel, whichever is faster for the number
// of rows.
#pragma once

#include <iterator>

#include "quantised/quantised_amx.h"

namespace yggdrasil {

// Multiplies a tile of rows with the pairs of panels [begin, end). The first `count` rows of the tile are the layer's
// rows from `row` on; the others are padding.
template <int R>
void multiply_pairs(const QuantisedJob& job, uint8_t* tile, int64_t rows, int64_t row, int64_t count, int64_t begin, int64_t end) {
  with_format(job.format, [&](auto format) {
    using F = decltype(format);
#ifdef YGG_AMX_INT8
    if constexpr (kSuitsAmx<F> && R >= 3) {
      if (rows >= kMinAmxRows && has_amx()) return AmxSteps<F, R>(job, tile, rows, row, count).run(begin, end);
    }
#endif
    constexpr int kAtOnce = F::kIsNested && R == 8 ? 4 : R;  // eight rows at once were 5 % slower for nested formats
    const int64_t groups = F::groups(job.inputs);
    alignas(64) float out[2 * kMaxTileRows * kLanes];
    for (int64_t pair = begin; pair < end; ++pair) {
      quantised_tile<F, kAtOnce>(job.packed + pair * groups * F::kGroup, tile, groups, rows, out);
      store_pair(job, row, count, rows, pair, out);
    }
  });
}

using QuantisedRunner = void (*)(const QuantisedJob&, uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t);

struct TileSize {
  int64_t rows;
  QuantisedRunner run;
};
#ifdef YGG_WIDE_WORDS
constexpr int kMostRows = 8, kSixRows = 6;  // rows multiplied at once; the sums of eight rows fit in the 32 registers
#else
constexpr int kMostRows = 4, kSixRows = 3;
#endif
constexpr TileSize kTileSizes[] = {{1, multiply_pairs<1>}, {2, multiply_pairs<2>},         {3, multiply_pairs<3>},
                                   {4, multiply_pairs<4>}, {6, multiply_pairs<kSixRows>},  {8, multiply_pairs<kMostRows>},
                                   {9, multiply_pairs<3>}, {12, multiply_pairs<4>},        {16, multiply_pairs<kMostRows>}};

inline const TileSize& tile_size(int64_t rows) {
  return *std::find_if(std::begin(kTileSizes), std::end(kTileSizes), [rows](const TileSize& size) { return size.rows >= rows; });
}

}  // namespace yggdrasil
