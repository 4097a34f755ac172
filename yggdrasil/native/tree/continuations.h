// N-gram counts: the tokens that followed each context, ranked by count, in a growing text and in a static table.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/huge_pages.h"
#include "common/tensor.h"

namespace yggdrasil {

template <typename T>
using HugePageVector = std::vector<T, OnHugePages<T>>;  // vector with random access, on huge pages

struct Continuation {
  int32_t token;
  int32_t count;
};

// Prefetches memory. Between two passes the processor's caches hold only the model's weights, so cache misses one after
// another would take most of the time.
inline void prefetch_bytes(const void* from, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(from) + line);
}

inline size_t hashed(uint64_t key, size_t slots) { return key * 0x9e3779b97f4a7c15ull >> 20 & (slots - 1); }

// Hash map from the contexts of a growing text to their continuations, by descending count, ties to the newer.
class CountedText {
 public:
  // A context with few continuations occupies one cache line.
  struct alignas(64) Context {
    uint64_t key = 0;
    int32_t total = 0, size = 0;  // total 0: empty entry
    int64_t spilled = -1;         // index in spilled_ of more than five continuations, else -1
    std::array<Continuation, 5> few{};
  };

  CountedText() { forget(); }

  void forget() {
    contexts_ = HugePageVector<Context>(kInitialContexts);  // frees the memory of a long text
    spilled_ = {};
    used_ = 0;
  }

  void add(uint64_t key, int32_t token) {
    if (4 * (used_ + 1) > 3 * contexts_.size()) grow();
    Context& context = contexts_[slot(key)];
    if (context.total == 0) ++used_, context.key = key;
    ++context.total;
    Continuation* ranked = ranked_of(context);
    int32_t index = 0;
    while (index < context.size && ranked[index].token != token) ++index;
    if (index == context.size) ranked = add_continuation(context, token);
    ++ranked[index].count;
    for (; index > 0 && ranked[index - 1].count <= ranked[index].count; --index) std::swap(ranked[index - 1], ranked[index]);
  }

  // Returns the context of this key; null if it was never seen.
  const Context* find(uint64_t key) const {
    const Context& context = contexts_[slot(key)];
    return context.total == 0 ? nullptr : &context;
  }

  const Continuation* ranked(const Context& context) const {
    return context.spilled < 0 ? context.few.data() : spilled_[context.spilled].data();
  }

  // Prefetches the entry of this key for a later `find` or `add`.
  void prefetch_slot(uint64_t key) const { __builtin_prefetch(&contexts_[hashed(key, contexts_.size())]); }

 private:
  static constexpr size_t kInitialContexts = 1 << 10;  // initial capacity

  Continuation* ranked_of(Context& context) { return const_cast<Continuation*>(ranked(context)); }

  Continuation* add_continuation(Context& context, int32_t token) {
    if (context.size == int32_t(context.few.size()) && context.spilled < 0) {
      context.spilled = int64_t(spilled_.size());
      spilled_.emplace_back(context.few.begin(), context.few.end());
    }
    if (context.spilled < 0) context.few[context.size] = {token, 0};
    else spilled_[context.spilled].push_back({token, 0});
    ++context.size;
    return ranked_of(context);
  }

  // Returns the index of a key, or the index at which it would be inserted.
  size_t slot(uint64_t key) const {
    size_t index = hashed(key, contexts_.size());
    while (contexts_[index].total && contexts_[index].key != key) index = (index + 1) & (contexts_.size() - 1);
    return index;
  }

  void grow() {
    HugePageVector<Context> before(2 * contexts_.size());
    before.swap(contexts_);
    for (const Context& context : before)
      if (context.total) contexts_[slot(context.key)] = context;
  }

  HugePageVector<Context> contexts_;
  std::vector<std::vector<Continuation>> spilled_;
  size_t used_ = 0;
};

// Continuations of a fixed set of contexts, in arrays of the caller: a map of as many contexts takes more than twice the
// memory.
class CountedTable {
 public:
  bool empty() const { return size_ == 0; }

  // Reads C + 1 contexts, the last of which only ends the one before it, and F continuations, as bytes. The caller keeps
  // both.
  void set(const Tensor& contexts, const Tensor& continuations) {
    YGG_CHECK(contexts.is_contiguous() && continuations.is_contiguous() && contexts.nbytes() >= int64_t(sizeof(Context)),
              "the arrays of a table must be contiguous, and the contexts have an end");
    slots_ = {};  // what an earlier table took is given back first
    contexts_ = static_cast<const Context*>(contexts.const_data_ptr());
    continuations_ = static_cast<const Continuation*>(continuations.const_data_ptr());
    size_ = contexts.nbytes() / sizeof(Context) - 1;
    size_t slots = 2;
    while (slots < 2 * size_) slots *= 2;
    slots_ = HugePageVector<int32_t>(slots, -1);
    for (size_t i = 0; i < size_; ++i) slots_[slot(contexts_[i].key)] = int32_t(i);
  }

  // Returns the number of a context, or -1.
  int64_t find(int64_t key) const { return empty() ? -1 : slots_[slot(key)]; }

  // Prefetches the slot of this key, for a later `approach`.
  void prefetch_slot(int64_t key) const {
    if (!empty()) __builtin_prefetch(&slots_[hashed(key, slots_.size())]);
  }

  // Prefetches the context of this key, whose slot was prefetched by `expect`, for a later `find`.
  void prefetch_context(int64_t key) const {
    if (empty()) return;
    const int32_t first_context = slots_[hashed(key, slots_.size())];
    if (first_context >= 0) __builtin_prefetch(&contexts_[first_context]), __builtin_prefetch(&contexts_[first_context + 1]);
  }

  // Prefetches the continuations of a context.
  void prefetch_continuations(int64_t context) const { prefetch_bytes(begin(context), (end(context) - begin(context)) * sizeof(Continuation)); }

  int64_t total(int64_t context) const { return contexts_[context].total; }
  const Continuation* begin(int64_t context) const { return continuations_ + contexts_[context].begin; }
  const Continuation* end(int64_t context) const { return continuations_ + contexts_[context + 1].begin; }

 private:
  struct Context {  // in one struct, so that a context is one cache miss
    int64_t key;
    int32_t total, begin;  // its continuations end where those of the next context begin
  };
  static_assert(sizeof(Context) == 16 && sizeof(Continuation) == 8, "as Python writes them");

  // Returns the index of a key, or the index at which it would be inserted.
  size_t slot(int64_t key) const {
    size_t index = hashed(uint64_t(key), slots_.size());
    while (slots_[index] >= 0 && contexts_[slots_[index]].key != key) index = (index + 1) & (slots_.size() - 1);
    return index;
  }

  const Context* contexts_ = nullptr;
  const Continuation* continuations_ = nullptr;
  size_t size_ = 0;
  HugePageVector<int32_t> slots_;
};

}  // namespace yggdrasil
