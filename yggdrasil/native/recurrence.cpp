// CPU operators of recurrent layers.

#include "common/c_api.h"
#include "recurrence/committed_path.h"

using namespace yggdrasil;

YGG_API int32_t yggdrasil_tree_convolution(View input, View weight, View bias, View window, View inputs, View offsets, View parents,
                                           bool silu, int64_t num_threads, View out) {
  return guarded(
      [&] { tree_convolution(of(input), of(weight), of(bias), of(window), of(inputs), of(offsets), of(parents), silu, num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_tree_recurrence(View query, View key, View value, View decay, View strength, bool delta, View state, View decays,
                                          View strengths, View offsets, View parents, int64_t num_threads, View out) {
  return guarded([&] {
    tree_recurrence(of(query), of(key), of(value), of(decay), of(strength), delta, of(state), of(decays), of(strengths), of(offsets),
                    of(parents), num_threads, of(out));
  });
}

YGG_API int32_t yggdrasil_commit_states(View windows, int64_t num_windows, View inputs, int64_t num_inputs, View states, int64_t num_states,
                                        View decays, int64_t num_decays, View strengths, int64_t num_strengths, View taps, int64_t num_taps,
                                        View biases, int64_t num_biases, bool delta, const int64_t* slots, int64_t num_slots,
                                        int64_t num_threads) {
  return guarded([&] {
    const RecurrentStates all{all_of(windows, num_windows), all_of(inputs, num_inputs), all_of(states, num_states), all_of(decays, num_decays),
                              all_of(strengths, num_strengths), all_of(taps, num_taps), all_of(biases, num_biases), delta};
    all.commit(ints(slots, num_slots), num_threads);
  });
}
