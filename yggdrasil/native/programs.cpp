// The CPU operators that run programs, beside those of ops.cpp.

#include "common/shims.h"
#include "layers/layer_stack.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_keep_table(View tensors, int64_t count, int64_t* number) {
  return guarded([&] { *number = WeightRegistry::instance().keep(all_of(tensors, count)); });
}

YGG_API int32_t yggdrasil_drop_table(int64_t number) {
  return guarded([&] { WeightRegistry::instance().drop(number); });
}

YGG_API int32_t yggdrasil_run_program(View tensors, int64_t num_tensors, const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers,
                                      const int64_t* results, int64_t num_results, int64_t num_threads, View outs, int64_t num_outs) {
  return guarded([&] {
    run_program(all_of(tensors, num_tensors), ints(code, num_code), doubles(numbers, num_numbers), ints(results, num_results), num_threads,
                all_of(outs, num_outs));
  });
}

YGG_API int32_t yggdrasil_run_layers(View table, View carried, View shared, int64_t num_shared, const int64_t* places, int64_t num_places, int64_t count,
                                     const int64_t* kept, int64_t num_kept, const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers,
                                     int64_t num_threads, View outs, int64_t num_outs) {
  return guarded([&] {
    run_layers(of(table), of(carried), all_of(shared, num_shared), ints(places, num_places), count, ints(kept, num_kept), ints(code, num_code),
               doubles(numbers, num_numbers), num_threads, all_of(outs, num_outs));
  });
}

YGG_API int32_t yggdrasil_keep_stack(View tensors, int64_t num_tensors, const int64_t* kinds, int64_t num_kinds, const int64_t* places, int64_t num_places,
                                     const int64_t* code, int64_t num_code, const int64_t* code_sizes, int64_t num_code_sizes, const double* numbers,
                                     int64_t num_numbers, const int64_t* sizes, int64_t num_sizes, int64_t* number) {
  return guarded([&] {
    *number = keep_stack(all_of(tensors, num_tensors), ints(kinds, num_kinds), ints(places, num_places), ints(code, num_code), ints(code_sizes, num_code_sizes),
                         doubles(numbers, num_numbers), ints(sizes, num_sizes));
  });
}

YGG_API int32_t yggdrasil_drop_stack(int64_t number) {
  return guarded([&] { drop_stack(number); });
}

YGG_API int32_t yggdrasil_run_stack(int64_t number, View carried, View shared, int64_t num_shared, const int64_t* kept, int64_t num_kept, int64_t num_threads,
                                    View outs, int64_t num_outs) {
  return guarded([&] { run_stack(number, of(carried), all_of(shared, num_shared), ints(kept, num_kept), num_threads, all_of(outs, num_outs)); });
}

// ==== what compiled steps call ========================================================================================

AOTITorchError aoti_torch_cpu_run_program(const AtenTensorHandle* tensors, int64_t num_tensors, const int64_t* code, int64_t num_code,
                                          const double* numbers, int64_t num_numbers, const int64_t* results, int64_t num_results,
                                          int64_t num_threads, ...) {
  va_list targets;
  va_start(targets, num_threads);
  const AOTITorchError error = shimmed([&] {
    const std::vector<Tensor> given = tensors_of(tensors, num_tensors);
    const Program program{ints(code, num_code), doubles(numbers, num_numbers)};
    const std::vector<int64_t> sizes = row_sizes(program, given);
    const Tensor& rows = given.at(first_input(program));
    std::vector<Tensor> outputs;
    for (int64_t i = 0; i < num_results; ++i)
      outputs.push_back(new_tensor(with_last(rows, sizes.at(given.size() + results[i])), rows.dtype(), va_arg(targets, AtenTensorHandle*)));
    run_program(given, program.code, program.numbers, ints(results, num_results), num_threads, outputs);
  });
  va_end(targets);
  return error;
}

AOTITorchError aoti_torch_cpu_run_layers(AtenTensorHandle table, AtenTensorHandle carried, const AtenTensorHandle* shared, int64_t num_shared,
                                         const int64_t* places, int64_t num_places, int64_t count, const int64_t* kept, int64_t num_kept,
                                         const int64_t* code, int64_t num_code, const double* numbers, int64_t num_numbers, int64_t num_threads, ...) {
  va_list targets;
  va_start(targets, num_threads);
  const AOTITorchError error = shimmed([&] {
    const Tensor rows = tensor_of(carried);
    std::vector<Tensor> outputs;
    for (int64_t i = 0; i < num_kept; ++i) outputs.push_back(new_tensor(rows.sizes(), rows.dtype(), va_arg(targets, AtenTensorHandle*)));
    run_layers(tensor_of(table), rows, tensors_of(shared, num_shared), ints(places, num_places), count, ints(kept, num_kept), ints(code, num_code),
               doubles(numbers, num_numbers), num_threads, outputs);
  });
  va_end(targets);
  return error;
}
