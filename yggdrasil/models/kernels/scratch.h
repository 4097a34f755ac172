// Memory that outlives a call: a step makes hundreds of calls, and none may allocate.
#pragma once

#include <cstdint>
#include <vector>

namespace yggdrasil {

// A thread has one area a slot; asking again may move it.
template <int Slot = 0>
inline uint32_t* scratch_words(int64_t count) {
  static thread_local std::vector<uint32_t> words;
  if (static_cast<int64_t>(words.size()) < count) words.resize(count);
  return words.data();
}

}  // namespace yggdrasil
