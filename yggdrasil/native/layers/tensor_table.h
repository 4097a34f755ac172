// Table of the tensors that layers read and write.
#pragma once

#include <map>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

// The properties of each tensor that a step reads are stored together, because weights evict all caches between two
// steps.
struct Table {
  struct Entry {
    const void* data;
    int64_t kind;  // the same of tensors of one dtype, size and layout
  };

  std::vector<Tensor> tensors;
  std::vector<Entry> entries;

  explicit Table(List<Tensor> all) : tensors(all.vec()) {
    std::map<std::vector<int64_t>, int64_t> kinds;
    for (const Tensor& tensor : tensors) {
      std::vector<int64_t> described{static_cast<int64_t>(tensor.dtype())};
      for (const Ints numbers : {tensor.sizes(), tensor.strides()}) described.insert(described.end(), numbers.begin(), numbers.end());
      entries.push_back({tensor.const_data_ptr(), kinds.try_emplace(described, kinds.size()).first->second});
    }
  }

  bool are_alike(Ints some, Ints others) const {
    for (size_t i = 0; i < some.size(); ++i)
      if (entries.at(some[i]).kind != entries.at(others[i]).kind) return false;
    return true;
  }
};

}  // namespace yggdrasil
