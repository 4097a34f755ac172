// Token-tree work between two passes: candidates, ranking, accepted rows, and trees drafted from n-gram counts.
//
// A pass streams a model's weights through all processor caches, so a call should touch little memory: objects get their
// buffers once, and calls pass numbers through a mailbox, a shared buffer. Python keeps the buffers alive as long as the
// object.

#include "common/c_api.h"
#include "text/byte_pairs.h"
#include "tree/counts.h"
#include "tree/drawn_token.h"
#include "tree/draws.h"
#include "tree/ranking.h"
#include "tree/state_rows.h"
#include "tree/tree_ops.h"
#include "tree/verified_rows.h"

using namespace yggdrasil;

namespace {

// Returns a new object, or null if its constructor throws.
template <class Make>
void* create(const Make& make) {
  void* object = nullptr;
  status_of([&] { object = make(); });
  return object;
}

std::vector<int64_t> numbers(const int64_t* from, int64_t count) { return {from, from + count}; }

}  // namespace

YGG_API int32_t yggdrasil_top_candidates(View values, int64_t k, View best, View index) {
  return status_of([&] { top_candidates(tensor_of(values), k, tensor_of(best), tensor_of(index)); });
}

YGG_API int32_t yggdrasil_likely_draws(View scores, int64_t key, int64_t position, View tokens, int64_t* count) {
  return status_of([&] {
    const Tensor given = tensor_of(scores), found = tensor_of(tokens);
    YGG_CHECK(given.is_contiguous() && given.dtype() == DType::float32 && found.numel() >= given.numel(), "scores must be float32, and tokens have room for all");
    *count = likely_draws(given.const_data_ptr<float>(), given.numel(), key, position, found.mutable_data_ptr<int64_t>());
  });
}

YGG_API int32_t yggdrasil_drawn_token(View logits, double temperature, int64_t top_k, double top_p, double min_p, int64_t key, int64_t position, View margin,
                                      int64_t* token) {
  return status_of([&] {
    const Tensor given = tensor_of(logits);
    YGG_CHECK(given.dim() == 1 && given.numel() > 0 && given.is_contiguous(), "logits must be [V]");
    with_rows_of(given, [&]<typename T>(T) {
      const Truncation by{static_cast<float>(temperature), top_k, top_p, min_p};
      const DrawnToken drawn = TokenDraw<T>(given.const_data_ptr<T>(), given.numel(), by).draw(key, position);
      *token = drawn.token;
      *tensor_of(margin).mutable_data_ptr<double>() = drawn.margin;
    });
  });
}

YGG_API int32_t yggdrasil_rank_nodes(View scores, View order, View expected) {
  return status_of([&] { rank_nodes(tensor_of(scores), tensor_of(order), tensor_of(expected)); });
}

YGG_API int32_t yggdrasil_move_rows(View caches, int64_t num_caches, const int64_t* sources, int64_t num_sources, int64_t destination) {
  return status_of([&] { move_rows(tensors_of(caches, num_caches), ints(sources, num_sources), destination); });
}

// Encodes words (UTF-8, one behind another up to `ends`) to at most one token a byte; returns the number of tokens.
YGG_API int64_t yggdrasil_encode_words(const BytePairs* pairs, const char* words, const int64_t* ends, int64_t num_words, int32_t* tokens) {
  return count_or_error([&] {
    WordEncoder encoder(*pairs);
    int32_t* end = tokens;
    for (int64_t i = 0, begin = 0; i < num_words; begin = ends[i++]) end = encoder.encode({words + begin, size_t(ends[i] - begin)}, end);
    return int64_t(end - tokens);
  });
}

// ==== rows of a KV cache ==============================================================================================

YGG_API void* yggdrasil_rows_new(View caches, int64_t num_caches, View mail) {
  return create([&] { return new Rows(tensors_of(caches, num_caches), tensor_of(mail)); });
}
YGG_API void yggdrasil_rows_free(void* rows) { delete static_cast<Rows*>(rows); }
YGG_API int64_t yggdrasil_move(void* rows) {
  return status_of([&] { static_cast<Rows*>(rows)->move(); });
}

// ==== hidden states for a draft head ==================================================================================

YGG_API void* yggdrasil_state_rows_new(View buffer, int64_t layers, View mail) {
  return create([&] { return new StateRows(tensor_of(buffer), layers, tensor_of(mail)); });
}
YGG_API void yggdrasil_state_rows_free(void* states) { delete static_cast<StateRows*>(states); }
YGG_API int64_t yggdrasil_keep(void* states) {
  return status_of([&] { static_cast<StateRows*>(states)->keep(); });
}

// ==== a tree's ranking ================================================================================================

YGG_API void* yggdrasil_ranking_new(View scores, View depths, View order, View widths, View totals, View levels) {
  return create([&] { return new Ranking(tensor_of(scores), tensor_of(depths), tensor_of(order), tensor_of(widths), tensor_of(totals), tensor_of(levels)); });
}
YGG_API void yggdrasil_ranking_free(void* ranking) { delete static_cast<Ranking*>(ranking); }
YGG_API int64_t yggdrasil_rank(void* ranking) {
  return status_of([&] { static_cast<Ranking*>(ranking)->rank(); });
}

// ==== rows of a pass over a tree ======================================================================================

YGG_API void* yggdrasil_verified_rows_new(View chosen, View root, View tree_tokens, View tree_parents, View tree_depths, View scores, View tree_ancestors,
                                          View nodes, View tokens, View parents, View exist, View positions, View ancestors, View offsets, View choices,
                                          View best, View summary) {
  return create([&] {
    return new VerifiedRows{
        tensor_of(chosen).const_data_ptr<int64_t>(), tensor_of(root).const_data_ptr<int64_t>(), tensor_of(tree_tokens).const_data_ptr<int64_t>(),
        tensor_of(tree_parents).const_data_ptr<int64_t>(), tensor_of(tree_depths).const_data_ptr<int64_t>(), tensor_of(scores).const_data_ptr<float>(),
        static_cast<const bool*>(tensor_of(tree_ancestors).const_data_ptr()), tensor_of(nodes).mutable_data_ptr<int64_t>(), tensor_of(tokens).mutable_data_ptr<int64_t>(),
        tensor_of(parents).mutable_data_ptr<int64_t>(), tensor_of(exist).mutable_data_ptr<int64_t>(), tensor_of(positions).mutable_data_ptr<int64_t>(),
        static_cast<bool*>(tensor_of(ancestors).mutable_data_ptr()), tensor_of(offsets).mutable_data_ptr<int64_t>(), tensor_of(choices).const_data_ptr<int64_t>(), tensor_of(best).const_data_ptr<float>(),
        tensor_of(summary).mutable_data_ptr<int64_t>(), tensor_of(chosen).numel(), tensor_of(tree_tokens).numel()};
  });
}
YGG_API void yggdrasil_verified_rows_free(void* rows) { delete static_cast<VerifiedRows*>(rows); }
YGG_API int64_t yggdrasil_select_rows(void* rows) {
  return status_of([&] { static_cast<VerifiedRows*>(rows)->select(); });
}
YGG_API int64_t yggdrasil_accept_rows(void* rows) {
  return status_of([&] { static_cast<VerifiedRows*>(rows)->accept(); });
}

// ==== n-gram counts ===================================================================================================

YGG_API void* yggdrasil_counts_new(View counts, View totals, View bias, View out, View nothing) {
  return create([&] { return new Counts(tensor_of(counts), tensor_of(totals), tensor_of(bias), tensor_of(out), tensor_of(nothing)); });
}
YGG_API void yggdrasil_counts_free(void* counts) { delete static_cast<Counts*>(counts); }
YGG_API int32_t yggdrasil_counts_set_table(void* counts, View arrays) {
  return status_of([&] { static_cast<Counts*>(counts)->set_table(tensor_of(arrays), tensor_of(arrays + 1)); });
}
YGG_API int32_t yggdrasil_counts_forget(void* counts) {
  return status_of([&] { static_cast<Counts*>(counts)->forget(); });
}
YGG_API int32_t yggdrasil_counts_append(void* counts, const int64_t* tokens, int64_t num_tokens) {
  return status_of([&] { static_cast<Counts*>(counts)->append(numbers(tokens, num_tokens)); });
}
YGG_API int32_t yggdrasil_counts_leave_out_below(void* counts, double score) {
  return status_of([&] { static_cast<Counts*>(counts)->leave_out_below(score); });
}
YGG_API int32_t yggdrasil_counts_follow_draws(void* counts, int64_t key, double noise, double others) {
  return status_of([&] { static_cast<Counts*>(counts)->follow_draws(key, noise, others); });
}
// Writes at most `capacity` numbers of the feature rows, and returns how many there are.
YGG_API int64_t yggdrasil_counts_features(void* counts, const int64_t* path, int64_t num_path, int64_t* rows, int64_t capacity) {
  return count_or_error([&] {
    const std::vector<int64_t> found = static_cast<Counts*>(counts)->features(numbers(path, num_path));
    std::copy_n(found.begin(), std::min<int64_t>(capacity, found.size()), rows);
    return static_cast<int64_t>(found.size());
  });
}
YGG_API int32_t yggdrasil_counts_grow_in(void* counts, View buffers) {
  const auto each = [&](int i) { return tensor_of(buffers + i); };
  return status_of([&] { static_cast<Counts*>(counts)->grow_in(each(0), each(1), each(2), each(3), each(4), each(5), each(6)); });
}
YGG_API int32_t yggdrasil_counts_fill_in(void* counts, View buffers) {
  const auto each = [&](int i) { return tensor_of(buffers + i); };
  return status_of([&] {
    static_cast<Counts*>(counts)->fill_in(each(0), each(1), each(2), each(3), each(4), each(5), each(6), each(7), each(8));
  });
}
YGG_API int64_t yggdrasil_grow(void* counts) {
  return count_or_error([&] { return static_cast<Counts*>(counts)->grow(); });
}
YGG_API int64_t yggdrasil_fill(void* counts) {
  return count_or_error([&] { return static_cast<Counts*>(counts)->fill(); });
}
