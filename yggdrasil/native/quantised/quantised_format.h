// Layouts of quantised weights: blocks as in GGUF files, and panels as the kernels read them.
//
// A panel has 16 outputs; two panels (sides) form a pair, so that a loaded input is used for both. Along K, a pair is a
// sequence of groups, which correspond to the file's blocks and consist of whole cache lines. A group has a header of
// scales and chunks of 32 inputs for each side. If a group is one chunk, the headers of both sides precede the values
// of both, the order in which they are read; this makes one row up to 33 % faster. Groups of eight chunks store one
// side after the other, which was faster for them. The values of a chunk are eight vectors of 64 bytes; vector v holds
// inputs 4v to 4v+3 of all 16 outputs, four consecutive bytes per output, as unsigned values: weight = scale * (value -
// offset) + minimum. 4-bit values take four vectors, with vector v in the low and v + 4 in the high nibbles. The fifth
// bits of vector v are bit v of a further vector. Four vectors of 6-bit values are stored in three: one in each, and
// two bits of the fourth above each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/simd.h"

namespace yggdrasil {

constexpr int kLanes = 16, kChunk = 32;  // outputs of a panel; inputs of a chunk
constexpr int64_t kNibbleBytes = kLanes * kChunk / 2;

enum class Scaling {
  plain,    // one float16 scale per chunk
  affine,   // one float16 scale and minimum per chunk
  nested,   // scale and minimum of a chunk are 6-bit multiples of two float16 per group
  power,    // one power of two (bfloat16) per chunk
  halved,   // one scale per half chunk, an int8 multiple of one float16 per group
};

// A quantised format. kNumber is its GGUF type number, kRawBytes the bytes of a block in a GGUF file.
template <int Number, int Bits, Scaling Scales, int OffsetBits, int64_t BlockInputs, int64_t RawBytes>
struct Format {
  static constexpr int kNumber = Number, kBits = Bits, kOffsetBits = OffsetBits;
  static constexpr int kOffset = OffsetBits == 0 ? 0 : 1 << OffsetBits;
  static constexpr bool kIsTable = Scales == Scaling::power;  // values are indices into kMxfp4Values
  static constexpr int kMaxValue = kIsTable ? 28 : (1 << Bits) - 1;  // the largest unsigned value
  static constexpr Scaling kScaling = Scales;
  static constexpr bool kHasMinimum = Scales == Scaling::affine || Scales == Scaling::nested;
  static constexpr bool kIsNested = Scales == Scaling::nested || Scales == Scaling::halved;
  static constexpr int64_t kBlockInputs = BlockInputs, kRawBytes = RawBytes;
  static constexpr int64_t kChunks = BlockInputs / kChunk;  // per group
  static constexpr int64_t kHeader = kIsNested ? 320 : Scales == Scaling::affine ? 64 : 32;  // bytes, per side
  static constexpr int64_t kValues = kLanes * kChunk * Bits / 8;
  static constexpr int64_t kGroup = 2 * (kHeader + kChunks * kValues);

  static constexpr int64_t groups(int64_t inputs) { return inputs / BlockInputs; }
  static constexpr int64_t header_offset(int64_t side) { return kChunks > 1 ? side * kGroup / 2 : side * kHeader; }
  static constexpr int64_t values_offset(int64_t side, int64_t chunk) {
    return kChunks > 1 ? header_offset(side) + kHeader + chunk * kValues : 2 * kHeader + side * kValues;
  }
};

using Q4_0 = Format<2, 4, Scaling::plain, 3, 32, 18>;
using Q4_1 = Format<3, 4, Scaling::affine, 0, 32, 20>;
using Q5_0 = Format<6, 5, Scaling::plain, 4, 32, 22>;
using Q5_1 = Format<7, 5, Scaling::affine, 0, 32, 24>;
using Q8_0 = Format<8, 8, Scaling::plain, 7, 32, 34>;
using Q4_K = Format<12, 4, Scaling::nested, 0, 256, 144>;
using Q5_K = Format<13, 5, Scaling::nested, 0, 256, 176>;
using Q6_K = Format<14, 6, Scaling::halved, 5, 256, 210>;
using MXFP4 = Format<39, 4, Scaling::power, 4, 32, 17>;

// Values of the 4-bit E2M1 numbers of MXFP4, as unsigned bytes: 2 * value + 16.
alignas(16) constexpr uint8_t kMxfp4Values[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// Calls function(F{}) with the format of this number.
template <typename Function>
auto with_format(int64_t number, const Function& function) {
  switch (number) {
    case Q4_0::kNumber: return function(Q4_0{});
    case Q4_1::kNumber: return function(Q4_1{});
    case Q5_0::kNumber: return function(Q5_0{});
    case Q5_1::kNumber: return function(Q5_1{});
    case Q8_0::kNumber: return function(Q8_0{});
    case Q4_K::kNumber: return function(Q4_K{});
    case Q5_K::kNumber: return function(Q5_K{});
    case Q6_K::kNumber: return function(Q6_K{});
    case MXFP4::kNumber: return function(MXFP4{});
  }
  YGG_CHECK(false, "no kernel for the GGUF type number ", number);
}

inline float half_at(const uint8_t* bytes, int64_t index) {
  uint16_t value;
  std::memcpy(&value, bytes + 2 * index, sizeof value);
  return half_to_float(value);
}

inline float power_at(const uint8_t* bytes, int64_t index) {
  BFloat16 value;
  std::memcpy(&value, bytes + 2 * index, sizeof value);
  return to_float(value);
}

// ==== packing GGUF blocks =============================================================================================

// Extracts the unsigned values (or E2M1 codes) of chunk number `chunk` of a block. The compiler vectorises these loops
// of 16 or 32 equal steps.
template <typename F>
void raw_values(const uint8_t* block, int64_t chunk, uint8_t* values) {
  if constexpr (F::kNumber == Q8_0::kNumber) {
    for (int i = 0; i < kChunk; ++i) values[i] = static_cast<uint8_t>(block[2 + i] + F::kOffset);
  } else if constexpr (F::kNumber == Q6_K::kNumber) {
    const int64_t half = chunk / 4, quarter = chunk % 4;
    const uint8_t *low = block + half * 64 + quarter % 2 * 32, *high = block + 128 + half * 32;
    const int low_shift = static_cast<int>(quarter / 2 * 4), high_shift = static_cast<int>(2 * quarter);
    for (int i = 0; i < kChunk; ++i)
      values[i] = static_cast<uint8_t>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
  } else if constexpr (F::kIsNested) {
    const uint8_t* nibbles = block + 16 + (F::kBits == 5 ? 32 : 0) + chunk / 2 * 32;
    const int shift = static_cast<int>(chunk % 2 * 4);
    for (int i = 0; i < kChunk; ++i) values[i] = nibbles[i] >> shift & 15;
    if constexpr (F::kBits == 5)
      for (int i = 0; i < kChunk; ++i) values[i] |= (block[16 + i] >> chunk & 1) << 4;
  } else {
    const int64_t high = F::kIsTable ? 1 : F::kHasMinimum ? 4 : 2;
    const uint8_t* nibbles = block + high + (F::kBits == 5 ? 4 : 0);
    for (int i = 0; i < kChunk / 2; ++i) values[i] = nibbles[i] & 15;
    for (int i = 0; i < kChunk / 2; ++i) values[kChunk / 2 + i] = nibbles[i] >> 4;
    if constexpr (F::kBits == 5)
      for (int i = 0; i < kChunk; ++i) values[i] |= (block[high + i / 8] >> (i % 8) & 1) << 4;
  }
}

// Writes a block's scales for one output.
template <typename F>
void pack_scales(const uint8_t* block, int lane, uint8_t* header) {
  const auto half = [&](int64_t row, const uint8_t* value) { std::memcpy(header + 2 * (row * kLanes + lane), value, 2); };
  if constexpr (F::kScaling == Scaling::plain) {
    half(0, block);
  } else if constexpr (F::kScaling == Scaling::power) {
    const BFloat16 scale(std::ldexp(1.0f, *block - 128));  // half the scale, because kMxfp4Values are doubled
    std::memcpy(header + 2 * lane, &scale, sizeof scale);
  } else if constexpr (F::kScaling == Scaling::affine) {
    half(0, block);
    half(1, block + 2);
  } else if constexpr (F::kScaling == Scaling::nested) {
    half(0, block);
    half(1, block + 2);
    const uint8_t* packed = block + 4;
    for (int i = 0; i < 8; ++i) {
      const bool is_early = i < 4;
      uint8_t* multiples = header + (4 + 2 * i) * kLanes + lane;
      multiples[0] = is_early ? packed[i] & 63 : (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
      multiples[kLanes] = is_early ? packed[i + 4] & 63 : packed[i + 4] >> 4 | packed[i] >> 6 << 4;
    }
  } else {
    half(0, block + 208);
    for (int i = 0; i < 16; ++i) header[(2 + i) * kLanes + lane] = block[192 + i];
  }
}

// Writes the values of a chunk of one output to its lane. Four bytes are computed at once in a 32-bit word, because GCC
// does not vectorise such short byte loops.
template <typename F>
void pack_values(const uint8_t* values, int lane, uint8_t* chunk) {
  uint8_t* target = chunk + lane * 4;
  uint32_t fours[kChunk / 4];
  std::memcpy(fours, values, kChunk);
  const auto put = [&](int vector, uint32_t four) { std::memcpy(target + vector * 64, &four, 4); };
  if constexpr (F::kBits == 8) {
    for (int vector = 0; vector < 8; ++vector) put(vector, fours[vector]);
  } else if constexpr (F::kBits == 6) {
    for (int vector = 0; vector < 6; ++vector) {
      const int half = vector / 3;
      put(vector, fours[vector + half] | (fours[4 * half + 3] >> (vector % 3 * 2) & 0x03030303) << 6);
    }
  } else {
    for (int vector = 0; vector < 4; ++vector)
      put(vector, (fours[vector] & 0x0f0f0f0f) | (fours[vector + 4] & 0x0f0f0f0f) << 4);
  }
  if constexpr (F::kBits == 5) {
    uint32_t high_bits = 0;
    for (int i = 0; i < kChunk / 4; ++i) high_bits |= (fours[i] >> 4 & 0x01010101) << i;
    std::memcpy(target + kNibbleBytes, &high_bits, 4);
  }
}

// Returns the byte offset of the pair that contains a panel.
template <typename F>
int64_t pair_offset(int64_t panel, int64_t inputs) {
  return panel / 2 * F::groups(inputs) * F::kGroup;
}

// Packs up to 16 rows of GGUF blocks to a side (0 or 1) of a pair, which must be zeros; lanes without a row stay zero.
template <typename F>
void pack_quantised_panel(const uint8_t* rows, int64_t num_rows, int64_t inputs, int64_t side, uint8_t* pair) {
  const int64_t groups = F::groups(inputs);
  for (int lane = 0; lane < num_rows; ++lane) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* block = rows + (lane * groups + g) * F::kRawBytes;
      uint8_t* group = pair + g * F::kGroup;
      pack_scales<F>(block, lane, group + F::header_offset(side));
      for (int64_t chunk = 0; chunk < F::kChunks; ++chunk) {
        uint8_t values[kChunk];
        raw_values<F>(block, chunk, values);
        pack_values<F>(values, lane, group + F::values_offset(side, chunk));
      }
    }
  }
}

// ==== dequantising ====================================================================================================

struct GroupScales {
  float scale, minimum;  // multiples of the minimum are added
};

template <typename F>
GroupScales group_scales(const uint8_t* header, int lane) {
  if constexpr (F::kScaling == Scaling::power) return {power_at(header, lane), 0.0f};
  const float minimum = F::kHasMinimum ? half_at(header, kLanes + lane) : 0.0f;
  return {half_at(header, lane), F::kScaling == Scaling::nested ? -minimum : minimum};
}

struct ChunkMultiples {
  int scale[2] = {1, 1}, minimum = 1;  // multiples of the group's scale for each half of the chunk, and of its minimum
};

template <typename F>
ChunkMultiples chunk_multiples(const uint8_t* header, int64_t chunk, int lane) {
  if constexpr (F::kScaling == Scaling::nested) {
    const uint8_t* multiples = header + (4 + 2 * chunk) * kLanes + lane;
    return {{multiples[0], multiples[0]}, multiples[kLanes]};
  } else if constexpr (F::kScaling == Scaling::halved) {
    const auto* multiples = reinterpret_cast<const int8_t*>(header) + (2 + 2 * chunk) * kLanes + lane;
    return {{multiples[0], multiples[kLanes]}};
  }
  return {};
}

template <typename F>
uint8_t value_at(const uint8_t* chunk, int lane, int input) {
  const int vector = input / 4, byte = lane * 4 + input % 4;
  if constexpr (F::kBits == 8) return chunk[vector * 64 + byte];
  if constexpr (F::kBits == 6) {
    const uint8_t* three = chunk + vector / 4 * 192 + byte;
    return vector % 4 < 3 ? three[vector % 4 * 64] & 63 : three[0] >> 6 | three[64] >> 6 << 2 | three[128] >> 6 << 4;
  }
  uint8_t value = chunk[vector % 4 * 64 + byte] >> (vector / 4 * 4) & 15;
  if constexpr (F::kIsTable) return kMxfp4Values[value];
  if constexpr (F::kBits == 5) value |= (chunk[kNibbleBytes + byte] >> vector & 1) << 4;
  return value;
}

// Dequantises the weights of one output, such as a row of an embedding.
template <typename F>
void unpack_row(const uint8_t* pair, int64_t side, int lane, int64_t inputs, float* row) {
  for (int64_t first = 0; first < inputs; first += kChunk) {
    const uint8_t* group = pair + first / kChunk / F::kChunks * F::kGroup;
    const int64_t chunk = first / kChunk % F::kChunks;
    const uint8_t* header = group + F::header_offset(side);
    const GroupScales scales = group_scales<F>(header, lane);
    const ChunkMultiples multiples = chunk_multiples<F>(header, chunk, lane);
    const float minimum = scales.minimum * static_cast<float>(multiples.minimum);
    for (int i = 0; i < kChunk; ++i) {
      const int value = value_at<F>(group + F::values_offset(side, chunk), lane, i) - F::kOffset;
      row[first + i] = scales.scale * static_cast<float>(multiples.scale[i / 16] * value) + minimum;
    }
  }
}

}  // namespace yggdrasil
