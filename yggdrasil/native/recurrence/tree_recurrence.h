// Linear recurrence with a matrix state along the paths of a tree, for gated delta networks and Mamba-2.
//
// A head's state S [Dk, Dv] is updated by every token: S = S * exp(decay) + key x update. The update is strength *
// value, or with the delta rule strength * (value - exp(decay) * key . S). The output is query . S with the new S; it
// is computed from the old one, exp(decay) * query . S + (query . key) * update, so a node without children has no
// state. Columns of S are independent, so a thread processes a few columns for the whole tree: the text's state is read
// once, and the nodes' states exist only as these columns in the processor's cache. Of each node only its decay and
// strength are stored, and the input of the convolution before the recurrence, from which `commit_states` computes the
// key and the value of accepted nodes again.
//
// Dims: W rows, Hk key heads, Hv value heads (a multiple of Hk), Dk and Dv their sizes, M slots.
#pragma once

#include <cmath>
#include <vector>

#include "common/scratch.h"
#include "recurrence/tree_convolution.h"

namespace yggdrasil {

constexpr int64_t kColumns = 32;  // columns of a state that are processed together for the whole tree
constexpr int64_t kParts = kColumns / 16;

// Assigns buffers for the columns of nodes with children. A buffer is reused after the last child of its node, also by
// that child.
struct ColumnBuffers {
  std::vector<int64_t> of_row;  // -1 without children
  int64_t count = 0;

  explicit ColumnBuffers(Ints parents) : of_row(parents.size(), -1) {
    std::vector<int64_t> num_left(parents.size()), free;
    for (const int64_t parent : parents)
      if (parent >= 0) ++num_left[parent];
    for (size_t row = 0; row < parents.size(); ++row) {
      const bool has_children = num_left[row] > 0;
      if (parents[row] >= 0 && --num_left[parents[row]] == 0) free.push_back(of_row[parents[row]]);
      if (!has_children) continue;
      if (free.empty()) free.push_back(count++);
      of_row[row] = free.back(), free.pop_back();
    }
  }
};

template <typename Number>
float dot(const Number* a, const Number* b, int64_t size) {
  constexpr int64_t kSums = 16;
  float sums[kSums] = {}, sum = 0.0f;
  int64_t i = 0;
  for (; i + kSums <= size; i += kSums)
    for (int64_t j = 0; j < kSums; ++j) sums[j] = multiply_add(to_float(a[i + j]), to_float(b[i + j]), sums[j]);
  for (; i < size; ++i) sums[0] += to_float(a[i]) * to_float(b[i]);
  for (const float partial : sums) sum += partial;
  return sum;
}

// Loads and stores kColumns columns; with Whole = false only the first `count` of them.
template <bool Whole>
struct Columns {
  int64_t count;

  Lanes load(const float* from, int64_t part) const { return Whole ? load16(from + 16 * part) : load_first(from + 16 * part, num_left(part)); }
  void store(float* to, Lanes values, int64_t part) const {
    if (Whole) store16(to + 16 * part, values);
    else store_first(to + 16 * part, values, num_left(part));
  }

 private:
  int64_t num_left(int64_t part) const { return std::clamp<int64_t>(count - 16 * part, 0, 16); }
};

// One token of one head, over kColumns columns of its state; with Whole = false over the first `count` of them.
template <bool Whole>
struct TokenStep {
  const float *key, *query, *value;
  float decay;                       // factor of the state, already exponentiated
  float overlap;                     // query . key
  float strength;
  bool delta;
  float* out;
  Columns<Whole> columns;

  // Reads the state before the token from `from` (row stride `stride`) and writes the state after it to `to` (row
  // stride kColumns). `to` is null if no row needs it, and may equal `from`.
  void run(const float* from, int64_t stride, float* to, int64_t key_size) const {
    const Lanes decay_lanes = broadcast(decay);
    Lanes products[kParts], sum[kParts], added[kParts];
    for (int64_t j = 0; j < kParts; ++j) products[j] = sum[j] = zeros(), added[j] = columns.load(value, j);
    for (int64_t i = 0; i < key_size; ++i)
      for (int64_t j = 0; j < kParts; ++j) {
        const Lanes old = columns.load(from + i * stride, j);
        if (delta) products[j] = fmadd(old, broadcast(key[i]), products[j]);
        sum[j] = fmadd(old, broadcast(query[i]), sum[j]);
      }
    for (int64_t j = 0; j < kParts; ++j) {
      if (delta) added[j] = fmadd(products[j], broadcast(-decay), added[j]);
      added[j] = added[j] * broadcast(strength);
      columns.store(out, fmadd(added[j], broadcast(overlap), sum[j] * decay_lanes), j);
    }
    if (!to) return;
    for (int64_t i = 0; i < key_size; ++i)
      for (int64_t j = 0; j < kParts; ++j) store16(to + i * kColumns + 16 * j, fmadd(broadcast(key[i]), added[j], columns.load(from + i * stride, j) * decay_lanes));
  }
};

// Runs the steps of all rows of the tree on some columns of one head. `state` has the row stride `stride`.
inline void run_columns(Ints parents, const ColumnBuffers& buffers, const float* state, int64_t stride, int64_t key_size, const auto& step_of) {
  const int64_t size = key_size * kColumns;
  auto* memory = reinterpret_cast<float*>(scratch_words<Scratch::columns>(buffers.count * size));
  const auto columns_of = [&](int64_t row) { return buffers.of_row[row] < 0 ? nullptr : memory + buffers.of_row[row] * size; };
  for (int64_t row = 0; row < int64_t(parents.size()); ++row) {
    const int64_t parent = parents[row];
    step_of(row).run(parent < 0 ? state : columns_of(parent), parent < 0 ? stride : kColumns, columns_of(row), key_size);
  }
}

// Sizes of a state [Hv, Dk, Dv], and of the rows' `decays` and `strengths` [M, Hv], all dense and float32.
struct RecurrenceSizes {
  int64_t slots, key_heads, heads, key_size, value_size;

  // `keys` are Hk * Dk.
  RecurrenceSizes(int64_t keys, const Tensor& state, const Tensor& decays, const Tensor& strengths) {
    for (const Tensor* tensor : {&state, &decays, &strengths})
      YGG_CHECK(tensor->dtype() == DType::float32 && tensor->is_contiguous(), "states are dense and float32");
    YGG_CHECK(state.dim() == 3 && decays.dim() == 2, "a state has heads, keys and values");
    slots = decays.size(0), heads = state.size(0), key_size = state.size(1), value_size = state.size(2), key_heads = keys / key_size;
    YGG_CHECK(key_heads > 0 && keys == key_heads * key_size && heads % key_heads == 0 && decays.size(1) == heads &&
                  strengths.sizes() == decays.sizes(),
              "a recurrence of the state ", state.sizes(), " has ", keys, " keys and the decays ", decays.sizes());
  }
};

// L2-normalises a head's query or key of a gated delta network, and multiplies it by `scale`.
template <typename T>
void normalise(const T* from, float scale, int64_t size, float* to) {
  const float factor = 1.0f / std::sqrt(dot(from, from, size) + 1e-6f);
  for (int64_t i = 0; i < size; ++i) to[i] = to_float(from[i]) * factor * scale;
}

// The recurrence of all rows of a tree, in float32. Outputs overwrite the values.
struct TreeRecurrence : RecurrenceSizes {
  TreeSlots tree;
  const ColumnBuffers* buffers;
  bool delta;
  float *query, *keys, *overlaps;     // [W, Hk, Dk] twice; [W, Hk]
  const float* state;                 // [Hv, Dk, Dv]
  float *decays, *strengths, *rows;   // [M, Hv] each, decays as logarithms; [W, Hv, Dv], values, overwritten by outputs

  int64_t units() const { return heads * parts(); }

  // A unit of work is kColumns columns of a head.
  void recur(int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t head = unit / parts(), first = unit % parts() * kColumns;
      const float* columns = state + head * key_size * value_size + first;
      const bool whole = value_size - first >= kColumns;
      if (whole) run_columns(tree.parents, *buffers, columns, value_size, key_size, [&](int64_t row) { return step_of<true>(row, head, first); });
      else run_columns(tree.parents, *buffers, columns, value_size, key_size, [&](int64_t row) { return step_of<false>(row, head, first); });
    }
  }

 private:
  int64_t parts() const { return (value_size + kColumns - 1) / kColumns; }

  template <bool Whole>
  TokenStep<Whole> step_of(int64_t row, int64_t head, int64_t first) const {
    const int64_t slot = tree.slot(row), own_key = head / (heads / key_heads);
    float* values = rows + (row * heads + head) * value_size + first;
    return {keys + (row * key_heads + own_key) * key_size, query + (row * key_heads + own_key) * key_size, values, std::exp(decays[slot * heads + head]),
            overlaps[row * key_heads + own_key], strengths[slot * heads + head], delta, values, {value_size - first}};
  }
};

// Operator: `query` and `key` [W, Hk, Dk], normalised here with the delta rule, `value` [W, Hv, Dv], `decay` (a
// logarithm) and `strength` [W, Hv], `state` [Hv, Dk, Dv]. `decays` and `strengths` [M, Hv] receive those of the rows.
// All float32.
inline void tree_recurrence(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& strength, bool delta,
                            const Tensor& state, const Tensor& decays, const Tensor& strengths, const Tensor& offsets, const Tensor& parents,
                            int64_t num_threads, const Tensor& out) {
  const Tensor q = query.contiguous(), k = key.contiguous(), v = value.contiguous(), g = decay.contiguous(), b = strength.contiguous();
  YGG_CHECK(k.dim() == 3 && q.sizes() == k.sizes(), "a recurrence has the queries ", q.sizes(), " and the keys ", k.sizes());
  const int64_t rows = k.size(0), queries = k.size(1) * k.size(2);
  const RecurrenceSizes sizes(queries, state, decays, strengths);
  const int64_t heads = sizes.heads;
  YGG_CHECK(k.size(2) == sizes.key_size, "a recurrence of keys ", k.sizes(), " has the state ", state.sizes());
  for (const Tensor* tensor : {&g, &b}) YGG_CHECK(tensor->sizes() == Ints({rows, heads}), "a row has a decay and a strength for each head");
  check_result(out, {rows, heads, sizes.value_size}, DType::float32);
  const Tensor dense_parents = parents.contiguous(), dense_offsets = offsets.contiguous();
  const TreeSlots tree(dense_parents, dense_offsets, rows, sizes.slots);
  const ColumnBuffers buffers(tree.parents);
  std::vector<float> memory(rows * (2 * queries + sizes.key_heads));
  const TreeRecurrence all{sizes, tree, &buffers, delta, memory.data(), memory.data() + rows * queries, memory.data() + 2 * rows * queries,
                           state.const_data_ptr<float>(), decays.mutable_data_ptr<float>(), strengths.mutable_data_ptr<float>(),
                           out.mutable_data_ptr<float>()};
  std::copy_n(v.const_data_ptr<float>(), v.numel(), all.rows);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(g.const_data_ptr<float>() + row * heads, heads, all.decays + tree.slot(row) * heads);
    std::copy_n(b.const_data_ptr<float>() + row * heads, heads, all.strengths + tree.slot(row) * heads);
  }
  for (int64_t unit = 0; unit < rows * sizes.key_heads; ++unit) {
    const int64_t size = sizes.key_size, at = unit * size;
    const float *own_query = q.const_data_ptr<float>() + at, *own_key = k.const_data_ptr<float>() + at;
    if (delta) {
      normalise(own_query, 1.0f / std::sqrt(static_cast<float>(size)), size, all.query + at);
      normalise(own_key, 1.0f, size, all.keys + at);
    } else {
      std::copy_n(own_query, size, all.query + at), std::copy_n(own_key, size, all.keys + at);
    }
    all.overlaps[unit] = dot(all.query + at, all.keys + at, size);
  }
  parallel(all.units(), num_threads, [&](int64_t begin, int64_t end) { all.recur(begin, end); });
}

}  // namespace yggdrasil
