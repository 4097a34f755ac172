// The C interface that Python calls directly (``calls.py``), without PyTorch's dispatcher.
//
// A function takes views of tensors (null for None), lists as a pointer and a count, and after its arguments views of
// its results. It returns 0, or -1 on failure; `yggdrasil_error` then returns the message.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "common/tensor.h"

#define YGG_API extern "C" __attribute__((visibility("default")))

namespace yggdrasil {

using View = const YggdrasilTensor*;

// Message of this thread's last failed call.
inline std::string& last_error() {
  static thread_local std::string message;
  return message;
}

// Calls the action and returns its result, or -1 if it throws.
template <class Action>
int64_t count_or_error(const Action& action) {
  try {
    return action();
  } catch (const std::exception& error) {
    last_error() = error.what();
    return -1;
  }
}

// Calls the action and returns 0, or -1 if it throws.
template <class Action>
int32_t status_of(const Action& action) {
  return static_cast<int32_t>(count_or_error([&]() -> int64_t { return action(), 0; }));
}

inline Tensor tensor_of(View view) { return view ? Tensor(*view) : Tensor(); }
inline std::vector<Tensor> tensors_of(View views, int64_t count) { return {views, views + count}; }
inline List<double> doubles(const double* numbers, int64_t count) { return {numbers, static_cast<size_t>(count)}; }
inline Ints ints(const int64_t* numbers, int64_t count) { return {numbers, static_cast<size_t>(count)}; }

}  // namespace yggdrasil
