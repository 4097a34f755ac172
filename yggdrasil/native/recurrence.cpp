// CPU operators of recurrent layers.

#include "common/c_api.h"
#include "common/c_api.h"
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
