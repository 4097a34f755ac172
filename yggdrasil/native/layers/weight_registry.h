// Tensors that layers read and write, by number: a step names its weights and caches by one number and their places.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

// What a step needs to know of each tensor lies together: all weights pass through the caches between two steps.
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

// Tables by number. Whoever keeps one keeps its tensors until it is dropped.
class WeightRegistry {
 public:
  static WeightRegistry& instance() {
    static auto* registry = new WeightRegistry;  // never destroyed: steps may end later
    return *registry;
  }

  int64_t keep(List<Tensor> tensors) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tables_[++last_] = std::make_shared<const Table>(tensors);
    return last_;
  }

  void drop(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tables_.erase(number);
  }

  std::shared_ptr<const Table> at(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tables_.find(number);
    YGG_CHECK(found != tables_.end(), "there is no table ", number);
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Table>> tables_;
  int64_t last_ = 0;
};

}  // namespace yggdrasil
