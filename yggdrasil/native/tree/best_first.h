// Best-first tree growth: nodes and candidates.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

struct OpenNode {
  double score, edge;
  int64_t serial, parent;
  int64_t token;
  bool operator<(const OpenNode& other) const {  // ties: the earlier one first
    return score != other.score ? score < other.score : serial > other.serial;
  }
};

// The buffers of a tree. A node's path includes the node and its ancestors.
struct Nodes {
  int64_t capacity;
  int64_t *token, *parent, *level;
  float *score, *edge;
  bool* path;  // [capacity, capacity]

  Nodes(Tensor& tokens, Tensor& parents, Tensor& depths, Tensor& scores, Tensor& edges,
        Tensor& ancestors)
      : capacity(tokens.numel()), token(tokens.mutable_data_ptr<int64_t>()),
        parent(parents.mutable_data_ptr<int64_t>()), level(depths.mutable_data_ptr<int64_t>()),
        score(scores.mutable_data_ptr<float>()), edge(edges.mutable_data_ptr<float>()),
        path(ancestors.mutable_data_ptr<bool>()) {}

  void put(int64_t node, const OpenNode& open) {
    token[node] = open.token, parent[node] = open.parent;
    level[node] = node ? level[open.parent] + 1 : 0;
    score[node] = float(open.score), edge[node] = float(open.edge);
    bool* row = path + node * capacity;
    if (node) std::copy_n(path + open.parent * capacity, capacity, row);
    else std::fill_n(row, capacity, false);
    row[node] = true;
  }

  void clear(int64_t first) {
    std::fill(score + first, score + capacity, -std::numeric_limits<float>::infinity());
    for (int64_t node = first; node < capacity; ++node) {
      std::fill_n(path + node * capacity, capacity, false);
      path[node * capacity + node] = true;
    }
  }
};

// Candidates of a drafter that are not attached to the tree, K per node.
class Pool {
 public:
  struct PoolEntry {
    int32_t token;
    double probability;
  };

  Pool(const Tensor& tokens, const Tensor& scores, int64_t nodes)
      : token_(tokens.const_data_ptr<int64_t>()), score_(scores.const_data_ptr<float>()),
        per_node_(tokens.numel() / nodes) {}

  // Returns the candidates below `node`, whose score was `parent_score` when they were added; empty if no drafter has
  // read the node.
  std::vector<PoolEntry> candidates_of(int64_t node, double parent_score) const {
    std::vector<PoolEntry> found;
    for (int64_t entry = node * per_node_; entry < (node + 1) * per_node_; ++entry)
      if (std::isfinite(score_[entry])) found.push_back({int32_t(token_[entry]), std::exp(double(score_[entry]) - parent_score)});
    return found;
  }

  // Whether a node with this number of children has no candidates left.
  bool is_exhausted(size_t children) const { return per_node_ > 1 && int64_t(children) >= per_node_; }

 private:
  const int64_t* token_;
  const float* score_;
  int64_t per_node_;
};

}  // namespace yggdrasil
