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

// Writes the k largest values of each row, the largest first, ties to the lower index. k is small: one pass with a
// threshold, where one comparison dismisses nearly every block of 16 values.
inline void top_candidates(const Tensor& values, int64_t k, const Tensor& best, const Tensor& index) {
  const Tensor input = values.contiguous();
  YGG_CHECK(input.dtype() == DType::float32 && input.dim() == 2, "values must be [W, V] float32");
  const int64_t rows = input.size(0), size = input.size(1);
  YGG_CHECK(k >= 1 && k <= size, "k must be in 1..", size);
  check_result(best, {rows, k}, DType::float32);
  check_result(index, {rows, k}, DType::int64);
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = input.const_data_ptr<float>() + row * size;
    float* top = best.mutable_data_ptr<float>() + row * k;
    int64_t* place = index.mutable_data_ptr<int64_t>() + row * k;
    std::fill(top, top + k, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < k; ++i) place[i] = i;
    const auto offer = [&](int64_t i) {
      int64_t at = k - 1;
      for (; at > 0 && source[i] > top[at - 1]; --at) top[at] = top[at - 1], place[at] = place[at - 1];
      top[at] = source[i], place[at] = i;
    };
    int64_t i = 0;
#ifdef YGG_AVX512
    for (; i + 16 <= size; i += 16) {
      unsigned mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(source + i), _mm512_set1_ps(top[k - 1]), _CMP_GT_OQ);
      for (; mask; mask &= mask - 1) {
        const int64_t candidate = i + __builtin_ctz(mask);
        if (source[candidate] > top[k - 1]) offer(candidate);
      }
    }
#endif
    for (; i < size; ++i)
      if (source[i] > top[k - 1]) offer(i);
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
  const auto each = [&](const Tensor& cache, const auto& act) {
    const int64_t heads = cache.size(0), bytes = cache.size(2) * cache.element_size(), head_bytes = cache.size(1) * bytes;
    char* data = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t h = 0; h < heads; ++h, data += head_bytes)
      for (int64_t i = 0; i < count; ++i)
        if (source[i] != destination + i) act(data + (destination + i) * bytes, data + source[i] * bytes, bytes);
  };
  const auto fetch = [](char* to, char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at), __builtin_prefetch(to + at, 1);
  };
  // The pass between has driven them out of the caches: while the rows of one layer are moved those of others come.
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < std::min(kAhead, caches.size()); ++i) each(caches[i], fetch);
  for (size_t i = 0; i < caches.size(); ++i) {
    if (i + kAhead < caches.size()) each(caches[i + kAhead], fetch);
    each(caches[i], [](char* to, char* from, int64_t bytes) { std::memcpy(to, from, bytes); });
  }
}

// KV entries of one model's caches, which are moved between passes (see direct.h). The tensors are registered once.
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
