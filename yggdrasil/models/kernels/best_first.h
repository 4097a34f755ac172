// A tree that is grown best first: its nodes, and what may become one. `drafters/best_first.py` is the same in Python.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace yggdrasil {

struct Guess {
  double score, edge;
  int64_t serial, parent;
  int64_t token;
  bool operator<(const Guess& other) const {  // the earlier first among equals
    return score != other.score ? score < other.score : serial > other.serial;
  }
};

// The buffers of a tree: a node's path holds itself and all above it.
struct Nodes {
  int64_t capacity;
  int64_t *token, *parent, *level;
  float *score, *edge;
  bool* path;  // [capacity, capacity]

  Nodes(at::Tensor& tokens, at::Tensor& parents, at::Tensor& depths, at::Tensor& scores, at::Tensor& edges,
        at::Tensor& ancestors)
      : capacity(tokens.numel()), token(tokens.mutable_data_ptr<int64_t>()),
        parent(parents.mutable_data_ptr<int64_t>()), level(depths.mutable_data_ptr<int64_t>()),
        score(scores.mutable_data_ptr<float>()), edge(edges.mutable_data_ptr<float>()),
        path(ancestors.mutable_data_ptr<bool>()) {}

  void put(int64_t node, const Guess& guess) {
    token[node] = guess.token, parent[node] = guess.parent;
    level[node] = node ? level[guess.parent] + 1 : 0;
    score[node] = float(guess.score), edge[node] = float(guess.edge);
    bool* row = path + node * capacity;
    if (node) std::copy_n(path + guess.parent * capacity, capacity, row);
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

}  // namespace yggdrasil
