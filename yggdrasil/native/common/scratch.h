// Scratch memory that is reused across calls: a step makes hundreds of calls, and none may allocate.
#pragma once

#include <cstdint>
#include <vector>

namespace yggdrasil {

// Who uses an area. What a program holds from stage to stage lies apart from what a chunk of work takes for itself: the
// thread that began the program takes chunks too.
enum class Scratch { work, rows, values, carried, experts };

// A thread has one area a use, which begins on a cache line; asking again may move it.
template <Scratch Use = Scratch::work>
inline uint32_t* scratch_words(int64_t count) {
  constexpr int64_t kLine = 64, kSpare = kLine / sizeof(uint32_t);
  static thread_local std::vector<uint32_t> words;
  if (static_cast<int64_t>(words.size()) < count + kSpare) words.resize(count + kSpare);
  return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(words.data()) + kLine - 1) / kLine * kLine);
}

}  // namespace yggdrasil
