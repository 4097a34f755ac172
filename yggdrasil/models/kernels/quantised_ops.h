// The operators over quantised weights: packing, linear layers, rows of an embedding.
#pragma once

#include <numeric>
#include <vector>

#include "quantised_tiles.h"
#include "scratch.h"
#include "threads.h"

namespace yggdrasil {

// Bytes of a pair of panels of a format for so many inputs.
inline int64_t pair_bytes(int64_t format, int64_t inputs) {
  return with_format(format, [&](auto f) { return decltype(f)::groups(inputs) * decltype(f)::kGroup; });
}

inline int64_t num_pairs(int64_t outputs) { return (outputs + 2 * kLanes - 1) / (2 * kLanes); }

inline std::vector<int64_t> quantised_shape(const Tensor& rows, int64_t format, int64_t inputs) {
  return {num_pairs(rows.size(0)), pair_bytes(format, inputs)};
}

// rows [N, bytes] as they lie in a file; packed is zeros.
inline void pack_quantised(const Tensor& rows, int64_t format, int64_t inputs, Tensor& packed) {
  with_format(format, [&](auto f) {
    using F = decltype(f);
    const int64_t outputs = rows.size(0), row_bytes = inputs / F::kBlockInputs * F::kRawBytes;
    TORCH_CHECK(inputs % F::kBlockInputs == 0 && rows.size(1) == row_bytes && rows.is_contiguous() && rows.scalar_type() == at::kByte,
                "rows must be the blocks of ", inputs, " inputs");
    TORCH_CHECK(packed.sizes() == at::IntArrayRef(quantised_shape(rows, format, inputs)) && packed.is_contiguous(),
                "packed weights must have the packed shape");
    const uint8_t* source = rows.const_data_ptr<uint8_t>();
    uint8_t* target = packed.mutable_data_ptr<uint8_t>();
    parallel((outputs + kLanes - 1) / kLanes, at::get_num_threads(), [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel)
        pack_quantised_panel<F>(source + panel * kLanes * row_bytes, std::min<int64_t>(kLanes, outputs - panel * kLanes), inputs,
                                panel % 2, target + pair_place<F>(panel, inputs));
    });
  });
}

// Rows in tiles, one behind the other, a chunk of a tile at a time: chunks share no cache line, rows do.
template <typename T>
struct RoundedInput {
  InputRows<T> input;
  int64_t chunks;
  uint8_t* all;

  int64_t units() const { return (input.rows + kMostRows - 1) / kMostRows * chunks; }

  void round(int64_t begin, int64_t end) const {
    float inverses[kMostRows];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / chunks * kMostRows, chunk = unit % chunks;
      const int64_t count = std::min(kMostRows, input.rows - first), m = tile_size(count).rows;
      if (unit == begin || chunk == 0)
        for (int64_t row = 0; row < count; ++row) inverses[row] = input.inverse_rms(first + row);
      round_rows(input, first, count, inverses, m, chunk, all + (first * chunks + chunk * m) * InputChunk::kBytes);
    }
  }
};

// Several layers over one input in one parallel region.
inline std::vector<Tensor> quantised_around(const Tensor& input, const Around& around, at::TensorList packed,
                                            const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features,
                                            at::IntArrayRef formats, int64_t num_threads) {
  constexpr int64_t kNear = 6;  // pairs that all tiles visit before the next ones: they are read from memory once
  const RowsOf x(input, around);
  const int64_t inputs = x.inputs(), rows = x.rows();
  const int64_t chunks = inputs / kChunk, row_bytes = chunks * InputChunk::kBytes;
  const int64_t together = rows > kMostRows ? kNear : std::numeric_limits<int64_t>::max();
  const int64_t most_rows = (rows + kMostRows - 1) / kMostRows * kMostRows;
  auto* rounded = reinterpret_cast<uint8_t*>(scratch_words(most_rows * row_bytes / 4));
  Outputs outputs(x, around, out_features, biases);
  std::vector<QuantisedJob> jobs;
  std::vector<int64_t> first_pair{0};
  for (size_t i = 0; i < packed.size(); ++i) {
    TORCH_CHECK(packed[i].size(0) == num_pairs(out_features[i]) && packed[i].size(1) == pair_bytes(formats[i], inputs), "weights were not packed for this layer");
    jobs.push_back({packed[i].const_data_ptr<uint8_t>(), formats[i], inputs, outputs.of(i)});
    first_pair.push_back(first_pair.back() + packed[i].size(0));
  }
  const auto multiply_for = [&](BestOfPanels* best, int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first_pair.begin(), first_pair.end(), begin) - first_pair.begin() - 1;
    for (int64_t pair = begin, last = 0; pair < end; pair = last) {
      while (pair >= first_pair[i + 1]) ++i;
      last = pair + std::min(together, std::min(end, first_pair[i + 1]) - pair);
      QuantisedJob job = jobs[i];
      job.output.best = best;
      for (int64_t row = 0; row < rows; row += kMostRows) {
        const int64_t count = std::min(kMostRows, rows - row);
        const TileSize& size = tile_size(count);
        size.run(job, rounded + row * row_bytes, size.rows, row, count, pair - first_pair[i], last - first_pair[i]);
      }
    }
  };
  const auto multiply = [&](int64_t begin, int64_t end) {
    outputs.share([&](BestOfPanels* best) { multiply_for(best, begin, end); });
  };
  const auto run = [&](const auto& rows_of_type) {
    const RoundedInput<std::remove_cvref_t<decltype(*rows_of_type.x)>> unrounded{rows_of_type, chunks, rounded};
    const auto round = [&](int64_t begin, int64_t end) { unrounded.round(begin, end); };
    if (rows >= kFewRows) return parallel_behind(unrounded.units(), round, first_pair.back(), num_threads, multiply);
    unrounded.round(0, unrounded.units());
    parallel(first_pair.back(), num_threads, multiply);
  };
  x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
  return outputs.take();
}

inline std::vector<Tensor> quantised_linears(const Tensor& input, const std::optional<Tensor>& gate, const std::optional<Tensor>& norm,
                                             double eps, const std::optional<Tensor>& residual, at::TensorList packed,
                                             const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features,
                                             at::IntArrayRef formats, int64_t num_threads) {
  return quantised_around(input, {gate, norm, eps, residual}, packed, biases, out_features, formats, num_threads);
}

// The greatest output of each row, and its place.
inline std::tuple<Tensor, Tensor> quantised_best(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                                 int64_t out_features, int64_t format, int64_t num_threads) {
  const auto found = quantised_around(input, {.is_best = true}, {packed}, alone(bias), {out_features}, {format}, num_threads);
  return {found[0], found[1]};
}

inline Tensor quantised_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
                               int64_t format, int64_t num_threads) {
  return quantised_around(input, {}, {packed}, alone(bias), {out_features}, {format}, num_threads)[0];
}

// Rows of a packed table, as numbers.
inline Tensor quantised_rows(const Tensor& ids, const Tensor& packed, int64_t format, int64_t inputs, int64_t num_rows, at::ScalarType dtype) {
  auto sizes = ids.sizes().vec();
  sizes.push_back(inputs);
  const Tensor flat = ids.contiguous();
  Tensor rows = at::empty(sizes, packed.options().dtype(at::kFloat));
  const int64_t* id = flat.const_data_ptr<int64_t>();
  float* target = rows.mutable_data_ptr<float>();
  with_format(format, [&](auto f) {
    for (int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK(id[i] >= 0 && id[i] < num_rows, "no row ", id[i], " in a table of ", num_rows);
      const int64_t panel = id[i] / kLanes;
      const uint8_t* pair = packed.const_data_ptr<uint8_t>() + pair_place<decltype(f)>(panel, inputs);
      unpack_row<decltype(f)>(pair, panel % 2, id[i] % kLanes, inputs, target + i * inputs);
    }
  });
  return rows.to(dtype);
}

}  // namespace yggdrasil
