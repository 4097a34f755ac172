// The operators over quantised weights: packing, linear layers, rows of an embedding.
#pragma once

#include <numeric>
#include <vector>

#include "quantised_linear.h"
#include "scratch.h"
#include "threads.h"

namespace yggdrasil {

// Bytes of a pair of panels of a format for so many inputs.
inline int64_t pair_bytes(int64_t format, int64_t inputs) {
  return with_format(format, [&](auto f) { return decltype(f)::groups(inputs) * decltype(f)::kPairGroup; });
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
                                target + panel_place<F>(panel, inputs));
    });
  });
}

// Chunks of inputs that every one of these formats reads: whole groups.
inline int64_t num_chunks(at::IntArrayRef formats, int64_t inputs) {
  int64_t most = 0;
  for (const int64_t format : formats)
    most = std::max(most, with_format(format, [&](auto f) { return decltype(f)::groups(inputs) * decltype(f)::kChunks; }));
  return most;
}

// The rows of x in tiles, one behind the other, a chunk of a tile at a time: chunks share no cache line, rows do.
template <typename T>
struct RoundedInput {
  const T* x;
  int64_t rows, inputs, chunks;
  uint8_t* all;

  int64_t units() const { return (rows + kMostRows - 1) / kMostRows * chunks; }

  void round(int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / chunks * kMostRows, chunk = unit % chunks;
      const int64_t count = std::min(kMostRows, rows - first), m = tile_size(count).rows;
      const T* source = chunk * kChunk < inputs ? x + first * inputs + chunk * kChunk : nullptr;
      round_rows(source, inputs, count, m, all + (first * chunks + chunk * m) * InputChunk::kBytes);
    }
  }
};

// Several layers over one input in one parallel region.
inline std::vector<Tensor> quantised_linears(const Tensor& input, at::TensorList packed, const c10::List<std::optional<Tensor>>& biases,
                                             at::IntArrayRef out_features, at::IntArrayRef formats, int64_t num_threads) {
  constexpr int64_t kTogether = 6;  // pairs that all tiles visit before the next ones: they are read from memory once
  constexpr int64_t kFewRows = 4;   // are rounded sooner than a second thread sees them
  const Tensor x = input.contiguous();
  const bool is_bf16 = x.scalar_type() == at::kBFloat16;
  const int64_t inputs = x.size(-1), rows = x.numel() / inputs;
  TORCH_CHECK(is_bf16 || x.scalar_type() == at::kFloat, "quantised linears take bfloat16 or float32 rows");
  const int64_t chunks = num_chunks(formats, inputs), row_bytes = chunks * InputChunk::kBytes;
  const int64_t most_rows = (rows + kMostRows - 1) / kMostRows * kMostRows;
  auto* rounded = reinterpret_cast<uint8_t*>(scratch_words(most_rows * row_bytes / 4));
  std::vector<Tensor> outputs, bias_floats(packed.size());
  std::vector<QuantisedJob> jobs;
  std::vector<int64_t> first_pair{0};
  for (size_t i = 0; i < packed.size(); ++i) {
    TORCH_CHECK(packed[i].size(0) == num_pairs(out_features[i]) && packed[i].size(1) == pair_bytes(formats[i], inputs), "weights were not packed for this layer");
    auto sizes = x.sizes().vec();
    sizes.back() = out_features[i];
    outputs.push_back(at::empty(sizes, x.options()));
    const std::optional<Tensor> bias = biases.get(i);
    if (bias) bias_floats[i] = bias->to(at::kFloat).contiguous();
    jobs.push_back({packed[i].const_data_ptr<uint8_t>(), formats[i], inputs,
                    {outputs[i].mutable_data_ptr(), bias ? bias_floats[i].const_data_ptr<float>() : nullptr, out_features[i], is_bf16}});
    first_pair.push_back(first_pair.back() + packed[i].size(0));
  }
  const auto multiply = [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first_pair.begin(), first_pair.end(), begin) - first_pair.begin() - 1;
    for (int64_t pair = begin, last = 0; pair < end; pair = last) {
      while (pair >= first_pair[i + 1]) ++i;
      last = std::min({pair + kTogether, end, first_pair[i + 1]});
      for (int64_t row = 0; row < rows; row += kMostRows) {
        const int64_t count = std::min(kMostRows, rows - row);
        const TileSize& size = tile_size(count);
        size.run(jobs[i], rounded + row * row_bytes, size.rows, row, count, pair - first_pair[i], last - first_pair[i]);
      }
    }
  };
  const auto run = [&](const auto* values) {
    const RoundedInput<std::remove_cvref_t<decltype(*values)>> input{values, rows, inputs, chunks, rounded};
    const auto round = [&](int64_t begin, int64_t end) { input.round(begin, end); };
    if (rows >= kFewRows) return parallel_behind(input.units(), round, first_pair.back(), num_threads, multiply);
    input.round(0, input.units());
    parallel(first_pair.back(), num_threads, multiply);
  };
  is_bf16 ? run(x.const_data_ptr<BFloat16>()) : run(x.const_data_ptr<float>());
  return outputs;
}

inline Tensor quantised_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
                               int64_t format, int64_t num_threads) {
  c10::List<std::optional<Tensor>> biases;
  biases.push_back(bias);
  return quantised_linears(input, {packed}, biases, {out_features}, {format}, num_threads)[0];
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
      const uint8_t* panel = packed.const_data_ptr<uint8_t>() + panel_place<decltype(f)>(id[i] / kLanes, inputs);
      unpack_row<decltype(f)>(panel, id[i] % kLanes, inputs, target + i * inputs);
    }
  });
  return rows.to(dtype);
}

}  // namespace yggdrasil
