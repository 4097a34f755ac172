// Scratch memory that is reused across calls, because a step makes hundreds of calls and none may allocate.
#pragma once

#include <cstdint>
#include <vector>

namespace yggdrasil {

// Separate scratch buffers. Values that a program keeps between stages do not share a buffer with the temporaries of a
// chunk, because the thread that runs the program also runs chunks.
enum class Scratch { work, rows, values, carried, experts, columns };

// Returns this thread's scratch buffer for `Use`, of at least `count` words, aligned to a cache line. A later call for
// the same use may reallocate it.
template <Scratch Use = Scratch::work>
inline uint32_t* scratch_words(int64_t count) {
  constexpr int64_t kLine = 64, kSpare = kLine / sizeof(uint32_t);
  static thread_local std::vector<uint32_t> words;
  if (static_cast<int64_t>(words.size()) < count + kSpare) words.resize(count + kSpare);
  return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(words.data()) + kLine - 1) / kLine * kLine);
}

}  // namespace yggdrasil
