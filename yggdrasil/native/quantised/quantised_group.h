// Sums of products over a group of inputs for which a row has one scale; integers up to the end of the group.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#ifdef YGG_AVX2
// Adds the sums of a group of a side, [rows, lanes], to those of its rows; input is the first chunk.
template <typename F>
void add_group(const uint8_t* header, uint8_t* input, int64_t rows, const int32_t* group, float* out) {
  const Lanes scale = load16_halves(header), minimum = load16_halves(header + 2 * kLanes);
  Integers multiples[4];  // of the minimum, for two chunks each
  for (int i = 0; i < 4 && F::kHasMinimum; ++i) multiples[i] = low_and_high_words(header + (5 + 4 * i) * kLanes, header + (7 + 4 * i) * kLanes);
  for (int64_t row = 0; row < rows; ++row, group += kLanes, out += kLanes) {
    Lanes sum = to_floats(load16(group)) * scale;
    if constexpr (F::kHasMinimum) {
      Integers counts = no_sums();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        uint8_t* odd_chunk = input + (2 * i + 1) * rows * InputChunk::kBytes;
        counts = add_products_of_words(counts, multiples[i], InputChunk::pair_counts(odd_chunk, rows)[row]);
      }
      sum = fused(to_floats(counts), minimum, sum);
    }
    store16(out, fused(sum, spread(InputChunk::scales(input, rows)[row]), load16(out)));
  }
}
#endif

}  // namespace yggdrasil
