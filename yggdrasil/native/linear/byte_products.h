// Integer products of 16-bit rows with 8-bit weights, for panels of 16 outputs and up to 16 rows at once.
//
// A row is stored as two rows of signed bytes, high and low (256 * high + low); weights as unsigned bytes with 128
// added, [inputs / 4, 16, 4].
#pragma once

#include <algorithm>
#include <cmath>

#include "common/input_rows.h"
#include "common/amx.h"
#include "quantised/quantised_vector.h"

namespace yggdrasil {

#if defined(YGG_VNNI) || defined(YGG_SHORT_VNNI)
#define YGG_BYTE_PRODUCTS 1
constexpr int64_t kTileInputs = 64;  // inputs of a row in an AMX tile; rows are zero-padded to a multiple of it

inline int64_t padded(int64_t inputs) { return (inputs + kTileInputs - 1) / kTileInputs * kTileInputs; }
inline int64_t panel_bytes(int64_t inputs) { return padded(inputs) * 16; }

// Up to 16 rows: the high bytes of all, then the low ones.
struct ByteRows {
  int8_t* bytes;  // [2, rows, filled inputs]
  int32_t* sums;  // [2, rows]: 128 times the sums of the bytes, to be subtracted from every product because weights have 128 added
  int64_t rows, inputs;

  static int64_t words(int64_t rows, int64_t inputs) { return 2 * rows * (padded(inputs) / 4 + 1); }
  int8_t* row(int64_t part, int64_t row) const { return bytes + (part * rows + row) * padded(inputs); }

  // Rounds a row to 16-bit integers of at most kMaxValue, and splits them into high and low bytes. `inverse` is one
  // over the scale.
  static constexpr float kMaxValue = 127 * 256;
  void write(int64_t index, const float* values, float inverse) const {
    int8_t *high = row(0, index), *low = row(1, index);
    int32_t byte_sums[2] = {0, 0};
    for (int64_t k = 0; k < inputs; ++k) {
      const auto value = static_cast<int32_t>(std::nearbyint(values[k] * inverse)), high_value = (value + 128) >> 8;
      high[k] = static_cast<int8_t>(high_value), low[k] = static_cast<int8_t>(value - 256 * high_value);
      byte_sums[0] += high_value, byte_sums[1] += value - 256 * high_value;
    }
    for (int64_t k = inputs; k < padded(inputs); ++k) high[k] = low[k] = 0;
    sums[index] = 128 * byte_sums[0], sums[rows + index] = 128 * byte_sums[1];
  }
};

#ifdef YGG_VNNI
inline IntLanes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline IntLanes add_products(IntLanes sums, IntLanes weights, const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, sizeof word);
  return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(word));
}
inline Lanes subtract(IntLanes sums, int32_t index) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(index))); }
#else
inline IntLanes load_bytes(const uint8_t* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline IntLanes add_products(IntLanes sums, IntLanes weights, const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, sizeof word);
  const __m256i repeated = _mm256_set1_epi32(word);
  return {add_products_of_bytes(sums.low, weights.low, repeated), add_products_of_bytes(sums.high, weights.high, repeated)};
}
inline Lanes subtract(IntLanes sums, int32_t index) {
  const __m256i subtrahend = _mm256_set1_epi32(index);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(sums.low, subtrahend)), _mm256_cvtepi32_ps(_mm256_sub_epi32(sums.high, subtrahend))};
}
#endif

// Returns 256 * high + low of a row's sums, without the offset of the weights.
inline Lanes combine(const ByteRows& rows, int64_t row, IntLanes high, IntLanes low) {
  return fmadd(subtract(high, rows.sums[row]), broadcast(256.0f), subtract(low, rows.sums[rows.rows + row]));
}

// Multiplies R rows from `first` on with a panel, and calls emit(row, sums) for each.
template <int R, typename Take>
inline void multiply_panel(const ByteRows& rows, int64_t first, const uint8_t* panel, const Take& emit) {
  IntLanes sums[2][R];
  const int8_t* bytes[2][R];
  for (int part = 0; part < 2; ++part)
    for (int r = 0; r < R; ++r) sums[part][r] = zero_ints(), bytes[part][r] = rows.row(part, first + r);
  const int64_t inputs = padded(rows.inputs);
  for (int64_t k = 0; k < inputs; k += 4, panel += 64) {
    prefetch_l2(panel + 4096);
    const IntLanes weights = load_bytes(panel);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[part][r] = add_products(sums[part][r], weights, bytes[part][r] + k);
  }
  for (int r = 0; r < R; ++r) emit(first + r, combine(rows, first + r, sums[0][r], sums[1][r]));
}

#ifdef YGG_AMX
// Tiles 0 and 1 hold the high and the low bytes of rows, 2 weights, 4 and 5 sums. The sums of a panel are read while
// the next panel is multiplied, because loads right after a tile store stall.
template <typename Take>
void multiply_panels_amx(const ByteRows& rows, const uint8_t* panels, int64_t begin, int64_t end, const Take& emit) {
  AmxTiles amx;
  for (const int tile : {0, 1, 4, 5}) amx.shape(tile, rows.rows, kTileBytes);
  amx.shape(2, kTileRows, kTileBytes);
  amx.configure();
  const int64_t inputs = padded(rows.inputs), rows_per_tile = (rows.rows * kTileInputs + inputs - 1) / inputs;
  alignas(64) int32_t sums[2][2][kTileRows * 16];  // sums of two panels, high and low
  const auto emit_row = [&](int64_t panel, int64_t row) {
    const auto& [high, low] = sums[panel % 2];
    emit(panel, row, combine(rows, row, _mm512_load_si512(high + row * 16), _mm512_load_si512(low + row * 16)));
  };
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint8_t* weights = panels + panel * panel_bytes(rows.inputs);
    int64_t emitted = panel > begin ? 0 : rows.rows;
    zero_tile<4>();
    zero_tile<5>();
    for (int64_t k = 0; k < inputs; k += kTileInputs, weights += kTileRows * kTileBytes) {
      for (int64_t line = 0; line < kTileRows * kTileBytes; line += 64) prefetch_l2(weights + 8192 + line);
      load_tile<2>(weights, kTileBytes);
      load_tile<0>(rows.bytes + k, inputs);
      load_tile<1>(rows.row(1, 0) + k, inputs);
      add_mixed_products<4, 0, 2>();
      add_mixed_products<5, 1, 2>();
      for (const int64_t last = std::min(emitted + rows_per_tile, rows.rows); emitted < last; ++emitted) emit_row(panel - 1, emitted);
    }
    store_tile<4>(sums[panel % 2][0], kTileBytes);
    store_tile<5>(sums[panel % 2][1], kTileBytes);
  }
  for (int64_t row = 0; begin < end && row < rows.rows; ++row) emit_row(end - 1, row);
}
#endif

// Calls emit(panel, row, sums) for all rows and the panels [begin, end).
template <typename Take>
void multiply_panels(const ByteRows& rows, const uint8_t* panels, int64_t begin, int64_t end, const Take& emit) {
#ifdef YGG_AMX
  if (rows.rows > 1 && has_amx()) return multiply_panels_amx(rows, panels, begin, end, emit);
#endif
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint8_t* weights = panels + panel * panel_bytes(rows.inputs);
    const auto emit_row = [&](int64_t row, Lanes sums) { emit(panel, row, sums); };
    int64_t row = 0;
    for (; row + 8 <= rows.rows; row += 8) multiply_panel<8>(rows, row, weights, emit_row);
    if (row + 4 <= rows.rows) multiply_panel<4>(rows, row, weights, emit_row), row += 4;
    if (row + 2 <= rows.rows) multiply_panel<2>(rows, row, weights, emit_row), row += 2;
    if (row < rows.rows) multiply_panel<1>(rows, row, weights, emit_row);
  }
}
#endif

}  // namespace yggdrasil
