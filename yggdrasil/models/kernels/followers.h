// Which tokens have followed a context, by count: of a text as it grows, and in a table that never changes.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace yggdrasil {

constexpr int64_t kShares = 5, kTotals = 4;

struct Follower {
  int32_t token;
  int32_t count;
};

struct Followers {
  int64_t total = 0;
  std::vector<Follower> ranked;

  void add(int32_t token) {
    ++total;
    size_t place = 0;
    while (place < ranked.size() && ranked[place].token != token) ++place;
    if (place == ranked.size()) ranked.push_back({token, 0});
    ++ranked[place].count;
    for (; place > 0 && ranked[place - 1].count <= ranked[place].count; --place)
      std::swap(ranked[place - 1], ranked[place]);
  }
};

// The kind of evidence: context length, how often the context was seen, the candidate's share of that; 0 is none.
inline int64_t evidence_kind(int64_t length, int64_t count, int64_t total) {
  const int64_t seen = total == 1 ? 0 : total <= 3 ? 1 : total <= 10 ? 2 : 3;
  return 1 + ((length - 1) * kTotals + seen) * kShares + std::min(count * kShares / total, kShares - 1);
}

// Followers of contexts that never change, in arrays: a map of as many contexts takes more than twice the memory.
class CountedTable {
 public:
  bool empty() const { return contexts_.empty(); }

  // Followers of context i are entries starts[i] .. starts[i + 1] - 1.
  void set(const at::Tensor& keys, const at::Tensor& totals, const at::Tensor& starts, const at::Tensor& tokens,
           const at::Tensor& counts) {
    const int64_t size = keys.numel();
    const auto *key = keys.const_data_ptr<int64_t>(), *total = totals.const_data_ptr<int64_t>();
    const auto* start = starts.const_data_ptr<int64_t>();
    contexts_.clear();
    contexts_.reserve(size);
    for (int64_t i = 0; i < size; ++i) contexts_.push_back({key[i], int32_t(total[i]), int32_t(start[i]), int32_t(start[i + 1])});
    followers_.clear();
    followers_.reserve(tokens.numel());
    const auto *token = tokens.const_data_ptr<int64_t>(), *count = counts.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < tokens.numel(); ++i) followers_.push_back({int32_t(token[i]), int32_t(count[i])});
    size_t slots = 2;
    while (slots < 2 * contexts_.size()) slots *= 2;
    slots_.assign(slots, -1);
    for (int64_t i = 0; i < size; ++i) slots_[slot(key[i])] = int32_t(i);
  }

  // Number of a context, or -1.
  int64_t find(int64_t key) const { return empty() ? -1 : slots_[slot(key)]; }

  // `find` will be asked for this key.
  void expect(int64_t key) const {
    if (!empty()) __builtin_prefetch(&slots_[first_slot(key)]);
  }

  int64_t total(int64_t context) const { return contexts_[context].total; }
  const Follower* begin(int64_t context) const { return followers_.data() + contexts_[context].begin; }
  const Follower* end(int64_t context) const { return followers_.data() + contexts_[context].end; }

 private:
  struct Context {  // together: behind a pass each line of memory is a wait
    int64_t key;
    int32_t total, begin, end;
  };

  size_t first_slot(int64_t key) const { return (uint64_t(key) * 0x9e3779b97f4a7c15ull) >> 20 & (slots_.size() - 1); }

  // Where a key is, or would be.
  size_t slot(int64_t key) const {
    size_t place = first_slot(key);
    while (slots_[place] >= 0 && contexts_[slots_[place]].key != key) place = (place + 1) & (slots_.size() - 1);
    return place;
  }

  std::vector<Context> contexts_;
  std::vector<int32_t> slots_;
  std::vector<Follower> followers_;
};

}  // namespace yggdrasil
