// CPU operators over quantised weights.

#include "common/c_api.h"
#include "linear/bounded_argmax.h"
#include "quantised/quantised_experts.h"
#include "quantised/quantised_ops.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_has_byte_products() { return has_byte_products(); }

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

YGG_API int32_t yggdrasil_bounded_argmax(View input, View packed, View bias, View copy, View factors, int64_t out_features, int64_t num_threads, View best,
                                        View place) {
  return guarded([&] { bounded_argmax(of(input), of(packed), of(bias), of(copy), of(factors), out_features, num_threads, of(best), of(place)); });
}

YGG_API int32_t yggdrasil_quantised_experts(View input, View chosen, View shares, View packed, int64_t num_packed, const int64_t* formats,
                                            int64_t num_formats, View biases, int64_t num_biases, int64_t inner_features, int64_t activation, const double* clamp,
                                            int64_t num_clamp, int64_t num_threads, View out) {
  return guarded([&] {
    quantised_experts(of(input), of(chosen), of(shares), all_of(packed, num_packed), ints(formats, num_formats), inner_features,
                      all_of(biases, num_biases), activation, doubles(clamp, num_clamp), num_threads, of(out));
  });
}

YGG_API int32_t yggdrasil_quantised_rows(View ids, View packed, int64_t format, int64_t inputs, int64_t num_rows, int32_t, View out) {
  return guarded([&] { quantised_rows(of(ids), of(packed), format, inputs, num_rows, of(out)); });
}
