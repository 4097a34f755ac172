// The CPU operators of recurrent layers, beside those of ops.cpp.

#include "common/c_api.h"
#include "common/shims.h"
#include "recurrence/tree_recurrence.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_tree_convolution(View input, View weight, View bias, View window, View inputs, View offsets, View parents,
                                           int64_t num_threads, View out) {
  return guarded(
      [&] { tree_convolution(of(input), of(weight), of(bias), of(window), of(inputs), of(offsets), of(parents), num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_tree_recurrence(View query, View key, View value, View decay, View beta, View state, View keys, View updates,
                                          View decays, View offsets, View parents, int64_t num_threads, View out) {
  return guarded([&] {
    tree_recurrence(of(query), of(key), of(value), of(decay), of(beta), of(state), of(keys), of(updates), of(decays), of(offsets), of(parents),
                    num_threads, of(out));
  });
}

YGG_API int32_t yggdrasil_commit_states(View windows, int64_t num_windows, View inputs, int64_t num_inputs, View states, int64_t num_states,
                                        View keys, int64_t num_keys, View updates, int64_t num_updates, View decays, int64_t num_decays,
                                        const int64_t* slots, int64_t num_slots, int64_t num_threads) {
  return guarded([&] {
    commit_states(all_of(windows, num_windows), all_of(inputs, num_inputs), all_of(states, num_states), all_of(keys, num_keys),
                  all_of(updates, num_updates), all_of(decays, num_decays), ints(slots, num_slots), num_threads);
  });
}

// ==== what compiled steps call ========================================================================================

AOTITorchError aoti_torch_cpu_tree_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle window,
                                               AtenTensorHandle inputs, AtenTensorHandle offsets, AtenTensorHandle parents, int64_t num_threads,
                                               AtenTensorHandle* result) {
  return shimmed([&] {
    const Tensor x = tensor_of(input);
    tree_convolution(x, tensor_of(weight), optional_tensor_of(bias), tensor_of(window), tensor_of(inputs), tensor_of(offsets), tensor_of(parents),
                     num_threads, new_tensor(x.sizes(), x.dtype(), result));
  });
}

AOTITorchError aoti_torch_cpu_tree_recurrence(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle decay,
                                              AtenTensorHandle* beta, AtenTensorHandle state, AtenTensorHandle keys, AtenTensorHandle updates,
                                              AtenTensorHandle decays, AtenTensorHandle offsets, AtenTensorHandle parents, int64_t num_threads,
                                              AtenTensorHandle* result) {
  return shimmed([&] {
    const Tensor v = tensor_of(value);
    tree_recurrence(tensor_of(query), tensor_of(key), v, tensor_of(decay), optional_tensor_of(beta), tensor_of(state), tensor_of(keys),
                    tensor_of(updates), tensor_of(decays), tensor_of(offsets), tensor_of(parents), num_threads,
                    new_tensor(v.sizes(), v.dtype(), result));
  });
}
