// CPU operators of static-shape steps, with AMX, AVX-512 or AVX2 if the library is compiled for them, else plain C++.
// Operators over quantised weights, layer bytecode and token trees are in other source files, compiled in parallel.
//
// They provide what PyTorch's operators do not:
//  * packed weights, in panels of 16 outputs, which one row reads at memory bandwidth, and up to 16 rows in about the same
//    time;
//  * attention whose time depends on the context length, not on the cache's capacity;
//  * results of a row that are independent of the other rows: every output is accumulated over K, and attention over keys in
//    order of position, in a fixed order. Verifying a tree of W tokens therefore gives bitwise the same results as W plain
//    steps, so that bf16 output is independent of the plan.
//
// Dims: W rows of a step, K inputs, N outputs, P panels of 16 outputs, Hq query heads, Hkv key heads, D head size,
//       S cache capacity, T tree slots.

#include <atomic>

#include "attention/attention_ops.h"
#include "attention/rows_attention.h"
#include "common/best_token.h"
#include "common/norm_stage.h"
#include "common/c_api.h"
#include "common/threads.h"
#include "linear/linear_ops.h"
#include "linear/packed_experts.h"
#include "linear/plain_linear.h"

using namespace yggdrasil;

namespace {

// Reads every word of a buffer and returns their exclusive or: the fastest that a step could pass over its weights.
int64_t read_words(const Tensor& buffer, int64_t num_threads) {
  constexpr int64_t kBlock = 4096;  // words
  const int64_t count = buffer.nbytes() / sizeof(uint64_t), blocks = (count + kBlock - 1) / kBlock;
  const uint64_t* words = static_cast<const uint64_t*>(buffer.const_data_ptr());
  std::atomic<uint64_t> total{0};
  parallel(blocks, num_threads, [&](int64_t begin, int64_t end) {
    uint64_t lanes[32] = {};
    int64_t i = begin * kBlock;
    const int64_t stop = std::min(end * kBlock, count);
    for (; i + 32 <= stop; i += 32)
      for (int j = 0; j < 32; ++j) lanes[j] ^= words[i + j];
    for (; i < stop; ++i) lanes[0] ^= words[i];
    uint64_t folded = 0;
    for (const uint64_t lane : lanes) folded ^= lane;
    total.fetch_xor(folded);
  });
  return static_cast<int64_t>(total.load());
}

}  // namespace

// ==== what Python calls ===============================================================================================

YGG_API const char* yggdrasil_error() { return last_error().c_str(); }

YGG_API int32_t yggdrasil_pack_linear(View weight, View packed, int64_t num_threads) {
  return guarded([&] { pack_linear(of(weight), of(packed), num_threads); });
}

YGG_API int32_t yggdrasil_packed_linear(View input, View packed, View bias, int64_t out_features, int64_t num_threads, View out) {
  return guarded([&] { packed_linear(of(input), of(packed), of(bias), out_features, num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_packed_linears(View input, View gate, bool gelu, View norm, bool plus_one, double eps, View residual, View packed, int64_t num_packed,
                                         View biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features, int64_t num_threads,
                                         View outs, int64_t num_outs) {
  return guarded([&] {
    packed_around(of(input), {of(gate), gelu, of(norm), plus_one, eps, of(residual)}, all_of(packed, num_packed), all_of(biases, num_biases),
                  ints(out_features, num_out_features), num_threads, all_of(outs, num_outs));
  });
}

YGG_API int32_t yggdrasil_packed_best(View input, View packed, View bias, int64_t out_features, int64_t num_threads, View best, View place) {
  return guarded([&] { packed_best(of(input), of(packed), of(bias), out_features, num_threads, of(best), of(place)); });
}

YGG_API int32_t yggdrasil_plain_linear(View input, View weight, View bias, int64_t num_threads, View out) {
  return guarded([&] { plain_linear(of(input), of(weight), of(bias), num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_packed_experts(View input, View chosen, View shares, View gate_up, View down, View biases, int64_t num_biases, int64_t inner_features,
                                         int64_t activation, const double* clamp, int64_t num_clamp, int64_t num_threads, View out) {
  return guarded([&] {
    packed_experts(of(input), of(chosen), of(shares), of(gate_up), of(down), inner_features, all_of(biases, num_biases), activation, doubles(clamp, num_clamp),
                   num_threads, of(out));
  });
}

YGG_API int32_t yggdrasil_norm_rows(View input, View norm, bool plus_one, double eps, View residual, int64_t num_threads, View out) {
  return guarded([&] { norm_rows(of(input), of(norm), plus_one, eps, of(residual), num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_tree_attention(View query, View key, View value, View key_cache, View value_cache, View offsets, View tree_mask, double scale,
                                         int64_t window, double softcap, View sinks, int64_t num_threads, View out) {
  return guarded([&] {
    tree_attention(of(query), of(key), of(value), of(key_cache), of(value_cache), of(offsets), of(tree_mask), scale, window, softcap, of(sinks), num_threads,
                   of(out));
  });
}

YGG_API int32_t yggdrasil_rows_attention(View query, View keys, View values, View lengths, double scale, int64_t window, double softcap, int64_t num_threads,
                                         View out) {
  return guarded([&] { rows_attention(of(query), of(keys), of(values), of(lengths), scale, window, softcap, num_threads, of(out)); });
}

YGG_API int32_t yggdrasil_best_tokens(View logits, int64_t num_threads, View best, View place) {
  return guarded([&] { best_tokens(of(logits), num_threads, of(best), of(place)); });
}

YGG_API int32_t yggdrasil_read_words(View buffer, int64_t num_threads, int64_t* result) {
  return guarded([&] { *result = read_words(of(buffer), num_threads); });
}
