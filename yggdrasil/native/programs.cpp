// CPU operators that run a model's layers from bytecode.

#include "common/c_api.h"
#include "layers/layer_stack.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_keep_stack(View tensors, int64_t num_tensors, const int64_t* kinds, int64_t num_kinds, const int64_t* tensor_indices, int64_t num_places,
                                     const int64_t* code, int64_t num_code, const int64_t* code_sizes, int64_t num_code_sizes, const double* numbers,
                                     int64_t num_numbers, const int64_t* sizes, int64_t num_sizes, int64_t* number) {
  return status_of([&] {
    *number = keep_stack(tensors_of(tensors, num_tensors), ints(kinds, num_kinds), ints(tensor_indices, num_places), ints(code, num_code), ints(code_sizes, num_code_sizes),
                         doubles(numbers, num_numbers), ints(sizes, num_sizes));
  });
}

YGG_API int32_t yggdrasil_drop_stack(int64_t number) {
  return status_of([&] { drop_stack(number); });
}

YGG_API int32_t yggdrasil_run_stack(int64_t number, View carried, View shared, int64_t num_shared, const int64_t* kept, int64_t num_kept, int64_t num_threads,
                                    View outs, int64_t num_outs) {
  return status_of([&] { run_stack(number, tensor_of(carried), tensors_of(shared, num_shared), ints(kept, num_kept), num_threads, tensors_of(outs, num_outs)); });
}
