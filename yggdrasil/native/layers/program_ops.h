// The operators that run programs: one over tensors, one for each unit of layers that repeat.
#pragma once

#include <algorithm>
#include <vector>

#include "layers/program.h"
#include "layers/weight_registry.h"

namespace yggdrasil {

// Calls run(T{}) with the dtype of the rows.
template <typename Run>
auto with_rows_of(const Tensor& rows, const Run& run) {
  if (rows.dtype() == DType::bfloat16) return run(BFloat16{});
  YGG_CHECK(rows.dtype() == DType::float32, "programs serve bfloat16 and float32");
  return run(0.0f);
}

// Runs a program once; `outputs` take what the stages `results` gave, numbered from the first one's first output.
inline void run_program(List<Tensor> tensors, Ints code, List<double> numbers, Ints results,
                        int64_t num_threads, List<Tensor> outputs) {
  const Program program{code, numbers};
  std::vector<Tensor> dense;
  std::vector<const Tensor*> given;
  dense.reserve(tensors.size());
  for (const Tensor& tensor : tensors) given.push_back(&dense.emplace_back(tensor.contiguous()));
  const size_t first = first_input(program);
  YGG_CHECK(first < given.size(), "a program reads the tensor ", first, ", which is not given");
  const Tensor& rows = *given[first];
  YGG_CHECK(outputs.size() == results.size(), "a program gives ", results.size(), " results");
  with_rows_of(rows, [&]<typename T>(T) {
    ProgramRun<T> run(program, rows.numel() / rows.size(-1), given, num_threads);
    std::vector<std::pair<int64_t, void*>> places;
    for (size_t i = 0; i < results.size(); ++i) {
      const int64_t value = static_cast<int64_t>(given.size()) + results[i];
      check_result(outputs[i], with_last(rows, run.size(value)), rows.dtype());
      places.emplace_back(value, outputs[i].mutable_data_ptr());
    }
    run.lay_out(given, places);
    run.run();
  });
}

// Runs a program for each of `count` units: its tensors are what the unit before gave, what all share, and the unit's own
// places of the table. `outputs` take what the units `kept` gave, which ascend.
// NOTE: units write to their caches, which the schema does not say: no other operator of the graph may use them.
inline void run_layers(const Tensor& number, const Tensor& carried, List<Tensor> shared, Ints places, int64_t count,
                                      Ints kept, Ints code, List<double> numbers, int64_t num_threads, List<Tensor> outputs) {
  const std::shared_ptr<const Table> table = WeightRegistry::instance().at(*number.const_data_ptr<int64_t>());
  const Program program{code, numbers};
  const size_t own = places.size() / count;
  constexpr size_t kLine = 8;  // pointers
  std::vector<Tensor> dense;
  dense.reserve(shared.size());
  const Tensor value = carried.contiguous();
  YGG_CHECK(outputs.size() == kept.size(), "layers give ", kept.size(), " results");
  for (const Tensor& output : outputs) check_result(output, value.sizes(), value.dtype());
  std::vector<const Tensor*> tensors{&value};
  for (const Tensor& tensor : shared) tensors.push_back(&dense.emplace_back(tensor.contiguous()));
  const auto of_unit = [&](int64_t unit) { return places.slice(unit * own, own); };
  const auto take_own = [&](int64_t unit) {
    tensors.resize(1 + shared.size());
    for (const int64_t place : of_unit(unit)) tensors.push_back(&table->tensors.at(place));
  };
  // Looked up before anything runs: between two units all threads wait, and weights have passed through the caches.
  std::vector<const void*> data;
  std::vector<char> is_alike(count, false);  // to the unit before
  data.reserve(places.size() + kLine);
  for (const int64_t place : places) data.push_back(table->entries.at(place).data);
  for (int64_t i = 1; i < count; ++i) is_alike[i] = table->are_alike(of_unit(i - 1), of_unit(i));
  take_own(0);
  with_rows_of(value, [&]<typename T>(T) {
    ProgramRun<T> run(program, value.numel() / value.size(-1), tensors, num_threads);
    YGG_CHECK(run.size(run.last_value()) == value.size(-1), "layers that repeat give rows of the size that they take");
    const int64_t words = (value.nbytes() / 4 + 16) / 16 * 16;
    uint32_t* buffers = scratch_words<Scratch::carried>(2 * words);
    void* from = value.mutable_data_ptr();
    size_t num_kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      for (size_t k = 0; i + 1 < count && k < own + kLine; k += kLine) __builtin_prefetch(data.data() + (i + 1) * own + k);
      const bool is_kept = num_kept < kept.size() && kept[num_kept] == i;
      void* to = is_kept ? outputs[num_kept++].mutable_data_ptr() : buffers + i % 2 * words;
      if (is_alike[i]) {
        run.place(0, from);
        run.place(run.last_value(), to);
        for (size_t k = 0; k < own; ++k) run.place(1 + shared.size() + k, data[i * own + k]);
      } else {
        take_own(i);
        run.lay_out(tensors, {{0, from}, {run.last_value(), to}});
      }
      run.run();
      from = to;
    }
  });
}

}  // namespace yggdrasil
