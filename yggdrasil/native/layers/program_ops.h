// The operators that run programs: one over tensors, one for each unit of layers that repeat.
#pragma once

#include <algorithm>
#include <vector>

#include "layers/program.h"
#include "layers/units.h"

namespace yggdrasil {

// Calls run(T{}) with the dtype of the rows.
template <typename Run>
auto with_rows_of(const Tensor& rows, const Run& run) {
  if (rows.scalar_type() == at::kBFloat16) return run(BFloat16{});
  TORCH_CHECK(rows.scalar_type() == at::kFloat, "programs serve bfloat16 and float32");
  return run(0.0f);
}

// A tensor like `rows` with other sizes of a row.
inline Tensor rows_like(const Tensor& rows, int64_t size) {
  auto shape = rows.sizes().vec();
  shape.back() = size;
  return at::empty(shape, rows.options());
}

// Runs a program once; returns what the stages `results` gave, numbered from the first one's first output.
inline std::vector<Tensor> run_program(at::TensorList tensors, at::IntArrayRef code, at::ArrayRef<double> numbers, at::IntArrayRef results,
                                       int64_t num_threads) {
  const Program program{code, numbers};
  std::vector<Tensor> dense;
  std::vector<const Tensor*> given;
  dense.reserve(tensors.size());
  for (const Tensor& tensor : tensors) given.push_back(&dense.emplace_back(tensor.contiguous()));
  const size_t first = first_input(program);
  TORCH_CHECK(first < given.size(), "a program reads the tensor ", first, ", which is not given");
  const Tensor& rows = *given[first];
  return with_rows_of(rows, [&]<typename T>(T) {
    ProgramRun<T> run(program, rows.numel() / rows.size(-1), given, num_threads);
    std::vector<Tensor> outputs;
    std::vector<std::pair<int64_t, void*>> places;
    for (const int64_t result : results) {
      const int64_t value = static_cast<int64_t>(given.size()) + result;
      outputs.push_back(rows_like(rows, run.size(value)));
      places.emplace_back(value, outputs.back().mutable_data_ptr());
    }
    run.lay_out(given, places);
    run.run();
    return outputs;
  });
}

// Runs a program for each of `count` units: its tensors are what the unit before gave, what all share, and the unit's own
// places of the table. Returns what the units `kept` gave, which ascend.
// NOTE: units write to their caches, which the schema does not say: no other operator of the graph may use them.
inline std::vector<Tensor> run_layers(const Tensor& number, const Tensor& carried, at::TensorList shared, at::IntArrayRef places, int64_t count,
                                      at::IntArrayRef kept, at::IntArrayRef code, at::ArrayRef<double> numbers, int64_t num_threads) {
  const std::shared_ptr<const Table> table = table_of(*number.const_data_ptr<int64_t>());
  const Program program{code, numbers};
  const size_t own = places.size() / count;
  constexpr size_t kLine = 8;  // pointers
  std::vector<Tensor> dense, results;
  dense.reserve(shared.size());
  results.reserve(kept.size());
  Tensor value = carried.contiguous();
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
  return with_rows_of(value, [&]<typename T>(T) {
    ProgramRun<T> run(program, value.numel() / value.size(-1), tensors, num_threads);
    TORCH_CHECK(run.size(run.last_value()) == value.size(-1), "layers that repeat give rows of the size that they take");
    Tensor buffers[2];
    for (int64_t i = 0; i < count; ++i) {
      for (size_t k = 0; i + 1 < count && k < own + kLine; k += kLine) __builtin_prefetch(data.data() + (i + 1) * own + k);
      const bool is_kept = results.size() < kept.size() && kept[results.size()] == i;
      Tensor& buffer = buffers[i % 2];
      Tensor output = is_kept ? at::empty_like(value) : buffer.defined() ? buffer : buffer = at::empty_like(value);
      if (is_alike[i]) {
        run.place(0, value.const_data_ptr());
        run.place(run.last_value(), output.mutable_data_ptr());
        for (size_t k = 0; k < own; ++k) run.place(1 + shared.size() + k, data[i * own + k]);
      } else {
        take_own(i);
        run.lay_out(tensors, {{run.last_value(), output.mutable_data_ptr()}});
      }
      run.run();
      if (is_kept) results.push_back(output);
      value = std::move(output);
    }
    return results;
  });
}

}  // namespace yggdrasil
