// The stack of a model's layers, each given as bytecode over its own tensors; registered once, run by one call.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layers/program.h"
#include "layers/tensor_table.h"

namespace yggdrasil {

// Layers of one kind share a program, which reads the rows, the tensors shared by all layers, and the layer's own
// tensors.
struct LayerStack {
  struct Kind {
    std::vector<int64_t> code;
    std::vector<double> numbers;

    Program program() const { return {code, numbers}; }
  };

  struct Layer {
    size_t kind;
    std::vector<int64_t> tensor_indices;  // indices of the layer's own tensors
    std::vector<const void*> data;
    bool has_same_layout = false;  // its tensors have the same dtypes, sizes and strides as those of the previous layer of its kind
  };

  Table table;
  std::vector<Kind> kinds;
  std::vector<Layer> layers;
};

struct Stacks {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const LayerStack>> kept;
  int64_t last = 0;

  static Stacks& all() {
    static auto* stacks = new Stacks;
    return *stacks;
  }
};

// Registers a stack of layers and returns its number. `kinds` holds each layer's kind; `places` the indices in
// `tensors` of the layers' own tensors, concatenated; `code` and `numbers` the bytecode and float parameters of the
// kinds, concatenated; `sizes` for each kind the number of float parameters and of own tensors.
inline int64_t keep_stack(List<Tensor> tensors, Ints kinds, Ints tensor_indices, Ints code, Ints code_sizes,
                          List<double> numbers, Ints sizes) {
  YGG_CHECK(sizes.size() == 2 * code_sizes.size(), "each kind of layer says how many numbers and tensors it has");
  auto stack = std::make_shared<LayerStack>(LayerStack{Table(tensors), {}, {}});
  size_t code_begin = 0, number_begin = 0, index_begin = 0;
  for (size_t i = 0; i < code_sizes.size(); ++i) {
    const Ints own_code = code.slice(code_begin, code_sizes[i]);
    const List<double> own_numbers = numbers.slice(number_begin, sizes[2 * i]);
    stack->kinds.push_back({own_code.vec(), own_numbers.vec()});
    code_begin += code_sizes[i], number_begin += sizes[2 * i];
  }
  std::vector<const LayerStack::Layer*> last(code_sizes.size(), nullptr);
  stack->layers.reserve(kinds.size());
  for (const int64_t kind : kinds) {
    YGG_CHECK(kind >= 0 && kind < static_cast<int64_t>(last.size()), "a layer is of the kind ", kind, ", which is not given");
    const int64_t count = sizes[2 * kind + 1];
    auto& layer = stack->layers.emplace_back(LayerStack::Layer{static_cast<size_t>(kind), tensor_indices.slice(index_begin, count).vec(), {}, false});
    index_begin += count;
    for (const int64_t index : layer.tensor_indices) layer.data.push_back(stack->table.entries.at(index).data);
    layer.has_same_layout = last[kind] && stack->table.have_same_layout(last[kind]->tensor_indices, layer.tensor_indices);
    last[kind] = &layer;
  }
  Stacks& all = Stacks::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.kept[++all.last] = std::move(stack);
  return all.last;
}

inline void drop_stack(int64_t number) {
  Stacks& all = Stacks::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.kept.erase(number);
}

inline std::shared_ptr<const LayerStack> stack_of(int64_t number) {
  Stacks& all = Stacks::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.kept.find(number);
  YGG_CHECK(found != all.kept.end(), "there is no stack ", number);
  return found->second;
}

// Runs the layers over the rows `carried`, and writes the outputs of the layers `kept` (in ascending order) to
// `outputs`. NOTE: layers write to their caches, which the operator's schema does not declare.
inline void run_stack(int64_t number, const Tensor& carried, List<Tensor> shared, Ints kept, int64_t num_threads, List<Tensor> outputs) {
  const std::shared_ptr<const LayerStack> stack = stack_of(number);
  std::vector<Tensor> dense;
  dense.reserve(shared.size());
  for (const Tensor& tensor : shared) dense.push_back(tensor.contiguous());
  const Tensor value = carried.contiguous();
  YGG_CHECK(outputs.size() == kept.size(), "layers give ", kept.size(), " results");
  for (const Tensor& output : outputs) check_result(output, value.sizes(), value.dtype());
  std::vector<const Tensor*> tensors;
  const auto gather_tensors = [&](const LayerStack::Layer& layer) {
    tensors.assign(1, &value);
    for (const Tensor& tensor : dense) tensors.push_back(&tensor);
    for (const int64_t index : layer.tensor_indices) tensors.push_back(&stack->table.tensors.at(index));
  };
  const size_t num_shared = shared.size(), num_kinds = stack->kinds.size();
  with_rows_of(value, [&]<typename T>(T) {
    std::deque<ProgramRun<T>> runs;  // one per kind of layer
    std::vector<size_t> run_of(num_kinds, num_kinds);
    for (const LayerStack::Layer& layer : stack->layers) {
      if (run_of[layer.kind] != num_kinds) continue;
      gather_tensors(layer);
      run_of[layer.kind] = runs.size();
      const int64_t first_attention = runs.empty() ? 0 : runs.back().end_attention();
      const auto& run = runs.emplace_back(stack->kinds[layer.kind].program(), value.numel() / value.size(-1), tensors, num_threads, first_attention);
      YGG_CHECK(run.size(run.last_value()) == value.size(-1), "layers give rows of the size that they take");
    }
    for (const auto& run : runs) run.reserve();
    std::vector<char> is_bound(runs.size(), false);
    const int64_t words = (value.nbytes() / 4 + 16) / 16 * 16;
    uint32_t* buffers = scratch_words<Scratch::carried>(2 * words);
    void* from = value.mutable_data_ptr();
    size_t num_kept = 0;
    for (size_t i = 0; i < stack->layers.size(); ++i) {
      const LayerStack::Layer& layer = stack->layers[i];
      if (i + 1 < stack->layers.size())
        for (const void* const& next : stack->layers[i + 1].data) __builtin_prefetch(&next);
      ProgramRun<T>& run = runs[run_of[layer.kind]];
      const bool is_kept = num_kept < kept.size() && kept[num_kept] == static_cast<int64_t>(i);
      void* to = is_kept ? outputs[num_kept++].mutable_data_ptr() : buffers + i % 2 * words;
      if (layer.has_same_layout && is_bound[run_of[layer.kind]]) {
        run.set_address(0, from);
        run.set_address(run.last_value(), to);
        for (size_t k = 0; k < layer.data.size(); ++k) run.set_address(1 + num_shared + k, layer.data[k]);
      } else {
        gather_tensors(layer);
        run.bind(tensors, {{0, from}, {run.last_value(), to}});
        is_bound[run_of[layer.kind]] = true;
      }
      run.run();
      from = to;
    }
  });
}

}  // namespace yggdrasil
