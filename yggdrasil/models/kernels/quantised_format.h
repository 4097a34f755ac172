// Quantised weights: blocks as a GGUF file holds them, and panels as our kernels read them.
//
// A panel holds 16 outputs. Along K it is a sequence of groups; a group is a header of scales and then its chunks of 32
// inputs, all of whole cache lines. Two panels are a pair, their groups in turns: they are read as one stream, and an
// input that is at hand meets both. The values of a chunk are eight vectors of 64 bytes, vector v holding inputs 4v to
// 4v+3 of all 16 outputs, four beside each other, as numbers from 0 on: weight = scale * (value - offset) + minimum.
// Nibbles lie in four vectors, v in the low and v + 4 in the high half. The fifth bits of vector v are 64 bits at 8v;
// the two highest of six are a quarter of vector v / 4 of two.
#pragma once

#include <algorithm>

#include "simd.h"

namespace yggdrasil {

constexpr int kLanes = 16, kChunk = 32;  // outputs of a panel; inputs of a chunk
constexpr int64_t kNibbleBytes = kLanes * kChunk / 2;

enum class Scaling {
  plain,    // a scale (float16) a chunk
  affine,   // a scale and a minimum (float16) a chunk
  nested,   // scale and minimum of a chunk are 6-bit multiples of two float16 a group
  halved,   // every half of a chunk has a scale, an 8-bit multiple of one float16 a group
};

// Numbered as GGUF numbers them; kRawBytes are the bytes of a block (a group of ours may hold two) in a file.
template <int Number, int Bits, Scaling Scales, int OffsetBits, int64_t BlockInputs, int64_t RawBytes>
struct Format {
  static constexpr int kNumber = Number, kBits = Bits, kOffsetBits = OffsetBits;
  static constexpr int kOffset = OffsetBits == 0 ? 0 : 1 << OffsetBits;
  static constexpr Scaling kScaling = Scales;
  static constexpr bool kHasMinimum = Scales == Scaling::affine || Scales == Scaling::nested;
  static constexpr bool kIsNested = Scales == Scaling::nested || Scales == Scaling::halved;
  static constexpr int64_t kBlockInputs = BlockInputs, kRawBytes = RawBytes;
  static constexpr int64_t kChunks = kIsNested ? 8 : 2;  // of a group
  static constexpr int64_t kHeader = kIsNested ? 320 : Scales == Scaling::affine ? 128 : 64;
  static constexpr int64_t kValues = kLanes * kChunk * Bits / 8;
  static constexpr int64_t kGroup = kHeader + kChunks * kValues;
  static constexpr int64_t kPairGroup = 2 * kGroup;  // from a panel's group to its next

  static constexpr int64_t groups(int64_t inputs) { return (inputs + kChunks * kChunk - 1) / (kChunks * kChunk); }
};

using Q4_0 = Format<2, 4, Scaling::plain, 3, 32, 18>;
using Q4_1 = Format<3, 4, Scaling::affine, 0, 32, 20>;
using Q5_0 = Format<6, 5, Scaling::plain, 4, 32, 22>;
using Q5_1 = Format<7, 5, Scaling::affine, 0, 32, 24>;
using Q8_0 = Format<8, 8, Scaling::plain, 7, 32, 34>;
using Q4_K = Format<12, 4, Scaling::nested, 0, 256, 144>;
using Q5_K = Format<13, 5, Scaling::nested, 0, 256, 176>;
using Q6_K = Format<14, 6, Scaling::halved, 5, 256, 210>;

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
  }
  TORCH_CHECK(false, "no kernel for the GGUF type number ", number);
}

inline float half_at(const uint8_t* bytes, int64_t index) {
  at::Half value;
  std::memcpy(&value, bytes + 2 * index, sizeof value);
  return static_cast<float>(value);
}

// ==== from a file's blocks ============================================================================================

// Values of the chunk-th 32 inputs of a block, from 0 on.
template <typename F>
void raw_values(const uint8_t* block, int64_t chunk, uint8_t* values) {
  for (int i = 0; i < kChunk; ++i) {
    if constexpr (F::kNumber == Q8_0::kNumber) {
      values[i] = static_cast<uint8_t>(static_cast<int8_t>(block[2 + i]) + F::kOffset);
    } else if constexpr (F::kNumber == Q6_K::kNumber) {
      const int64_t half = chunk / 4, quarter = chunk % 4;
      const uint8_t nibbles = block[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4);
      values[i] = static_cast<uint8_t>((nibbles & 15) | (block[128 + half * 32 + i] >> (2 * quarter) & 3) << 4);
    } else if constexpr (F::kIsNested) {
      const uint8_t* nibbles = block + 16 + (F::kBits == 5 ? 32 : 0) + chunk / 2 * 32;
      values[i] = nibbles[i] >> (chunk % 2 * 4) & 15;
      if (F::kBits == 5) values[i] |= (block[16 + i] >> chunk & 1) << 4;
    } else {
      const int64_t high = F::kHasMinimum ? 4 : 2, nibbles = high + (F::kBits == 5 ? 4 : 0);
      values[i] = block[nibbles + i % 16] >> (i / 16 * 4) & 15;
      if (F::kBits == 5) values[i] |= (block[high + i / 8] >> (i % 8) & 1) << 4;
    }
  }
}

// Writes the block's scales for one output of a group; chunk is the block's first in the group.
template <typename F>
void pack_scales(const uint8_t* block, int64_t chunk, int lane, uint8_t* header) {
  const auto half = [&](int64_t place, const uint8_t* value) { std::memcpy(header + 2 * (place * kLanes + lane), value, 2); };
  if constexpr (F::kScaling == Scaling::plain) {
    half(chunk, block);
  } else if constexpr (F::kScaling == Scaling::affine) {
    half(2 * chunk, block);
    half(2 * chunk + 1, block + 2);
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

template <typename F>
void pack_values(const uint8_t* values, int lane, uint8_t* chunk) {
  for (int i = 0; i < kChunk; ++i) {
    const int vector = i / 4, byte = lane * 4 + i % 4;
    if constexpr (F::kBits == 8) {
      chunk[vector * 64 + byte] = values[i];
      continue;
    }
    chunk[vector % 4 * 64 + byte] |= (values[i] & 15) << (vector / 4 * 4);
    if constexpr (F::kBits == 5) chunk[kNibbleBytes + vector * 8 + byte / 8] |= (values[i] >> 4) << (byte % 8);
    if constexpr (F::kBits == 6) chunk[kNibbleBytes + vector / 4 * 64 + byte] |= (values[i] >> 4) << (vector % 4 * 2);
  }
}

// Where a panel of packed rows begins.
template <typename F>
int64_t panel_place(int64_t panel, int64_t inputs) {
  return panel / 2 * F::groups(inputs) * F::kPairGroup + panel % 2 * F::kGroup;
}

// Rows of a file's blocks to a panel of zeros; lanes without a row and inputs past the last stay so.
template <typename F>
void pack_quantised_panel(const uint8_t* rows, int64_t num_rows, int64_t inputs, uint8_t* panel) {
  const int64_t blocks = inputs / F::kBlockInputs, chunks = F::kBlockInputs / kChunk;
  for (int lane = 0; lane < num_rows; ++lane) {
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* block = rows + (lane * blocks + b) * F::kRawBytes;
      const int64_t first = b * chunks % F::kChunks;
      uint8_t* group = panel + b * chunks / F::kChunks * F::kPairGroup;
      pack_scales<F>(block, first, lane, group);
      for (int64_t c = 0; c < chunks; ++c) {
        uint8_t values[kChunk];
        raw_values<F>(block, c, values);
        pack_values<F>(values, lane, group + F::kHeader + (first + c) * F::kValues);
      }
    }
  }
}

// ==== to numbers ======================================================================================================

struct ChunkScales {
  float scale[2], minimum;  // a scale a half of the chunk
};

template <typename F>
ChunkScales chunk_scales(const uint8_t* header, int64_t chunk, int lane) {
  if constexpr (F::kScaling == Scaling::plain) {
    const float scale = half_at(header, chunk * kLanes + lane);
    return {{scale, scale}, 0.0f};
  } else if constexpr (F::kScaling == Scaling::affine) {
    const float scale = half_at(header, 2 * chunk * kLanes + lane);
    return {{scale, scale}, half_at(header, (2 * chunk + 1) * kLanes + lane)};
  } else if constexpr (F::kScaling == Scaling::nested) {
    const uint8_t* multiples = header + (4 + 2 * chunk) * kLanes + lane;
    const float scale = half_at(header, lane) * multiples[0];
    return {{scale, scale}, -half_at(header, kLanes + lane) * multiples[kLanes]};
  } else {
    const auto* multiples = reinterpret_cast<const int8_t*>(header) + (2 + 2 * chunk) * kLanes + lane;
    return {{half_at(header, lane) * multiples[0], half_at(header, lane) * multiples[kLanes]}, 0.0f};
  }
}

template <typename F>
uint8_t value_at(const uint8_t* chunk, int lane, int input) {
  const int vector = input / 4, byte = lane * 4 + input % 4;
  if constexpr (F::kBits == 8) return chunk[vector * 64 + byte];
  uint8_t value = chunk[vector % 4 * 64 + byte] >> (vector / 4 * 4) & 15;
  if constexpr (F::kBits == 5) value |= (chunk[kNibbleBytes + vector * 8 + byte / 8] >> (byte % 8) & 1) << 4;
  if constexpr (F::kBits == 6) value |= (chunk[kNibbleBytes + vector / 4 * 64 + byte] >> (vector % 4 * 2) & 3) << 4;
  return value;
}

// One output's weights as numbers: a row of an embedding.
template <typename F>
void unpack_row(const uint8_t* panel, int lane, int64_t inputs, float* row) {
  for (int64_t first = 0; first < inputs; first += kChunk) {
    const uint8_t* group = panel + first / kChunk / F::kChunks * F::kPairGroup;
    const int64_t chunk = first / kChunk % F::kChunks;
    const ChunkScales scales = chunk_scales<F>(group, chunk, lane);
    for (int i = 0; i < kChunk; ++i) {
      const int value = value_at<F>(group + F::kHeader + chunk * F::kValues, lane, i) - F::kOffset;
      row[first + i] = scales.scale[i / 16] * static_cast<float>(value) + scales.minimum;
    }
  }
}

}  // namespace yggdrasil
