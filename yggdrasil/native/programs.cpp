// The CPU operators that run programs, beside those of ops.cpp: a source of their own, compiled at the same time.

#include <ATen/ATen.h>
#include <torch/library.h>

#include "layers/layer_stack.h"
#include "layers/program_ops.h"
#include "common/shims.h"

using namespace yggdrasil;

AOTITorchError aoti_torch_cpu_run_program(const AtenTensorHandle* tensors, int64_t num_tensors, const int64_t* code, int64_t num_code,
                                          const double* numbers, int64_t num_numbers, const int64_t* results, int64_t num_results,
                                          int64_t num_threads, ...) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto outputs = run_program(tensors_of(tensors, num_tensors), at::IntArrayRef(code, num_code), at::ArrayRef<double>(numbers, num_numbers),
                               at::IntArrayRef(results, num_results), num_threads);
    va_list targets;
    va_start(targets, num_threads);
    give_all(std::move(outputs), targets);
    va_end(targets);
  });
}

AOTITorchError aoti_torch_cpu_run_layers(AtenTensorHandle table, AtenTensorHandle carried, const AtenTensorHandle* shared, int64_t num_shared,
                                         const int64_t* places, int64_t num_places, int64_t count, const int64_t* kept, int64_t num_kept,
                                         const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers, int64_t num_threads, ...) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto outputs = run_layers(tensor_of(table), tensor_of(carried), tensors_of(shared, num_shared), at::IntArrayRef(places, num_places), count,
                              at::IntArrayRef(kept, num_kept), at::IntArrayRef(code, num_code), at::ArrayRef<double>(numbers, num_numbers), num_threads);
    va_list targets;
    va_start(targets, num_threads);
    give_all(std::move(outputs), targets);
    va_end(targets);
  });
}

TORCH_LIBRARY_IMPL(yggdrasil, CPU, m) {
  m.impl("run_program", &run_program);
  m.impl("run_layers", &run_layers);
  m.impl("run_stack", &run_stack);
}

TORCH_LIBRARY_IMPL(yggdrasil, CompositeExplicitAutograd, m) {
  m.impl("keep_stack", &keep_stack);
  m.impl("drop_stack", &drop_stack);
}
