// The operators over packed weights: packing, linear layers, several over one input, the greatest output of each row.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "linear/layers_of_rows.h"
#include "linear/linear_stage.h"

namespace yggdrasil {

// Words of 32 bits: two bfloat16 or one float32. A tile of 16 x 16 is read by rows and written by columns, so that both
// sides pass through whole cache lines.
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

inline bool packs_pairs(const Tensor& weight) { return weight.scalar_type() == at::kBFloat16; }

inline std::vector<int64_t> packed_shape(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight must be [N, K]");
  const int64_t panels = (weight.size(0) + kPanel - 1) / kPanel, k = weight.size(1);
  if (!packs_pairs(weight)) return {panels, k, kPanel};
  TORCH_CHECK(k % 2 == 0, "packing in pairs needs an even number of inputs");
  return {panels, (k / 2 + kTilePairs - 1) / kTilePairs * kTilePairs, kPanel, 2};
}

inline void pack_linear(const Tensor& weight, Tensor& packed) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kFloat, "weight must be bfloat16 or float32");
  TORCH_CHECK(packed.sizes() == at::IntArrayRef(packed_shape(weight)) && packed.scalar_type() == weight.scalar_type() && packed.is_contiguous(),
              "packed weights must have the packed shape and the dtype of the weight");
  const Tensor rows = weight.contiguous();
  const int64_t outputs = rows.size(0), words = packs_pairs(rows) ? rows.size(1) / 2 : rows.size(1), padded = packed.size(1);
  const auto* source = static_cast<const uint32_t*>(rows.const_data_ptr());
  auto* target = static_cast<uint32_t*>(packed.mutable_data_ptr());
  parallel(packed.size(0), at::get_num_threads(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      pack_panel(source + panel * kPanel * words, std::min<int64_t>(kPanel, outputs - panel * kPanel), words, padded,
                 target + panel * kPanel * padded);
  });
}

inline std::vector<Tensor> packed_around(const Tensor& input, const Around& around, at::TensorList packed,
                                         const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features, int64_t num_threads) {
  return run_linears<PackedStage>(input, around, packed, biases, out_features, {}, num_threads);
}

inline std::vector<Tensor> packed_linears(const Tensor& input, const std::optional<Tensor>& gate, bool gelu, const std::optional<Tensor>& norm, bool plus_one,
                                   double eps, const std::optional<Tensor>& residual, at::TensorList packed,
                                   const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features, int64_t num_threads) {
  return packed_around(input, {gate, gelu, norm, plus_one, eps, residual}, packed, biases, out_features, num_threads);
}

// The greatest output of each row, and its place.
inline std::tuple<Tensor, Tensor> packed_best(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
                                       int64_t num_threads) {
  const auto found = packed_around(input, {.is_best = true}, {packed}, alone(bias), {out_features}, num_threads);
  return {found[0], found[1]};
}

inline Tensor packed_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features, int64_t num_threads) {
  return packed_around(input, {}, {packed}, alone(bias), {out_features}, num_threads)[0];
}

}  // namespace yggdrasil
