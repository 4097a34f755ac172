// Token-tree work between two passes: candidates, ranking, accepted rows, and trees drafted from n-gram counts.
//
// A pass streams a model's weights through all processor caches, so a call should touch little memory: objects get their
// buffers once, and calls pass numbers through a mailbox, a shared buffer. Python keeps the buffers alive as long as the
// object.

#include "common/c_api.h"
#include "tree/counts.h"
#include "tree/drawn_token.h"
#include "tree/draws.h"
#include "tree/ranking.h"
#include "tree/state_rows.h"
#include "tree/tree_ops.h"
#include "tree/verified_rows.h"

using namespace yggdrasil;

namespace {

// A new object, or null where it cannot be.
template <class Make>
void* made(const Make& make) {
  void* object = nullptr;
  guarded([&] { object = make(); });
  return object;
}

std::vector<int64_t> numbers(const int64_t* from, int64_t count) { return {from, from + count}; }

}  // namespace

YGG_API int32_t yggdrasil_top_candidates(View values, int64_t k, View best, View place) {
  return guarded([&] { top_candidates(of(values), k, of(best), of(place)); });
}

YGG_API int32_t yggdrasil_likely_draws(View scores, int64_t key, int64_t position, View tokens, int64_t* count) {
  return guarded([&] {
    const Tensor given = of(scores), found = of(tokens);
    YGG_CHECK(given.is_contiguous() && given.dtype() == DType::float32 && found.numel() >= given.numel(), "scores must be float32, and tokens have room for all");
    *count = likely_draws(given.const_data_ptr<float>(), given.numel(), key, position, found.mutable_data_ptr<int64_t>());
  });
}

YGG_API int32_t yggdrasil_drawn_token(View logits, double temperature, int64_t top_k, double top_p, double min_p, int64_t key, int64_t position, View margin,
                                      int64_t* token) {
  return guarded([&] {
    const Tensor given = of(logits);
    YGG_CHECK(given.dim() == 1 && given.numel() > 0 && given.is_contiguous(), "logits must be [V]");
    with_rows_of(given, [&]<typename T>(T) {
      const Truncation by{static_cast<float>(temperature), top_k, top_p, min_p};
      const DrawnToken drawn = TokenDraw<T>(given.const_data_ptr<T>(), given.numel(), by).draw(key, position);
      *token = drawn.token;
      *of(margin).mutable_data_ptr<double>() = drawn.margin;
    });
  });
}

YGG_API int32_t yggdrasil_rank_nodes(View scores, View order, View expected) {
  return guarded([&] { rank_nodes(of(scores), of(order), of(expected)); });
}

YGG_API int32_t yggdrasil_move_rows(View caches, int64_t num_caches, const int64_t* sources, int64_t num_sources, int64_t destination) {
  return guarded([&] { move_rows(all_of(caches, num_caches), ints(sources, num_sources), destination); });
}

// ==== a cache's rows ==================================================================================================

YGG_API void* yggdrasil_rows_new(View caches, int64_t num_caches, View mail) {
  return made([&] { return new Rows(all_of(caches, num_caches), of(mail)); });
}
YGG_API void yggdrasil_rows_free(void* rows) { delete static_cast<Rows*>(rows); }
YGG_API int64_t yggdrasil_move(void* rows) {
  return guarded([&] { static_cast<Rows*>(rows)->move(); });
}

// ==== states of a head ================================================================================================

YGG_API void* yggdrasil_state_rows_new(View buffer, int64_t layers, View mail) {
  return made([&] { return new StateRows(of(buffer), layers, of(mail)); });
}
YGG_API void yggdrasil_state_rows_free(void* states) { delete static_cast<StateRows*>(states); }
YGG_API int64_t yggdrasil_keep(void* states) {
  return guarded([&] { static_cast<StateRows*>(states)->keep(); });
}

// ==== a tree's ranking ================================================================================================

YGG_API void* yggdrasil_ranking_new(View scores, View depths, View order, View widths, View totals, View levels) {
  return made([&] { return new Ranking(of(scores), of(depths), of(order), of(widths), of(totals), of(levels)); });
}
YGG_API void yggdrasil_ranking_free(void* ranking) { delete static_cast<Ranking*>(ranking); }
YGG_API int64_t yggdrasil_rank(void* ranking) {
  return guarded([&] { static_cast<Ranking*>(ranking)->rank(); });
}

// ==== rows of a pass over a tree ======================================================================================

YGG_API void* yggdrasil_verified_rows_new(View chosen, View root, View tree_tokens, View tree_parents, View tree_depths, View scores, View tree_ancestors,
                                          View nodes, View tokens, View parents, View exist, View positions, View ancestors, View offsets, View choices,
                                          View best, View summary) {
  return made([&] {
    return new VerifiedRows{
        of(chosen).const_data_ptr<int64_t>(), of(root).const_data_ptr<int64_t>(), of(tree_tokens).const_data_ptr<int64_t>(),
        of(tree_parents).const_data_ptr<int64_t>(), of(tree_depths).const_data_ptr<int64_t>(), of(scores).const_data_ptr<float>(),
        static_cast<const bool*>(of(tree_ancestors).const_data_ptr()), of(nodes).mutable_data_ptr<int64_t>(), of(tokens).mutable_data_ptr<int64_t>(),
        of(parents).mutable_data_ptr<int64_t>(), of(exist).mutable_data_ptr<int64_t>(), of(positions).mutable_data_ptr<int64_t>(),
        static_cast<bool*>(of(ancestors).mutable_data_ptr()), of(offsets).mutable_data_ptr<int64_t>(), of(choices).const_data_ptr<int64_t>(), of(best).const_data_ptr<float>(),
        of(summary).mutable_data_ptr<int64_t>(), of(chosen).numel(), of(tree_tokens).numel()};
  });
}
YGG_API void yggdrasil_verified_rows_free(void* rows) { delete static_cast<VerifiedRows*>(rows); }
YGG_API int64_t yggdrasil_select_rows(void* rows) {
  return guarded([&] { static_cast<VerifiedRows*>(rows)->select(); });
}
YGG_API int64_t yggdrasil_accept_rows(void* rows) {
  return guarded([&] { static_cast<VerifiedRows*>(rows)->accept(); });
}

// ==== counted features ================================================================================================

YGG_API void* yggdrasil_counts_new(View counts, View totals, View bias, View out, View nothing) {
  return made([&] { return new Counts(of(counts), of(totals), of(bias), of(out), of(nothing)); });
}
YGG_API void yggdrasil_counts_free(void* counts) { delete static_cast<Counts*>(counts); }
YGG_API int32_t yggdrasil_counts_set_table(void* counts, View keys, View totals, View starts, View tokens, View frequencies) {
  return guarded([&] { static_cast<Counts*>(counts)->set_table(of(keys), of(totals), of(starts), of(tokens), of(frequencies)); });
}
YGG_API int32_t yggdrasil_counts_forget(void* counts) {
  return guarded([&] { static_cast<Counts*>(counts)->forget(); });
}
YGG_API int32_t yggdrasil_counts_append(void* counts, const int64_t* tokens, int64_t num_tokens) {
  return guarded([&] { static_cast<Counts*>(counts)->append(numbers(tokens, num_tokens)); });
}
YGG_API int32_t yggdrasil_counts_leave_out_below(void* counts, double score) {
  return guarded([&] { static_cast<Counts*>(counts)->leave_out_below(score); });
}
YGG_API int32_t yggdrasil_counts_follow_draws(void* counts, int64_t key, double noise, double others) {
  return guarded([&] { static_cast<Counts*>(counts)->follow_draws(key, noise, others); });
}
// Writes as many numbers of the rows as there is room for; returns how many there are.
YGG_API int64_t yggdrasil_counts_features(void* counts, const int64_t* path, int64_t num_path, int64_t* rows, int64_t room) {
  return counted([&] {
    const std::vector<int64_t> found = static_cast<Counts*>(counts)->features(numbers(path, num_path));
    std::copy_n(found.begin(), std::min<int64_t>(room, found.size()), rows);
    return static_cast<int64_t>(found.size());
  });
}
YGG_API int32_t yggdrasil_counts_grow_in(void* counts, View buffers) {
  const auto each = [&](int i) { return of(buffers + i); };
  return guarded([&] { static_cast<Counts*>(counts)->grow_in(each(0), each(1), each(2), each(3), each(4), each(5), each(6)); });
}
YGG_API int32_t yggdrasil_counts_grow_for(void* counts, int64_t address, int64_t count) {
  return guarded([&] { static_cast<Counts*>(counts)->grow_for(address, count); });
}
YGG_API int32_t yggdrasil_counts_fill_in(void* counts, View buffers) {
  const auto each = [&](int i) { return of(buffers + i); };
  return guarded([&] {
    static_cast<Counts*>(counts)->fill_in(each(0), each(1), each(2), each(3), each(4), each(5), each(6), each(7), each(8));
  });
}
YGG_API int64_t yggdrasil_grow(void* counts) {
  return counted([&] { return static_cast<Counts*>(counts)->grow(); });
}
YGG_API int64_t yggdrasil_fill(void* counts) {
  return counted([&] { return static_cast<Counts*>(counts)->fill(); });
}
