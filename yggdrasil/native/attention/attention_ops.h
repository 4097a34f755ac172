// The tree attention operator: writes a step's keys and values to the cache, then computes the attention of its rows.
#pragma once

#include "attention/tree_attention.h"

namespace yggdrasil {

inline Tensor with_dense_rows(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

inline void tree_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                      const Tensor& offsets, const Tensor& tree_mask, double scale, int64_t window, double softcap, const Tensor& sinks,
                           int64_t num_threads,
                           const Tensor& out) {
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const int64_t rows = q.size(2), capacity = key_cache.size(1);
  YGG_CHECK(k.sizes() == v.sizes() && k.size(1) == key_cache.size(0) && k.size(3) == key_cache.size(2) &&
                  key_cache.sizes() == value_cache.sizes() && q.size(3) == k.size(3) && q.size(1) % k.size(1) == 0,
              "keys and values do not have the cache's heads and head size: keys ", k.sizes(), ", values ", v.sizes(), ", cache ",
              key_cache.sizes());
  YGG_CHECK(!sinks.defined() || (sinks.numel() == q.size(1) && sinks.numel() == sinks.size(0)), "each query head has a sink");
  const Tensor sinks_float32 = sinks.floats();
  static thread_local VisibleKeys visible;  // reused by every layer of every step
  visible.read(tree_mask.contiguous(), offsets, capacity, window);
  visible.check(k.size(2), capacity);
  check_result(out, {1, rows, q.size(1), q.size(3)}, q.dtype());

  with_rows_of(q, [&]<typename T>(T) {
    write_rows<T>(k, key_cache, visible.start);
    write_rows<T>(v, value_cache, visible.start);
    const AttentionInputs<T> inputs{q.const_data_ptr<T>(), q.size(1), q.stride(1), q.stride(2), key_cache.const_data_ptr<T>(), value_cache.const_data_ptr<T>(),
                            key_cache.size(0), capacity, q.size(3), scale, softcap, sinks_float32.defined() ? sinks_float32.const_data_ptr<float>() : nullptr};
    const TreeAttention<T> attention(inputs, visible, rows, out.mutable_data_ptr<T>(), num_threads);
    parallel(attention.count(), num_threads, [&](int64_t begin, int64_t end) { attention.attend(begin, end); });
  });
}

}  // namespace yggdrasil
