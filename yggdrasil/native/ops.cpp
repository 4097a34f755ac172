// CPU operators of the static-shape steps: what each does is in the headers, here they are given their names.
//
// Two properties matter more than peak rate:
//  * cost follows the weights' bytes for narrow steps (W up to about 16) and the context's real length, never the
//    cache's capacity;
//  * a row's result does not depend on how many rows travel with it. Every output is accumulated over K, and over the
//    keys in order of position, in one fixed order. Verifying a tree of W tokens therefore gives the same bits as W
//    plain steps, which is what makes bf16 output independent of the plan.
//
// Dims: W rows of a step, K inputs, N outputs, P panels of 16 outputs, Hq query heads, Hkv key heads, D head size,
//       S cache capacity, T tree slots.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>

#include "attention/attention_ops.h"
#include "common/best_token.h"
#include "tree/counts.h"
#include "tree/direct.h"
#include "common/kept_memory.h"
#include "linear/linear_ops.h"
#include "common/norm_stage.h"
#include "common/package.h"
#include "linear/packed_experts.h"
#include "linear/plain_linear.h"
#include "tree/ranking.h"
#include "attention/rows_attention.h"
#include "common/shims.h"
#include "common/threads.h"
#include "tree/tree_ops.h"
#include "layers/units.h"

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

// ==== what compiled steps call ========================================================================================

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                            int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(packed_linear(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), out_features, num_threads));
  });
}

AOTITorchError aoti_torch_cpu_packed_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                          int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give_both(packed_best(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), out_features, num_threads), best, place);
  });
}

AOTITorchError aoti_torch_cpu_packed_linears(AtenTensorHandle input, AtenTensorHandle* gate, bool gelu, AtenTensorHandle* norm,
                                             bool plus_one, double eps, AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed,
                                             const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features,
                                             int64_t num_out_features, int64_t num_threads, ...) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto results = packed_around(tensor_of(input), around_of(gate, gelu, norm, plus_one, eps, residual), tensors_of(packed, num_packed), optional_tensors_of(biases, num_biases),
                                  at::IntArrayRef(out_features, num_out_features), num_threads);
    va_list targets;
    va_start(targets, num_threads);
    give_all(std::move(results), targets);
    va_end(targets);
  });
}

AOTITorchError aoti_torch_cpu_plain_linear(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t num_threads,
                                           AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(plain_linear(tensor_of(input), tensor_of(weight), pointer_to_optional<Tensor>(bias), num_threads));
  });
}

AOTITorchError aoti_torch_cpu_packed_experts(AtenTensorHandle input, AtenTensorHandle chosen, AtenTensorHandle shares, AtenTensorHandle gate_up,
                                             AtenTensorHandle down, int64_t inner_features, bool gelu, int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(packed_experts(tensor_of(input), tensor_of(chosen), tensor_of(shares), tensor_of(gate_up), tensor_of(down),
                                               inner_features, gelu, num_threads));
  });
}

AOTITorchError aoti_torch_cpu_norm_rows(AtenTensorHandle input, AtenTensorHandle norm, bool plus_one, double eps, AtenTensorHandle* residual,
                                        int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(norm_rows(tensor_of(input), tensor_of(norm), plus_one, eps, pointer_to_optional<Tensor>(residual), num_threads));
  });
}

AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle key_cache,
                                             AtenTensorHandle value_cache, AtenTensorHandle offsets, AtenTensorHandle tree_mask, double scale,
                                             int64_t window, double softcap, int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(tree_attention(tensor_of(query), tensor_of(key), tensor_of(value), tensor_of(key_cache), tensor_of(value_cache),
                                               tensor_of(offsets), tensor_of(tree_mask), scale, window, softcap, num_threads));
  });
}

AOTITorchError aoti_torch_cpu_best_tokens(AtenTensorHandle logits, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give_both(best_tokens(tensor_of(logits), num_threads), best, place);
  });
}

[[maybe_unused]] const bool is_installed = (KeptMemory::install(), true);

// Schemas live in kernels/__init__.py, beside the portable implementations.
TORCH_LIBRARY_IMPL(yggdrasil, CPU, m) {
  m.impl("packed_shape", &packed_shape);
  m.impl("pack_linear", &pack_linear);
  m.impl("packed_linear", &packed_linear);
  m.impl("packed_linears", &packed_linears);
  m.impl("packed_best", &packed_best);
  m.impl("packed_experts", &packed_experts);
  m.impl("plain_linear", &plain_linear);
  m.impl("norm_rows", &norm_rows);
  m.impl("tree_attention", &tree_attention);
  m.impl("rows_attention", &rows_attention);
  m.impl("best_tokens", &best_tokens);
  m.impl("top_candidates", &top_candidates);
  m.impl("rank_nodes", &rank_nodes);
  m.impl("move_rows", &move_rows);
  m.impl("read_words", &read_words);
  m.impl("run_units", &run_units);
}

TORCH_LIBRARY_IMPL(yggdrasil, CompositeExplicitAutograd, m) {
  m.impl("open_unit", &open_unit);
  m.impl("keep_table", &keep_table);
  m.impl("drop_table", &drop_table);
}

TORCH_LIBRARY_FRAGMENT(yggdrasil, m) {
  m.class_<yggdrasil::Package>("Package").def(torch::init<std::string>());
  m.class_<yggdrasil::Run>("Run").def(torch::init<c10::intrusive_ptr<yggdrasil::Package>, std::vector<Tensor>>()).def("run", &yggdrasil::Run::run);
  m.class_<yggdrasil::Rows>("Rows").def(torch::init<std::vector<Tensor>, Tensor>()).def("address", &yggdrasil::Rows::address);
  m.class_<yggdrasil::StateRows>("StateRows").def(torch::init<Tensor, int64_t, Tensor>()).def("address", &yggdrasil::StateRows::address);
  m.class_<yggdrasil::Ranking>("Ranking")
      .def(torch::init<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>())
      .def("address", &yggdrasil::Ranking::address);
  m.class_<yggdrasil::Counts>("Counts")
      .def(torch::init<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>())
      .def("recycle", &yggdrasil::Counts::recycle)
      .def("set_table", &yggdrasil::Counts::set_table)
      .def("forget", &yggdrasil::Counts::forget)
      .def("append", &yggdrasil::Counts::append)
      .def("leave_out_below", &yggdrasil::Counts::leave_out_below)
      .def("evidence", &yggdrasil::Counts::evidence)
      .def("address", &yggdrasil::Counts::address)
      .def("grow_in", &yggdrasil::Counts::grow_in)
      .def("grow_for", &yggdrasil::Counts::grow_for)
      .def("fill_in", &yggdrasil::Counts::fill_in);
}
