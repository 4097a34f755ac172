// Linear recurrence with a matrix state along the paths of a tree, for gated delta networks and Mamba-2.
//
// A head's state S [Dk, Dv] is updated by every token: S = S * exp(decay) + key x update. The update is the value, or with
// the delta rule beta * (value - exp(decay) * key . S). The output is query . S with the new S; it is computed from the old
// one, exp(decay) * query . S + (query . key) * update, so a node without children has no state. Columns of S are
// independent, so a thread processes a few columns for the whole tree: the text's state is read once, and the nodes' states
// exist only as these columns in the processor's cache. Only the factors key, update and decay of each node are stored;
// `commit_state` applies those of the accepted path to the state. Both use the same operations in the same order, so results
// equal those of plain steps.
//
// Dims: W rows, Hk key heads, Hv value heads (a multiple of Hk), Dk and Dv their sizes, M slots.
#pragma once

#include <cmath>
#include <vector>

#include "common/scratch.h"
#include "recurrence/tree_convolution.h"

namespace yggdrasil {

constexpr int64_t kColumns = 32;  // of a state that go through the tree together

// Buffers for the columns of nodes with children, as few as the tree's shape allows: a node's last child may take over its
// parent's.
struct ColumnBuffers {
  std::vector<int64_t> of_row;  // -1 without children
  int64_t count = 0;

  explicit ColumnBuffers(Ints parents) : of_row(parents.size(), -1) {
    std::vector<int64_t> left(parents.size()), free;
    for (const int64_t parent : parents)
      if (parent >= 0) ++left[parent];
    for (size_t row = 0; row < parents.size(); ++row) {
      const bool has_children = left[row] > 0;
      if (parents[row] >= 0 && --left[parents[row]] == 0) free.push_back(of_row[parents[row]]);
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
    for (int64_t j = 0; j < kSums; ++j) sums[j] = multiply_add(widen(a[i + j]), widen(b[i + j]), sums[j]);
  for (; i < size; ++i) sums[0] += widen(a[i]) * widen(b[i]);
  for (const float some : sums) sum += some;
  return sum;
}

// One token of one head, over kColumns columns of its state; not `Whole`: over the first `count` of them.
template <bool Whole>
struct TokenStep {
  const float *key, *query, *value;
  float decay;        // a factor
  float overlap;      // query . key
  const float* beta;  // null: no delta rule
  float *update, *out;
  int64_t count;

  // The state before the token is `from`, whose rows are `stride` apart; the state after it goes to `to`, whose rows are
  // kColumns apart. `to` is null if no row follows, and may be `from`.
  void run(const float* from, int64_t stride, float* to, int64_t key_size) const {
    const Lanes fade = spread(decay);
    Lanes seen[kParts], sum[kParts], added[kParts];
    for (int64_t j = 0; j < kParts; ++j) seen[j] = sum[j] = zeros(), added[j] = load(value, j);
    for (int64_t i = 0; i < key_size; ++i)
      for (int64_t j = 0; j < kParts; ++j) {
        const Lanes old = load(from + i * stride, j);
        if (beta) seen[j] = fused(old, spread(key[i]), seen[j]);
        sum[j] = fused(old, spread(query[i]), sum[j]);
      }
    for (int64_t j = 0; j < kParts; ++j) {
      if (beta) added[j] = fused(seen[j], spread(-decay), added[j]) * spread(*beta);
      store(update, added[j], j), store(out, fused(added[j], spread(overlap), sum[j] * fade), j);
    }
    if (!to) return;
    for (int64_t i = 0; i < key_size; ++i)
      for (int64_t j = 0; j < kParts; ++j) store16(to + i * kColumns + 16 * j, fused(spread(key[i]), added[j], load(from + i * stride, j) * fade));
  }

 private:
  static constexpr int64_t kParts = kColumns / 16;

  int64_t left(int64_t part) const { return std::clamp<int64_t>(count - 16 * part, 0, 16); }
  Lanes load(const float* from, int64_t part) const { return Whole ? load16(from + 16 * part) : load_first(from + 16 * part, left(part)); }
  void store(float* to, Lanes values, int64_t part) const {
    if (Whole) store16(to + 16 * part, values);
    else store_first(to + 16 * part, values, left(part));
  }
};

// Some columns of one head: what each row of the tree adds and gives. The rows of `state` are `stride` apart.
inline void run_columns(Ints parents, const ColumnBuffers& buffers, const float* state, int64_t stride, int64_t key_size, const auto& step_of) {
  const int64_t size = key_size * kColumns;
  auto* memory = reinterpret_cast<float*>(scratch_words<Scratch::columns>(buffers.count * size));
  const auto columns_of = [&](int64_t row) { return buffers.of_row[row] < 0 ? nullptr : memory + buffers.of_row[row] * size; };
  for (int64_t row = 0; row < int64_t(parents.size()); ++row) {
    const int64_t parent = parents[row];
    step_of(row).run(parent < 0 ? state : columns_of(parent), parent < 0 ? stride : kColumns, columns_of(row), key_size);
  }
}

// Sizes of a state [Hv, Dk, Dv] and of the factors `keys` [M, Hk, Dk], `updates` [M, Hv, Dv] and `decays` [M, Hv], which are
// dense and float32.
struct RecurrenceSizes {
  int64_t slots, key_heads, heads, key_size, value_size;

  RecurrenceSizes(const Tensor& state, const Tensor& keys, const Tensor& updates, const Tensor& decays) {
    for (const Tensor* tensor : {&state, &keys, &updates, &decays})
      YGG_CHECK(tensor->dtype() == DType::float32 && tensor->is_contiguous(), "states are dense and float32");
    YGG_CHECK(state.dim() == 3 && keys.dim() == 3, "a state has heads, keys and values");
    slots = keys.size(0), key_heads = keys.size(1), heads = state.size(0), key_size = state.size(1), value_size = state.size(2);
    YGG_CHECK(keys.size(2) == key_size && heads % key_heads == 0 && updates.sizes() == Ints({slots, heads, value_size}) &&
                  decays.sizes() == Ints({slots, heads}),
              "a recurrence of the state ", state.sizes(), " has the keys ", keys.sizes(), " and updates ", updates.sizes());
  }
};

// All rows of a tree: their factors are in their slots, and their outputs take the place of their values. All float32.
struct TreeRecurrence : RecurrenceSizes {
  TreeSlots tree;
  const ColumnBuffers* buffers;
  const float *query, *overlaps;      // [W, Hk, Dk]; [W, Hk], with the row's keys
  const float *beta, *state;          // [W, Hv] or null; [Hv, Dk, Dv]
  const float *keys, *decays;         // [M, Hk, Dk]; [M, Hv], logarithms
  float *updates, *rows;              // [M, Hv, Dv]; [W, Hv, Dv], values that become outputs

  int64_t units() const { return heads * parts(); }

  // Some columns of some heads each.
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
    const int64_t slot = tree.slot(row), own = head / (heads / key_heads);
    float* values = rows + (row * heads + head) * value_size + first;
    return {keys + (slot * key_heads + own) * key_size, query + (row * key_heads + own) * key_size, values, std::exp(decays[slot * heads + head]),
            overlaps[row * key_heads + own], beta ? beta + row * heads + head : nullptr, updates + (slot * heads + head) * value_size + first, values, value_size - first};
  }
};

// `query`, `key` [W, Hk, Dk], `value` [W, Hv, Dv], `decay` [W, Hv] (a logarithm), `beta` [W, Hv] or none, `state`
// [Hv, Dk, Dv]; `keys` [M, Hk, Dk], `updates` [M, Hv, Dv] and `decays` [M, Hv] keep the factors. All float32.
inline void tree_recurrence(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& beta,
                            const Tensor& state, const Tensor& keys, const Tensor& updates, const Tensor& decays, const Tensor& offsets,
                            const Tensor& parents, int64_t num_threads, const Tensor& out) {
  const Tensor q = query.contiguous(), k = key.contiguous(), v = value.contiguous(), g = decay.contiguous(), b = beta.contiguous();
  const RecurrenceSizes sizes(state, keys, updates, decays);
  const int64_t rows = k.size(0), heads = sizes.heads;
  YGG_CHECK(k.sizes() == Ints({rows, sizes.key_heads, sizes.key_size}) && q.sizes() == k.sizes(), "a recurrence of keys ", k.sizes(),
            " and values ", v.sizes(), " has the state ", state.sizes());
  check_result(out, {rows, heads, sizes.value_size}, DType::float32);
  const Tensor above = parents.contiguous(), places = offsets.contiguous();
  const TreeSlots tree(above, places, rows, sizes.slots);
  const ColumnBuffers buffers(tree.parents);
  auto *keys_ = keys.mutable_data_ptr<float>(), *decays_ = decays.mutable_data_ptr<float>(), *out_ = out.mutable_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t slot = tree.slot(row), size = sizes.key_heads * sizes.key_size;
    std::copy_n(k.const_data_ptr<float>() + row * size, size, keys_ + slot * size);
    std::copy_n(g.const_data_ptr<float>() + row * heads, heads, decays_ + slot * heads);
  }
  std::copy_n(v.const_data_ptr<float>(), v.numel(), out_);
  std::vector<float> overlaps(rows * sizes.key_heads);
  for (size_t i = 0; i < overlaps.size(); ++i)
    overlaps[i] = dot(q.const_data_ptr<float>() + i * sizes.key_size, k.const_data_ptr<float>() + i * sizes.key_size, sizes.key_size);
  const TreeRecurrence all{sizes, tree, &buffers, q.const_data_ptr<float>(), overlaps.data(),
                           b.defined() ? b.const_data_ptr<float>() : nullptr, state.const_data_ptr<float>(), keys_, decays_,
                           updates.mutable_data_ptr<float>(), out_};
  parallel(all.units(), num_threads, [&](int64_t begin, int64_t end) { all.recur(begin, end); });
}

// The factors in `slots`, a path in order, become the state's.
inline void commit_state(const Tensor& state, const Tensor& keys, const Tensor& updates, const Tensor& decays, const std::vector<int64_t>& slots,
                         int64_t num_threads) {
  const int64_t heads = state.size(0), key_size = state.size(1), value_size = state.size(2), key_heads = keys.size(1), group = heads / key_heads;
  auto* s_ = state.mutable_data_ptr<float>();
  const auto *k_ = keys.const_data_ptr<float>(), *u_ = updates.const_data_ptr<float>(), *g_ = decays.const_data_ptr<float>();
  parallel(heads, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<float> factors(slots.size());
    for (int64_t head = begin; head < end; ++head) {
      for (size_t i = 0; i < slots.size(); ++i) factors[i] = std::exp(g_[slots[i] * heads + head]);
      for (int64_t d = 0; d < key_size; ++d) {
        float* row = s_ + (head * key_size + d) * value_size;
        for (size_t i = 0; i < slots.size(); ++i) {
          const float* update = u_ + (slots[i] * heads + head) * value_size;
          const float key = k_[(slots[i] * key_heads + head / group) * key_size + d];
          for (int64_t c = 0; c < value_size; ++c) {
            const float faded = row[c] * factors[i];
            row[c] = multiply_add(key, update[c], faded);
          }
        }
      }
    }
  });
}

// What the rows in `slots` have added, a path in order, becomes part of the text's states, in every layer.
inline void commit_states(const std::vector<Tensor>& windows, const std::vector<Tensor>& inputs, const std::vector<Tensor>& states,
                          const std::vector<Tensor>& keys, const std::vector<Tensor>& updates, const std::vector<Tensor>& decays, Ints slots,
                          int64_t num_threads) {
  YGG_CHECK(inputs.size() == windows.size() && keys.size() == states.size() && updates.size() == states.size() && decays.size() == states.size(),
            "every state has its factors");
  const std::vector<int64_t> path = slots.vec();
  for (size_t i = 0; i < windows.size(); ++i) {
    for (const int64_t slot : path) YGG_CHECK(0 <= slot && slot < inputs[i].size(0), "there is no slot ", slot);
    commit_window(windows[i], inputs[i], path);
  }
  for (size_t i = 0; i < states.size(); ++i) commit_state(states[i], keys[i], updates[i], decays[i], path, num_threads);
}

}  // namespace yggdrasil
