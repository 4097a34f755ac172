// Linear recurrence with a matrix state along the paths of a tree, for gated delta networks and Mamba-2.
//
// A head's state S [Dk, Dv] is updated by every token: S = S * exp(decay) + key x update; the output is query . S. The
// update is the value, or with the delta rule beta * (value - key . S). Columns of S are independent, so a thread processes
// a few columns for the whole tree: the text's state is read once, and the nodes' states exist only as these columns in the
// processor's cache. Only the factors key, update and decay of each node are stored; `commit_state` applies those of the
// accepted path to the state. Both use the same operations in the same order, so results equal those of plain steps.
//
// Dims: W rows, Hk key heads, Hv value heads (a multiple of Hk), Dk and Dv their sizes, M slots.
#pragma once

#include <cmath>
#include <vector>

#include "recurrence/tree_convolution.h"

namespace yggdrasil {

constexpr int64_t kColumns = 32;  // of a state that go through the tree together

// Buffers for the columns of nodes, as few as the tree's shape allows: a node's last child takes over its parent's.
struct ColumnBuffers {
  std::vector<int64_t> of_row;
  int64_t count = 0;

  explicit ColumnBuffers(Ints parents) : of_row(parents.size()) {
    std::vector<int64_t> children(parents.size()), free;
    for (const int64_t parent : parents)
      if (parent >= 0) ++children[parent];
    std::vector<int64_t> left = children;
    for (size_t row = 0; row < parents.size(); ++row) {
      const int64_t parent = parents[row];
      if (parent >= 0 && --left[parent] == 0) {
        of_row[row] = of_row[parent];
      } else if (free.empty()) {
        of_row[row] = count++;
      } else {
        of_row[row] = free.back();
        free.pop_back();
      }
      if (!children[row]) free.push_back(of_row[row]);
    }
  }
};

// One token of one head, over `n` columns of its state.
struct TokenStep {
  const float *key, *query, *value;
  float decay;        // a factor
  const float* beta;  // null: no delta rule
  float *update, *out;

  // `from` and `to` may be the same; rows of `from` are `stride` apart, those of `to` kColumns.
  template <int64_t N>
  void run(const float* from, int64_t stride, float* to, int64_t key_size, int64_t given) const {
    const int64_t n = N ? N : given;
    float seen[kColumns] = {}, sum[kColumns] = {}, added[kColumns];
    for (int64_t i = 0; i < key_size; ++i) {
      const float factor = key[i];
      const float* __restrict__ old = from + i * stride;
      float faded[kColumns];
      for (int64_t c = 0; c < n; ++c) faded[c] = old[c] * decay;
      for (int64_t c = 0; c < n; ++c) seen[c] = multiply_add(faded[c], factor, seen[c]);
      std::copy_n(faded, n, to + i * kColumns);
    }
    for (int64_t c = 0; c < n; ++c) added[c] = beta ? (value[c] - seen[c]) * *beta : value[c];
    std::copy_n(added, n, update);
    for (int64_t i = 0; i < key_size; ++i) {
      const float factor = key[i], asked = query[i];
      float next[kColumns];
      std::copy_n(to + i * kColumns, n, next);
      for (int64_t c = 0; c < n; ++c) next[c] = multiply_add(factor, added[c], next[c]);
      for (int64_t c = 0; c < n; ++c) sum[c] = multiply_add(next[c], asked, sum[c]);
      std::copy_n(next, n, to + i * kColumns);
    }
    std::copy_n(sum, n, out);
  }
};

// The columns from `first` on of one head: what each row of the tree adds and gives.
template <int64_t N>
void run_columns(Ints parents, const ColumnBuffers& buffers, const float* state, int64_t key_size, int64_t value_size,
                 int64_t first, const auto& step_of) {
  static thread_local std::vector<float> memory;
  const int64_t size = key_size * kColumns;
  if (int64_t(memory.size()) < buffers.count * size) memory.resize(buffers.count * size);
  for (size_t row = 0; row < parents.size(); ++row) {
    const int64_t parent = parents[row];
    const float* from = parent < 0 ? state + first : memory.data() + buffers.of_row[parent] * size;
    const TokenStep step = step_of(int64_t(row));
    step.run<N>(from, parent < 0 ? value_size : kColumns, memory.data() + buffers.of_row[row] * size, key_size, value_size - first);
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
  const float *query, *beta, *state;  // [W, Hk, Dk]; [W, Hv] or null; [Hv, Dk, Dv]
  const float *keys, *decays;         // [M, Hk, Dk]; [M, Hv], logarithms
  float *updates, *rows;              // [M, Hv, Dv]; [W, Hv, Dv], values that become outputs

  int64_t units() const { return heads * parts(); }

  // Some columns of some heads each.
  void recur(int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t head = unit / parts(), first = unit % parts() * kColumns, group = heads / key_heads;
      const auto step_of = [&](int64_t row) {
        const int64_t slot = tree.slot(row), own = head / group;
        float* values = rows + (row * heads + head) * value_size + first;
        return TokenStep{keys + (slot * key_heads + own) * key_size, query + (row * key_heads + own) * key_size, values,
                         std::exp(decays[slot * heads + head]), beta ? beta + row * heads + head : nullptr,
                         updates + (slot * heads + head) * value_size + first, values};
      };
      const float* own = state + head * key_size * value_size;
      if (value_size - first >= kColumns) run_columns<kColumns>(tree.parents, *buffers, own, key_size, value_size, first, step_of);
      else run_columns<0>(tree.parents, *buffers, own, key_size, value_size, first, step_of);
    }
  }

 private:
  int64_t parts() const { return (value_size + kColumns - 1) / kColumns; }
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
  const TreeRecurrence all{sizes, tree, &buffers, q.const_data_ptr<float>(),
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
