// Programs: what a step does to its rows, stage by stage, in one parallel region a time.
//
// Compiled graphs call an operator for each layer, and between two of them a thread makes and frees tensors while the
// others wait: in small models a fifth of the time. A program names what is read and written by numbers, so nothing but
// the threads' meetings lies between its stages. Its operators take it as integers:
//
//   linears    0, input, gate, gelu, norm, plus one, residual, how many, then for each layer: packed, bias, outputs, format
//              (-1: not quantised)
//   attention  1, query, key, value, query norm, key norm, cos, sin, key cache, value cache, offsets, tree mask, window, plus one
//   norm       2, input, norm, plus one, residual
//
// and of each stage three numbers: eps of a norm, scale and softcap. Of gates and norms `gelu` and `plus one` say which they
// are, 0 or 1, as in Around. Tensors are numbered first, then what stages give, one
// number a layer or attention; -1 is nothing. Queries are normed and turned where they lie, so nobody else may read them.
#pragma once

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "attention_stage.h"
#include "linear_stage.h"
#include "norm_stage.h"
#include "quantised_stage.h"

namespace yggdrasil {

struct Program {
  at::IntArrayRef code;
  at::ArrayRef<double> numbers;
};

struct LinearsCode {
  int64_t input, gate, gelu, norm, plus_one, residual;
  at::IntArrayRef layers;  // four numbers each
  double eps;
};

struct AttentionCode {
  int64_t query, key, value, query_norm, key_norm, cos, sin, key_cache, value_cache, offsets, mask, window, plus_one;
  double eps, scale, softcap;
};

struct NormCode {
  int64_t input, norm, plus_one, residual;
  double eps;
};

// The tensor that the first stage reads, which says how many rows there are.
inline size_t first_input(const Program& program) {
  TORCH_CHECK(program.code.size() > 1 && program.code[0] != 1 && program.code[1] >= 0, "a program begins with linear layers or a norm over rows that are given");
  return program.code[1];
}

// Calls linears(LinearsCode), attention(AttentionCode) or norm(NormCode) for each stage.
template <typename Linears, typename Attention, typename Norm>
void read_program(const Program& program, const Linears& linears, const Attention& attention, const Norm& norm) {
  size_t at = 0;
  const auto take = [&] {
    TORCH_CHECK(at < program.code.size(), "a program ends within a stage");
    return program.code[at++];
  };
  for (size_t stage = 0; at < program.code.size(); ++stage) {
    TORCH_CHECK(3 * stage + 2 < program.numbers.size(), "a program has three numbers a stage");
    const double* numbers = program.numbers.data() + 3 * stage;
    const int64_t kind = take();
    if (kind == 0) {
      LinearsCode code{take(), take(), take(), take(), take(), take(), {}, numbers[0]};
      const auto count = static_cast<size_t>(4 * take());
      TORCH_CHECK(at + count <= program.code.size(), "a program ends within a stage");
      code.layers = program.code.slice(at, count);
      at += count;
      linears(code);
    } else if (kind == 1) {
      attention(AttentionCode{take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(), take(),
                              numbers[0], numbers[1], numbers[2]});
    } else {
      TORCH_CHECK(kind == 2, "a program has no stage of the kind ", kind);
      norm(NormCode{take(), take(), take(), take(), numbers[0]});
    }
  }
}

// A program over rows of dtype T; it may run many times, each time over other tensors of the same sizes.
template <typename T>
class ProgramRun {
 public:
  // `rows` [..., K] are what the first stage reads, `tensors` those of the first run.
  ProgramRun(const Program& program, int64_t rows, const std::vector<const Tensor*>& tensors, int64_t num_threads)
      : program_(program), rows_(rows), num_threads_(num_threads) {
    for (const Tensor* tensor : tensors) sizes_.push_back(tensor && tensor->dim() > 0 ? tensor->size(-1) : 0);
    int64_t attentions = 0;
    std::vector<std::vector<int64_t>> reads;  // of each stage
    std::vector<size_t> ends;                 // values that are there behind it
    const auto end_stage = [&](std::vector<int64_t>&& read) { reads.push_back(std::move(read)), ends.push_back(sizes_.size()); };
    read_program(
        program,
        [&](const LinearsCode& code) {
          const int64_t inputs = size(code.input);
          const bool is_quantised = code.layers[3] >= 0;
          stage_words_ = std::max(stage_words_, is_quantised ? QuantisedStage<T>::words(rows, inputs) : PackedStage<T>::words(rows, inputs));
          for (size_t i = 0; i < code.layers.size(); i += 4) sizes_.push_back(code.layers[i + 2]);
          end_stage({code.input, code.gate, code.residual});
        },
        [&](const AttentionCode& code) {
          sizes_.push_back(size(code.query));
          end_stage({code.query, code.key, code.value});
          ++attentions;
        },
        [&](const NormCode& code) {
          sizes_.push_back(size(code.input));
          end_stage({code.input, code.residual});
        });
    place_values(tensors.size(), reads, ends);
    if (static_cast<int64_t>(seen().size()) < attentions) seen().resize(attentions);
  }

  int64_t size(int64_t value) const {
    TORCH_CHECK(value >= 0 && value < static_cast<int64_t>(sizes_.size()), "a program reads the value ", value, ", which is not there yet");
    return sizes_[value];
  }

  int64_t last_value() const { return static_cast<int64_t>(sizes_.size()) - 1; }

  // `given` are the values that are wanted, where they shall lie; others lie in memory that outlives the call.
  void run(const std::vector<const Tensor*>& tensors, const std::vector<std::pair<int64_t, void*>>& given, bool is_new_step) {
    uint32_t *memory = scratch_words<Scratch::rows>(stage_words_), *values = scratch_words<Scratch::values>(value_words_);
    data_.clear(), biases_.clear(), packed_.clear(), quantised_.clear(), attentions_.clear(), norms_.clear();
    for (const Tensor* tensor : tensors) data_.push_back(tensor ? tensor->const_data_ptr() : nullptr);
    for (const int64_t place : places_) data_.push_back(values + place);
    for (const auto& [value, place] : given) data_[value] = place;
    Stages stages;
    int64_t value = tensors.size(), attention = 0;
    read_program(
        program_,
        [&](const LinearsCode& code) {
          for (const int64_t read : {code.gate, code.norm}) TORCH_CHECK(read < 0 || size(read) == size(code.input), "a gate and a norm have the size of the input");
          const InputRows<T> input{rows_at(code.input, tensors), {rows_at(code.gate, tensors), code.gelu != 0}, norm_at(code.norm, code, tensors),
                                   rows_, size(code.input)};
          const auto add_to = [&](auto& stage) {
            for (size_t i = 0; i < code.layers.size(); i += 4) {
              const Tensor& packed = tensor_at(code.layers[i], tensors);
              TORCH_CHECK(code.residual < 0 || size(code.residual) == code.layers[i + 2], "a residual has the size of the outputs");
              stage.add(packed, code.layers[i + 3], {nullptr, const_cast<void*>(data_[value++]), bias_at(code.layers[i + 1], tensors),
                                                     rows_at(code.residual, tensors), code.layers[i + 2], std::is_same_v<T, BFloat16>});
            }
            stage.share_out(stages, num_threads_, stages.is_empty());
          };
          code.layers[3] >= 0 ? add_to(quantised_.emplace_back(input, memory)) : add_to(packed_.emplace_back(input, memory));
        },
        [&](const AttentionCode& code) {
          const Tensor &keys = tensor_at(code.key_cache, tensors), &cached = tensor_at(code.value_cache, tensors);
          SeenKeys& sees = seen()[attention++];
          if (is_new_step) {
            sees.look(tensor_at(code.mask, tensors), tensor_at(code.offsets, tensors), keys.size(1), code.window);
            sees.check(rows_, keys.size(1));
          }
          const int64_t d = keys.size(2), heads = size(code.query) / d;
          TORCH_CHECK(keys.sizes() == cached.sizes() && size(code.key) == keys.size(0) * d && size(code.value) == size(code.key) && heads * d == size(code.query) &&
                          heads % keys.size(0) == 0 && (code.cos < 0 || (size(code.cos) == d && size(code.sin) == d)),
                      "keys and values do not have the cache's heads and head size: cache ", keys.sizes());
          const AttentionOf<T> of{nullptr, heads, 0, 0, keys.template const_data_ptr<T>(), cached.template const_data_ptr<T>(), keys.size(0),
                                  keys.size(1), d, code.scale, code.softcap};
          for (const int64_t norm : {code.query_norm, code.key_norm}) TORCH_CHECK(norm < 0 || size(norm) == d, "a norm of heads has their size");
          const HeadTurn<T> turn{norm_at(code.query_norm, code, tensors), norm_at(code.key_norm, code, tensors), rows_at(code.cos, tensors),
                                 rows_at(code.sin, tensors)};
          auto& stage = attentions_.emplace_back(of, sees, rows_, const_cast<T*>(rows_at(code.query, tensors)), rows_at(code.key, tensors),
                                                 rows_at(code.value, tensors), turn, static_cast<T*>(const_cast<void*>(data_[value++])), num_threads_);
          stage.share_out(stages, num_threads_);
        },
        [&](const NormCode& code) {
          for (const int64_t read : {code.norm, code.residual}) TORCH_CHECK(read < 0 || size(read) == size(code.input), "a norm and a residual have the size of the input");
          TORCH_CHECK(code.norm >= 0, "a norm has a weight");
          const InputRows<T> input{rows_at(code.input, tensors), {}, norm_at(code.norm, code, tensors), rows_, size(code.input)};
          const auto& stage = norms_.emplace_back(input, rows_at(code.residual, tensors), static_cast<T*>(const_cast<void*>(data_[value++])));
          stage.share_out(stages, num_threads_, stages.is_empty());
        });
    stages.run(num_threads_);
  }

 private:
  // Lays out what stages give; where nobody reads a value any more, the next of its size lies: a program of several layers
  // takes the memory of one.
  void place_values(size_t num_tensors, const std::vector<std::vector<int64_t>>& reads, const std::vector<size_t>& ends) {
    std::vector<size_t> last(sizes_.size(), 0);  // the stage behind which a value may go
    for (size_t stage = 0, value = num_tensors; stage < ends.size(); ++stage) {
      for (; value < ends[stage]; ++value) last[value] = stage;
      for (const int64_t read : reads[stage])
        if (read >= 0 && read < static_cast<int64_t>(value)) last[read] = stage;
    }
    std::multimap<int64_t, int64_t> free;  // places by their words
    for (size_t stage = 0, value = num_tensors; stage < ends.size(); ++stage) {
      for (; value < ends[stage]; ++value) {
        const int64_t words = words_of(value);
        const auto found = free.find(words);
        places_.push_back(found == free.end() ? std::exchange(value_words_, value_words_ + words) : found->second);
        if (found != free.end()) free.erase(found);
      }
      for (size_t gone = num_tensors; gone < value; ++gone)
        if (last[gone] == stage) free.emplace(words_of(gone), places_[gone - num_tensors]);
    }
  }

  int64_t words_of(size_t value) const { return (rows_ * sizes_[value] * static_cast<int64_t>(sizeof(T)) / 4 + 16) / 16 * 16; }

  static std::vector<SeenKeys>& seen() {
    static thread_local std::vector<SeenKeys> kept;
    return kept;
  }

  static const Tensor& tensor_at(int64_t value, const std::vector<const Tensor*>& tensors) {
    TORCH_CHECK(value >= 0 && value < static_cast<int64_t>(tensors.size()) && tensors[value], "a program reads the tensor ", value, ", which is not given");
    return *tensors[value];
  }

  const T* rows_at(int64_t value, const std::vector<const Tensor*>& tensors) const {
    if (value < 0) return nullptr;
    if (value < static_cast<int64_t>(tensors.size())) {
      const Tensor& tensor = tensor_at(value, tensors);
      TORCH_CHECK(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value && tensor.is_contiguous() && tensor.numel() == rows_ * size(value),
                  "rows of a program are dense and of one dtype and number, not ", tensor.sizes());
    }
    return static_cast<const T*>(data_.at(value));
  }

  template <typename Code>
  NormOf<T> norm_at(int64_t value, const Code& code, const std::vector<const Tensor*>& tensors) const {
    if (value < 0) return {};
    const Tensor& norm = tensor_at(value, tensors);
    TORCH_CHECK(norm.scalar_type() == c10::CppTypeToScalarType<T>::value && norm.is_contiguous(), "a norm has the dtype of the rows");
    return {norm.template const_data_ptr<T>(), code.plus_one != 0, static_cast<float>(code.eps)};
  }

  const float* bias_at(int64_t value, const std::vector<const Tensor*>& tensors) {
    if (value < 0) return nullptr;
    return biases_.emplace_back(tensor_at(value, tensors).to(at::kFloat).contiguous()).template const_data_ptr<float>();
  }

  const Program program_;
  const int64_t rows_, num_threads_;
  std::vector<int64_t> sizes_, places_;  // numbers of a row; where values lie among those that are not given
  int64_t stage_words_ = 0, value_words_ = 0;
  std::vector<const void*> data_;
  std::deque<Tensor> biases_;
  std::deque<PackedStage<T>> packed_;
  std::deque<QuantisedStage<T>> quantised_;
  std::deque<AttentionStage<T>> attentions_;
  std::deque<NormStage<T>> norms_;
};

}  // namespace yggdrasil
