// CPU operators over quantised weights, beside those of ops.cpp.

#include "common/shims.h"
#include "linear/screened_best.h"
#include "quantised/quantised_experts.h"
#include "quantised/quantised_ops.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_can_screen() { return can_screen(); }

YGG_API int64_t yggdrasil_pair_bytes(int64_t format, int64_t inputs) {
  return counted([&] { return pair_bytes(format, inputs); });
}

YGG_API int32_t yggdrasil_pack_quantised(View rows, int64_t format, int64_t inputs, View packed, int64_t num_threads) {
  return guarded([&] { pack_quantised(of(rows), format, inputs, of(packed), num_threads); });
}

YGG_API int32_t yggdrasil_quantised_linear(View input, View packed, View bias, int64_t out_features, int64_t format, int64_t num_threads, View out) {
  return guarded([&] { quantised_linear(of(input), of(packed), of(bias), out_features, format, num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_quantised_linears(View input, View gate, bool gelu, View norm, bool plus_one, double eps, View residual, View packed,
                                            int64_t num_packed, View biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features,
                                            const int64_t* formats, int64_t num_formats, int64_t num_threads, View outs, int64_t num_outs) {
  return guarded([&] {
    quantised_around(of(input), {of(gate), gelu, of(norm), plus_one, eps, of(residual)}, all_of(packed, num_packed), all_of(biases, num_biases),
                     ints(out_features, num_out_features), ints(formats, num_formats), num_threads, all_of(outs, num_outs));
  });
}

YGG_API int32_t yggdrasil_quantised_best(View input, View packed, View bias, int64_t out_features, int64_t format, int64_t num_threads, View best, View place) {
  return guarded([&] { quantised_best(of(input), of(packed), of(bias), out_features, format, num_threads, of(best), of(place)); });
}

YGG_API int32_t yggdrasil_screened_best(View input, View packed, View bias, View copy, View factors, int64_t out_features, int64_t num_threads, View best,
                                        View place) {
  return guarded([&] { screened_best(of(input), of(packed), of(bias), of(copy), of(factors), out_features, num_threads, of(best), of(place)); });
}

YGG_API int32_t yggdrasil_quantised_experts(View input, View chosen, View shares, View packed, int64_t num_packed, const int64_t* formats,
                                            int64_t num_formats, View biases, int64_t num_biases, int64_t inner_features, bool gelu, const double* clamp,
                                            int64_t num_clamp, int64_t num_threads, View out) {
  return guarded([&] {
    quantised_experts(of(input), of(chosen), of(shares), all_of(packed, num_packed), ints(formats, num_formats), inner_features,
                      {all_of(biases, num_biases), gelu, doubles(clamp, num_clamp)}, num_threads, of(out));
  });
}

YGG_API int32_t yggdrasil_quantised_rows(View ids, View packed, int64_t format, int64_t inputs, int64_t num_rows, int32_t, View out) {
  return guarded([&] { quantised_rows(of(ids), of(packed), format, inputs, num_rows, of(out)); });
}

// ==== what compiled steps call ========================================================================================

AOTITorchError aoti_torch_cpu_quantised_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                               int64_t format, int64_t num_threads, AtenTensorHandle* result) {
  return shimmed([&] {
    const Tensor x = tensor_of(input);
    quantised_linear(x, tensor_of(packed), optional_tensor_of(bias), out_features, format, num_threads, new_tensor(with_last(x, out_features), x.dtype(), result));
  });
}

AOTITorchError aoti_torch_cpu_quantised_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                             int64_t format, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place) {
  return shimmed([&] {
    const Tensor x = tensor_of(input);
    quantised_best(x, tensor_of(packed), optional_tensor_of(bias), out_features, format, num_threads, new_tensor({rows_of(x)}, x.dtype(), best),
                   new_tensor({rows_of(x)}, DType::int64, place));
  });
}

AOTITorchError aoti_torch_cpu_screened_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, AtenTensorHandle copy,
                                            AtenTensorHandle factors, int64_t out_features, int64_t num_threads, AtenTensorHandle* best,
                                            AtenTensorHandle* place) {
  return shimmed([&] {
    const Tensor x = tensor_of(input);
    screened_best(x, tensor_of(packed), optional_tensor_of(bias), tensor_of(copy), tensor_of(factors), out_features, num_threads,
                  new_tensor({rows_of(x)}, x.dtype(), best), new_tensor({rows_of(x)}, DType::int64, place));
  });
}

AOTITorchError aoti_torch_cpu_quantised_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm,
                                                bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed,
                                                const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features,
                                                int64_t num_out_features, const int64_t* formats, int64_t num_formats, int64_t num_threads, ...) {
  va_list targets;
  va_start(targets, num_threads);
  const AOTITorchError error = shimmed([&] {
    const Tensor x = tensor_of(input);
    std::vector<Tensor> results;
    for (int64_t i = 0; i < num_out_features; ++i) results.push_back(new_tensor(with_last(x, out_features[i]), x.dtype(), va_arg(targets, AtenTensorHandle*)));
    quantised_around(x, around_of(gate, gelu, norm, plus_one, eps, residual), tensors_of(packed, num_packed), optional_tensors_of(biases, num_biases),
                     ints(out_features, num_out_features), ints(formats, num_formats), num_threads, results);
  });
  va_end(targets);
  return error;
}

AOTITorchError aoti_torch_cpu_quantised_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, const AtenTensorHandle* packed,
                                                int64_t num_packed, const int64_t* formats, int64_t num_formats, const AtenTensorHandle* biases,
                                                int64_t num_biases, int64_t inner_features, bool gelu, const double* clamp, int64_t num_clamp,
                                                int64_t num_threads, AtenTensorHandle* result) {
  return shimmed([&] {
    const Tensor x = tensor_of(input);
    quantised_experts(x, tensor_of(chosen), tensor_of(shares), tensors_of(packed, num_packed), ints(formats, num_formats), inner_features,
                      {tensors_of(biases, num_biases), gelu, doubles(clamp, num_clamp)}, num_threads, new_tensor(x.sizes(), x.dtype(), result));
  });
}

AOTITorchError aoti_torch_cpu_quantised_rows(AtenTensorHandle ids, AtenTensorHandle packed, int64_t format, int64_t inputs, int64_t num_rows, int32_t dtype,
                                             AtenTensorHandle* result) {
  return shimmed([&] {
    const Tensor tokens = tensor_of(ids);
    std::vector<int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(inputs);
    quantised_rows(tokens, tensor_of(packed), format, inputs, num_rows, new_tensor(sizes, static_cast<DType>(dtype), result));
  });
}
