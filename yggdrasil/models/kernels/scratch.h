// Memory that outlives a call: a step makes hundreds of calls, and none may allocate.
#pragma once

#include <cstdint>
#include <vector>

namespace yggdrasil {

// A thread has one area a slot, which begins on a cache line; asking again may move it.
template <int Slot = 0>
inline uint32_t* scratch_words(int64_t count) {
  constexpr int64_t kLine = 64, kSpare = kLine / sizeof(uint32_t);
  static thread_local std::vector<uint32_t> words;
  if (static_cast<int64_t>(words.size()) < count + kSpare) words.resize(count + kSpare);
  return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(words.data()) + kLine - 1) / kLine * kLine);
}

}  // namespace yggdrasil
