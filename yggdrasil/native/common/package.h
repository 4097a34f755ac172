// A compiled step's package.
//
// PyTorch's own loader holds Python's lock while it runs one: nothing else of the process could go on, a server's sockets
// among it, and whoever waited would get the lock between two steps alone. A method of a class is called without it.
#pragma once

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <utility>
#include <vector>

namespace yggdrasil {

struct Package : torch::CustomClassHolder {
  torch::inductor::AOTIModelPackageLoader loader;

  explicit Package(const std::string& path) : loader(path, "model", /*run_single_threaded=*/true) {}
};

// A package over its inputs, of which a step has hundreds: handed over once and not at each call.
class Run : public torch::CustomClassHolder {
 public:
  Run(c10::intrusive_ptr<Package> package, std::vector<at::Tensor> inputs) : package_(std::move(package)), inputs_(std::move(inputs)) {}

  std::vector<at::Tensor> run() { return package_->loader.run(inputs_); }

 private:
  c10::intrusive_ptr<Package> package_;
  std::vector<at::Tensor> inputs_;
};

}  // namespace yggdrasil
