// Attention of a step's rows over a static KV cache, divided among threads. The time depends on the context length, not
// on the cache's capacity.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_avx2.h"
#include "attention/attention_amx.h"
#include "attention/attention_avx512.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace yggdrasil {

// The keys that each row of a step attends to: the context from one position on, and slots of the tree. Layers of one
// window share it.
struct VisibleKeys {
  int64_t context = 0, start = 0, tree_slots = 0;  // context length, first slot that is written, number of slots in the tree mask
  std::vector<int64_t> first_key;
  std::vector<std::vector<int64_t>> slots;

  // Fills in the keys from tree_mask [R, T] and offsets [2], the operator's arguments, reusing the memory of the
  // previous step.
  void read(const Tensor& tree_mask, const Tensor& offsets, int64_t capacity, int64_t window) {
    YGG_CHECK(tree_mask.dtype() == DType::boolean && tree_mask.is_contiguous() && offsets.dtype() == DType::int64 && offsets.numel() == 2,
                "a tree mask is dense and bool, and offsets are two int64");
    context = offsets.const_data_ptr<int64_t>()[0], start = offsets.const_data_ptr<int64_t>()[1], tree_slots = tree_mask.size(-1);
    const int64_t rows = tree_mask.numel() / tree_slots;
    if (static_cast<int64_t>(slots.size()) < rows) slots.resize(rows), first_key.resize(rows);
    const bool* mask = tree_mask.const_data_ptr<bool>();
    for (int64_t row = 0; row < rows; ++row) {
      auto& visible = slots[row];
      visible.clear();
      for (int64_t t = 0; t < tree_slots && context + t < capacity; ++t)
        if (mask[row * tree_slots + t]) visible.push_back(context + t);
      // Keys of a path are in order of position, so a sliding window is the last `window` of them. A negative window
      // means chunked attention.
      const int64_t count = context + static_cast<int64_t>(visible.size());
      const int64_t num_hidden = window > 0 ? std::max<int64_t>(0, count - window) : window < 0 ? (count - 1) / -window * -window : 0;
      first_key[row] = std::min(num_hidden, context);
      if (num_hidden > context) visible.erase(visible.begin(), visible.begin() + (num_hidden - context));
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
struct AttentionInputs {
  const T* query;  // strides in elements
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
  TreeAttention(const AttentionInputs<T>& inputs, const VisibleKeys& visible, int64_t rows, T* out, int64_t num_threads) : inputs_(inputs), out_(out) {
    job_.rows = rows;
    job_.query_heads = inputs.query_heads;
    job_.group = inputs.query_heads / inputs.key_heads;
    job_.head_dim = inputs.head_dim;
    job_.capacity = inputs.capacity;
    job_.context = visible.context;
    job_.context_stride = visible.context + visible.tree_slots;
    job_.query_head_stride = inputs.query_head_stride;
    job_.query_row_stride = inputs.query_row_stride;
    job_.scale = static_cast<float>(inputs.scale);
    job_.softcap = static_cast<float>(inputs.softcap);
    job_.first_key = visible.first_key.data();
    job_.slots = &visible.slots;
    if (groups_by_key_head()) {
      count_ = inputs.key_heads * rows * job_.group;
      return;
    }
    // If heads do not divide evenly among threads, groups of rows are divided, provided that the head's KV cache stays
    // in the L2 cache for the second group.
    const bool fits_core_cache = 2 * visible.context * inputs.head_dim * static_cast<int64_t>(sizeof(T)) <= kCoreCacheBytes;
    const bool splits_rows = fits_core_cache && num_threads > 1 && inputs.query_heads % num_threads != 0;
    rows_per_unit_ = std::min(rows, splits_rows ? kRowGroup : kRowGroup * kRowGroups);
    count_ = inputs.query_heads * ((rows + rows_per_unit_ - 1) / rows_per_unit_);
  }

  int64_t count() const { return count_; }

  void attend(int64_t begin, int64_t end) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (groups_by_key_head()) return attend_key_heads(begin, end);
    }
    const int64_t units_per_head = (job_.rows + rows_per_unit_ - 1) / rows_per_unit_, head_size = inputs_.capacity * inputs_.head_dim;
    auto* sums = reinterpret_cast<float*>(scratch_words(rows_per_unit_ * (inputs_.head_dim + job_.context_stride)));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t head = unit / units_per_head, first_row = unit % units_per_head * rows_per_unit_, offset = head / job_.group * head_size;
      const T *queries = inputs_.query + head * inputs_.query_head_stride, *keys = inputs_.key_cache + offset, *values = inputs_.value_cache + offset;
      const int64_t count = std::min(rows_per_unit_, job_.rows - first_row);
      attend_rows(HeadRows<T>{job_, queries, keys, values, first_row, count, sums, sums + rows_per_unit_ * inputs_.head_dim, inputs_.sinks ? inputs_.sinks + head : nullptr},
                  out_ + head * inputs_.head_dim);
    }
  }

 private:
  bool groups_by_key_head() const { return std::is_same_v<T, BFloat16> && (fits_amx(inputs_.head_dim) || fits_avx512(inputs_.head_dim) || fits_avx2(inputs_.head_dim)); }

  void attend_key_heads(int64_t begin, int64_t end) const {
    if (fits_amx(inputs_.head_dim)) return attend_groups(begin, end, kAmxRows, amx_words(job_), attend_amx);
    if (fits_avx512(inputs_.head_dim)) return attend_groups(begin, end, avx512_rows(job_), avx512_words(job_, avx512_rows(job_)), attend_avx512);
    attend_groups(begin, end, avx2_rows(job_), avx2_words(job_, avx2_rows(job_)), attend_avx2);
  }

  // Processes the rows of one key head after another, up to `max_rows` at a time. All query heads that read a key head
  // share its rearranged keys.
  template <typename Attend>
  void attend_groups(int64_t begin, int64_t end, int64_t max_rows, int64_t words, const Attend& attend) const {
    const int64_t all = job_.rows * job_.group, head_size = inputs_.capacity * inputs_.head_dim;
    uint32_t* scratch = scratch_words(words);
    for (int64_t row = begin, count; row < end; row += count) {
      const int64_t head = row / all, first = row % all;
      count = std::min({max_rows, end - row, all - first});
      attend(KeyHeadRows{job_, inputs_.query + head * job_.group * inputs_.query_head_stride, inputs_.key_cache + head * head_size,
                         inputs_.value_cache + head * head_size, out_ + head * job_.group * inputs_.head_dim, first, count,
                         inputs_.sinks ? inputs_.sinks + head * job_.group : nullptr},
             scratch);
    }
  }

  AttentionInputs<T> inputs_;
  AttentionJob job_{};
  T* out_;
  int64_t rows_per_unit_ = 1, count_ = 0;
};

}  // namespace yggdrasil
