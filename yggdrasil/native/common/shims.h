// The operators of a step as TorchInductor's packages call them: by name, without a dispatcher and boxed arguments between.
//
// ``shims.py`` reads the declarations from this file, so each must stand on one line. Handles are borrowed, results are
// new handles of the caller's. PyTorch's C interface, which is stable, is found when the library is loaded.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <vector>

#include "common/c_api.h"
#include "common/input_rows.h"

using AtenTensorHandle = struct AtenTensorOpaque*;
using AOTITorchError = int32_t;

namespace yggdrasil {

// Functions of PyTorch's C interface, in the order in which `yggdrasil_use_torch` is given them.
struct TorchFunctions {
  AOTITorchError (*get_data_ptr)(AtenTensorHandle, void**);
  AOTITorchError (*get_dim)(AtenTensorHandle, int64_t*);
  AOTITorchError (*get_sizes)(AtenTensorHandle, int64_t**);
  AOTITorchError (*get_strides)(AtenTensorHandle, int64_t**);
  AOTITorchError (*get_dtype)(AtenTensorHandle, int32_t*);
  AOTITorchError (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);
};

inline TorchFunctions& torch_functions() {
  static TorchFunctions functions{};
  return functions;
}

inline void torch_check(AOTITorchError error) { YGG_CHECK(error == 0, "PyTorch refused a tensor of a step"); }

inline Tensor tensor_of(AtenTensorHandle handle) {
  const TorchFunctions& torch = torch_functions();
  YggdrasilTensor view;
  int64_t dim, *sizes, *strides;
  torch_check(torch.get_data_ptr(handle, &view.data) | torch.get_dim(handle, &dim) | torch.get_sizes(handle, &sizes) |
              torch.get_strides(handle, &strides) | torch.get_dtype(handle, &view.dtype));
  YGG_CHECK(dim <= kMostDims, "a tensor has ", dim, " dimensions, more than ", kMostDims);
  view.dim = static_cast<int32_t>(dim);
  std::copy_n(sizes, dim, view.sizes);
  std::copy_n(strides, dim, view.strides);
  return Tensor(view);
}

inline Tensor optional_tensor_of(const AtenTensorHandle* handle) { return handle ? tensor_of(*handle) : Tensor(); }

inline std::vector<Tensor> tensors_of(const AtenTensorHandle* handles, int64_t count) {
  std::vector<Tensor> tensors;
  tensors.reserve(count);
  for (int64_t i = 0; i < count; ++i) tensors.push_back(tensor_of(handles[i]));
  return tensors;
}

inline std::vector<Tensor> optional_tensors_of(const AtenTensorHandle** handles, int64_t count) {
  std::vector<Tensor> tensors;
  tensors.reserve(count);
  for (int64_t i = 0; i < count; ++i) tensors.push_back(optional_tensor_of(handles[i]));
  return tensors;
}

inline Around around_of(AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm, bool plus_one, double eps, AtenTensorHandle* residual) {
  return {optional_tensor_of(gate), gelu, optional_tensor_of(norm), plus_one, eps, optional_tensor_of(residual)};
}

// A new dense tensor of PyTorch's.
inline Tensor new_tensor(Ints sizes, DType dtype, AtenTensorHandle* handle) {
  std::vector<int64_t> strides(sizes.size());
  for (int64_t stride = 1, i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) strides[i] = stride, stride *= sizes[i];
  torch_check(torch_functions().empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), static_cast<int32_t>(dtype), 0, 0, handle));
  return tensor_of(*handle);
}

inline int64_t rows_of(const Tensor& tensor) { return tensor.numel() / std::max<int64_t>(tensor.size(-1), 1); }

// As `guarded`; PyTorch reports that a step failed, not why.
template <class Action>
AOTITorchError shimmed(const Action& action) {
  const int32_t failed = guarded(action);
  if (failed) std::fprintf(stderr, "yggdrasil: %s\n", last_error().c_str());
  return failed;
}

}  // namespace yggdrasil

#pragma GCC visibility push(default)
// clang-format off
extern "C" {
AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_packed_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm, bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed, const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_quantised_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t format, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_quantised_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm, bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed, const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features, const int64_t* formats, int64_t num_formats, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_plain_linear(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_packed_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, AtenTensorHandle gate_up, AtenTensorHandle down, const AtenTensorHandle* biases, int64_t num_biases, int64_t inner_features, bool gelu, const double* clamp, int64_t num_clamp, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_quantised_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, const AtenTensorHandle* packed, int64_t num_packed, const int64_t* formats, int64_t num_formats, const AtenTensorHandle* biases, int64_t num_biases, int64_t inner_features, bool gelu, const double* clamp, int64_t num_clamp, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_norm_rows(AtenTensorHandle input, AtenTensorHandle norm, bool plus_one, double eps, AtenTensorHandle* residual, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_run_program(const AtenTensorHandle* tensors, int64_t num_tensors, const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers, const int64_t* results, int64_t num_results, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_packed_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_quantised_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, int64_t format, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_screened_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, AtenTensorHandle copy, AtenTensorHandle factors, int64_t out_features, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle key_cache, AtenTensorHandle value_cache, AtenTensorHandle offsets, AtenTensorHandle tree_mask, double scale, int64_t window, double softcap, AtenTensorHandle* sinks, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_tree_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle window, AtenTensorHandle inputs, AtenTensorHandle offsets, AtenTensorHandle parents, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_tree_recurrence(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle decay, AtenTensorHandle* beta, AtenTensorHandle state, AtenTensorHandle keys, AtenTensorHandle updates, AtenTensorHandle decays, AtenTensorHandle offsets, AtenTensorHandle parents, int64_t num_threads, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_run_layers(AtenTensorHandle table, AtenTensorHandle carried, const AtenTensorHandle* shared, int64_t num_shared, const int64_t* places, int64_t num_places, int64_t count, const int64_t* kept, int64_t num_kept, const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers, int64_t num_threads, ...);
AOTITorchError aoti_torch_cpu_best_tokens(AtenTensorHandle logits, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place);
AOTITorchError aoti_torch_cpu_quantised_rows(AtenTensorHandle ids, AtenTensorHandle packed, int64_t format, int64_t inputs, int64_t num_rows, int32_t dtype, AtenTensorHandle* result);
AOTITorchError aoti_torch_cpu_top_candidates(AtenTensorHandle values, int64_t k, AtenTensorHandle* best, AtenTensorHandle* place);
}
// clang-format on
#pragma GCC visibility pop
