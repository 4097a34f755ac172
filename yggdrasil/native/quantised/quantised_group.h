// Scales the integer sums of a group of inputs and adds them to a row's float32 outputs.
#pragma once

#include "quantised/quantised_input.h"

namespace yggdrasil {

#ifdef YGG_AVX2
// Scales the integer sums `group` [rows, lanes] of one side and adds them to `out` [rows, lanes]. `input` is the
// group's first chunk of rounded rows.
template <typename F>
void add_group(const uint8_t* header, uint8_t* input, int64_t rows, const int32_t* group, float* out) {
  const Lanes scale = load16_float16(header), minimum = load16_float16(header + 2 * kLanes);
  IntLanes multiples[4];  // multiples of the minimum, each of two chunks
  for (int i = 0; i < 4 && F::kHasMinimum; ++i) multiples[i] = interleave_words(header + (5 + 4 * i) * kLanes, header + (7 + 4 * i) * kLanes);
  for (int64_t row = 0; row < rows; ++row, group += kLanes, out += kLanes) {
    Lanes sum = to_floats(load16(group)) * scale;
    if constexpr (F::kHasMinimum) {
      IntLanes minimum_sums = zero_ints();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        uint8_t* odd_chunk = input + (2 * i + 1) * rows * InputChunk::kBytes;
        minimum_sums = madd_words(minimum_sums, multiples[i], InputChunk::pair_counts(odd_chunk, rows)[row]);
      }
      sum = fmadd(to_floats(minimum_sums), minimum, sum);
    }
    store16(out, fmadd(sum, broadcast(InputChunk::scales(input, rows)[row]), load16(out)));
  }
}
#endif

}  // namespace yggdrasil
