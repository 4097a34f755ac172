// CPU operators over quantised weights.

#include "common/c_api.h"
#include "linear/bounded_argmax.h"
#include "quantised/quantised_experts.h"
#include "quantised/quantised_ops.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_has_byte_products() { return has_byte_products(); }

YGG_API int64_t yggdrasil_pair_bytes(int64_t format, int64_t inputs) {
  return count_or_error([&] { return pair_bytes(format, inputs); });
}

YGG_API int32_t yggdrasil_pack_quantised(View rows, int64_t format, int64_t inputs, View packed, int64_t num_threads) {
  return status_of([&] { pack_quantised(tensor_of(rows), format, inputs, tensor_of(packed), num_threads); });
}

YGG_API int32_t yggdrasil_quantised_linear(View input, View packed, View bias, int64_t out_features, int64_t format, int64_t num_threads, View out) {
  return status_of([&] { quantised_linear(tensor_of(input), tensor_of(packed), tensor_of(bias), out_features, format, num_threads, tensor_of(out)); });
}

YGG_API int32_t yggdrasil_quantised_linears(View input, View gate, bool gelu, View norm, bool plus_one, double eps, View residual, View packed,
                                            int64_t num_packed, View biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features,
                                            const int64_t* formats, int64_t num_formats, int64_t num_threads, View outs, int64_t num_outs) {
  return status_of([&] {
    quantised_linears(tensor_of(input), {tensor_of(gate), gelu, tensor_of(norm), plus_one, eps, tensor_of(residual)}, tensors_of(packed, num_packed), tensors_of(biases, num_biases),
                     ints(out_features, num_out_features), ints(formats, num_formats), num_threads, tensors_of(outs, num_outs));
  });
}

YGG_API int32_t yggdrasil_quantised_best(View input, View packed, View bias, int64_t out_features, int64_t format, int64_t num_threads, View best, View index) {
  return status_of([&] { quantised_best(tensor_of(input), tensor_of(packed), tensor_of(bias), out_features, format, num_threads, tensor_of(best), tensor_of(index)); });
}

YGG_API int32_t yggdrasil_bounded_argmax(View input, View packed, View bias, View copy, View factors, int64_t out_features, int64_t num_threads, View best,
                                        View index) {
  return status_of([&] { bounded_argmax(tensor_of(input), tensor_of(packed), tensor_of(bias), tensor_of(copy), tensor_of(factors), out_features, num_threads, tensor_of(best), tensor_of(index)); });
}

YGG_API int32_t yggdrasil_quantised_experts(View input, View chosen, View shares, View packed, int64_t num_packed, const int64_t* formats,
                                            int64_t num_formats, View biases, int64_t num_biases, int64_t inner_features, int64_t activation, const double* clamp,
                                            int64_t num_clamp, int64_t num_threads, View out) {
  return status_of([&] {
    quantised_experts(tensor_of(input), tensor_of(chosen), tensor_of(shares), tensors_of(packed, num_packed), ints(formats, num_formats), inner_features,
                      tensors_of(biases, num_biases), activation, doubles(clamp, num_clamp), num_threads, tensor_of(out));
  });
}

YGG_API int32_t yggdrasil_quantised_rows(View ids, View packed, int64_t format, int64_t inputs, int64_t num_rows, int32_t, View out) {
  return status_of([&] { quantised_rows(tensor_of(ids), tensor_of(packed), format, inputs, num_rows, tensor_of(out)); });
}
