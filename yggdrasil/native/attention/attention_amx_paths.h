// Blocks of values after the end of the context, where each row has its own path in the tree. A block is shared by as
// many rows as its lanes allow.
//
// AMX accumulates the even and the odd lanes of a block separately, each in order, and then adds both. A weight of zero
// adds nothing, so values of other rows may lie between a row's own values. The sums are bitwise those of a plain step
// if a row's values keep their block and their order, with even positions in even lanes.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention_positions.h"

namespace yggdrasil {

#ifdef YGG_AVX512
constexpr int64_t kBlockKeys = 32;  // positions (lanes) that one tile of weights covers

// For each lane of a block: the row's position whose value it holds, and whether it holds one.
struct RowLanes {
  alignas(64) int16_t positions[kBlockKeys];
  __mmask32 valid;

  void permute(BFloat16* weights) const {
    const __m512i values = _mm512_loadu_si512(weights), order = _mm512_load_si512(positions);
    _mm512_storeu_si512(weights, _mm512_maskz_permutexvar_epi16(valid, order, values));
  }
};

// The slots whose values are in a block's lanes, and the rows [first, last) that use it.
class PathBlock {
 public:
  // Creates a block whose first `num_common` lanes hold positions that all rows attend to.
  PathBlock(int64_t context, int64_t position, int64_t num_common, const std::vector<int64_t>& path, int64_t row)
      : first(row), last(row), context_(context), position_(position), shared_(num_common), used_{(num_common + 1) / 2, num_common / 2} {
    std::fill(slots, slots + kBlockKeys, -1);
    for (int64_t lane = 0; lane < num_common; ++lane) slots[lane] = position + lane < context ? position + lane : path[position + lane - context];
  }

  // Adds a row's path after the common positions. Returns whether there were enough free lanes for it.
  bool try_add_row(const std::vector<int64_t>& path, RowLanes& row) {
    int64_t next[2] = {(shared_ + 1) / 2, shared_ / 2}, used[2] = {used_[0], used_[1]};
    for (int64_t lane = 0; lane < kBlockKeys; ++lane) row.positions[lane] = static_cast<int16_t>(lane);
    row.valid = static_cast<__mmask32>((uint64_t{1} << shared_) - 1);
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
      row.valid |= __mmask32{1} << lane;
    }
    std::copy(used, used + 2, used_);
    return true;
  }

  int64_t first, last;         // rows of the unit of work
  int64_t slots[kBlockKeys];   // -1 for an empty lane

 private:
  int64_t context_, position_, shared_, used_[2];
};

// Distributes the paths of all rows to blocks, and permutes the rows' weights to the lanes of their values.
inline void pack_paths(const KeyHeadRows& rows, const Positions& positions, BFloat16* weights, std::vector<PathBlock>& blocks) {
  const int64_t context = rows.job.context;
  const auto& some = rows.slots_of(0);
  size_t num_common = some.size(), longest = some.size();
  for (int64_t i = rows.rows_of_path(0); i < rows.count; i += rows.rows_of_path(i)) {
    const auto& path = rows.slots_of(i);
    num_common = std::mismatch(some.begin(), some.begin() + std::min(num_common, path.size()), path.begin()).first - some.begin();
    longest = std::max(longest, path.size());
  }
  blocks.clear();
  RowLanes lanes;
  for (int64_t position = context / kBlockKeys * kBlockKeys; position < context + static_cast<int64_t>(longest); position += kBlockKeys) {
    const int64_t num_shared = std::clamp<int64_t>(context + num_common - position, 0, kBlockKeys);
    if (num_shared == kBlockKeys || num_common == longest) {
      blocks.emplace_back(context, position, num_shared, some, 0).last = rows.count;
      continue;
    }
    for (int64_t i = 0; i < rows.count;) {
      const auto& path = rows.slots_of(i);
      if (i == 0 || !blocks.back().try_add_row(path, lanes)) blocks.emplace_back(context, position, num_shared, path, i).try_add_row(path, lanes);
      for (const int64_t end = i + rows.rows_of_path(i); i < end; ++i) lanes.permute(weights + i * positions.length + position - positions.start);
      blocks.back().last = i;
    }
  }
}
#endif

}  // namespace yggdrasil
