// The recurrent layers of a program.
#pragma once

#include <deque>

#include "layers/program_experts.h"
#include "recurrence/recurrent_layer.h"

namespace yggdrasil {

template <typename T>
class ProgramRecurrence : public ProgramExperts<T> {
  using Base = ProgramExperts<T>;

 public:
  using Base::Base, Base::size;

 protected:
  using typename Base::Needs;
  using Base::rows_, Base::at, Base::floats_at, Base::result_at, Base::norm_at, Base::tensor_at, Base::check_sizes, Base::check_rows, Base::check_floats, Base::check_norms,
      Base::is_of_rows, Base::num_threads_, Base::stages, Base::memory_, Base::needs_of, Base::add;

  Needs needs_of(const ConvolutionCode& code) const { return {{code.input, code.factor, code.gate}, {size(code.input)}}; }
  Needs needs_of(const RecurrenceCode& code) const {
    return {{code.mixed, code.decay, code.beta, code.gate}, {size(code.gate)},
            RecurrentLayer<T>::words(rows_, (size(code.mixed) - size(code.gate)) / 2, size(code.decay), size(code.gate))};
  }


  struct ConvolutionWork {
    const ProgramRecurrence& run;
    ConvolutionCode code;
    TreeSlots tree;
    int64_t taps, value;

    void convolve(int64_t begin, int64_t end) const { run.convolution_of(code, tree, taps, value).convolve(begin, end); }
  };

  struct RecurrenceWork {
    const ProgramRecurrence& run;
    RecurrenceCode code;
    TreeSlots tree;
    RecurrenceSizes sizes;
    ColumnBuffers buffers;
    int64_t value;

    void prepare(int64_t begin, int64_t end) const { run.recurrence_of(*this).prepare(begin, end); }
    void recur(int64_t begin, int64_t end) const { run.recurrence_of(*this).recurrence.recur(begin, end); }
    void finish(int64_t begin, int64_t end) const { run.recurrence_of(*this).finish(begin, end); }
  };

  int64_t add(const ConvolutionCode& code, int64_t value, const Tensors& tensors) {
    const Tensor &weight = tensor_at(code.weight, tensors), &window = tensor_at(code.window, tensors), &inputs = tensor_at(code.inputs, tensors);
    check_sizes({code.factor, code.gate, code.weight, code.bias, code.window, code.inputs}, size(code.input), "operands of a convolution have the size of the input,");
    check_rows({code.input, code.factor, code.gate}, tensors);
    for (const Tensor* kept : {&window, &inputs}) YGG_CHECK(is_of_rows(*kept) && kept->is_contiguous(), "a state is dense and has the dtype of the rows");
    check_floats({code.weight, code.bias}, tensors);
    YGG_CHECK(window.dim() == 2 && window.size(0) == weight.size(0) - 1, "a convolution's state has a row less than its weight, ", weight.sizes());
    const TreeSlots tree(tensor_at(code.parents, tensors), tensor_at(code.offsets, tensors), rows_, inputs.size(0));
    const ConvolutionWork& work = convolutions_.emplace_back(ConvolutionWork{*this, code, tree, weight.size(0), value});
    convolution_of(code, tree, work.taps, value).add_stages(stages(), work, num_threads_);
    return 1;
  }

  int64_t add(const RecurrenceCode& code, int64_t value, const Tensors& tensors) {
    const RecurrenceSizes sizes((size(code.mixed) - size(code.gate)) / 2, tensor_at(code.state, tensors), tensor_at(code.decays, tensors),
                                tensor_at(code.strengths, tensors));
    const int64_t queries = sizes.key_heads * sizes.key_size, values = sizes.heads * sizes.value_size;
    check_rows({code.mixed, code.decay, code.beta, code.gate}, tensors);
    check_floats({code.bias, code.rate, code.skip}, tensors);
    check_norms({code.norm}, tensors);
    YGG_CHECK((code.beta < 0) != (code.skip < 0), "a recurrence has a delta rule, or what its inputs are multiplied by");
    check_sizes({code.decay, code.beta, code.bias, code.rate, code.skip}, sizes.heads, "operands of a recurrence have its heads,");
    check_sizes({code.norm}, code.beta < 0 ? values : sizes.value_size, "a gated norm has the size of what it norms,");
    check_sizes({code.gate}, values, "a gate has the size of the values,");
    check_sizes({code.mixed}, 2 * queries + values, "queries, keys and values have together the size");
    const TreeSlots tree(tensor_at(code.parents, tensors), tensor_at(code.offsets, tensors), rows_, sizes.slots);
    const RecurrenceWork& work = recurrences_.emplace_back(RecurrenceWork{*this, code, tree, sizes, ColumnBuffers(tree.parents), value});
    recurrence_of(work).add_stages(stages(), work, num_threads_);
    return 1;
  }

  void clear() { Base::clear(), convolutions_.clear(), recurrences_.clear(); }

 private:
  TreeConvolution<T> convolution_of(const ConvolutionCode& code, const TreeSlots& tree, int64_t taps, int64_t value) const {
    return {tree, at(code.input), at(code.factor), at(code.gate), floats_at(code.weight), floats_at(code.bias), at(code.window),
            static_cast<T*>(result_at(code.inputs)), static_cast<T*>(result_at(value)), size(code.input), taps, code.silu != 0};
  }

  RecurrentLayer<T> recurrence_of(const RecurrenceWork& work) const {
    const RecurrenceCode& code = work.code;
    const int64_t count = rows_ * work.sizes.key_heads * work.sizes.key_size;
    float *queries = reinterpret_cast<float*>(memory_), *keys = queries + count, *overlaps = keys + count, *rows = overlaps + rows_ * work.sizes.heads;
    const TreeRecurrence of{work.sizes, work.tree, &work.buffers, code.beta >= 0, queries, keys, overlaps, floats_at(code.state),
                            static_cast<float*>(result_at(code.decays)), static_cast<float*>(result_at(code.strengths)), rows};
    return {of, at(code.mixed), at(code.decay), at(code.beta), at(code.gate), floats_at(code.bias), floats_at(code.rate), floats_at(code.skip),
            norm_at(code.norm, 0, code.eps), code.norm_first != 0, static_cast<float>(code.min_time), static_cast<float>(code.max_time), static_cast<T*>(result_at(work.value))};
  }

  std::deque<ConvolutionWork> convolutions_;
  std::deque<RecurrenceWork> recurrences_;
};

}  // namespace yggdrasil
