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
#include "common/argmax.h"
#include "common/norm_stage.h"
#include "common/c_api.h"
#include "common/threads.h"
#include "linear/linear_ops.h"
#include "linear/packed_experts.h"
#include "linear/plain_linear.h"

using namespace yggdrasil;

namespace {

// Reads every word of a buffer and returns their exclusive or: a lower bound of the time in which a step reads its
// weights.
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

// ==== C functions called from Python ==================================================================================

YGG_API const char* yggdrasil_error() { return last_error().c_str(); }

YGG_API int32_t yggdrasil_pack_linear(View weight, View packed, int64_t num_threads) {
  return status_of([&] { pack_linear(tensor_of(weight), tensor_of(packed), num_threads); });
}

YGG_API int32_t yggdrasil_packed_linear(View input, View packed, View bias, int64_t out_features, int64_t num_threads, View out) {
  return status_of([&] { packed_linear(tensor_of(input), tensor_of(packed), tensor_of(bias), out_features, num_threads, tensor_of(out)); });
}

YGG_API int32_t yggdrasil_packed_linears(View input, View gate, bool gelu, View norm, bool plus_one, double eps, View residual, View packed, int64_t num_packed,
                                         View biases, int64_t num_biases, const int64_t* out_features, int64_t num_out_features, int64_t num_threads,
                                         View outs, int64_t num_outs) {
  return status_of([&] {
    packed_linears(tensor_of(input), {tensor_of(gate), gelu, tensor_of(norm), plus_one, eps, tensor_of(residual)}, tensors_of(packed, num_packed), tensors_of(biases, num_biases),
                  ints(out_features, num_out_features), num_threads, tensors_of(outs, num_outs));
  });
}

YGG_API int32_t yggdrasil_packed_best(View input, View packed, View bias, int64_t out_features, int64_t num_threads, View best, View index) {
  return status_of([&] { packed_best(tensor_of(input), tensor_of(packed), tensor_of(bias), out_features, num_threads, tensor_of(best), tensor_of(index)); });
}

YGG_API int32_t yggdrasil_plain_linear(View input, View weight, View bias, int64_t num_threads, View out) {
  return status_of([&] { plain_linear(tensor_of(input), tensor_of(weight), tensor_of(bias), num_threads, tensor_of(out)); });
}

YGG_API int32_t yggdrasil_packed_experts(View input, View chosen, View shares, View gate_up, View down, View biases, int64_t num_biases, int64_t inner_features,
                                         int64_t activation, const double* clamp, int64_t num_clamp, int64_t num_threads, View out) {
  return status_of([&] {
    packed_experts(tensor_of(input), tensor_of(chosen), tensor_of(shares), tensor_of(gate_up), tensor_of(down), inner_features, tensors_of(biases, num_biases), activation, doubles(clamp, num_clamp),
                   num_threads, tensor_of(out));
  });
}

YGG_API int32_t yggdrasil_norm_rows(View input, View norm, bool plus_one, double eps, View residual, int64_t num_threads, View out) {
  return status_of([&] { norm_rows(tensor_of(input), tensor_of(norm), plus_one, eps, tensor_of(residual), num_threads, tensor_of(out)); });
}

YGG_API int32_t yggdrasil_tree_attention(View query, View key, View value, View key_cache, View value_cache, View offsets, View tree_mask, double scale,
                                         int64_t window, double softcap, View sinks, int64_t num_threads, View out) {
  return status_of([&] {
    tree_attention(tensor_of(query), tensor_of(key), tensor_of(value), tensor_of(key_cache), tensor_of(value_cache), tensor_of(offsets), tensor_of(tree_mask), scale, window, softcap, tensor_of(sinks), num_threads,
                   tensor_of(out));
  });
}

YGG_API int32_t yggdrasil_rows_attention(View query, View keys, View values, View lengths, double scale, int64_t window, double softcap, int64_t num_threads,
                                         View out) {
  return status_of([&] { rows_attention(tensor_of(query), tensor_of(keys), tensor_of(values), tensor_of(lengths), scale, window, softcap, num_threads, tensor_of(out)); });
}

YGG_API int32_t yggdrasil_best_tokens(View logits, int64_t num_threads, View best, View index) {
  return status_of([&] { best_tokens(tensor_of(logits), num_threads, tensor_of(best), tensor_of(index)); });
}

YGG_API int32_t yggdrasil_read_words(View buffer, int64_t num_threads, int64_t* result) {
  return status_of([&] { *result = read_words(tensor_of(buffer), num_threads); });
}
