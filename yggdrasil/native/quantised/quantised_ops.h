// The operators over quantised weights: packing, linear layers, rows of an embedding.
#pragma once

#include <vector>

#include "linear/layers_of_rows.h"
#include "quantised/quantised_stage.h"

namespace yggdrasil {

inline std::vector<int64_t> quantised_shape(const Tensor& rows, int64_t format, int64_t inputs) {
  return {num_pairs(rows.size(0)), pair_bytes(format, inputs)};
}

// rows [N, bytes] as they lie in a file; packed is zeros.
inline void pack_quantised(const Tensor& rows, int64_t format, int64_t inputs, Tensor& packed) {
  with_format(format, [&](auto f) {
    using F = decltype(f);
    const int64_t outputs = rows.size(0), row_bytes = inputs / F::kBlockInputs * F::kRawBytes;
    TORCH_CHECK(inputs % F::kBlockInputs == 0 && rows.size(1) == row_bytes && rows.is_contiguous() && rows.scalar_type() == at::kByte,
                "rows must be the blocks of ", inputs, " inputs");
    TORCH_CHECK(packed.sizes() == at::IntArrayRef(quantised_shape(rows, format, inputs)) && packed.is_contiguous(),
                "packed weights must have the packed shape");
    const uint8_t* source = rows.const_data_ptr<uint8_t>();
    uint8_t* target = packed.mutable_data_ptr<uint8_t>();
    parallel((outputs + kLanes - 1) / kLanes, at::get_num_threads(), [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel)
        pack_quantised_panel<F>(source + panel * kLanes * row_bytes, std::min<int64_t>(kLanes, outputs - panel * kLanes), inputs,
                                panel % 2, target + pair_place<F>(panel, inputs));
    });
  });
}

inline std::vector<Tensor> quantised_around(const Tensor& input, const Around& around, at::TensorList packed,
                                            const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features,
                                            at::IntArrayRef formats, int64_t num_threads) {
  return run_linears<QuantisedStage>(input, around, packed, biases, out_features, formats, num_threads);
}

inline std::vector<Tensor> quantised_linears(const Tensor& input, const std::optional<Tensor>& gate, bool gelu, const std::optional<Tensor>& norm,
                                             bool plus_one, double eps, const std::optional<Tensor>& residual, at::TensorList packed,
                                             const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features,
                                             at::IntArrayRef formats, int64_t num_threads) {
  return quantised_around(input, {gate, gelu, norm, plus_one, eps, residual}, packed, biases, out_features, formats, num_threads);
}

// The greatest output of each row, and its place.
inline std::tuple<Tensor, Tensor> quantised_best(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                                 int64_t out_features, int64_t format, int64_t num_threads) {
  const auto found = quantised_around(input, {.is_best = true}, {packed}, alone(bias), {out_features}, {format}, num_threads);
  return {found[0], found[1]};
}

inline Tensor quantised_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
                               int64_t format, int64_t num_threads) {
  return quantised_around(input, {}, {packed}, alone(bias), {out_features}, {format}, num_threads)[0];
}

// Rows of a packed table, as numbers.
inline Tensor quantised_rows(const Tensor& ids, const Tensor& packed, int64_t format, int64_t inputs, int64_t num_rows, at::ScalarType dtype) {
  auto sizes = ids.sizes().vec();
  sizes.push_back(inputs);
  const Tensor flat = ids.contiguous();
  Tensor rows = at::empty(sizes, packed.options().dtype(at::kFloat));
  const int64_t* id = flat.const_data_ptr<int64_t>();
  float* target = rows.mutable_data_ptr<float>();
  with_format(format, [&](auto f) {
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(id[i] >= 0 && id[i] < num_rows, "no row ", id[i], " in a table of ", num_rows);
      const int64_t panel = id[i] / kLanes;
      const uint8_t* pair = packed.const_data_ptr<uint8_t>() + pair_place<decltype(f)>(panel, inputs);
      unpack_row<decltype(f)>(pair, panel % 2, id[i] % kLanes, inputs, target + i * inputs);
    }
  });
  return rows.to(dtype);
}

}  // namespace yggdrasil
