// The C interface: what Python calls (``calls.py``), without a dispatcher between.
//
// A function takes views of tensors (null: none), lists as a pointer and a count, and views of its results behind its
// arguments. It returns 0, or else `yggdrasil_error` says in one sentence what was wrong.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "common/tensor.h"

#define YGG_API extern "C" __attribute__((visibility("default")))

namespace yggdrasil {

using View = const YggdrasilTensor*;

// What went wrong in this thread's last call that failed.
inline std::string& last_error() {
  static thread_local std::string sentence;
  return sentence;
}

// What the action returns, or -1 where it failed.
template <class Action>
int64_t counted(const Action& action) {
  try {
    return action();
  } catch (const std::exception& error) {
    last_error() = error.what();
    return -1;
  }
}

// 0, or -1 where the action failed.
template <class Action>
int32_t guarded(const Action& action) {
  return static_cast<int32_t>(counted([&]() -> int64_t { return action(), 0; }));
}

inline Tensor of(View view) { return view ? Tensor(*view) : Tensor(); }
inline std::vector<Tensor> all_of(View views, int64_t count) { return {views, views + count}; }
inline List<double> doubles(const double* numbers, int64_t count) { return {numbers, static_cast<size_t>(count)}; }
inline Ints ints(const int64_t* numbers, int64_t count) { return {numbers, static_cast<size_t>(count)}; }

}  // namespace yggdrasil
