// Blocks of values after the end of the context, where each row follows its own path; a block serves several rows.
//
// AMX sums the even and the odd lanes of a block separately, each in order, and then adds both. A weight of zero adds
// nothing, so values of other rows may be between a row's own values. The sums equal those of a plain step, bit by bit, if
// a row's values keep their block and their order, with even positions in even lanes.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention_positions.h"

namespace yggdrasil {

#ifdef YGG_AVX512
constexpr int64_t kBlockKeys = 32;  // positions, or lanes, that one tile of weights covers

// A row's positions of a block that lie in its lanes.
struct LanesOfRow {
  alignas(64) int16_t positions[kBlockKeys];
  __mmask32 seen;

  void move(BFloat16* weights) const {
    const __m512i there = _mm512_loadu_si512(weights), order = _mm512_load_si512(positions);
    _mm512_storeu_si512(weights, _mm512_maskz_permutexvar_epi16(seen, order, there));
  }
};

// The slots whose values lie in a block's lanes, and the rows that it serves.
class PathBlock {
 public:
  // Creates a block whose first `shared` lanes hold positions that all rows see.
  PathBlock(int64_t context, int64_t position, int64_t shared, const std::vector<int64_t>& path, int64_t row)
      : first(row), last(row), context_(context), position_(position), shared_(shared), used_{(shared + 1) / 2, shared / 2} {
    std::fill(slots, slots + kBlockKeys, -1);
    for (int64_t lane = 0; lane < shared; ++lane) slots[lane] = position + lane < context ? position + lane : path[position + lane - context];
  }

  // Adds a row's path after the shared positions, if there are lanes for its new positions; returns whether there are.
  bool take(const std::vector<int64_t>& path, LanesOfRow& row) {
    int64_t next[2] = {(shared_ + 1) / 2, shared_ / 2}, used[2] = {used_[0], used_[1]};
    for (int64_t lane = 0; lane < kBlockKeys; ++lane) row.positions[lane] = static_cast<int16_t>(lane);
    row.seen = static_cast<__mmask32>((uint64_t{1} << shared_) - 1);
    const int64_t end = std::min<int64_t>(context_ + path.size() - position_, kBlockKeys);
    for (int64_t position = shared_; position < end; ++position) {
      const int64_t slot = path[position_ + position - context_], odd = position % 2;
      int64_t pair = next[odd];
      while (pair < used[odd] && slots[2 * pair + odd] != slot) ++pair;
      const int64_t lane = 2 * pair + odd;
      if (lane >= kBlockKeys) return false;
      slots[lane] = slot;
      used[odd] = std::max(used[odd], pair + 1);
      next[odd] = pair + 1;
      row.positions[lane] = static_cast<int16_t>(position);
      row.seen |= __mmask32{1} << lane;
    }
    std::copy(used, used + 2, used_);
    return true;
  }

  int64_t first, last;         // row of the unit
  int64_t slots[kBlockKeys];   // or -1: nothing is there

 private:
  int64_t context_, position_, shared_, used_[2];
};

// Distributes the paths of all rows to blocks, and moves the rows' weights to the lanes of their values.
inline void lay_paths(const KeyHeadRows& rows, const Positions& at, BFloat16* weights, std::vector<PathBlock>& blocks) {
  const int64_t context = rows.job.context;
  const auto& some = rows.slots_of(0);
  size_t shared = some.size(), longest = some.size();
  for (int64_t i = rows.alike(0); i < rows.count; i += rows.alike(i)) {
    const auto& path = rows.slots_of(i);
    shared = std::mismatch(some.begin(), some.begin() + std::min(shared, path.size()), path.begin()).first - some.begin();
    longest = std::max(longest, path.size());
  }
  blocks.clear();
  LanesOfRow lanes;
  for (int64_t position = context / kBlockKeys * kBlockKeys; position < context + static_cast<int64_t>(longest); position += kBlockKeys) {
    const int64_t alike = std::clamp<int64_t>(context + shared - position, 0, kBlockKeys);
    if (alike == kBlockKeys || shared == longest) {
      blocks.emplace_back(context, position, alike, some, 0).last = rows.count;
      continue;
    }
    for (int64_t i = 0; i < rows.count;) {
      const auto& path = rows.slots_of(i);
      if (i == 0 || !blocks.back().take(path, lanes)) blocks.emplace_back(context, position, alike, path, i).take(path, lanes);
      for (const int64_t end = i + rows.alike(i); i < end; ++i) lanes.move(weights + i * at.length + position - at.start);
      blocks.back().last = i;
    }
  }
}
#endif

}  // namespace yggdrasil
