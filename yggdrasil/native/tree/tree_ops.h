// Token-tree operators: top-k candidates, ranking of nodes, and moving accepted rows in the cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "common/simd.h"

namespace yggdrasil {

// Writes the k largest values of each row, the largest first, ties to the lower index. One pass over the row keeps them
// in a heap whose front is the last of them, so one comparison dismisses nearly every block of 16 values.
inline void top_candidates(const Tensor& values, int64_t k, const Tensor& best, const Tensor& index) {
  const Tensor input = values.contiguous();
  YGG_CHECK(input.dtype() == DType::float32 && input.dim() == 2, "values must be [W, V] float32");
  const int64_t rows = input.size(0), size = input.size(1);
  YGG_CHECK(k >= 1 && k <= size, "k must be in 1..", size);
  check_result(best, {rows, k}, DType::float32);
  check_result(index, {rows, k}, DType::int64);
  using Entry = std::pair<float, int64_t>;
  const auto before = [](const Entry& a, const Entry& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
  std::vector<Entry> top(k);
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = input.const_data_ptr<float>() + row * size;
    for (int64_t i = 0; i < k; ++i) top[i] = {std::isnan(source[i]) ? -std::numeric_limits<float>::infinity() : source[i], i};
    std::make_heap(top.begin(), top.end(), before);
    const auto consider = [&](int64_t i) {
      if (!(source[i] > top.front().first)) return;
      std::pop_heap(top.begin(), top.end(), before);
      top.back() = {source[i], i};
      std::push_heap(top.begin(), top.end(), before);
    };
    int64_t i = k;
#ifdef YGG_AVX512
    for (; i + 16 <= size; i += 16) {
      unsigned mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(source + i), _mm512_set1_ps(top.front().first), _CMP_GT_OQ);
      for (; mask; mask &= mask - 1) consider(i + __builtin_ctz(mask));
    }
#endif
    for (; i < size; ++i) consider(i);
    std::sort_heap(top.begin(), top.end(), before);
    for (int64_t j = 0; j < k; ++j) {
      best.mutable_data_ptr<float>()[row * k + j] = top[j].first;
      index.mutable_data_ptr<int64_t>()[row * k + j] = top[j].second;
    }
  }
}

// Writes the nodes by descending score, ties by ascending number, and the expected tokens of each prefix, the root's 1
// included.
inline void rank_nodes(const Tensor& scores, const Tensor& order, const Tensor& expected) {
  YGG_CHECK(scores.dtype() == DType::float32 && order.dtype() == DType::int64 && expected.dtype() == DType::float32 &&
                  scores.dim() == 1 && order.sizes() == scores.sizes() && expected.sizes() == scores.sizes(),
              "ranking takes scores [N] float32 and gives order [N] int64 and expected tokens [N] float32");
  const float* score = scores.const_data_ptr<float>();
  int64_t* node = order.mutable_data_ptr<int64_t>();
  std::iota(node, node + order.numel(), 0);
  std::stable_sort(node, node + order.numel(), [score](int64_t a, int64_t b) { return score[a] > score[b]; });
  double sum = 0.0;
  for (int64_t i = 0; i < order.numel(); ++i) expected.mutable_data_ptr<float>()[i] = static_cast<float>(sum += std::exp(score[node[i]]));
}

inline void move_rows(List<Tensor> caches, Ints source, int64_t destination) {
  // Rows source[i] -> destination + i. Sources ascend and never lie below their destination, so no row is lost.
  const int64_t count = static_cast<int64_t>(source.size());
  const auto for_each_row = [&](const Tensor& cache, const auto& act) {
    const int64_t heads = cache.size(0), bytes = cache.size(2) * cache.element_size(), head_bytes = cache.size(1) * bytes;
    char* data = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t h = 0; h < heads; ++h, data += head_bytes)
      for (int64_t i = 0; i < count; ++i)
        if (source[i] != destination + i) act(data + (destination + i) * bytes, data + source[i] * bytes, bytes);
  };
  const auto prefetch_row = [](char* to, char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at), __builtin_prefetch(to + at, 1);
  };
  // The pass has evicted these rows from the caches: while the rows of one layer are moved, those of later layers are
  // prefetched.
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < std::min(kAhead, caches.size()); ++i) for_each_row(caches[i], prefetch_row);
  for (size_t i = 0; i < caches.size(); ++i) {
    if (i + kAhead < caches.size()) for_each_row(caches[i + kAhead], prefetch_row);
    for_each_row(caches[i], [](char* to, char* from, int64_t bytes) { std::memcpy(to, from, bytes); });
  }
}

// Moves KV entries of one model's caches between passes. The tensors are registered once.
class Rows {
 public:
  // `mail` holds the number of rows, their destination, and their slots.
  Rows(std::vector<Tensor> caches, Tensor mail) : caches_(std::move(caches)), mail_(std::move(mail)) {}

  void move() {
    const auto* mail = mail_.const_data_ptr<int64_t>();
    move_rows(caches_, Ints(mail + 2, static_cast<size_t>(mail[0])), mail[1]);
  }

 private:
  std::vector<Tensor> caches_;
  Tensor mail_;
};

}  // namespace yggdrasil
