// Attention of a step's rows over a static cache, shared among threads. The time depends on the context length, not on the
// cache's capacity.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_lanes.h"
#include "attention/attention_matrix.h"
#include "attention/attention_pairs.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace yggdrasil {

// The keys that each row of a step sees: the context from one position on, and slots of the tree. Layers of one window
// share it.
struct SeenKeys {
  int64_t context = 0, start = 0, tree_slots = 0;  // keys of the context, the first slot written, slots that a mask covers
  std::vector<int64_t> first_key;
  std::vector<std::vector<int64_t>> slots;

  // Reads tree_mask [R, T] and offsets [2] as in the operator; memory of an earlier step is reused.
  void look(const Tensor& tree_mask, const Tensor& offsets, int64_t capacity, int64_t window) {
    YGG_CHECK(tree_mask.dtype() == DType::boolean && tree_mask.is_contiguous() && offsets.dtype() == DType::int64 && offsets.numel() == 2,
                "a tree mask is dense and bool, and offsets are two int64");
    context = offsets.const_data_ptr<int64_t>()[0], start = offsets.const_data_ptr<int64_t>()[1], tree_slots = tree_mask.size(-1);
    const int64_t rows = tree_mask.numel() / tree_slots;
    if (static_cast<int64_t>(slots.size()) < rows) slots.resize(rows), first_key.resize(rows);
    const bool* mask = tree_mask.const_data_ptr<bool>();
    for (int64_t row = 0; row < rows; ++row) {
      auto& seen = slots[row];
      seen.clear();
      for (int64_t t = 0; t < tree_slots && context + t < capacity; ++t)
        if (mask[row * tree_slots + t]) seen.push_back(context + t);
      // Keys of a path are in order of position, so a window is the last `window` of them; a negative window means
      // chunks.
      const int64_t count = context + static_cast<int64_t>(seen.size());
      const int64_t hidden = window > 0 ? std::max<int64_t>(0, count - window) : window < 0 ? (count - 1) / -window * -window : 0;
      first_key[row] = std::min(hidden, context);
      if (hidden > context) seen.erase(seen.begin(), seen.begin() + (hidden - context));
    }
  }

  void check(int64_t written, int64_t capacity) const {
    YGG_CHECK(context >= 0 && start >= context && start + written <= capacity, "step does not fit the cache: context ", context,
                ", write start ", start, ", width ", written, ", capacity ", capacity);
    YGG_CHECK(start + written - context <= tree_slots, "rows are written outside the tree's slots");
  }
};

// Addresses of a layer's queries and caches, and parameters of its scores.
template <typename T>
struct AttentionOf {
  const T* query;  // strides in numbers
  int64_t query_heads, query_head_stride, query_row_stride;
  const T *key_cache, *value_cache;  // [Hkv, S, D]
  int64_t key_heads, capacity, head_dim;
  double scale, softcap;
  const float* sinks = nullptr;  // [Hq]; null: none
};

template <typename T>
class TreeAttention {
 public:
  // `out` is [rows, Hq, D].
  TreeAttention(const AttentionOf<T>& of, const SeenKeys& seen, int64_t rows, T* out, int64_t num_threads) : of_(of), out_(out) {
    job_.rows = rows;
    job_.query_heads = of.query_heads;
    job_.group = of.query_heads / of.key_heads;
    job_.head_dim = of.head_dim;
    job_.capacity = of.capacity;
    job_.context = seen.context;
    job_.context_stride = seen.context + seen.tree_slots;
    job_.query_head_stride = of.query_head_stride;
    job_.query_row_stride = of.query_row_stride;
    job_.scale = static_cast<float>(of.scale);
    job_.softcap = static_cast<float>(of.softcap);
    job_.first_key = seen.first_key.data();
    job_.slots = &seen.slots;
    if (by_key_heads()) {
      count_ = of.key_heads * rows * job_.group;
      return;
    }
    // If heads do not divide evenly among threads, groups of rows do, as long as the head's cache stays near for the
    // second group.
    const bool is_near = 2 * seen.context * of.head_dim * static_cast<int64_t>(sizeof(T)) <= kNearBytes;
    const bool splits = is_near && num_threads > 1 && of.query_heads % num_threads != 0;
    span_ = std::min(rows, splits ? kRowGroup : kRowGroup * kRowGroups);
    count_ = of.query_heads * ((rows + span_ - 1) / span_);
  }

  int64_t count() const { return count_; }

  void attend(int64_t begin, int64_t end) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (by_key_heads()) return attend_key_heads(begin, end);
    }
    const int64_t spans = (job_.rows + span_ - 1) / span_, head_size = of_.capacity * of_.head_dim;
    auto* sums = reinterpret_cast<float*>(scratch_words(span_ * (of_.head_dim + job_.context_stride)));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t head = unit / spans, first_row = unit % spans * span_, offset = head / job_.group * head_size;
      const T *queries = of_.query + head * of_.query_head_stride, *keys = of_.key_cache + offset, *values = of_.value_cache + offset;
      const int64_t count = std::min(span_, job_.rows - first_row);
      attend_rows(HeadRows<T>{job_, queries, keys, values, first_row, count, sums, sums + span_ * of_.head_dim, of_.sinks ? of_.sinks + head : nullptr},
                  out_ + head * of_.head_dim);
    }
  }

 private:
  bool by_key_heads() const { return std::is_same_v<T, BFloat16> && (fits_amx(of_.head_dim) || fits_pairs(of_.head_dim) || fits_lanes(of_.head_dim)); }

  void attend_key_heads(int64_t begin, int64_t end) const {
    if (fits_amx(of_.head_dim)) return attend_together(begin, end, kAmxRows, matrix_words(job_), attend_matrix);
    if (fits_pairs(of_.head_dim)) return attend_together(begin, end, pair_rows(job_), pair_words(job_, pair_rows(job_)), attend_pairs);
    attend_together(begin, end, lane_rows(job_), lane_words(job_, lane_rows(job_)), attend_lanes);
  }

  // Processes rows of one key head after another, up to `span` at a time: all query heads that read it share its
  // rearranged keys.
  template <typename Attend>
  void attend_together(int64_t begin, int64_t end, int64_t span, int64_t words, const Attend& attend) const {
    const int64_t all = job_.rows * job_.group, head_size = of_.capacity * of_.head_dim;
    uint32_t* scratch = scratch_words(words);
    for (int64_t row = begin, count; row < end; row += count) {
      const int64_t head = row / all, first = row % all;
      count = std::min({span, end - row, all - first});
      attend(KeyHeadRows{job_, of_.query + head * job_.group * of_.query_head_stride, of_.key_cache + head * head_size,
                         of_.value_cache + head * head_size, out_ + head * job_.group * of_.head_dim, first, count,
                         of_.sinks ? of_.sinks + head * job_.group : nullptr},
             scratch);
    }
  }

  AttentionOf<T> of_;
  AttentionJob job_{};
  T* out_;
  int64_t span_ = 1, count_ = 0;
};

}  // namespace yggdrasil
