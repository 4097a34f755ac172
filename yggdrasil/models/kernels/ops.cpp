// CPU operators of the static-shape steps: packed linear, tree attention over a static cache, cache row moves.
//
// Two properties matter more than peak rate:
//  * cost follows the weights' bytes for narrow steps (W up to about 16) and the context's real length, never the
//    cache's capacity;
//  * a row's result does not depend on how many rows travel with it. Every output is accumulated over K, and over the
//    keys in order of position, in one fixed order. Verifying a tree of W tokens therefore gives the same bits as W
//    plain steps, which is what makes bf16 output independent of the plan.
//
// Dims: W rows of a step, K inputs, N outputs, P panels of 16 outputs, Hq query heads, Hkv key heads, D head size,
//       S cache capacity, T tree slots.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "attention.h"
#include "attention_matrix.h"
#include "best_token.h"
#include "counts.h"
#include "kept_memory.h"
#include "linear_matrix.h"
#include "linear_vector.h"
#include "package.h"
#include "scratch.h"
#include "shims.h"
#include "threads.h"

namespace {

using namespace yggdrasil;

// ==== packed linear ===================================================================================================

// All rows take the same unit, whatever the width: the two round their sums differently.
void run_rows(const LinearJob& job, int64_t row, int64_t rows, int64_t begin, int64_t end) {
#ifdef YGG_AMX
  if (job.tiled) return run_matrix_panels(job, row, rows, begin, end);
#endif
  kRunners[rows](job, row, begin, end);
}

// Rows that visit a group of panels together: up to two blocks of the matrix unit, or an even share of up to 8.
std::vector<int64_t> row_shares(int64_t rows, bool is_tiled) {
  std::vector<int64_t> shares;
  if (is_tiled) {
    for (int64_t row = 0; row < rows; row += 32) shares.push_back(std::min<int64_t>(32, rows - row));
    return shares;
  }
  const int64_t tiles = (rows + 7) / 8;
  for (int64_t i = 0; i < tiles; ++i) shares.push_back(rows * (i + 1) / tiles - rows * i / tiles);
  return shares;
}

// Words of 32 bits: two bfloat16 or one float32. A tile of 16 x 16 is read by rows and written by columns, so that both
// sides pass through whole cache lines.
void pack_panel(const uint32_t* weight, int64_t outputs, int64_t words, int64_t padded_words, uint32_t* packed) {
  uint32_t tile[kPanel][kPanel];
  for (int64_t first = 0; first < padded_words; first += kPanel) {
    const int64_t count = std::clamp<int64_t>(words - first, 0, kPanel);
    if (outputs < kPanel || count < kPanel) std::memset(tile, 0, sizeof tile);
    for (int64_t j = 0; j < outputs; ++j) std::memcpy(tile[j], weight + j * words + first, count * sizeof(uint32_t));
    for (int64_t i = 0; i < std::min<int64_t>(kPanel, padded_words - first); ++i)
      for (int64_t j = 0; j < kPanel; ++j) packed[(first + i) * kPanel + j] = tile[j][i];
  }
}

bool packs_pairs(const Tensor& weight) { return weight.scalar_type() == at::kBFloat16; }

std::vector<int64_t> packed_shape(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight must be [N, K]");
  const int64_t panels = (weight.size(0) + kPanel - 1) / kPanel, k = weight.size(1);
  if (!packs_pairs(weight)) return {panels, k, kPanel};
  TORCH_CHECK(k % 2 == 0, "packing in pairs needs an even number of inputs");
  return {panels, (k / 2 + kTilePairs - 1) / kTilePairs * kTilePairs, kPanel, 2};
}

void pack_linear(const Tensor& weight, Tensor& packed) {
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

// Panels that all tiles visit before the next ones, so that they are read from memory once.
constexpr int64_t kGroup = 12;

// Several layers over one input in one parallel region.
std::vector<Tensor> packed_around(const Tensor& input, const Around& around, at::TensorList packed,
                                  const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features, int64_t num_threads) {
  const RowsOf x(input, around);
  const int64_t k = x.inputs(), rows = x.rows(), k_steps = x.is_bf16() ? k / 2 : k;
  const bool is_tiled = x.is_bf16() && has_matrix_unit();
  const auto shares = row_shares(rows, is_tiled);
  const auto run = [&](const auto& of_type) {
    using T = std::remove_cvref_t<decltype(*of_type.x)>;
    const bool is_given = of_type.are_given();
    T* made = is_given ? nullptr : reinterpret_cast<T*>(scratch_words<1>(rows * k_steps));
    const auto make = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) of_type.read(row, 0, k, of_type.inverse_rms(row), made + row * k);
    };
    const bool is_behind = !is_given && !is_tiled && rows >= kFewRows;
    if (!is_given && !is_behind) parallel(rows, rows < kFewRows ? 1 : num_threads, make);
    const auto* words = reinterpret_cast<const uint32_t*>(is_given ? of_type.x : made);
    const uint32_t* tiled = is_tiled ? tiled_copy(words, rows, k_steps) : nullptr;
    Outputs outputs(x, around, out_features, biases);
    std::vector<LinearJob> jobs;
    std::vector<int64_t> first_group{0};
    for (size_t i = 0; i < packed.size(); ++i) {
      TORCH_CHECK(packed[i].scalar_type() == x.given().scalar_type(), "input and packed weights must have one dtype");
      jobs.push_back({static_cast<const uint32_t*>(packed[i].const_data_ptr()), words, tiled, rows, k_steps, packed[i].size(1) * kPanel, outputs.of(i)});
      const int64_t panels = (out_features[i] + kPanel - 1) / kPanel;
      first_group.push_back(first_group.back() + (panels + kGroup - 1) / kGroup);
    }
    const auto multiply_for = [&](BestOfPanels* best, int64_t begin, int64_t end) {
      size_t i = std::upper_bound(first_group.begin(), first_group.end(), begin) - first_group.begin() - 1;
      for (int64_t group = begin; group < end; ++group) {
        while (group >= first_group[i + 1]) ++i;
        LinearJob job = jobs[i];
        job.output.best = best;
        const int64_t panel = (group - first_group[i]) * kGroup, panels = (job.output.outputs + kPanel - 1) / kPanel;
        int64_t first = 0;
        for (const int64_t size : shares) {
          run_rows(job, first, size, panel, std::min(panel + kGroup, panels));
          first += size;
        }
      }
    };
    const auto multiply = [&](int64_t begin, int64_t end) {
      outputs.share([&](BestOfPanels* best) { multiply_for(best, begin, end); });
    };
    is_behind ? parallel_behind(rows, make, first_group.back(), num_threads, multiply) : parallel(first_group.back(), num_threads, multiply);
    return outputs.take();
  };
  return x.is_bf16() ? run(x.as<BFloat16>()) : run(x.as<float>());
}

std::vector<Tensor> packed_linears(const Tensor& input, const std::optional<Tensor>& gate, const std::optional<Tensor>& norm, double eps,
                                   const std::optional<Tensor>& residual, at::TensorList packed,
                                   const c10::List<std::optional<Tensor>>& biases, at::IntArrayRef out_features, int64_t num_threads) {
  return packed_around(input, {gate, norm, eps, residual}, packed, biases, out_features, num_threads);
}

// The greatest output of each row, and its place.
std::tuple<Tensor, Tensor> packed_best(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features,
                                       int64_t num_threads) {
  const auto found = packed_around(input, {.is_best = true}, {packed}, alone(bias), {out_features}, num_threads);
  return {found[0], found[1]};
}

Tensor packed_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t out_features, int64_t num_threads) {
  return packed_around(input, {}, {packed}, alone(bias), {out_features}, num_threads)[0];
}

// ==== tree attention ==================================================================================================

Tensor with_dense_rows(const Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

Tensor tree_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                      const Tensor& offsets, const Tensor& tree_mask, double scale, int64_t window, double softcap, int64_t num_threads) {
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  const int64_t context = offsets.const_data_ptr<int64_t>()[0], start = offsets.const_data_ptr<int64_t>()[1];
  const int64_t rows = q.size(2), tree_slots = tree_mask.size(-1), capacity = key_cache.size(1);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(1) == key_cache.size(0) && k.size(3) == key_cache.size(2) &&
                  key_cache.sizes() == value_cache.sizes() && q.size(3) == k.size(3) && q.size(1) % k.size(1) == 0,
              "keys and values do not have the cache's heads and head size: keys ", k.sizes(), ", values ", v.sizes(), ", cache ",
              key_cache.sizes());
  TORCH_CHECK(context >= 0 && start >= context && start + rows <= capacity, "step does not fit the cache: context ", context,
              ", write start ", start, ", width ", rows, ", capacity ", capacity);
  TORCH_CHECK(start + rows - context <= tree_slots, "rows are written outside the tree's slots");

  static thread_local std::vector<std::vector<int64_t>> slots;  // kept: every layer of every step fills them
  static thread_local std::vector<int64_t> first_key;
  if (static_cast<int64_t>(slots.size()) < rows) slots.resize(rows), first_key.resize(rows);
  const bool* mask = tree_mask.const_data_ptr<bool>();
  for (int64_t row = 0; row < rows; ++row) {
    auto& seen = slots[row];
    seen.clear();
    for (int64_t t = 0; t < tree_slots && context + t < capacity; ++t)
      if (mask[row * tree_slots + t]) seen.push_back(context + t);
    // A path's keys lie in order of position, so a window is the last `window` of them.
    const int64_t hidden = window > 0 ? std::max<int64_t>(0, context + static_cast<int64_t>(seen.size()) - window) : 0;
    first_key[row] = std::min(hidden, context);
    if (hidden > context) seen.erase(seen.begin(), seen.begin() + (hidden - context));
  }

  AttentionJob job{};
  job.rows = rows;
  job.query_heads = q.size(1);
  job.group = q.size(1) / key_cache.size(0);
  job.head_dim = q.size(3);
  job.capacity = capacity;
  job.context = context;
  job.context_stride = context + tree_slots;
  job.query_head_stride = q.stride(1);
  job.query_row_stride = q.stride(2);
  job.scale = static_cast<float>(scale);
  job.softcap = static_cast<float>(softcap);
  job.first_key = first_key.data();
  job.slots = &slots;
  Tensor out = at::empty({1, rows, job.query_heads, job.head_dim}, q.options());

  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    write_rows<T>(k, key_cache, start);
    write_rows<T>(v, value_cache, start);
    const bool on_matrix_unit = std::is_same_v<T, BFloat16> && fits_matrix_unit(job.head_dim);
    // Where heads do not share out evenly, groups of rows do, as long as a second group finds the head's cache nearby.
    const bool is_near = 2 * context * job.head_dim * static_cast<int64_t>(sizeof(T)) <= kNearBytes;
    const bool splits = !on_matrix_unit && is_near && num_threads > 1 && job.query_heads % num_threads != 0;
    const int64_t span = on_matrix_unit ? rows : std::min(rows, splits ? kRowGroup : kRowGroup * kRowGroups);
    const int64_t spans = (rows + span - 1) / span;
    const int64_t words = on_matrix_unit ? matrix_words(context + tree_slots, tree_slots, job.head_dim)
                                         : span * (job.head_dim + job.context_stride);
    parallel(job.query_heads * spans, num_threads, [&](int64_t begin, int64_t end) {
      uint32_t* scratch = scratch_words(words);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t head = unit / spans, first_row = unit % spans * span;
        const int64_t offset = head / job.group * capacity * job.head_dim;
        const T* queries = q.const_data_ptr<T>() + head * job.query_head_stride;
        const T* keys = key_cache.const_data_ptr<T>() + offset;
        const T* values = value_cache.const_data_ptr<T>() + offset;
        T* target = out.mutable_data_ptr<T>() + head * job.head_dim;
        if constexpr (std::is_same_v<T, BFloat16>) {
          if (on_matrix_unit) {
            attend_head_matrix(job, queries, keys, values, target, scratch);
            continue;
          }
        }
        auto* sums = reinterpret_cast<float*>(scratch);
        const int64_t count = std::min(span, rows - first_row);
        attend_rows(HeadRows<T>{job, queries, keys, values, first_row, count, sums, sums + span * job.head_dim}, target);
      }
    });
  };
  if (q.scalar_type() == at::kBFloat16) {
    run(static_cast<BFloat16*>(nullptr));
  } else {
    TORCH_CHECK(q.scalar_type() == at::kFloat, "tree_attention serves bfloat16 and float32");
    run(static_cast<float*>(nullptr));
  }
  return out;
}

// ==== candidates =======================================================================================================

// The k greatest values of each row, best first, ties to the lower index. k is small: one pass with a threshold, where
// nearly every block of 16 values is dismissed by one comparison.
std::tuple<Tensor, Tensor> top_candidates(const Tensor& values, int64_t k) {
  const Tensor input = values.contiguous();
  TORCH_CHECK(input.scalar_type() == at::kFloat && input.dim() == 2, "values must be [W, V] float32");
  const int64_t rows = input.size(0), size = input.size(1);
  TORCH_CHECK(k >= 1 && k <= size, "k must be in 1..", size);
  Tensor best = at::empty({rows, k}, input.options()), index = at::empty({rows, k}, input.options().dtype(at::kLong));
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = input.const_data_ptr<float>() + row * size;
    float* top = best.mutable_data_ptr<float>() + row * k;
    int64_t* place = index.mutable_data_ptr<int64_t>() + row * k;
    std::fill(top, top + k, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < k; ++i) place[i] = i;
    const auto offer = [&](int64_t i) {
      int64_t at = k - 1;
      for (; at > 0 && source[i] > top[at - 1]; --at) top[at] = top[at - 1], place[at] = place[at - 1];
      top[at] = source[i], place[at] = i;
    };
    int64_t i = 0;
#ifdef YGG_AVX512
    for (; i + 16 <= size; i += 16) {
      unsigned mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(source + i), _mm512_set1_ps(top[k - 1]), _CMP_GT_OQ);
      for (; mask; mask &= mask - 1) {
        const int64_t candidate = i + __builtin_ctz(mask);
        if (source[candidate] > top[k - 1]) offer(candidate);
      }
    }
#endif
    for (; i < size; ++i)
      if (source[i] > top[k - 1]) offer(i);
  }
  return {best, index};
}

// ==== ranking =========================================================================================================

// Nodes by score, best first, ties to the lower number; and what each prefix should give, the root's 1 included.
void rank_nodes(const Tensor& scores, Tensor& order, Tensor& expected) {
  TORCH_CHECK(scores.scalar_type() == at::kFloat && order.scalar_type() == at::kLong && expected.scalar_type() == at::kFloat &&
                  scores.dim() == 1 && order.sizes() == scores.sizes() && expected.sizes() == scores.sizes(),
              "ranking takes scores [N] float32 and gives order [N] int64 and expected tokens [N] float32");
  const float* score = scores.const_data_ptr<float>();
  int64_t* node = order.mutable_data_ptr<int64_t>();
  std::iota(node, node + order.numel(), 0);
  std::stable_sort(node, node + order.numel(), [score](int64_t a, int64_t b) { return score[a] > score[b]; });
  double sum = 0.0;
  for (int64_t i = 0; i < order.numel(); ++i) expected.mutable_data_ptr<float>()[i] = static_cast<float>(sum += std::exp(score[node[i]]));
}

// ==== commit ==========================================================================================================

void move_rows(at::TensorList caches, at::IntArrayRef source, int64_t destination) {
  // Rows source[i] -> destination + i. Sources ascend and never lie below their destination, so no row is lost.
  const int64_t count = static_cast<int64_t>(source.size());
  for (const Tensor& cache : caches) {
    const int64_t heads = cache.size(0), bytes = cache.size(2) * cache.element_size(), head_bytes = cache.size(1) * bytes;
    char* data = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < count; ++i)
        if (source[i] != destination + i) std::memcpy(data + h * head_bytes + (destination + i) * bytes, data + h * head_bytes + source[i] * bytes, bytes);
  }
}

// ==== layers that repeat ==============================================================================================

// Tensors that units read and write, and where PyTorch describes them: each tensor's and its storage's header.
struct Table {
  std::vector<Tensor> tensors;
  std::vector<std::pair<const char*, const char*>> headers;

  explicit Table(at::TensorList all) : tensors(all.begin(), all.end()) {
    for (const Tensor& tensor : tensors)
      headers.emplace_back(reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl()),
                           reinterpret_cast<const char*>(tensor.storage().unsafeGetStorageImpl()));
  }

  // The headers were read a step ago, and all weights have passed through the caches since.
  void fetch_headers(at::IntArrayRef places) const {
    for (const int64_t place : places) {
      for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(headers[place].first + line);
      for (size_t line = 0; line < sizeof(c10::StorageImpl); line += 64) __builtin_prefetch(headers[place].second + line);
    }
  }
};

// What steps refer to by name or number: packages of one unit each, which last as long as the process, and tables of the
// tensors that units read and write, which belong to whoever keeps them.
struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<torch::inductor::AOTIModelPackageLoader>> units;
  std::unordered_map<int64_t, std::shared_ptr<const Table>> tables;
  int64_t last_table = 0;
};

Registry& registry() {
  static auto* everything = new Registry;  // never destroyed: libraries may be gone by then
  return *everything;
}

void open_unit(std::string name, std::string path) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& unit = all.units[name];
  if (!unit) unit = std::make_unique<torch::inductor::AOTIModelPackageLoader>(path, "model", /*run_single_threaded=*/true);
}

int64_t keep_table(at::TensorList tensors) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables[++all.last_table] = std::make_shared<const Table>(tensors);
  return all.last_table;
}

void drop_table(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables.erase(number);
}

// Runs one unit `count` times; each takes what the one before gave, what all share, and its own places of the table.
// NOTE: a unit writes to its caches, which the schema does not say: no other operator of the graph may use them.
Tensor run_units(std::string name, const Tensor& number, const Tensor& carried, at::TensorList shared,
                 at::IntArrayRef places, int64_t count) {
  torch::inductor::AOTIModelContainerRunner* unit = nullptr;
  std::shared_ptr<const Table> table;
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto package = all.units.find(name);
    const auto tensors = all.tables.find(*number.const_data_ptr<int64_t>());
    TORCH_CHECK(package != all.units.end() && tensors != all.tables.end(), "the unit ", name, " is not open");
    unit = package->second->get_runner(), table = tensors->second;
  }
  const size_t own = places.size() / count;
  Tensor value = carried;
  std::vector<Tensor> inputs;
  table->fetch_headers(places.slice(0, own));
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) table->fetch_headers(places.slice((i + 1) * own, own));
    inputs.clear();
    inputs.reserve(1 + shared.size() + own);
    inputs.push_back(std::move(value));
    inputs.insert(inputs.end(), shared.begin(), shared.end());
    for (const int64_t place : places.slice(i * own, own)) inputs.push_back(table->tensors.at(place));
    value = std::move(unit->boxed_run(std::move(inputs)).at(0));
  }
  return value;
}

// ==== yardstick =======================================================================================================

// Reads every word of a buffer and returns their exclusive or: the fastest that a step could pass over its weights.
int64_t read_words(const Tensor& buffer, int64_t num_threads) {
  constexpr int64_t kBlock = 4096;  // words
  const int64_t count = buffer.nbytes() / sizeof(uint64_t), blocks = (count + kBlock - 1) / kBlock;
  const uint64_t* words = static_cast<const uint64_t*>(buffer.const_data_ptr());
  std::atomic<uint64_t> total{0};
  parallel(blocks, num_threads, [&](int64_t begin, int64_t end) {
    uint64_t lanes[32] = {};
    int64_t i = begin * kBlock;
    const int64_t stop = std::min(end * kBlock, count);
    for (; i + 32 <= stop; i += 32)
      for (int j = 0; j < 32; ++j) lanes[j] ^= words[i + j];
    for (; i < stop; ++i) lanes[0] ^= words[i];
    uint64_t folded = 0;
    for (const uint64_t lane : lanes) folded ^= lane;
    total.fetch_xor(folded);
  });
  return static_cast<int64_t>(total.load());
}

}  // namespace

// ==== what compiled steps call ========================================================================================

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                            int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(packed_linear(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), out_features, num_threads));
  });
}

AOTITorchError aoti_torch_cpu_packed_best(AtenTensorHandle input, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features,
                                          int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give_both(packed_best(tensor_of(input), tensor_of(packed), pointer_to_optional<Tensor>(bias), out_features, num_threads), best, place);
  });
}

AOTITorchError aoti_torch_cpu_packed_linears(AtenTensorHandle input, AtenTensorHandle* gate, AtenTensorHandle* norm, double eps,
                                             AtenTensorHandle* residual, const AtenTensorHandle* packed, int64_t num_packed,
                                             const AtenTensorHandle** biases, int64_t num_biases, const int64_t* out_features,
                                             int64_t num_out_features, int64_t num_threads, ...) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto results = packed_around(tensor_of(input), around_of(gate, norm, eps, residual), tensors_of(packed, num_packed), optional_tensors_of(biases, num_biases),
                                  at::IntArrayRef(out_features, num_out_features), num_threads);
    va_list targets;
    va_start(targets, num_threads);
    give_all(std::move(results), targets);
    va_end(targets);
  });
}

AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle key_cache,
                                             AtenTensorHandle value_cache, AtenTensorHandle offsets, AtenTensorHandle tree_mask, double scale,
                                             int64_t window, double softcap, int64_t num_threads, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(tree_attention(tensor_of(query), tensor_of(key), tensor_of(value), tensor_of(key_cache), tensor_of(value_cache),
                                               tensor_of(offsets), tensor_of(tree_mask), scale, window, softcap, num_threads));
  });
}

AOTITorchError aoti_torch_cpu_best_tokens(AtenTensorHandle logits, int64_t num_threads, AtenTensorHandle* best, AtenTensorHandle* place) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    give_both(best_tokens(tensor_of(logits), num_threads), best, place);
  });
}

[[maybe_unused]] const bool is_installed = (KeptMemory::install(), true);

// Schemas live in kernels/__init__.py, beside the portable implementations.
TORCH_LIBRARY_IMPL(yggdrasil, CPU, m) {
  m.impl("packed_shape", &packed_shape);
  m.impl("pack_linear", &pack_linear);
  m.impl("packed_linear", &packed_linear);
  m.impl("packed_linears", &packed_linears);
  m.impl("packed_best", &packed_best);
  m.impl("tree_attention", &tree_attention);
  m.impl("best_tokens", &best_tokens);
  m.impl("top_candidates", &top_candidates);
  m.impl("rank_nodes", &rank_nodes);
  m.impl("move_rows", &move_rows);
  m.impl("read_words", &read_words);
  m.impl("run_units", &run_units);
}

TORCH_LIBRARY_IMPL(yggdrasil, CompositeExplicitAutograd, m) {
  m.impl("open_unit", &open_unit);
  m.impl("keep_table", &keep_table);
  m.impl("drop_table", &drop_table);
}

TORCH_LIBRARY_FRAGMENT(yggdrasil, m) {
  m.class_<yggdrasil::Package>("Package").def(torch::init<std::string>());
  m.class_<yggdrasil::Run>("Run").def(torch::init<c10::intrusive_ptr<yggdrasil::Package>, std::vector<Tensor>>()).def("run", &yggdrasil::Run::run);
  m.class_<yggdrasil::Counts>("Counts")
      .def(torch::init<int64_t, at::Tensor, at::Tensor, at::Tensor>())
      .def("set_table", &yggdrasil::Counts::set_table)
      .def("forget", &yggdrasil::Counts::forget)
      .def("append", &yggdrasil::Counts::append)
      .def("leave_out_below", &yggdrasil::Counts::leave_out_below)
      .def("evidence", &yggdrasil::Counts::evidence)
      .def("grow", &yggdrasil::Counts::grow)
      .def("fill", &yggdrasil::Counts::fill);
}
