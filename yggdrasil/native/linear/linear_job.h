// Parameters of a linear layer over packed weights, common to its vector and AMX kernels.
#pragma once

#include "linear/linear_output.h"

namespace yggdrasil {

constexpr int kTilePairs = 16;  // bf16 panels end on a whole tile of so many input pairs, filled with zeros

// Whether bf16 rows are multiplied with bf16 weights directly, two inputs at a time; else inputs are converted to
// float32 before.
#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// bf16: [P, K/2, 16, 2] (pairs along K beside each other, K rounded up to whole tiles); float32: [P, K, 16].
struct LinearJob {
  const uint32_t* packed;
  const uint32_t* x;      // [W, row_words]: two bf16 or one float32 a word
  const uint32_t* tiled;  // the same for AMX; null where it is not used
  int64_t rows, k_steps, row_words, panel_words;
  LinearOutput output;
};

}  // namespace yggdrasil
