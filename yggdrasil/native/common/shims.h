// The operators of a step with C signatures: what compiled steps call, without a dispatcher and boxed arguments between.
//
// AOTInductor's wrapper calls by these names; ``shims.py`` reads the declarations from this file, so each must stand on
// one line. Handles are borrowed, results are new handles of the caller's.
#pragma once

#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <cstdarg>
#include <optional>
#include <vector>

#include "common/input_rows.h"

namespace yggdrasil {

using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::pointer_to_optional;

inline Tensor& tensor_of(AtenTensorHandle handle) { return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle); }

inline std::vector<Tensor> tensors_of(const AtenTensorHandle* handles, int64_t count) {
  std::vector<Tensor> tensors;
  tensors.reserve(count);
  for (int64_t i = 0; i < count; ++i) tensors.push_back(tensor_of(handles[i]));
  return tensors;
}

inline c10::List<std::optional<Tensor>> optional_tensors_of(const AtenTensorHandle** handles, int64_t count) {
  c10::List<std::optional<Tensor>> tensors;
  tensors.reserve(count);
  for (int64_t i = 0; i < count; ++i) tensors.push_back(pointer_to_optional<Tensor>(handles[i]));
  return tensors;
}

inline Around around_of(AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm, bool plus_one, double eps, AtenTensorHandle* residual) {
  return {pointer_to_optional<Tensor>(gate), gelu, pointer_to_optional<Tensor>(norm), plus_one, eps, pointer_to_optional<Tensor>(residual)};
}

inline void give_both(std::tuple<Tensor, Tensor>&& results, AtenTensorHandle* first, AtenTensorHandle* second) {
  *first = new_tensor_handle(std::move(std::get<0>(results)));
  *second = new_tensor_handle(std::move(std::get<1>(results)));
}

// One pointer a result follows the arguments.
inline void give_all(std::vector<Tensor>&& results, va_list targets) {
  for (Tensor& result : results) *va_arg(targets, AtenTensorHandle*) = new_tensor_handle(std::move(result));
}

}  // namespace yggdrasil

// clang-format off
extern "C" {
AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_packed_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm, bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed, const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_quantised_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t format, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_quantised_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm, bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed, const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features, const int64_t* formats, int64_t num_formats, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_plain_linear(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_packed_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, AtenTensorHandle gate_up, AtenTensorHandle down, int64_t inner_features, bool gelu, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_quantised_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, const AtenTensorHandle* packed, int64_t num_packed, const int64_t* formats, int64_t num_formats, int64_t inner_features, bool gelu, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_norm_rows(AtenTensorHandle input, AtenTensorHandle norm, bool plus_one, double eps, AtenTensorHandle* residual, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_run_program(const AtenTensorHandle* tensors, int64_t num_tensors, const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers, const int64_t* results, int64_t num_results, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_packed_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_quantised_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t format, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_screened_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, AtenTensorHandle copy, AtenTensorHandle factors, int64_t out_features, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle key_cache, AtenTensorHandle value_cache, AtenTensorHandle offsets, AtenTensorHandle tree_mask, double scale, int64_t window, double softcap, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_run_layers(AtenTensorHandle table, AtenTensorHandle carried, const AtenTensorHandle* shared, int64_t num_shared, const int64_t* places, int64_t num_places, int64_t count, const int64_t* kept, int64_t num_kept, const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_best_tokens(AtenTensorHandle logits, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
}
// clang-format on
