// TorchInductor's packages: loaded and run without Python's lock, a package of one layer once for each of several layers.
//
// PyTorch's own loader holds Python's lock while it runs a package: nothing else of the process could go on, a server's
// sockets among it. A method of a TorchScript class is called without it. Of all native code this alone needs PyTorch's
// headers, so it is a library of its own, compiled where packages are run.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::inductor::AOTIModelPackageLoader;

struct Package : torch::CustomClassHolder {
  AOTIModelPackageLoader loader;

  explicit Package(const std::string& path) : loader(path, "model", /*run_single_threaded=*/true) {}
};

// A package over its inputs, of which a step has hundreds: handed over once and not at each call.
class Run : public torch::CustomClassHolder {
 public:
  Run(c10::intrusive_ptr<Package> package, std::vector<Tensor> inputs) : package_(std::move(package)), inputs_(std::move(inputs)) {}

  std::vector<Tensor> run() { return package_->loader.run(inputs_); }

 private:
  c10::intrusive_ptr<Package> package_;
  std::vector<Tensor> inputs_;
};

// Tensors that units read and write. PyTorch's descriptions of them lie far apart, and all weights pass through the caches
// between two steps.
class Table {
 public:
  explicit Table(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const Tensor& tensor : tensors_)
      headers_.emplace_back(reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl()),
                            reinterpret_cast<const char*>(tensor.storage().unsafeGetStorageImpl()));
  }

  const Tensor& at(int64_t place) const { return tensors_.at(place); }

  void fetch_headers(at::IntArrayRef places) const {
    for (const int64_t place : places) {
      for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(headers_[place].first + line);
      for (size_t line = 0; line < sizeof(c10::StorageImpl); line += 64) __builtin_prefetch(headers_[place].second + line);
    }
  }

 private:
  std::vector<Tensor> tensors_;
  std::vector<std::pair<const char*, const char*>> headers_;  // of each tensor and of its storage
};

// What steps refer to by name or number: packages of one layer each, which last as long as the process, and tables.
struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<AOTIModelPackageLoader>> units;
  std::unordered_map<int64_t, std::shared_ptr<const Table>> tables;
};

Registry& registry() {
  static auto* everything = new Registry;  // never destroyed: libraries may be gone by then
  return *everything;
}

void open_unit(std::string name, std::string path) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& unit = all.units[name];
  if (!unit) unit = std::make_unique<AOTIModelPackageLoader>(path, "model", /*run_single_threaded=*/true);
}

void hold_table(int64_t number, std::vector<Tensor> tensors) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables[number] = std::make_shared<const Table>(std::move(tensors));
}

void release_table(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables.erase(number);
}

// Runs one unit `count` times; each takes what the one before gave, what all share, and its own places of the table.
// Returns what the units `kept` gave, which ascend.
// NOTE: a unit writes to its caches, which the schema does not say: no other operator of the graph may use them.
std::vector<Tensor> run_units(std::string name, const Tensor& number, const Tensor& carried, at::TensorList shared, at::IntArrayRef places, int64_t count,
                              at::IntArrayRef kept) {
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
    for (const int64_t place : places.slice(i * own, own)) inputs.push_back(table->at(place));
    value = std::move(unit->boxed_run(std::move(inputs)).at(0));
    if (results.size() < kept.size() && kept[results.size()] == i) results.push_back(value);
  }
  return results;
}

}  // namespace

TORCH_LIBRARY(yggdrasil_packages, m) {
  m.def("open_unit(str name, str path) -> ()", &open_unit);
  m.def("hold_table(int number, Tensor[] tensors) -> ()");
  m.impl("hold_table", c10::DispatchKey::CompositeExplicitAutograd, &hold_table);
  m.def("release_table(int number) -> ()", &release_table);
  m.class_<Package>("Package").def(torch::init<std::string>());
  m.class_<Run>("Run").def(torch::init<c10::intrusive_ptr<Package>, std::vector<Tensor>>()).def("run", &Run::run);
}

TORCH_LIBRARY_IMPL(yggdrasil, CPU, m) { m.impl("run_units", &run_units); }
