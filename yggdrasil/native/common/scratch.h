// Scratch memory that is reused across calls: a step makes hundreds of calls, and none may allocate.
#pragma once

#include <cstdint>
#include <vector>

namespace yggdrasil {

// Uses of scratch memory. Values that a program keeps between stages are separate from memory of a single chunk of
// work, because the thread that runs the program also runs chunks.
enum class Scratch { work, rows, values, carried, experts, columns };

// Returns this thread's memory for one use, aligned to a cache line. A later call for the same use may move it.
template <Scratch Use = Scratch::work>
inline uint32_t* scratch_words(int64_t count) {
  constexpr int64_t kLine = 64, kSpare = kLine / sizeof(uint32_t);
  static thread_local std::vector<uint32_t> words;
  if (static_cast<int64_t>(words.size()) < count + kSpare) words.resize(count + kSpare);
  return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(words.data()) + kLine - 1) / kLine * kLine);
}

}  // namespace yggdrasil
