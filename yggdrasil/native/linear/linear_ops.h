// Operators over packed weights: packing, one or several linear layers over one input, argmax of outputs.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/linear_layers.h"
#include "linear/linear_stage.h"

namespace yggdrasil {

// Packs a panel of 32-bit words (two bfloat16 or one float32). Tiles of 16 x 16 words are transposed, so that reads and
// writes use whole cache lines.
inline void pack_panel(const uint32_t* weight, int64_t outputs, int64_t words, int64_t padded_words, uint32_t* packed) {
  uint32_t tile[kPanel][kPanel];
  for (int64_t first = 0; first < padded_words; first += kPanel) {
    const int64_t count = std::clamp<int64_t>(words - first, 0, kPanel);
    if (outputs < kPanel || count < kPanel) std::memset(tile, 0, sizeof tile);
    for (int64_t j = 0; j < outputs; ++j) std::memcpy(tile[j], weight + j * words + first, count * sizeof(uint32_t));
    for (int64_t i = 0; i < std::min<int64_t>(kPanel, padded_words - first); ++i)
      for (int64_t j = 0; j < kPanel; ++j) packed[(first + i) * kPanel + j] = tile[j][i];
  }
}

inline bool packs_pairs(const Tensor& weight) { return weight.dtype() == DType::bfloat16; }

inline std::vector<int64_t> packed_shape(const Tensor& weight) {
  YGG_CHECK(weight.dim() == 2, "weight must be [N, K]");
  const int64_t panels = (weight.size(0) + kPanel - 1) / kPanel, k = weight.size(1);
  if (!packs_pairs(weight)) return {panels, k, kPanel};
  YGG_CHECK(k % 2 == 0, "packing in pairs needs an even number of inputs");
  return {panels, (k / 2 + kTilePairs - 1) / kTilePairs * kTilePairs, kPanel, 2};
}

inline void pack_linear(const Tensor& weight, const Tensor& packed, int64_t num_threads) {
  YGG_CHECK(weight.dtype() == DType::bfloat16 || weight.dtype() == DType::float32, "weight must be bfloat16 or float32");
  YGG_CHECK(packed.sizes() == Ints(packed_shape(weight)) && packed.dtype() == weight.dtype() && packed.is_contiguous(),
              "packed weights must have the packed shape and the dtype of the weight");
  const Tensor rows = weight.contiguous();
  const int64_t outputs = rows.size(0), words = packs_pairs(rows) ? rows.size(1) / 2 : rows.size(1), padded = packed.size(1);
  const auto* source = static_cast<const uint32_t*>(rows.const_data_ptr());
  auto* target = static_cast<uint32_t*>(packed.mutable_data_ptr());
  parallel(packed.size(0), num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      pack_panel(source + panel * kPanel * words, std::min<int64_t>(kPanel, outputs - panel * kPanel), words, padded,
                 target + panel * kPanel * padded);
  });
}

inline void packed_linears(const Tensor& input, const FusedOps& fused_ops, List<Tensor> packed,
                                         List<Tensor> biases, Ints out_features, int64_t num_threads, List<Tensor> results) {
  run_linears<PackedStage>(input, fused_ops, packed, biases, out_features, {}, num_threads, results);
}

// Operator: writes the largest output of each row and its index.
inline void packed_best(const Tensor& input, const Tensor& packed, const Tensor& bias, int64_t out_features, int64_t num_threads,
                        const Tensor& best, const Tensor& index) {
  packed_linears(input, {.argmax = true}, {packed}, {bias}, {out_features}, num_threads, {best, index});
}

inline void packed_linear(const Tensor& input, const Tensor& packed, const Tensor& bias, int64_t out_features, int64_t num_threads,
                          const Tensor& out) {
  packed_linears(input, {}, {packed}, {bias}, {out_features}, num_threads, {out});
}

}  // namespace yggdrasil
