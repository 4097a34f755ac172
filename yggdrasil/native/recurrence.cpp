// CPU operators of recurrent layers.

#include "common/c_api.h"
#include "recurrence/committed_path.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_tree_convolution(View input, View weight, View bias, View window, View inputs, View offsets, View parents,
                                           bool silu, int64_t num_threads, View out) {
  return status_of(
      [&] { tree_convolution(tensor_of(input), tensor_of(weight), tensor_of(bias), tensor_of(window), tensor_of(inputs), tensor_of(offsets), tensor_of(parents), silu, num_threads, tensor_of(out)); });
}

YGG_API int32_t yggdrasil_tree_recurrence(View query, View key, View value, View decay, View strength, bool delta, View state, View decays,
                                          View strengths, View offsets, View parents, int64_t num_threads, View out) {
  return status_of([&] {
    tree_recurrence(tensor_of(query), tensor_of(key), tensor_of(value), tensor_of(decay), tensor_of(strength), delta, tensor_of(state), tensor_of(decays), tensor_of(strengths), tensor_of(offsets),
                    tensor_of(parents), num_threads, tensor_of(out));
  });
}

YGG_API int32_t yggdrasil_commit_states(View windows, int64_t num_windows, View inputs, int64_t num_inputs, View states, int64_t num_states,
                                        View decays, int64_t num_decays, View strengths, int64_t num_strengths, View taps, int64_t num_taps,
                                        View biases, int64_t num_biases, bool delta, const int64_t* slots, int64_t num_slots,
                                        int64_t num_threads) {
  return status_of([&] {
    const RecurrentStates all{tensors_of(windows, num_windows), tensors_of(inputs, num_inputs), tensors_of(states, num_states), tensors_of(decays, num_decays),
                              tensors_of(strengths, num_strengths), tensors_of(taps, num_taps), tensors_of(biases, num_biases), delta};
    all.commit(ints(slots, num_slots), num_threads);
  });
}
