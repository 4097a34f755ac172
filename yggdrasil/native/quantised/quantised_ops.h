// Operators over quantised weights: packing, linear layers, argmax of outputs, rows of an embedding.
#pragma once

#include <vector>

#include "linear/linear_layers.h"
#include "quantised/quantised_stage.h"

namespace yggdrasil {

inline std::vector<int64_t> quantised_shape(const Tensor& rows, int64_t format, int64_t inputs) {
  return {num_pairs(rows.size(0)), pair_bytes(format, inputs)};
}

// Packs `rows` [N, bytes] of GGUF blocks to `packed`, which must be zeros.
inline void pack_quantised(const Tensor& rows, int64_t format, int64_t inputs, const Tensor& packed, int64_t num_threads) {
  with_format(format, [&](auto f) {
    using F = decltype(f);
    const int64_t outputs = rows.size(0), row_bytes = inputs / F::kBlockInputs * F::kRawBytes;
    YGG_CHECK(inputs % F::kBlockInputs == 0 && rows.size(1) == row_bytes && rows.is_contiguous() && rows.dtype() == DType::uint8,
                "rows must be the blocks of ", inputs, " inputs");
    YGG_CHECK(packed.sizes() == Ints(quantised_shape(rows, format, inputs)) && packed.is_contiguous(),
                "packed weights must have the packed shape");
    const uint8_t* source = rows.const_data_ptr<uint8_t>();
    uint8_t* target = packed.mutable_data_ptr<uint8_t>();
    parallel((outputs + kLanes - 1) / kLanes, num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel)
        pack_quantised_panel<F>(source + panel * kLanes * row_bytes, std::min<int64_t>(kLanes, outputs - panel * kLanes), inputs,
                                panel % 2, target + pair_offset<F>(panel, inputs));
    });
  });
}

inline void quantised_linears(const Tensor& input, const FusedOps& fused_ops, List<Tensor> packed, List<Tensor> biases, Ints out_features,
                             Ints formats, int64_t num_threads, List<Tensor> results) {
  run_linears<QuantisedStage>(input, fused_ops, packed, biases, out_features, formats, num_threads, results);
}

// Operator: the largest output of each row and its index.
inline void quantised_best(const Tensor& input, const Tensor& packed, const Tensor& bias, int64_t out_features, int64_t format,
                           int64_t num_threads, const Tensor& best, const Tensor& index) {
  quantised_linears(input, {.argmax = true}, {packed}, {bias}, {out_features}, {format}, num_threads, {best, index});
}

inline void quantised_linear(const Tensor& input, const Tensor& packed, const Tensor& bias, int64_t out_features, int64_t format,
                             int64_t num_threads, const Tensor& out) {
  quantised_linears(input, {}, {packed}, {bias}, {out_features}, {format}, num_threads, {out});
}

// Operator: dequantises the rows `ids` of a packed embedding.
inline void quantised_rows(const Tensor& ids, const Tensor& packed, int64_t format, int64_t inputs, int64_t num_rows, const Tensor& out) {
  const Tensor indices = ids.contiguous();
  YGG_CHECK(out.is_contiguous() && out.numel() == indices.numel() * inputs, "rows of a table take their inputs each");
  const int64_t* index_of_row = indices.const_data_ptr<int64_t>();
  const auto write = [&]<typename T>(T* target) {
    std::vector<float> row(inputs);
    with_format(format, [&](auto f) {
      for (int64_t i = 0; i < indices.numel(); ++i, target += inputs) {
        YGG_CHECK(index_of_row[i] >= 0 && index_of_row[i] < num_rows, "no row ", index_of_row[i], " in a table of ", num_rows);
        const int64_t panel = index_of_row[i] / kLanes;
        const uint8_t* pair = packed.const_data_ptr<uint8_t>() + pair_offset<decltype(f)>(panel, inputs);
        unpack_row<decltype(f)>(pair, panel % 2, index_of_row[i] % kLanes, inputs, row.data());
        std::copy(row.begin(), row.end(), target);
      }
    });
  };
  out.dtype() == DType::bfloat16 ? write(out.mutable_data_ptr<BFloat16>()) : write(out.mutable_data_ptr<float>());
}

}  // namespace yggdrasil
