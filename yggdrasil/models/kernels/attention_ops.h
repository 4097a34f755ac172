// Attention of a step's rows over a static cache: its cost follows the context's real length, never the capacity.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "attention_matrix.h"
#include "attention_pairs.h"
#include "scratch.h"
#include "threads.h"

namespace yggdrasil {

inline Tensor with_dense_rows(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

// Rows of one key head after the other: all query heads that read it share what is turned of it.
inline void attend_key_heads(const AttentionJob& job, const Tensor& q, const Tensor& key_cache, const Tensor& value_cache, Tensor& out,
                             int64_t num_threads) {
  const int64_t all = job.rows * job.group, head_size = job.capacity * job.head_dim, span = pair_rows(job), words = pair_words(job, span);
  parallel(key_cache.size(0) * all, num_threads, [&](int64_t begin, int64_t end) {
    uint32_t* scratch = scratch_words(words);
    for (int64_t row = begin, count; row < end; row += count) {
      const int64_t head = row / all, first = row % all;
      count = std::min({span, end - row, all - first});
      attend_pairs(job, q.const_data_ptr<BFloat16>() + head * job.group * job.query_head_stride, key_cache.const_data_ptr<BFloat16>() + head * head_size,
                   value_cache.const_data_ptr<BFloat16>() + head * head_size, first, count, out.mutable_data_ptr<BFloat16>() + head * job.group * job.head_dim,
                   scratch);
    }
  });
}

inline Tensor tree_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                      const Tensor& offsets, const Tensor& tree_mask, double scale, int64_t window, double softcap, int64_t num_threads) {
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const int64_t context = offsets.const_data_ptr<int64_t>()[0], start = offsets.const_data_ptr<int64_t>()[1];
  const int64_t rows = q.size(2), written = k.size(2), tree_slots = tree_mask.size(-1), capacity = key_cache.size(1);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(1) == key_cache.size(0) && k.size(3) == key_cache.size(2) &&
                  key_cache.sizes() == value_cache.sizes() && q.size(3) == k.size(3) && q.size(1) % k.size(1) == 0,
              "keys and values do not have the cache's heads and head size: keys ", k.sizes(), ", values ", v.sizes(), ", cache ",
              key_cache.sizes());
  TORCH_CHECK(context >= 0 && start >= context && start + written <= capacity, "step does not fit the cache: context ", context,
              ", write start ", start, ", width ", written, ", capacity ", capacity);
  TORCH_CHECK(start + written - context <= tree_slots, "rows are written outside the tree's slots");

  static thread_local std::vector<std::vector<int64_t>> slots;  // kept: every layer of every step fills them
  static thread_local std::vector<int64_t> first_key;
  if (static_cast<int64_t>(slots.size()) < rows) slots.resize(rows), first_key.resize(rows);
  const bool* mask = tree_mask.const_data_ptr<bool>();
  for (int64_t row = 0; row < rows; ++row) {
    auto& seen = slots[row];
    seen.clear();
    for (int64_t t = 0; t < tree_slots && context + t < capacity; ++t)
      if (mask[row * tree_slots + t]) seen.push_back(context + t);
    // A path's keys lie in order of position, so a window is the last `window` of them.
    const int64_t hidden = window > 0 ? std::max<int64_t>(0, context + static_cast<int64_t>(seen.size()) - window) : 0;
    first_key[row] = std::min(hidden, context);
    if (hidden > context) seen.erase(seen.begin(), seen.begin() + (hidden - context));
  }

  AttentionJob job{};
  job.rows = rows;
  job.query_heads = q.size(1);
  job.group = q.size(1) / key_cache.size(0);
  job.head_dim = q.size(3);
  job.capacity = capacity;
  job.context = context;
  job.context_stride = context + tree_slots;
  job.query_head_stride = q.stride(1);
  job.query_row_stride = q.stride(2);
  job.scale = static_cast<float>(scale);
  job.softcap = static_cast<float>(softcap);
  job.first_key = first_key.data();
  job.slots = &slots;
  Tensor out = at::empty({1, rows, job.query_heads, job.head_dim}, q.options());

  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    write_rows<T>(k, key_cache, start);
    write_rows<T>(v, value_cache, start);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (!fits_matrix_unit(job.head_dim) && fits_pairs(job.head_dim)) return attend_key_heads(job, q, key_cache, value_cache, out, num_threads);
    }
    const bool on_matrix_unit = std::is_same_v<T, BFloat16> && fits_matrix_unit(job.head_dim);
    // Where heads do not share out evenly, groups of rows do, as long as a second group finds the head's cache nearby.
    const bool is_near = 2 * context * job.head_dim * static_cast<int64_t>(sizeof(T)) <= kNearBytes;
    const bool splits = !on_matrix_unit && is_near && num_threads > 1 && job.query_heads % num_threads != 0;
    const int64_t span = on_matrix_unit ? rows : std::min(rows, splits ? kRowGroup : kRowGroup * kRowGroups);
    const int64_t spans = (rows + span - 1) / span;
    const int64_t words = on_matrix_unit ? matrix_words(context + tree_slots, tree_slots, job.head_dim)
                                         : span * (job.head_dim + job.context_stride);
    parallel(job.query_heads * spans, num_threads, [&](int64_t begin, int64_t end) {
      uint32_t* scratch = scratch_words(words);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t head = unit / spans, first_row = unit % spans * span;
        const int64_t offset = head / job.group * capacity * job.head_dim;
        const T* queries = q.const_data_ptr<T>() + head * job.query_head_stride;
        const T* keys = key_cache.const_data_ptr<T>() + offset;
        const T* values = value_cache.const_data_ptr<T>() + offset;
        T* target = out.mutable_data_ptr<T>() + head * job.head_dim;
        if constexpr (std::is_same_v<T, BFloat16>) {
          if (on_matrix_unit) {
            attend_head_matrix(job, queries, keys, values, target, scratch);
            continue;
          }
        }
        auto* sums = reinterpret_cast<float*>(scratch);
        const int64_t count = std::min(span, rows - first_row);
        attend_rows(HeadRows<T>{job, queries, keys, values, first_row, count, sums, sums + span * job.head_dim}, target);
      }
    });
  };
  if (q.scalar_type() == at::kBFloat16) {
    run(static_cast<BFloat16*>(nullptr));
  } else {
    TORCH_CHECK(q.scalar_type() == at::kFloat, "tree_attention serves bfloat16 and float32");
    run(static_cast<float*>(nullptr));
  }
  return out;
}

}  // namespace yggdrasil
