// CPU operators over quantised weights, beside those of ops.cpp: a source of their own, compiled at the same time.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "quantised/quantised_experts.h"
#include "quantised/quantised_ops.h"
#include "linear/screened_best.h"
#include "common/shims.h"

using namespace yggdrasil;

AOTITorchError aoti_torch_cpu_quantised_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                               int64_t format, int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(
        quantised_linear(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), out_features, format, num_threads));
  });
}

AOTITorchError aoti_torch_cpu_quantised_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                             int64_t format, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give_both(quantised_best(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), out_features, format, num_threads), best, place);
  });
}

AOTITorchError aoti_torch_cpu_screened_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, AtenTensorHandle copy,
                                            AtenTensorHandle factors, int64_t out_features, int64_t num_threads, AtenTensorHandle* best,
                                            AtenTensorHandle* place) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give_both(screened_best(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), tensor_of(copy), tensor_of(factors), out_features,
                            num_threads),
              best, place);
  });
}

AOTITorchError aoti_torch_cpu_quantised_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm,
                                                bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed,
                                                const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features,
                                                int64_t num_out_features, const int64_t* formats, int64_t num_formats, int64_t num_threads, ...) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto results = quantised_around(tensor_of(input), around_of(gate, gelu, norm, plus_one, eps, residual), tensors_of(packed, num_packed), optional_tensors_of(biases, num_biases),
                                     at::IntArrayRef(out_features, num_out_features), at::IntArrayRef(formats, num_formats), num_threads);
    va_list targets;
    va_start(targets, num_threads);
    give_all(std::move(results), targets);
    va_end(targets);
  });
}

AOTITorchError aoti_torch_cpu_quantised_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, const AtenTensorHandle* packed,
                                                int64_t num_packed, const int64_t* formats, int64_t num_formats, int64_t inner_features, bool gelu,
                                                int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(quantised_experts(tensor_of(input), tensor_of(chosen), tensor_of(shares), tensors_of(packed, num_packed),
                                                  at::IntArrayRef(formats, num_formats), inner_features, gelu, num_threads));
  });
}

TORCH_LIBRARY_IMPL(yggdrasil, CompositeExplicitAutograd, m) { m.impl("can_screen", &can_screen); }

TORCH_LIBRARY_IMPL(yggdrasil, CPU, m) {
  m.impl("quantised_shape", &quantised_shape);
  m.impl("pack_quantised", &pack_quantised);
  m.impl("quantised_linear", &quantised_linear);
  m.impl("quantised_linears", &quantised_linears);
  m.impl("quantised_best", &quantised_best);
  m.impl("screened_best", &screened_best);
  m.impl("quantised_experts", &quantised_experts);
  m.impl("quantised_rows", &quantised_rows);
}
