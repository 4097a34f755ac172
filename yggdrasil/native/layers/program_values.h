// Sizes and addresses of the values of layer bytecode: tensors, and outputs of stages.
#pragma once

#include <initializer_list>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/input_rows.h"
#include "common/scratch.h"
#include "common/tensor.h"

namespace yggdrasil {

using Tensors = std::vector<const Tensor*>;

// Values of a step of `rows_` rows of dtype T, by their numbers: first the tensors, then the outputs of stages.
template <typename T>
class ProgramValues {
 public:
  ProgramValues(int64_t rows, const Tensors& tensors) : rows_(rows) {
    for (const Tensor* tensor : tensors) sizes_.push_back(size_of(tensor));
  }

  int64_t size(int64_t value) const {
    YGG_CHECK(value >= 0 && value < static_cast<int64_t>(sizes_.size()), "a program reads the value ", value, ", which is not there yet");
    return sizes_[value];
  }

  int64_t last_value() const { return static_cast<int64_t>(sizes_.size()) - 1; }

  // Sets the address of a value, whose memory must have the same size and dtype.
  void set_address(int64_t value, const void* data) { data_[value] = data; }

 protected:
  // The inputs of a stage, the sizes of its outputs, and the words of scratch memory that it needs.
  struct Needs {
    std::vector<int64_t> reads, output_sizes;
    int64_t words = 0;
  };

  // Assigns offsets in scratch memory to the outputs of stages, which are numbered from `num_tensors` on. Memory of a
  // value that no later stage reads is reused for the next value of its size, so a program of several layers needs the
  // memory of one.
  void assign_memory(size_t num_tensors, const std::vector<Needs>& stages) {
    std::vector<size_t> last(sizes_.size(), 0);  // last stage that reads or writes a value
    size_t end = num_tensors;
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      for (size_t i = 0; i < stages[stage].output_sizes.size(); ++i) last[end++] = stage;
      for (const int64_t read : stages[stage].reads)
        if (read >= 0 && read < static_cast<int64_t>(end)) last[read] = stage;
    }
    std::multimap<int64_t, int64_t> free;  // free offsets by size in words
    size_t value = num_tensors;
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      for (size_t i = 0; i < stages[stage].output_sizes.size(); ++i) {
        const int64_t words = words_of(value++);
        const auto found = free.find(words);
        offsets_.push_back(found == free.end() ? std::exchange(value_words_, value_words_ + words) : found->second);
        if (found != free.end()) free.erase(found);
      }
      for (size_t unused = num_tensors; unused < value; ++unused)
        if (last[unused] == stage) free.emplace(words_of(unused), offsets_[unused - num_tensors]);
    }
  }

  void set_addresses(const Tensors& tensors, const std::vector<std::pair<int64_t, void*>>& given) {
    uint32_t* values = scratch_words<Scratch::values>(value_words_);
    data_.clear();
    for (size_t i = 0; i < tensors.size(); ++i) {
      YGG_CHECK(size_of(tensors[i]) == sizes_[i], "layers that repeat have tensors of one size");
      data_.push_back(tensors[i] ? tensors[i]->const_data_ptr() : nullptr);
    }
    for (const int64_t offset : offsets_) data_.push_back(values + offset);
    for (const auto& [value, address] : given) data_[value] = address;
  }

  const T* at(int64_t value) const { return value < 0 ? nullptr : static_cast<const T*>(data_.at(value)); }
  const float* floats_at(int64_t value) const { return static_cast<const float*>(at_raw(value)); }
  const void* at_raw(int64_t value) const { return value < 0 ? nullptr : data_.at(value); }
  void* result_at(int64_t value) const { return const_cast<void*>(data_.at(value)); }
  NormOp<T> norm_at(int64_t value, int64_t plus_one, double eps) const { return {at(value), plus_one == 1, static_cast<float>(eps), plus_one == 2}; }

  static const Tensor& tensor_at(int64_t value, const Tensors& tensors) {
    YGG_CHECK(value >= 0 && value < static_cast<int64_t>(tensors.size()) && tensors[value], "a program reads the tensor ", value, ", which is not given");
    return *tensors[value];
  }

  void check_sizes(std::initializer_list<int64_t> values, int64_t expected, const char* what) const {
    for (const int64_t value : values) YGG_CHECK(value < 0 || size(value) == expected, what, " ", expected, ", not ", size(value));
  }

  void check_rows(std::initializer_list<int64_t> values, const Tensors& tensors) const {
    for (const int64_t value : values) {
      if (value < 0 || value >= static_cast<int64_t>(tensors.size())) continue;
      const Tensor& tensor = tensor_at(value, tensors);
      YGG_CHECK(is_of_rows(tensor) && tensor.is_contiguous() && tensor.numel() == rows_ * size(value),
                  "rows of a program are dense and of one dtype and number, not ", tensor.sizes());
    }
  }

  // Checks that tensors are dense and float32; with `rows` above 0, that they have this number of rows.
  void check_floats(std::initializer_list<int64_t> values, const Tensors& tensors, int64_t rows = 0) const {
    for (const int64_t value : values) {
      if (value < 0) continue;
      const Tensor& tensor = tensor_at(value, tensors);
      YGG_CHECK(tensor.dtype() == DType::float32 && tensor.is_contiguous() && (!rows || tensor.numel() == rows * size(value)),
                "a dense float32 tensor is read, not ", tensor.sizes(), " of ", tensor.dtype());
    }
  }

  void check_norms(std::initializer_list<int64_t> values, const Tensors& tensors) const {
    for (const int64_t value : values) {
      if (value < 0) continue;
      const Tensor& norm = tensor_at(value, tensors);
      YGG_CHECK(is_of_rows(norm) && norm.is_contiguous() && norm.numel() == size(value), "a norm has the dtype of the rows");
    }
  }

  static bool is_of_rows(const Tensor& tensor) { return tensor.dtype() == dtype_of<T>; }
  static int64_t size_of(const Tensor* tensor) { return tensor && tensor->dim() > 0 ? tensor->size(-1) : 0; }

  const int64_t rows_;
  std::vector<int64_t> sizes_, offsets_;  // row sizes of values; word offsets of the stages' outputs
  std::vector<const void*> data_;
  int64_t value_words_ = 0;

 private:
  int64_t words_of(size_t value) const { return (rows_ * sizes_[value] * static_cast<int64_t>(sizeof(T)) / 4 + 16) / 16 * 16; }
};

}  // namespace yggdrasil
