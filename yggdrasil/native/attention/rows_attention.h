// Causal attention of tokens of several texts (one token each) or of one text, for batched generation.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_ops.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace yggdrasil {

inline void rows_attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& lengths, double scale, int64_t window,
                             double softcap, int64_t num_threads, const Tensor& out) {
  const Tensor q = query.contiguous();
  const int64_t tokens = q.size(0), heads = q.size(1), d = q.size(2), key_heads = keys.size(1), capacity = keys.size(2);
  YGG_CHECK(keys.dtype() == q.dtype() && values.dtype() == q.dtype(), "keys and values must have the queries' dtype");
  YGG_CHECK(keys.sizes() == values.sizes() && keys.is_contiguous() && values.is_contiguous() && keys.size(3) == d &&
                  (keys.size(0) == tokens || keys.size(0) == 1) && heads % key_heads == 0 && lengths.numel() == tokens,
              "queries do not fit the texts' cache: queries ", q.sizes(), ", cache ", keys.sizes(), ", lengths ", lengths.sizes());
  const int64_t* num_keys = lengths.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < tokens; ++token)
    YGG_CHECK(0 < num_keys[token] && num_keys[token] <= capacity, "a text of ", capacity, " slots cannot hold ", num_keys[token], " keys");
  const int64_t text_stride = keys.size(0) == 1 ? 0 : key_heads * capacity * d;
  const int64_t group = heads / key_heads;
  const std::vector<std::vector<int64_t>> no_slots(group);  // there are no tree slots: all keys are in the cache
  check_result(out, q.sizes(), q.dtype());

  with_rows_of(q, [&]<typename T>(T) {
    parallel(key_heads * tokens, num_threads, [&](int64_t begin, int64_t end) {
      std::vector<int64_t> first_key(group);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t head = unit / tokens, token = unit % tokens, context = num_keys[token];  // ordered by head, so that the keys of one text stay in cache
        const int64_t cache_offset = token * text_stride + head * capacity * d, query_offset = (token * heads + head * group) * d;
        std::fill(first_key.begin(), first_key.end(), window > 0 ? std::max<int64_t>(0, context - window) : 0);
        AttentionJob job{};  // the rows of the job are the query heads of one key head
        job.rows = group;
        job.query_heads = 1;
        job.head_dim = job.query_row_stride = d;
        job.context = job.context_stride = context;
        job.scale = static_cast<float>(scale);
        job.softcap = static_cast<float>(softcap);
        job.first_key = first_key.data();
        job.slots = &no_slots;
        for (int64_t row = 0; row < group; row += kRowGroup * kRowGroups) {
          const int64_t count = std::min(group - row, kRowGroup * kRowGroups);
          auto* sums = reinterpret_cast<float*>(scratch_words(count * (d + context)));
          attend_rows(HeadRows<T>{job, q.const_data_ptr<T>() + query_offset, keys.const_data_ptr<T>() + cache_offset,
                                  values.const_data_ptr<T>() + cache_offset, row, count, sums, sums + count * d},
                      out.mutable_data_ptr<T>() + query_offset);
        }
      }
    });
  });
}

}  // namespace yggdrasil
