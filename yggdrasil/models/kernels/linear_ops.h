// The operators over packed weights: packing, linear layers, several over one input, the greatest output of each row.
//
// All rows of a step take the same unit, and every output is accumulated over K in one fixed order: a row's result does
// not depend on how many rows travel with it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear_matrix.h"
#include "linear_vector.h"
#include "scratch.h"
#include "threads.h"

namespace yggdrasil {

// Rows of tiles: two blocks of the matrix unit, or an even share of up to 8.
inline std::vector<int64_t> row_shares(int64_t rows, bool is_tiled) {
  std::vector<int64_t> shares;
  if (is_tiled) {
    for (int64_t row = 0; row < rows; row += 32) shares.push_back(std::min<int64_t>(32, rows - row));
    return shares;
  }
  const int64_t tiles = (rows + kVectorRows - 1) / kVectorRows;
  for (int64_t i = 0; i < tiles; ++i) shares.push_back(rows * (i + 1) / tiles - rows * i / tiles);
  return shares;
}

// All rows take the same unit, whatever the width: the two round their sums differently.
inline void run_rows(const LinearJob& job, std::span<const int64_t> shares, int64_t begin, int64_t end) {
  int64_t row = 0;
#ifdef YGG_AMX
  if (job.tiled) {
    for (const int64_t rows : shares) run_matrix_panels(job, std::exchange(row, row + rows), rows, begin, end);
    return;
  }
#endif
  while (!shares.empty()) {
    const auto together = shares.first(std::min<size_t>(shares.size(), kTilesAtOnce));
    run_panels(job, row, together, begin, end);
    row = std::accumulate(together.begin(), together.end(), row);
    shares = shares.subspan(together.size());
  }
}

// Words of 32 bits: two bfloat16 or one float32. A tile of 16 x 16 is read by rows and written by columns, so that both
// sides pass through whole cache lines.
inline void pack_panel(const uint32_t* weight, int64_t outputs, int64_t words, int64_t padded_words, uint32_t* packed) {
  uint32_t tile[kPanel][kPanel];
  for (int64_t first = 0; first < padded_words; first += kPanel) {
    const int64_t count = std::clamp<int64_t>(words - first, 0, kPanel);
    if (outputs < kPanel || count < kPanel) std::memset(tile, 0, sizeof tile);
    for (int64_t j = 0; j < outputs; ++j) std::memcpy(tile[j], weight + j * words + first, count * sizeof(uint32_t));
    for (int64_t i = 0; i < std::min<int64_t>(kPanel, padded_words - first); ++i)
      for (int64_t j = 0; j < kPanel; ++j) packed[(first + i) * kPanel + j] = tile[j][i];
  }
}

inline bool packs_pairs(const Tensor& weight) { return weight.scalar_type() == at::kBFloat16; }

inline std::vector<int64_t> packed_shape(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight must be [N, K]");
  const int64_t panels = (weight.size(0) + kPanel - 1) / kPanel, k = weight.size(1);
  if (!packs_pairs(weight)) return {panels, k, kPanel};
  TORCH_CHECK(k % 2 == 0, "packing in pairs needs an even number of inputs");
  return {panels, (k / 2 + kTilePairs - 1) / kTilePairs * kTilePairs, kPanel, 2};
}

inline void pack_linear(const Tensor& weight, Tensor& packed) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kFloat, "weight must be bfloat16 or float32");
  TORCH_CHECK(packed.sizes() == at::IntArrayRef(packed_shape(weight)) && packed.scalar_type() == weight.scalar_type() && packed.is_contiguous(),
              "packed weights must have the packed shape and the dtype of the weight");
  const Tensor rows = weight.contiguous();
  const int64_t outputs = rows.size(0), words = packs_pairs(rows) ? rows.size(1) / 2 : rows.size(1), padded = packed.size(1);
  const auto* source = static_cast<const uint32_t*>(rows.const_data_ptr());
  auto* target = static_cast<uint32_t*>(packed.mutable_data_ptr());
  parallel(packed.size(0), at::get_num_threads(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      pack_panel(source + panel * kPanel * words, std::min<int64_t>(kPanel, outputs - panel * kPanel), words, padded,
                 target + panel * kPanel * padded);
  });
}

// Panels that meet rows at once are shared out together: a layer of 576 outputs has 36 panels, of which two threads would
// get 12 and 24 in pieces of a dozen.
inline int64_t panels_together(std::span<const int64_t> shares, bool is_tiled) {
  return is_tiled || shares.empty() ? kMatrixPanels : panels_at_once(*std::max_element(shares.begin(), shares.end()));
}

// Several layers over one input in one parallel region.
inline std::vector<Tensor> packed_around(const Tensor& input, const Around& around, at::TensorList packed,
                                  const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features, int64_t num_threads) {
  constexpr int64_t kNear = 12;   // panels that all rows visit before the next ones, where too many to meet them at once
  constexpr int64_t kMany = 3072;  // panels, which threads share out in more than a chunk each
  const RowsOf x(input, around);
  const int64_t k = x.inputs(), rows = x.rows(), k_steps = x.is_bf16() ? k / 2 : k, row_words = kMultipliesPairs ? k_steps : k;
  const bool is_tiled = x.is_bf16() && has_matrix_unit();
  const auto shares = row_shares(rows, is_tiled);
  const int64_t piece = panels_together(shares, is_tiled), at_once = is_tiled ? 1 : kTilesAtOnce;
  const int64_t most = static_cast<int64_t>(shares.size()) > at_once ? kNear / piece : std::numeric_limits<int64_t>::max();
  const auto run = [&](const auto& of_type) {
    using Given = std::remove_cvref_t<decltype(*of_type.x)>;
    using T = std::conditional_t<kMultipliesPairs, Given, float>;
    const bool is_given = std::is_same_v<T, Given> && of_type.are_given();
    T* made = is_given ? nullptr : reinterpret_cast<T*>(scratch_words<1>(rows * row_words));
    const auto make = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) of_type.read(row, 0, k, of_type.inverse_rms(row), made + row * k);
    };
    const bool is_behind = !is_given && !is_tiled && rows >= kFewRows;
    if (!is_given && !is_behind) parallel(rows, rows < kFewRows ? 1 : num_threads, make);
    const auto* words = static_cast<const uint32_t*>(is_given ? static_cast<const void*>(of_type.x) : made);
    const uint32_t* tiled = is_tiled ? tiled_copy(words, rows, k_steps) : nullptr;
    Outputs outputs(x, around, out_features, biases);
    std::vector<LinearJob> jobs;
    std::vector<int64_t> first_piece{0};
    for (size_t i = 0; i < packed.size(); ++i) {
      TORCH_CHECK(packed[i].scalar_type() == x.given().scalar_type(), "input and packed weights must have one dtype");
      jobs.push_back({static_cast<const uint32_t*>(packed[i].const_data_ptr()), words, tiled, rows, k_steps, row_words, packed[i].size(1) * kPanel, outputs.of(i)});
      const int64_t panels = (out_features[i] + kPanel - 1) / kPanel;
      first_piece.push_back(first_piece.back() + (panels + piece - 1) / piece);
    }
    const auto multiply_for = [&](BestOfPanels* best, int64_t begin, int64_t end) {
      size_t i = std::upper_bound(first_piece.begin(), first_piece.end(), begin) - first_piece.begin() - 1;
      for (int64_t now = begin, last = 0; now < end; now = last) {
        while (now >= first_piece[i + 1]) ++i;
        last = now + std::min(most, std::min(end, first_piece[i + 1]) - now);
        LinearJob job = jobs[i];
        job.output.best = best;
        const int64_t panels = (job.output.outputs + kPanel - 1) / kPanel;
        run_rows(job, shares, (now - first_piece[i]) * piece, std::min((last - first_piece[i]) * piece, panels));
      }
    };
    const auto multiply = [&](int64_t begin, int64_t end) {
      outputs.share([&](BestOfPanels* best) { multiply_for(best, begin, end); });
    };
    const int64_t pieces = first_piece.back(), much = kMany / piece;
    is_behind ? parallel_behind(rows, make, pieces, num_threads, multiply, much) : parallel(pieces, num_threads, multiply, much);
    return outputs.take();
  };
  return x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
}

inline std::vector<Tensor> packed_linears(const Tensor& input, const std::optional<Tensor>& gate, const std::optional<Tensor>& norm, double eps,
                                   const std::optional<Tensor>& residual, at::TensorList packed,
                                   const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features, int64_t num_threads) {
  return packed_around(input, {gate, norm, eps, residual}, packed, biases, out_features, num_threads);
}

// The greatest output of each row, and its place.
inline std::tuple<Tensor, Tensor> packed_best(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
                                       int64_t num_threads) {
  const auto found = packed_around(input, {.is_best = true}, {packed}, alone(bias), {out_features}, num_threads);
  return {found[0], found[1]};
}

inline Tensor packed_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features, int64_t num_threads) {
  return packed_around(input, {}, {packed}, alone(bias), {out_features}, num_threads)[0];
}

}  // namespace yggdrasil
