// Executable form of layer bytecode for one step: built once, run for each of the layers that share the bytecode.
#pragma once

#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "attention/attention_stage.h"
#include "linear/linear_stage.h"
#include "common/norm_stage.h"
#include "layers/program_code.h"
#include "quantised/quantised_stage.h"

namespace yggdrasil {

// A program over rows of dtype T. Between two units all threads wait for the one that lays out the next: once stages are
// there, only the places of values change.
template <typename T>
class ProgramRun {
 public:
  // `rows` [..., K] are what the first stage reads, `tensors` those of the first run.
  // Programs that are laid out at one time have no attention of one number, counted from `first_attention`.
  ProgramRun(const Program& program, int64_t rows, const std::vector<const Tensor*>& tensors, int64_t num_threads, int64_t first_attention = 0)
      : program_(program), rows_(rows), num_threads_(num_threads), first_attention_(first_attention) {
    for (const Tensor* tensor : tensors) sizes_.push_back(size_of(tensor));
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
    end_attention_ = first_attention_ + attentions;
    if (static_cast<int64_t>(seen().size()) < end_attention_) seen().resize(end_attention_);
  }

  int64_t size(int64_t value) const {
    YGG_CHECK(value >= 0 && value < static_cast<int64_t>(sizes_.size()), "a program reads the value ", value, ", which is not there yet");
    return sizes_[value];
  }

  int64_t end_attention() const { return end_attention_; }

  // Asks for the memory of several programs before any is laid out: asking again may move it.
  void reserve() const { scratch_words<Scratch::rows>(stage_words_), scratch_words<Scratch::values>(value_words_); }

  int64_t last_value() const { return static_cast<int64_t>(sizes_.size()) - 1; }

  // Lays the stages out over these tensors and checks them. `given` are the values that are wanted, where they shall lie;
  // others lie in memory that outlives the call.
  void lay_out(const std::vector<const Tensor*>& tensors, const std::vector<std::pair<int64_t, void*>>& given) {
    uint32_t *memory = scratch_words<Scratch::rows>(stage_words_), *values = scratch_words<Scratch::values>(value_words_);
    data_.clear(), packed_.clear(), quantised_.clear(), attentions_.clear(), norms_.clear(), stages_.clear(), narrow_.clear();
    widened_.assign(tensors.size(), {});
    for (size_t i = 0; i < tensors.size(); ++i) {
      YGG_CHECK(size_of(tensors[i]) == sizes_[i], "layers that repeat have tensors of one size");
      data_.push_back(tensors[i] ? tensors[i]->const_data_ptr() : nullptr);
    }
    for (const int64_t place : places_) data_.push_back(values + place);
    for (const auto& [value, place] : given) data_[value] = place;
    int64_t value = tensors.size(), attention = first_attention_;
    read_program(
        program_,
        [&](const LinearsCode& code) {
          check(code, tensors);
          code.layers[3] >= 0 ? add(quantised_.emplace_back(*this, code, value, memory), tensors) : add(packed_.emplace_back(*this, code, value, memory), tensors);
          value += code.layers.size() / 4;
        },
        [&](const AttentionCode& code) { add(code, seen()[attention++], value++, tensors); }, [&](const NormCode& code) { add(code, value++, tensors); });
  }

  // Lets a value lie elsewhere, in memory of the same size and dtype.
  void place(int64_t value, const void* data) { data_[value] = data; }

  void run() {
    for (const int64_t value : narrow_) {
      const T* from = at(value);
      for (float& number : widened_[value]) number = widen(*from++);
    }
    stages_.run(num_threads_);
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

  static std::deque<SeenKeys>& seen() {  // whose places stay where they are
    static thread_local std::deque<SeenKeys> kept;
    return kept;
  }

  static const Tensor& tensor_at(int64_t value, const std::vector<const Tensor*>& tensors) {
    YGG_CHECK(value >= 0 && value < static_cast<int64_t>(tensors.size()) && tensors[value], "a program reads the tensor ", value, ", which is not given");
    return *tensors[value];
  }

  // Stages as threads run them: what they read and write is looked up then. Were it written into the stages between two
  // units, each thread would wait for dozens of lines from the cache of the one that wrote.
  template <typename Stage>
  struct LinearsWork : LinearPlaces<T> {
    const ProgramRun& run;
    LinearsCode code;
    int64_t first;  // of the values that it gives
    Stage stage;

    LinearsWork(const ProgramRun& of, const LinearsCode& what, int64_t value, uint32_t* memory)
        : run(of), code(what), first(value), stage(run.input_of(code), memory) {}
    InputRows<T> input() const override { return run.input_of(code); }
    const void* packed(size_t layer) const override { return run.data_[code.layers[4 * layer]]; }
    LinearOutput output(size_t layer) const override { return run.output_of(code, layer, first + layer); }
  };

  struct AttentionWork {
    const ProgramRun& run;
    AttentionCode code;
    AttentionOf<T> of;
    const SeenKeys& sees;
    int64_t value;

    void place(int64_t begin, int64_t end) const { run.attention_of(code, of, sees, value).place(begin, end); }
    void attend(int64_t begin, int64_t end) const { run.attention_of(code, of, sees, value).attend(begin, end); }
  };

  struct NormWork {
    const ProgramRun& run;
    NormCode code;
    int64_t value;

    void write(int64_t begin, int64_t end) const { run.norm_of(code, value).write(begin, end); }
  };

  template <typename Work>
  void add(Work& work, const std::vector<const Tensor*>& tensors) {
    const Ints layers = work.code.layers;
    for (size_t i = 0; i < layers.size() / 4; ++i) {
      add_bias(layers[4 * i + 1], layers[4 * i + 2], tensors);
      work.stage.add(tensor_at(layers[4 * i], tensors), layers[4 * i + 3], work.output(i));
    }
    work.stage.move_to(work);
    work.stage.share_out(stages_, num_threads_, stages_.is_empty());
  }

  void add(const AttentionCode& code, SeenKeys& sees, int64_t value, const std::vector<const Tensor*>& tensors) {
    const Tensor &keys = tensor_at(code.key_cache, tensors), &values = tensor_at(code.value_cache, tensors);
    check(code, keys, values, tensors);
    sees.look(tensor_at(code.mask, tensors), tensor_at(code.offsets, tensors), keys.size(1), code.window);
    sees.check(rows_, keys.size(1));
    const int64_t d = keys.size(2);
    const AttentionOf<T> of{nullptr, size(code.query) / d, 0, 0, nullptr, nullptr, keys.size(0), keys.size(1), d, code.scale, code.softcap};
    const AttentionWork& work = attentions_.emplace_back(AttentionWork{*this, code, of, sees, value});
    attention_of(code, of, sees, value).share_out(stages_, work, num_threads_);
  }

  void add(const NormCode& code, int64_t value, const std::vector<const Tensor*>& tensors) {
    YGG_CHECK(code.norm >= 0, "a norm has a weight");
    for (const int64_t read : {code.norm, code.residual}) YGG_CHECK(read < 0 || size(read) == size(code.input), "a norm and a residual have the size of the input");
    check_rows({code.input, code.residual}, tensors);
    check_norm(code.norm, tensors);
    const NormWork& work = norms_.emplace_back(NormWork{*this, code, value});
    norm_of(code, value).share_out(stages_, work, num_threads_, stages_.is_empty());
  }

  // What is added to sums is float32; biases that are not are widened when the program runs.
  void add_bias(int64_t value, int64_t outputs, const std::vector<const Tensor*>& tensors) {
    if (value < 0) return;
    const Tensor& bias = tensor_at(value, tensors);
    const bool is_wide = bias.dtype() == DType::float32;
    YGG_CHECK((is_wide || is_of_rows(bias)) && bias.is_contiguous() && bias.numel() == outputs,
                "a bias has a number an output, in the dtype of the rows or float32, not ", bias.sizes(), " of ", bias.dtype());
    if (!is_wide) narrow_.push_back(value), widened_[value].resize(outputs);
  }

  // What stages are made of, wherever values lie just now.
  const T* at(int64_t value) const { return value < 0 ? nullptr : static_cast<const T*>(data_.at(value)); }
  const void* at_raw(int64_t value) const { return value < 0 ? nullptr : data_.at(value); }
  void* result_at(int64_t value) const { return const_cast<void*>(data_.at(value)); }
  NormOf<T> norm_at(int64_t value, int64_t plus_one, double eps) const { return {at(value), plus_one == 1, static_cast<float>(eps), plus_one == 2}; }

  InputRows<T> input_of(const LinearsCode& code) const {
    return {at(code.input), {at(code.gate), code.gelu != 0}, norm_at(code.norm, code.plus_one, code.eps), rows_, size(code.input)};
  }

  LinearOutput output_of(const LinearsCode& code, size_t layer, int64_t value) const {
    const int64_t bias = code.layers[4 * layer + 1];
    const float* known = bias < 0 ? nullptr : widened_[bias].empty() ? static_cast<const float*>(data_[bias]) : widened_[bias].data();
    return {nullptr, result_at(value), known, at(code.residual), code.layers[4 * layer + 2], std::is_same_v<T, BFloat16>,
            static_cast<float>(code.scale)};
  }

  AttentionStage<T> attention_of(const AttentionCode& code, AttentionOf<T> of, const SeenKeys& sees, int64_t value) const {
    of.key_cache = at(code.key_cache), of.value_cache = at(code.value_cache);
    const RotaryEmbedding<T> turn{norm_at(code.query_norm, code.plus_one, code.eps), norm_at(code.key_norm, code.plus_one, code.eps), {static_cast<Turn>(code.turn), at_raw(code.cos), at_raw(code.sin)}};
    return {of, sees, rows_, static_cast<T*>(result_at(code.query)), at(code.key), at(code.value), turn, static_cast<T*>(result_at(value)), num_threads_};
  }

  NormStage<T> norm_of(const NormCode& code, int64_t value) const {
    const InputRows<T> input{at(code.input), {}, norm_at(code.norm, code.plus_one, code.eps), rows_, size(code.input)};
    return {input, at(code.residual), static_cast<T*>(result_at(value))};
  }

  void check(const LinearsCode& code, const std::vector<const Tensor*>& tensors) const {
    for (const int64_t read : {code.gate, code.norm}) YGG_CHECK(read < 0 || size(read) == size(code.input), "a gate and a norm have the size of the input");
    for (size_t i = 2; i < code.layers.size(); i += 4)
      YGG_CHECK(code.residual < 0 || size(code.residual) == code.layers[i], "a residual has the size of the outputs");
    check_rows({code.input, code.gate, code.residual}, tensors);
    check_norm(code.norm, tensors);
  }

  void check(const AttentionCode& code, const Tensor& keys, const Tensor& values, const std::vector<const Tensor*>& tensors) const {
    const int64_t d = keys.size(2), heads = size(code.query) / d;
    YGG_CHECK(keys.sizes() == values.sizes() && size(code.key) == keys.size(0) * d && size(code.value) == size(code.key) && heads * d == size(code.query) &&
                    heads % keys.size(0) == 0 && (code.cos < 0 || (size(code.cos) == d && size(code.sin) == d)),
                "keys and values do not have the cache's heads and head size: cache ", keys.sizes());
    for (const Tensor* cache : {&keys, &values}) YGG_CHECK(is_of_rows(*cache) && cache->is_contiguous(), "a cache is dense and has the dtype of the rows");
    for (const int64_t norm : {code.query_norm, code.key_norm}) {
      YGG_CHECK(norm < 0 || size(norm) == d, "a norm of heads has their size");
      check_norm(norm, tensors);
    }
    YGG_CHECK(code.turn >= 0 && code.turn <= 2, "attention turns in no way ", code.turn);
    check_rows({code.query, code.key, code.value}, tensors);
    if (code.turn == 0) return check_rows({code.cos, code.sin}, tensors);
    for (const int64_t value : {code.cos, code.sin}) {
      const Tensor& turn = tensor_at(value, tensors);
      YGG_CHECK(turn.dtype() == DType::float32 && turn.is_contiguous() && turn.numel() == rows_ * d, "cos and sin of this turn are float32, not ", turn.dtype());
    }
  }

  void check_rows(std::initializer_list<int64_t> values, const std::vector<const Tensor*>& tensors) const {
    for (const int64_t value : values) {
      if (value < 0 || value >= static_cast<int64_t>(tensors.size())) continue;
      const Tensor& tensor = tensor_at(value, tensors);
      YGG_CHECK(is_of_rows(tensor) && tensor.is_contiguous() && tensor.numel() == rows_ * size(value),
                  "rows of a program are dense and of one dtype and number, not ", tensor.sizes());
    }
  }

  void check_norm(int64_t value, const std::vector<const Tensor*>& tensors) const {
    if (value < 0) return;
    const Tensor& norm = tensor_at(value, tensors);
    YGG_CHECK(is_of_rows(norm) && norm.is_contiguous() && norm.numel() == size(value), "a norm has the dtype of the rows");
  }

  static bool is_of_rows(const Tensor& tensor) { return tensor.dtype() == dtype_of<T>; }
  static int64_t size_of(const Tensor* tensor) { return tensor && tensor->dim() > 0 ? tensor->size(-1) : 0; }

  const Program program_;
  const int64_t rows_, num_threads_, first_attention_;
  int64_t end_attention_ = 0;
  std::vector<int64_t> sizes_, places_;  // numbers of a row; where values lie among those that are not given
  int64_t stage_words_ = 0, value_words_ = 0;
  std::vector<const void*> data_;
  std::vector<int64_t> narrow_;              // biases that are not float32
  std::vector<std::vector<float>> widened_;  // of these, by value
  std::deque<LinearsWork<PackedStage<T>>> packed_;
  std::deque<LinearsWork<QuantisedStage<T>>> quantised_;
  std::deque<AttentionWork> attentions_;
  std::deque<NormWork> norms_;
  Stages stages_;
};

}  // namespace yggdrasil
