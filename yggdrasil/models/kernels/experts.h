// A mixture of experts: each row goes through the experts that were chosen for it, and the sum of what they give is weighted.
//
// Rows that chose the same expert meet its weights together, once. What an expert gives a row, and the order in which a
// row's experts are added up, that of their numbers, do not depend on who else chose what.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "linear_stage.h"
#include "scratch.h"

namespace yggdrasil {

// Choices that are of the same expert: rows that lie one behind the other among the rows of all choices.
struct Meeting {
  int64_t expert, first, rows, first_tiled;  // as if all before it filled whole tiles
  std::vector<int64_t> shares;
};

// Who chose what: choices are numbered by expert, those of an expert by their place among a row's choices.
class Choices {
 public:
  // chosen [W, K] int64, shares [W, K]. A choice past the last expert is none: so transformers marks what is not here.
  Choices(const Tensor& chosen, const Tensor& shares, int64_t num_experts, bool are_tiled) : rows_(chosen.size(0)), places_(chosen.size(1)) {
    TORCH_CHECK(chosen.scalar_type() == at::kLong && chosen.sizes() == shares.sizes(), "each row chooses as many experts as it has weights for");
    const Tensor experts = chosen.contiguous(), weights = shares.to(at::kFloat).contiguous();
    const int64_t* expert = experts.const_data_ptr<int64_t>();
    std::vector<int64_t> next(num_experts + 1, 0);  // the number of an expert's next choice
    for (int64_t i = 0; i < rows_ * places_; ++i) {
      TORCH_CHECK(expert[i] >= 0 && expert[i] <= num_experts, "expert ", expert[i], " is chosen of ", num_experts);
      ++next[expert[i]];
    }
    for (int64_t e = 0, tiled = 0; e < num_experts; ++e) {
      const int64_t count = std::exchange(next[e], count_);
      if (count == 0) continue;
      meetings_.push_back({e, count_, count, tiled, row_shares(count, are_tiled)});
      count_ += count;
      tiled += (count + kTileRows - 1) / kTileRows * kTileRows;
    }
    row_of_.resize(count_);
    share_of_.resize(count_);
    for (int64_t place = 0; place < places_; ++place)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t i = row * places_ + place;
        if (expert[i] == num_experts) continue;
        const int64_t choice = next[expert[i]]++;
        row_of_[choice] = row;
        share_of_[choice] = weights.const_data_ptr<float>()[i];
      }
    std::vector<int64_t> known(rows_, 0);
    choices_of_.assign(rows_ * places_, -1);
    for (int64_t choice = 0; choice < count_; ++choice) {
      const int64_t row = row_of_[choice];
      choices_of_[row * places_ + known[row]++] = choice;
    }
  }

  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  int64_t row_of(int64_t choice) const { return row_of_[choice]; }
  float share_of(int64_t choice) const { return share_of_[choice]; }
  const std::vector<Meeting>& meetings() const { return meetings_; }
  int64_t rows_tiled() const { return meetings_.empty() ? 0 : meetings_.back().first_tiled + meetings_.back().rows; }

  const Meeting* meeting_of(int64_t choice) const {
    return &*(std::upper_bound(meetings_.begin(), meetings_.end(), choice, [](int64_t one, const Meeting& m) { return one < m.first; }) - 1);
  }

  // Calls body(choice) with the row's, by expert.
  template <typename Function>
  void each_of(int64_t row, const Function& body) const {
    const int64_t* choices = choices_of_.data() + row * places_;
    for (int64_t i = 0; i < places_ && choices[i] >= 0; ++i) body(choices[i]);
  }

 private:
  int64_t rows_, places_, count_ = 0;
  std::vector<Meeting> meetings_;
  std::vector<int64_t> row_of_, choices_of_;  // [choices]; [W, K], -1 behind a row's last
  std::vector<float> share_of_;               // [choices]
};

// One product of every choice: a stage that makes the rows, and one that multiplies them by their experts' weights.
template <typename T>
class ExpertsStage {
 public:
  static int64_t words(const Choices& choices, int64_t inputs) {
    return Met::are_tiled() ? tiled_words(choices.rows_tiled(), Met::steps(inputs)) : Met::words(choices.count(), inputs);
  }

  // `input` has the rows of the step, or those of the choices.
  ExpertsStage(const InputRows<T>& input, const Choices& choices, bool is_by_choice, uint32_t* memory)
      : input_(input), choices_(choices), is_by_choice_(is_by_choice), memory_(memory) {}

  ExpertsStage(const ExpertsStage&) = delete;

  // Of packed [E, M, ...], the number-th of each expert; out [choices, N].
  void add(const Tensor& packed, int64_t number, T* out, int64_t outputs) {
    const int64_t panel_steps = packed.size(3), words = packed.size(2) * panel_steps * kPanel;
    const uint32_t* matrices = Met::words_of(packed);
    for (const Meeting& meeting : choices_.meetings()) {
      const LinearOutput output{nullptr, out + meeting.first * outputs, nullptr, nullptr, outputs, std::is_same_v<T, BFloat16>};
      const uint32_t *x = nullptr, *tiled = nullptr;
      Met::are_tiled() ? tiled = tiled_of(meeting) : x = reinterpret_cast<const uint32_t*>(made() + meeting.first * input_.inputs);
      const uint32_t* matrix = matrices + (meeting.expert * packed.size(1) + number) * words;
      products_.add(Met::job(matrix, panel_steps, x, tiled, meeting.rows, input_.inputs, output), meeting.shares);
    }
  }

  void share_out(Stages& stages, int64_t num_threads, bool is_alone) const {
    stages.add<&ExpertsStage::make>(*this, choices_.count(), is_alone && choices_.count() < kFewRows ? 1 : num_threads);
    stages.add<&ExpertsStage::multiply>(*this, products_.pieces(), products_.chunks(num_threads));
  }

 private:
  using Met = MetRows<T>;
  using Made = typename Met::Made;

  Made* made() const { return reinterpret_cast<Made*>(memory_); }
  uint32_t* tiled_of(const Meeting& meeting) const { return memory_ + tiled_words(meeting.first_tiled, Met::steps(input_.inputs)); }

  void make(int64_t begin, int64_t end) const {
    if (begin == end) return;
    const int64_t inputs = input_.inputs, steps = Met::steps(inputs);
    auto* alone = reinterpret_cast<Made*>(scratch_words(Met::words(1, inputs)));
    const Meeting* meeting = choices_.meeting_of(begin);
    for (int64_t choice = begin; choice < end; ++choice) {
      if (choice == meeting->first + meeting->rows) ++meeting;
      Made* to = Met::are_tiled() ? alone : made() + choice * inputs;
      input_.read(is_by_choice_ ? choice : choices_.row_of(choice), 0, inputs, 1.0f, to);
      if (Met::are_tiled()) tile_row(reinterpret_cast<const uint32_t*>(to), choice - meeting->first, steps, tiled_of(*meeting));
    }
  }

  void multiply(int64_t begin, int64_t end) const { products_.run(begin, end, [](LinearJob&, size_t) {}); }

  InputRows<T> input_;
  const Choices& choices_;
  bool is_by_choice_;
  uint32_t* memory_;
  Products products_;
};

// The weighted sum of what a row's experts give, rounded as transformers does it: each by itself, and after each addition.
template <typename T>
class WeightedSums {
 public:
  // given [choices, H] become their products with the shares.
  WeightedSums(const Choices& choices, T* given, int64_t size, T* out) : choices_(choices), given_(given), size_(size), out_(out) {}

  void share_out(Stages& stages, int64_t num_threads) const { stages.add<&WeightedSums::add_up>(*this, choices_.rows(), num_threads); }

 private:
  void add_up(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      T* to = out_ + row * size_;
      std::fill(to, to + size_, static_cast<T>(0.0f));
      choices_.each_of(row, [&](int64_t choice) {
        T* values = given_ + choice * size_;
        // NOTE: in two loops, or a compiler makes one operation of both, which does not round between them.
        scale(values, choices_.share_of(choice));
        add(to, values);
      });
    }
  }

  [[gnu::noinline]] void scale(T* values, float share) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= size_; k += 16) store16(values + k, load16(values + k) * spread(share));
#endif
    for (; k < size_; ++k) values[k] = static_cast<T>(widen(values[k]) * share);
  }

  [[gnu::noinline]] void add(T* to, const T* values) const {
    int64_t k = 0;
#ifdef YGG_AVX2
    for (; k + 16 <= size_; k += 16) store16(to + k, load16(to + k) + load16(values + k));
#endif
    for (; k < size_; ++k) to[k] = static_cast<T>(widen(to[k]) + widen(values[k]));
  }

  const Choices& choices_;
  T* given_;
  int64_t size_;
  T* out_;
};

// The operator: rows [W, H], chosen [W, K] int64 and shares [W, K]; packed are gate_up [E, 2, ...] of I outputs and down [E, 1, ...]
// of H. Of each choice down(silu(gate(row)) * up(row)), or gelu by tanh.
inline Tensor packed_experts(const Tensor& input, const Tensor& chosen, const Tensor& shares, const Tensor& gate_up, const Tensor& down,
                             int64_t inner_features, bool gelu, int64_t num_threads) {
  const RowsOf x(input, {});
  TORCH_CHECK(input.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == input.size(0), "each row chooses experts");
  const auto is_of = [&](const Tensor& packed, int64_t matrices, int64_t outputs) {
    return packed.is_contiguous() && packed.dim() >= 5 && packed.size(0) == down.size(0) && packed.size(1) == matrices &&
           packed.size(2) == (outputs + kPanel - 1) / kPanel;
  };
  TORCH_CHECK(is_of(gate_up, 2, inner_features) && is_of(down, 1, x.inputs()), "experts are packed one beside the other");
  Tensor out = at::empty(input.sizes(), input.options());
  const auto run = [&]<typename T>(const InputRows<T>& rows) {
    using Stage = ExpertsStage<T>;
    const Choices choices(chosen, shares, down.size(0), MetRows<T>::are_tiled());
    const int64_t count = choices.count(), sizes[] = {inner_features, inner_features, rows.inputs};
    int64_t places[6] = {};  // of both stages' rows, then of what is given
    places[1] = Stage::words(choices, rows.inputs);
    places[2] = places[1] + Stage::words(choices, inner_features);
    for (int i = 0; i < 3; ++i) places[i + 3] = places[i + 2] + MetRows<T>::words(count, sizes[i]);
    uint32_t* memory = scratch_words<Scratch::values>(places[5]);
    const auto given = [&](int i) { return reinterpret_cast<T*>(memory + places[i + 2]); };
    Stage first(rows, choices, /*is_by_choice=*/false, memory);
    first.add(gate_up, 0, given(0), inner_features);
    first.add(gate_up, 1, given(1), inner_features);
    Stage second({given(1), {given(0), gelu}, {}, count, inner_features}, choices, /*is_by_choice=*/true, memory + places[1]);
    second.add(down, 0, given(2), rows.inputs);
    const WeightedSums<T> sums(choices, given(2), rows.inputs, out.mutable_data_ptr<T>());
    Stages stages;
    first.share_out(stages, num_threads, /*is_alone=*/true);
    second.share_out(stages, num_threads, /*is_alone=*/false);
    sums.share_out(stages, num_threads);
    stages.run(num_threads);
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
  return out;
}

}  // namespace yggdrasil
