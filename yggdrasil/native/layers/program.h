// Executable form of layer bytecode for one step: built once, run for each of the layers that share the bytecode.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "attention/attention_stage.h"
#include "linear/linear_stage.h"
#include "common/norm_stage.h"
#include "layers/program_recurrence.h"
#include "quantised/quantised_stage.h"

namespace yggdrasil {

// A program over rows of dtype T. Between two layers, all threads wait for the one that prepares the next. The stages
// are built once; after that, only the addresses of values change.
template <typename T>
class ProgramRun : public ProgramRecurrence<T> {
  using Base = ProgramRecurrence<T>;
  using typename Base::Needs;
  using Base::rows_, Base::sizes_, Base::data_, Base::at, Base::at_raw, Base::floats_at, Base::result_at, Base::norm_at, Base::tensor_at,
      Base::check_sizes, Base::check_rows, Base::check_floats, Base::check_norms, Base::is_of_rows, Base::num_threads_, Base::stages, Base::memory_,
      Base::needs_of, Base::add;

 public:
  using Base::size;
  // `rows` [..., K] are the input of the first stage, and `tensors` those of the first run. Programs that are prepared
  // at the same time must have different attention numbers, which count from `first_attention`.
  ProgramRun(const Program& program, int64_t rows, const Tensors& tensors, int64_t num_threads, int64_t first_attention = 0)
      : Base(rows, tensors, num_threads), program_(program), first_attention_(first_attention), end_attention_(first_attention) {
    std::vector<Needs> stages;
    read_program(program, [&](const auto& code) {
      stages.push_back(needs_of(code));
      sizes_.insert(sizes_.end(), stages.back().output_sizes.begin(), stages.back().output_sizes.end());
      stage_words_ = std::max(stage_words_, stages.back().words);
      end_attention_ += std::is_same_v<decltype(code), const AttentionCode&>;
    });
    this->assign_memory(tensors.size(), stages);
    if (static_cast<int64_t>(visible_keys().size()) < end_attention_) visible_keys().resize(end_attention_);
  }

  int64_t end_attention() const { return end_attention_; }

  // Allocates the scratch memory of several programs before any of them is prepared: a later allocation may move it.
  void reserve() const { scratch_words<Scratch::rows>(stage_words_), scratch_words<Scratch::values>(this->value_words_); }

  // Checks the tensors, and sets the addresses of all values. `given` has the addresses of requested output values;
  // other values are in scratch memory, which outlives the call.
  void bind(const Tensors& tensors, const std::vector<std::pair<int64_t, void*>>& given) {
    packed_.clear(), quantised_.clear(), attentions_.clear(), norms_.clear(), converted_.clear(), this->clear();
    widened_.assign(tensors.size(), {});
    this->set_addresses(tensors, given);
    memory_ = scratch_words<Scratch::rows>(stage_words_);
    next_attention_ = first_attention_;
    int64_t value = tensors.size();
    read_program(program_, [&](const auto& code) { value += add(code, value, tensors); });
  }

  void run() {
    for (const int64_t value : converted_) {
      const T* from = at(value);
      for (float& number : widened_[value]) number = to_float(*from++);
    }
    this->run_stages();
  }

 private:
  Needs needs_of(const LinearsCode& code) const {
    Needs needs{{code.input, code.gate, code.residual}, {}};
    needs.words = code.layers[3] >= 0 ? QuantisedStage<T>::words(rows_, size(code.input)) : PackedStage<T>::words(rows_, size(code.input));
    for (size_t i = 0; i < code.layers.size(); i += 4) needs.output_sizes.push_back(code.layers[i + 2]);
    return needs;
  }
  Needs needs_of(const AttentionCode& code) const { return {{code.query, code.key, code.value}, {size(code.query) / (code.gated ? 2 : 1)}}; }
  Needs needs_of(const NormCode& code) const { return {{code.input, code.residual}, {size(code.input)}}; }

  static std::deque<VisibleKeys>& visible_keys() {  // a deque, so that references stay valid
    static thread_local std::deque<VisibleKeys> kept;
    return kept;
  }

  // Stages look up the addresses of their inputs and outputs when threads run them. If one thread wrote the addresses
  // into the stages between two layers, each thread would wait for dozens of cache lines of that thread.
  template <typename Stage>
  struct LinearsWork : LinearAddresses<T> {
    const ProgramRun& run;
    LinearsCode code;
    int64_t first;  // number of the first output value
    Stage stage;

    LinearsWork(const ProgramRun& of, const LinearsCode& linears_code, int64_t value, uint32_t* memory)
        : run(of), code(linears_code), first(value), stage(run.input_of(code), memory) {}
    InputRows<T> input() const override { return run.input_of(code); }
    const void* packed(size_t layer) const override { return run.data_[code.layers[4 * layer]]; }
    LinearOutput output(size_t layer) const override { return run.output_of(code, layer, first + layer); }
  };

  struct AttentionWork {
    const ProgramRun& run;
    AttentionCode code;
    AttentionInputs<T> of;
    const VisibleKeys& visible;
    int64_t value;

    void write_keys(int64_t begin, int64_t end) const { run.attention_of(code, of, visible, value).write_keys(begin, end); }
    void attend(int64_t begin, int64_t end) const { run.attention_of(code, of, visible, value).attend(begin, end); }
    void gate(int64_t begin, int64_t end) const { run.attention_of(code, of, visible, value).gate(begin, end); }
  };

  struct NormWork {
    const ProgramRun& run;
    NormCode code;
    int64_t value;

    void write(int64_t begin, int64_t end) const { run.norm_of(code, value).write(begin, end); }
  };

  // Each of these adds a stage whose first output is `value`, and returns its number of outputs.
  int64_t add(const LinearsCode& code, int64_t value, const Tensors& tensors) {
    check(code, tensors);
    code.layers[3] >= 0 ? add(quantised_.emplace_back(*this, code, value, memory_), tensors) : add(packed_.emplace_back(*this, code, value, memory_), tensors);
    return code.layers.size() / 4;
  }

  template <typename Stage>
  void add(LinearsWork<Stage>& work, const Tensors& tensors) {
    const Ints layers = work.code.layers;
    for (size_t i = 0; i < layers.size() / 4; ++i) {
      add_bias(layers[4 * i + 1], layers[4 * i + 2], tensors);
      work.stage.add(tensor_at(layers[4 * i], tensors), layers[4 * i + 3], work.output(i));
    }
    work.stage.use_addresses(work);
    work.stage.add_stages(stages(), num_threads_, stages().is_empty());
  }

  int64_t add(const AttentionCode& code, int64_t value, const Tensors& tensors) {
    const Tensor &keys = tensor_at(code.key_cache, tensors), &values = tensor_at(code.value_cache, tensors);
    check(code, keys, values, tensors);
    VisibleKeys& visible = visible_keys()[next_attention_++];
    visible.read(tensor_at(code.mask, tensors), tensor_at(code.offsets, tensors), keys.size(1), code.window);
    visible.check(rows_, keys.size(1));
    const int64_t d = keys.size(2);
    const AttentionInputs<T> of{nullptr, size(code.query) / d / (code.gated ? 2 : 1), 0, 0, nullptr, nullptr, keys.size(0), keys.size(1), d, code.scale, code.softcap};
    const AttentionWork& work = attentions_.emplace_back(AttentionWork{*this, code, of, visible, value});
    attention_of(code, of, visible, value).add_stages(stages(), work, num_threads_);
    return 1;
  }

  int64_t add(const NormCode& code, int64_t value, const Tensors& tensors) {
    YGG_CHECK(code.norm >= 0, "a norm has a weight");
    check_sizes({code.norm, code.residual}, size(code.input), "a norm and a residual have the size of the input,");
    check_rows({code.input, code.residual}, tensors);
    check_norms({code.norm}, tensors);
    const NormWork& work = norms_.emplace_back(NormWork{*this, code, value});
    norm_of(code, value).add_stages(stages(), work, num_threads_, stages().is_empty());
    return 1;
  }

  // Biases must be float32; others are converted when the program runs.
  void add_bias(int64_t value, int64_t outputs, const Tensors& tensors) {
    if (value < 0) return;
    const Tensor& bias = tensor_at(value, tensors);
    const bool is_float32 = bias.dtype() == DType::float32;
    YGG_CHECK((is_float32 || is_of_rows(bias)) && bias.is_contiguous() && bias.numel() == outputs,
                "a bias has a number an output, in the dtype of the rows or float32, not ", bias.sizes(), " of ", bias.dtype());
    if (!is_float32) converted_.push_back(value), widened_[value].resize(outputs);
  }

  // Build a stage's parameters from the current addresses of its values.
  InputRows<T> input_of(const LinearsCode& code) const {
    return {at(code.input), {at(code.gate), static_cast<Activation>(code.gelu)}, norm_at(code.norm, code.plus_one, code.eps), rows_, size(code.input)};
  }

  LinearOutput output_of(const LinearsCode& code, size_t layer, int64_t value) const {
    const int64_t bias = code.layers[4 * layer + 1];
    const float* bias_data = bias < 0 || widened_[bias].empty() ? floats_at(bias) : widened_[bias].data();
    return {nullptr, result_at(value), bias_data, at(code.residual), code.layers[4 * layer + 2], std::is_same_v<T, BFloat16>,
            static_cast<float>(code.scale)};
  }

  AttentionStage<T> attention_of(const AttentionCode& code, AttentionInputs<T> of, const VisibleKeys& visible, int64_t value) const {
    of.key_cache = at(code.key_cache), of.value_cache = at(code.value_cache), of.sinks = floats_at(code.sinks);
    const RotaryEmbedding<T> turn{norm_at(code.query_norm, code.plus_one, code.eps), norm_at(code.key_norm, code.plus_one, code.eps), {static_cast<RotaryLayout>(code.turn), at_raw(code.cos), at_raw(code.sin), code.cos < 0 ? 0 : size(code.cos)}};
    return {of, visible, rows_, static_cast<T*>(result_at(code.query)), at(code.key), at(code.value), turn, code.gated != 0, static_cast<T*>(result_at(value)), num_threads_};
  }

  NormStage<T> norm_of(const NormCode& code, int64_t value) const {
    return {{at(code.input), {}, norm_at(code.norm, code.plus_one, code.eps), rows_, size(code.input)}, at(code.residual), static_cast<T*>(result_at(value))};
  }

  void check(const LinearsCode& code, const Tensors& tensors) const {
    check_sizes({code.gate, code.norm}, size(code.input), "a gate and a norm have the size of the input,");
    for (size_t i = 2; i < code.layers.size(); i += 4) check_sizes({code.residual}, code.layers[i], "a residual has the size of the outputs,");
    check_rows({code.input, code.gate, code.residual}, tensors);
    check_norms({code.norm}, tensors);
  }

  void check(const AttentionCode& code, const Tensor& keys, const Tensor& values, const Tensors& tensors) const {
    const int64_t d = keys.size(2), queries = size(code.query) / (code.gated ? 2 : 1), rotated = code.cos < 0 ? 0 : size(code.cos);
    YGG_CHECK(keys.sizes() == values.sizes() && size(code.key) == keys.size(0) * d && size(code.value) == size(code.key) &&
                    queries % size(code.key) == 0 && rotated <= d && rotated % 2 == 0 && (code.sin < 0 || size(code.sin) == rotated),
                "keys and values do not have the cache's heads and head size: cache ", keys.sizes());
    for (const Tensor* cache : {&keys, &values}) YGG_CHECK(is_of_rows(*cache) && cache->is_contiguous(), "a cache is dense and has the dtype of the rows");
    check_sizes({code.query_norm, code.key_norm}, d, "a norm of heads has their size,");
    check_norms({code.query_norm, code.key_norm}, tensors);
    check_sizes({code.sinks}, queries / d, "each query head has a sink,");
    check_floats({code.sinks}, tensors);
    YGG_CHECK(code.turn >= 0 && code.turn <= 2, "attention turns in no way ", code.turn);
    check_rows({code.query, code.key, code.value}, tensors);
    if (code.turn == 0) return check_rows({code.cos, code.sin}, tensors);
    check_floats({code.cos, code.sin}, tensors, rows_);
  }

  const Program program_;
  const int64_t first_attention_;
  int64_t end_attention_, next_attention_ = 0, stage_words_ = 0;
  std::vector<int64_t> converted_;              // bf16 biases, converted when the program runs
  std::vector<std::vector<float>> widened_;  // converted biases, by value
  std::deque<LinearsWork<PackedStage<T>>> packed_;
  std::deque<LinearsWork<QuantisedStage<T>>> quantised_;
  std::deque<AttentionWork> attentions_;
  std::deque<NormWork> norms_;
};

}  // namespace yggdrasil
