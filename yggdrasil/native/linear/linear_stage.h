// Several linear layers over packed weights and the same rows, in two stages: prepare the rows, and multiply them.
//
// All rows of a step use the same instructions, and every output is accumulated over K in a fixed order. A row's result
// is therefore independent of the number of rows.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear/linear_amx.h"
#include "linear/linear_vector.h"
#include "common/threads.h"

namespace yggdrasil {

// Divides rows into tiles, and returns their sizes: up to 32 rows (two AMX blocks), or equal parts of at most
// kVectorRows.
inline std::vector<int64_t> split_rows(int64_t rows, bool is_tiled) {
  std::vector<int64_t> tile_sizes;
  if (is_tiled) {
    for (int64_t row = 0; row < rows; row += 32) tile_sizes.push_back(std::min<int64_t>(32, rows - row));
    return tile_sizes;
  }
  const int64_t tiles = (rows + kVectorRows - 1) / kVectorRows;
  for (int64_t i = 0; i < tiles; ++i) tile_sizes.push_back(rows * (i + 1) / tiles - rows * i / tiles);
  return tile_sizes;
}

// All rows use the same kernel at every width, because AMX and vector kernels round sums differently.
inline void run_rows(const LinearJob& job, std::span<const int64_t> tile_sizes, int64_t begin, int64_t end) {
  int64_t row = 0;
#ifdef YGG_AMX
  if (job.tiled) {
    for (const int64_t rows : tile_sizes) run_amx_panels(job, std::exchange(row, row + rows), rows, begin, end);
    return;
  }
#endif
  while (!tile_sizes.empty()) {
    const auto batch = tile_sizes.first(std::min<size_t>(tile_sizes.size(), kMaxTiles));
    run_panels(job, row, batch, begin, end);
    row = std::accumulate(batch.begin(), batch.end(), row);
    tile_sizes = tile_sizes.subspan(batch.size());
  }
}

// Returns the number of panels that are multiplied with rows at the same time. Work is divided in such pieces, because
// larger ones balance badly: of a layer's 36 panels, two threads would get 12 and 24 in pieces of 12.
inline int64_t panels_together(std::span<const int64_t> tile_sizes, bool is_tiled) {
  return is_tiled || tile_sizes.empty() ? kAmxPanels : panels_at_once(*std::max_element(tile_sizes.begin(), tile_sizes.end()));
}

inline int64_t panels_of(const LinearOutput& output) { return (output.outputs + kPanel - 1) / kPanel; }

// Products of packed weights with rows, divided into pieces: panels that are multiplied with rows at the same time.
class Products {
 public:
  // `shares`, the tiles of the job's rows, must exist when the pieces run.
  void add(const LinearJob& job, std::span<const int64_t> tile_sizes) {
    const int64_t panels = panels_of(job.output), panels_per_piece = panels_together(tile_sizes, job.tiled != nullptr);
    all_.push_back({job, tile_sizes, panels_per_piece});
    first_piece_.push_back(first_piece_.back() + (panels + panels_per_piece - 1) / panels_per_piece);
    panels_ += panels;
  }

  int64_t pieces() const { return first_piece_.back(); }

  int64_t chunks(int64_t num_threads) const {
    constexpr int64_t kMany = 3072;  // from this number of panels on, a thread gets several chunks
    return std::min(pieces(), panels_ < kMany ? num_threads : 4 * num_threads);
  }

  const LinearJob& job(size_t number) const { return all_[number].job; }

  // Runs the pieces [begin, end); adjust(job, number) sets the parts of a job that are known only now.
  template <typename Adjust>
  void run(int64_t begin, int64_t end, const Adjust& adjust) const {
    size_t i = std::upper_bound(first_piece_.begin(), first_piece_.end(), begin) - first_piece_.begin() - 1;
    for (int64_t piece_index = begin, last = 0; piece_index < end; piece_index = last) {
      while (piece_index >= first_piece_[i + 1]) ++i;
      const auto& [product_job, tile_sizes, panels_per_piece] = all_[i];
      const int64_t max_tiles = product_job.tiled ? 1 : kMaxTiles;
      const int64_t max_pieces = static_cast<int64_t>(tile_sizes.size()) > max_tiles ? kPanelsTogether / panels_per_piece : std::numeric_limits<int64_t>::max();
      last = piece_index + std::min(max_pieces, std::min(end, first_piece_[i + 1]) - piece_index);
      LinearJob job = product_job;
      adjust(job, i);
      run_rows(job, tile_sizes, (piece_index - first_piece_[i]) * panels_per_piece, std::min((last - first_piece_[i]) * panels_per_piece, panels_of(job.output)));
    }
  }

 private:
  static constexpr int64_t kPanelsTogether = 12;  // panels that all tiles are multiplied with before the next panels, if there are more tiles than one call takes

  struct Product {
    LinearJob job;
    std::span<const int64_t> tile_sizes;
    int64_t panels_per_piece;  // panels
  };

  std::vector<Product> all_;
  std::vector<int64_t> first_piece_{0};
  int64_t panels_ = 0;
};

// Dtype and layout in which rows are multiplied with packed weights.
template <typename T>
struct PreparedRows {
  using Element = std::conditional_t<kMultipliesPairs, T, float>;

  static bool are_tiled() { return std::is_same_v<T, BFloat16> && has_amx(); }
  static int64_t steps(int64_t inputs) { return std::is_same_v<T, BFloat16> ? inputs / 2 : inputs; }

  // Returns the words of memory for this number of rows and inputs, in whole cache lines.
  static int64_t words(int64_t rows, int64_t inputs) {
    constexpr int64_t kLine = 16;
    return (rows * inputs * static_cast<int64_t>(sizeof(Element)) / 4 + kLine) / kLine * kLine;
  }

  static const uint32_t* words_of(const Tensor& packed) {
    YGG_CHECK(packed.dtype() == dtype_of<T>, "input and packed weights must have one dtype");
    return static_cast<const uint32_t*>(packed.const_data_ptr());
  }

  static LinearJob job(const uint32_t* packed, int64_t panel_steps, const uint32_t* x, const uint32_t* tiled, int64_t rows, int64_t inputs,
                       const LinearOutput& output) {
    return {packed, x, tiled, rows, steps(inputs), kMultipliesPairs ? steps(inputs) : inputs, panel_steps * kPanel, output};
  }
};

template <typename T>
class PackedStage {
 public:
  // Returns the words of memory that preparing this number of rows and inputs takes.
  static int64_t words(int64_t rows, int64_t inputs) {
    return Rows::words(rows, inputs) + (Rows::are_tiled() ? tiled_words(rows, Rows::steps(inputs)) : 0);
  }

  PackedStage(const InputRows<T>& input, uint32_t* memory, SharedArgmax* best = nullptr)
      : input_(input), tile_sizes_(split_rows(input.rows, Rows::are_tiled())), best_(best) {
    if (!uses_input_directly()) prepared_ = reinterpret_cast<Element*>(memory);
    if (Rows::are_tiled()) tiled_ = memory + Rows::words(input.rows, input.inputs);
  }

  PackedStage(const PackedStage&) = delete;  // products_ refers to tile_sizes_

  void add(const Tensor& packed, int64_t, const LinearOutput& output) {
    YGG_CHECK(packed.size(0) == panels_of(output), "weights were not packed for this layer");
    products_.add(Rows::job(Rows::words_of(packed), packed.size(1), words_of(input_), tiled_, input_.rows, input_.inputs, output), tile_sizes_);
  }

  // Sets an object that the stage asks for the addresses of rows, weights and outputs when it runs.
  void use_addresses(const LinearAddresses<T>& places) { addresses_ = &places; }

  // Limits the stage to these panels of its only layer, in ascending order.
  void select(std::span<const int64_t> panels) { selected_ = panels; }

  // `is_first_stage`: no thread has been woken yet, and few rows take less time than waking one.
  void add_stages(Stages& stages, int64_t num_threads, bool is_first_stage) const {
    if (!uses_input_directly() || tiled_) stages.add<&PackedStage::prepare>(*this, input_.rows, is_first_stage && input_.rows < kFewRows ? 1 : num_threads);
    if (!selected_.empty()) {
      stages.add<&PackedStage::multiply_selected>(*this, selected_.size(), num_threads);
      return;
    }
    stages.add<&PackedStage::multiply>(*this, products_.pieces(), products_.chunks(num_threads));
  }

 private:
  using Rows = PreparedRows<T>;
  using Element = typename Rows::Element;

  bool uses_input_directly() const { return std::is_same_v<Element, T> && input_.is_unmodified(); }
  InputRows<T> input_now() const { return addresses_ ? addresses_->input() : input_; }
  const uint32_t* words_of(const InputRows<T>& input) const { return static_cast<const uint32_t*>(uses_input_directly() ? static_cast<const void*>(input.x) : prepared_); }

  void prepare(int64_t begin, int64_t end) const {
    const InputRows<T> input = input_now();
    const int64_t steps = Rows::steps(input.inputs);
    for (int64_t row = begin; row < end; ++row) {
      if (!uses_input_directly()) input.read(row, 0, input.inputs, input.inverse_rms(row), prepared_ + row * input.inputs);
      if (tiled_) tile_row(words_of(input) + row * steps, row, steps, tiled_);
    }
  }

  void multiply(int64_t begin, int64_t end) const {
    with_thread_best(best_, [&](PanelArgmax* best) {
      products_.run(begin, end, [&](LinearJob& job, size_t i) {
        if (addresses_) job.packed = static_cast<const uint32_t*>(addresses_->packed(i)), job.x = words_of(addresses_->input()), job.output = addresses_->output(i);
        job.output.best = best;
      });
    });
  }

  void multiply_selected(int64_t begin, int64_t end) const {
    with_thread_best(best_, [&](PanelArgmax* best) {
      LinearJob job = products_.job(0);
      job.output.best = best;
      for (const int64_t panel : selected_.subspan(begin, end - begin)) run_rows(job, tile_sizes_, panel, panel + 1);
    });
  }

  InputRows<T> input_;
  std::vector<int64_t> tile_sizes_;
  SharedArgmax* best_;
  const LinearAddresses<T>* addresses_ = nullptr;
  Element* prepared_ = nullptr;
  uint32_t* tiled_ = nullptr;
  Products products_;
  std::span<const int64_t> selected_;
};

}  // namespace yggdrasil
