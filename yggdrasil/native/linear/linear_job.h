// Parameters of a linear layer over packed weights, common to its vector and AMX kernels.
#pragma once

#include "linear/linear_output.h"

namespace yggdrasil {

constexpr int kTilePairs = 16;  // bf16 panels are padded with zeros to a multiple of this number of input pairs

// Whether bf16 rows are multiplied with bf16 weights by instructions for pairs of inputs; else inputs are converted to
// float32 first.
#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Layout of `packed`: bf16 [P, K/2, 16, 2] (pairs along K adjacent, K padded to whole tiles); float32 [P, K, 16].
struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;      // [W, row_words]: two bf16 or one float32 per word
  const uint32_t* tiled;  // the rows in AMX tiles (tile_row); null if AMX is not used
  int64_t rows, k_steps, row_words, panel_words;
  LinearOutput output;
};

}  // namespace yggdrasil
