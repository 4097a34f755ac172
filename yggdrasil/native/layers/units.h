// Layers that repeat: packages of one layer each, opened once, and the tensors that their runs read and write.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace yggdrasil {

using at::Tensor;

// Tensors that units read and write, and what a step needs to know of each: PyTorch's descriptions of them lie far apart,
// and all weights pass through the caches between two steps.
struct Table {
  struct Entry {
    const void* data;
    int64_t kind;  // the same of tensors of one dtype, size and layout
  };

  std::vector<Tensor> tensors;
  std::vector<Entry> entries;
  std::vector<std::pair<const char*, const char*>> headers;  // of each tensor and of its storage

  explicit Table(at::TensorList all) {
    std::map<std::vector<int64_t>, int64_t> kinds;
    for (const Tensor& given : all) {
      const Tensor& tensor = tensors.emplace_back(given.detach());  // whatever is put in the place of its memory, this stays
      std::vector<int64_t> described{static_cast<int64_t>(tensor.scalar_type())};
      for (const at::IntArrayRef numbers : {tensor.sizes(), tensor.strides()}) described.insert(described.end(), numbers.begin(), numbers.end());
      entries.push_back({tensor.const_data_ptr(), kinds.try_emplace(described, kinds.size()).first->second});
      headers.emplace_back(reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl()),
                           reinterpret_cast<const char*>(tensor.storage().unsafeGetStorageImpl()));
    }
  }

  bool are_alike(at::IntArrayRef some, at::IntArrayRef others) const {
    for (size_t i = 0; i < some.size(); ++i)
      if (entries.at(some[i]).kind != entries.at(others[i]).kind) return false;
    return true;
  }

  // The headers were read a step ago, and all weights have passed through the caches since.
  void fetch_headers(at::IntArrayRef places) const {
    for (const int64_t place : places) {
      for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(headers[place].first + line);
      for (size_t line = 0; line < sizeof(c10::StorageImpl); line += 64) __builtin_prefetch(headers[place].second + line);
    }
  }
};

// What steps refer to by name or number: packages of one unit each, which last as long as the process, and tables of the
// tensors that units read and write, which belong to whoever keeps them.
struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<torch::inductor::AOTIModelPackageLoader>> units;
  std::unordered_map<int64_t, std::shared_ptr<const Table>> tables;
  int64_t last_table = 0;
};

inline Registry& registry() {
  static auto* everything = new Registry;  // never destroyed: libraries may be gone by then
  return *everything;
}

inline std::shared_ptr<const Table> table_of(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.tables.find(number);
  TORCH_CHECK(found != all.tables.end(), "there is no table ", number);
  return found->second;
}

inline void open_unit(std::string name, std::string path) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& unit = all.units[name];
  if (!unit) unit = std::make_unique<torch::inductor::AOTIModelPackageLoader>(path, "model", /*run_single_threaded=*/true);
}

inline int64_t keep_table(at::TensorList tensors) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables[++all.last_table] = std::make_shared<const Table>(tensors);
  return all.last_table;
}

inline void drop_table(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables.erase(number);
}

// Runs one unit `count` times; each takes what the one before gave, what all share, and its own places of the table.
// Returns what the units `kept` gave, which ascend.
// NOTE: a unit writes to its caches, which the schema does not say: no other operator of the graph may use them.
inline std::vector<Tensor> run_units(std::string name, const Tensor& number, const Tensor& carried, at::TensorList shared,
                                     at::IntArrayRef places, int64_t count, at::IntArrayRef kept) {
  torch::inductor::AOTIModelContainerRunner* unit = nullptr;
  std::shared_ptr<const Table> table;
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto package = all.units.find(name);
    const auto tensors = all.tables.find(*number.const_data_ptr<int64_t>());
    TORCH_CHECK(package != all.units.end() && tensors != all.tables.end(), "the unit ", name, " is not open");
    unit = package->second->get_runner(), table = tensors->second;
  }
  const size_t own = places.size() / count;
  Tensor value = carried;
  std::vector<Tensor> inputs, results;
  results.reserve(kept.size());
  table->fetch_headers(places.slice(0, own));
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) table->fetch_headers(places.slice((i + 1) * own, own));
    inputs.clear();
    inputs.reserve(1 + shared.size() + own);
    inputs.push_back(std::move(value));
    inputs.insert(inputs.end(), shared.begin(), shared.end());
    for (const int64_t place : places.slice(i * own, own)) inputs.push_back(table->tensors.at(place));
    value = std::move(unit->boxed_run(std::move(inputs)).at(0));
    if (results.size() < kept.size() && kept[results.size()] == i) results.push_back(value);
  }
  return results;
}

}  // namespace yggdrasil
