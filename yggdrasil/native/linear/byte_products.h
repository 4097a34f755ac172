// Integer products of 16-bit rows with 8-bit weights, for panels of 16 outputs and up to 16 rows at once.
//
// A row is stored as two rows of signed bytes, high and low (256 * high + low); weights as unsigned bytes with 128 added,
// [inputs / 4, 16, 4].
#pragma once

#include <algorithm>
#include <cmath>

#include "common/input_rows.h"
#include "common/amx.h"
#include "quantised/quantised_bytes.h"

namespace yggdrasil {

#if defined(YGG_VNNI) || defined(YGG_SHORT_VNNI)
#define YGG_BYTE_PRODUCTS 1
constexpr int64_t kByteLine = 64;  // inputs that a tile holds of a row: rows are filled up to that with zeros

inline int64_t filled(int64_t inputs) { return (inputs + kByteLine - 1) / kByteLine * kByteLine; }
inline int64_t panel_bytes(int64_t inputs) { return filled(inputs) * 16; }

// Up to 16 rows: the high bytes of all, then the low ones.
struct ByteRows {
  int8_t* bytes;  // [2, rows, filled inputs]
  int32_t* sums;  // [2, rows]: 128 times the sums of the bytes, which every product has too much
  int64_t rows, inputs;

  static int64_t words(int64_t rows, int64_t inputs) { return 2 * rows * (filled(inputs) / 4 + 1); }
  int8_t* row(int64_t part, int64_t row) const { return bytes + (part * rows + row) * filled(inputs); }

  // Rounds a row to multiples of `scale`, of which it holds no more than kMost.
  static constexpr float kMost = 127 * 256;
  void write(int64_t number, const float* values, float inverse) const {
    int8_t *high = row(0, number), *low = row(1, number);
    int32_t totals[2] = {0, 0};
    for (int64_t k = 0; k < inputs; ++k) {
      const auto whole = static_cast<int32_t>(std::nearbyint(values[k] * inverse)), upper = (whole + 128) >> 8;
      high[k] = static_cast<int8_t>(upper), low[k] = static_cast<int8_t>(whole - 256 * upper);
      totals[0] += upper, totals[1] += whole - 256 * upper;
    }
    for (int64_t k = inputs; k < filled(inputs); ++k) high[k] = low[k] = 0;
    sums[number] = 128 * totals[0], sums[rows + number] = 128 * totals[1];
  }
};

#ifdef YGG_VNNI
inline Integers load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Integers with_products(Integers sums, Integers weights, const int8_t* four) {
  int32_t together;
  std::memcpy(&together, four, sizeof together);
  return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(together));
}
inline Lanes less(Integers sums, int32_t number) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(number))); }
#else
inline Integers load_bytes(const uint8_t* from) {
  const auto* halves = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Integers with_products(Integers sums, Integers weights, const int8_t* four) {
  int32_t together;
  std::memcpy(&together, four, sizeof together);
  const __m256i spread_out = _mm256_set1_epi32(together);
  return {add_products_of_bytes(sums.low, weights.low, spread_out), add_products_of_bytes(sums.high, weights.high, spread_out)};
}
inline Lanes less(Integers sums, int32_t number) {
  const __m256i much = _mm256_set1_epi32(number);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(sums.low, much)), _mm256_cvtepi32_ps(_mm256_sub_epi32(sums.high, much))};
}
#endif

// Combines the sums of the high and the low bytes of a row.
inline Lanes whole_of(const ByteRows& rows, int64_t row, Integers high, Integers low) {
  return fused(less(high, rows.sums[row]), spread(256.0f), less(low, rows.sums[rows.rows + row]));
}

// Multiplies R rows from `first` on with a panel.
template <int R, typename Take>
inline void meet_panel(const ByteRows& rows, int64_t first, const uint8_t* panel, const Take& take) {
  Integers sums[2][R];
  const int8_t* bytes[2][R];
  for (int part = 0; part < 2; ++part)
    for (int r = 0; r < R; ++r) sums[part][r] = no_sums(), bytes[part][r] = rows.row(part, first + r);
  const int64_t inputs = filled(rows.inputs);
  for (int64_t k = 0; k < inputs; k += 4, panel += 64) {
    fetch_ahead(panel + 4096);
    const Integers weights = load_bytes(panel);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[part][r] = with_products(sums[part][r], weights, bytes[part][r] + k);
  }
  for (int r = 0; r < R; ++r) take(first + r, whole_of(rows, first + r, sums[0][r], sums[1][r]));
}

#ifdef YGG_AMX
// Tiles 0 and 1 hold the high and the low bytes of rows, 2 weights, 4 and 5 sums. Sums of a panel are taken while the next
// one's products are under way: what a tile has stored cannot be read at once.
template <typename Take>
void meet_panels_on_amx(const ByteRows& rows, const uint8_t* panels, int64_t begin, int64_t end, const Take& take) {
  AmxTiles unit;
  for (const int tile : {0, 1, 4, 5}) unit.shape(tile, rows.rows, kTileBytes);
  unit.shape(2, kTileRows, kTileBytes);
  unit.take_shapes();
  const int64_t inputs = filled(rows.inputs), at_once = (rows.rows * kByteLine + inputs - 1) / inputs;
  alignas(64) int32_t sums[2][2][kTileRows * 16];  // of two panels
  const auto take_row = [&](int64_t panel, int64_t row) {
    const auto& [high, low] = sums[panel % 2];
    take(panel, row, whole_of(rows, row, _mm512_load_si512(high + row * 16), _mm512_load_si512(low + row * 16)));
  };
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint8_t* weights = panels + panel * panel_bytes(rows.inputs);
    int64_t taken = panel > begin ? 0 : rows.rows;
    zero_tile<4>();
    zero_tile<5>();
    for (int64_t k = 0; k < inputs; k += kByteLine, weights += kTileRows * kTileBytes) {
      for (int64_t line = 0; line < kTileRows * kTileBytes; line += 64) fetch_ahead(weights + 8192 + line);
      load_tile<2>(weights, kTileBytes);
      load_tile<0>(rows.bytes + k, inputs);
      load_tile<1>(rows.row(1, 0) + k, inputs);
      add_mixed_products<4, 0, 2>();
      add_mixed_products<5, 1, 2>();
      for (const int64_t due = std::min(taken + at_once, rows.rows); taken < due; ++taken) take_row(panel - 1, taken);
    }
    store_tile<4>(sums[panel % 2][0], kTileBytes);
    store_tile<5>(sums[panel % 2][1], kTileBytes);
  }
  for (int64_t row = 0; begin < end && row < rows.rows; ++row) take_row(end - 1, row);
}
#endif

// Calls take(panel, row, sums) for all rows and the panels [begin, end).
template <typename Take>
void meet_panels(const ByteRows& rows, const uint8_t* panels, int64_t begin, int64_t end, const Take& take) {
#ifdef YGG_AMX
  if (rows.rows > 1 && has_amx()) return meet_panels_on_amx(rows, panels, begin, end, take);
#endif
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint8_t* weights = panels + panel * panel_bytes(rows.inputs);
    const auto take_row = [&](int64_t row, Lanes sums) { take(panel, row, sums); };
    int64_t row = 0;
    for (; row + 8 <= rows.rows; row += 8) meet_panel<8>(rows, row, weights, take_row);
    if (row + 4 <= rows.rows) meet_panel<4>(rows, row, weights, take_row), row += 4;
    if (row + 2 <= rows.rows) meet_panel<2>(rows, row, weights, take_row), row += 2;
    if (row < rows.rows) meet_panel<1>(rows, row, weights, take_row);
  }
}
#endif

}  // namespace yggdrasil
