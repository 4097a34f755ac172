// Best-first tree growth: nodes and candidates.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

struct Guess {
  double score, edge;
  int64_t serial, parent;
  int64_t token;
  bool operator<(const Guess& other) const {  // the earlier first among equals
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

// Candidates that a drafter has offered and that are not attached, K per node.
class Pool {
 public:
  struct Offer {
    int32_t token;
    double likely;
  };

  Pool(const Tensor& tokens, const Tensor& scores, int64_t nodes)
      : token_(tokens.const_data_ptr<int64_t>()), score_(scores.const_data_ptr<float>()),
        candidates_(tokens.numel() / nodes) {}

  // Returns the candidates below `node`, whose score was `above` when they were offered; none if no drafter has read
  // it.
  std::vector<Offer> offered(int64_t node, double above) const {
    std::vector<Offer> found;
    for (int64_t entry = node * candidates_; entry < (node + 1) * candidates_; ++entry)
      if (std::isfinite(score_[entry])) found.push_back({int32_t(token_[entry]), std::exp(double(score_[entry]) - above)});
    return found;
  }

  // Whether this number of children is all that a drafter keeps of a node's candidates.
  bool is_used_up(size_t children) const { return candidates_ > 1 && int64_t(children) >= candidates_; }

 private:
  const int64_t* token_;
  const float* score_;
  int64_t candidates_;
};

}  // namespace yggdrasil
