// Table of the tensors that layers read and write.
#pragma once

#include <map>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

// What a step reads of each tensor is stored contiguously, because the weights evict everything else from the caches
// between two steps.
struct Table {
  struct Entry {
    const void* data;
    int64_t kind;  // equal for tensors of equal dtype, sizes and strides
  };

  std::vector<Tensor> tensors;
  std::vector<Entry> entries;

  explicit Table(List<Tensor> all) : tensors(all.vec()) {
    std::map<std::vector<int64_t>, int64_t> kinds;
    for (const Tensor& tensor : tensors) {
      std::vector<int64_t> layout{static_cast<int64_t>(tensor.dtype())};
      for (const Ints numbers : {tensor.sizes(), tensor.strides()}) layout.insert(layout.end(), numbers.begin(), numbers.end());
      entries.push_back({tensor.const_data_ptr(), kinds.try_emplace(layout, kinds.size()).first->second});
    }
  }

  bool have_same_layout(Ints a, Ints b) const {
    for (size_t i = 0; i < a.size(); ++i)
      if (entries.at(a[i]).kind != entries.at(b[i]).kind) return false;
    return true;
  }
};

}  // namespace yggdrasil
