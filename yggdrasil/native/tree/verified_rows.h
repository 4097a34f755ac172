// Select the rows of a pass that verifies a tree, and find the accepted path; the buffers are registered once.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/tensor.h"

namespace yggdrasil {

// W rows hold nodes of a tree of N, parents before children, the root first.
struct VerifiedRows {
  const int64_t *chosen, *root;  // [W] nodes; [1] the root's position
  const int64_t *tree_tokens, *tree_parents, *tree_depths;  // [N]
  const float* scores;           // [N]; a node exists where its score is finite
  const bool* tree_ancestors;    // [N, N]
  int64_t *nodes, *tokens, *parents, *exist, *positions;  // [W]; parents are rows
  bool* ancestors;               // [W, W]
  int64_t* offsets;              // [2]
  const int64_t* choices;        // [W] the target's token after each row
  const float* best;             // [W] its logit
  int64_t* summary;              // [2 + 4W]
  int64_t width, num_nodes;
  std::vector<int64_t> row_of = std::vector<int64_t>(num_nodes, 0);

  bool exists(int64_t row) const { return std::isfinite(scores[nodes[row]]); }

  void select() {
    std::copy(chosen, chosen + width, nodes);
    std::sort(nodes, nodes + width);
    for (int64_t row = 0; row < width; ++row) row_of[nodes[row]] = row;
    for (int64_t row = 0; row < width; ++row) {
      const int64_t node = nodes[row];
      tokens[row] = tree_tokens[node];
      exist[row] = exists(row);
      positions[row] = *root + tree_depths[node];
      parents[row] = row_of[tree_parents[node]];
      for (int64_t other = 0; other < width; ++other) ancestors[row * width + other] = tree_ancestors[node * num_nodes + nodes[other]];
    }
    for (int64_t row = 0; row < width; ++row) row_of[nodes[row]] = 0;
    offsets[0] = offsets[1] = *root;
  }

  // Greedy acceptance, as in ``acceptance/greedy.py``. The summary holds the number of accepted rows, whether their
  // logits are finite, these rows (then the last row's number), the choices after them, all choices and all nodes.
  void accept() {
    int64_t last = 0, deepest = 0;
    for (int64_t row = 0; row < width; ++row) {
      const bool* path = ancestors + row * width;
      int64_t depth = 0;
      bool is_accepted = row == 0 || exists(row);
      for (int64_t other = 0; other < width; ++other) {
        if (!path[other]) continue;
        ++depth;
        is_accepted = is_accepted && (other == 0 || (exists(other) && tokens[other] == choices[parents[other]]));
      }
      if (is_accepted && depth > deepest) last = row, deepest = depth;
    }
    int64_t* accepted = summary + 2;
    int64_t count = 0;
    bool is_finite = true;
    for (int64_t row = 0; row < width; ++row) {
      if (!ancestors[last * width + row]) continue;
      accepted[count++] = row;
      is_finite = is_finite && std::isfinite(best[row]);
    }
    std::fill(accepted + count, accepted + width, width - 1);
    for (int64_t row = 0; row < width; ++row) accepted[width + row] = choices[accepted[row]];
    std::copy(choices, choices + width, accepted + 2 * width);
    std::copy(nodes, nodes + width, accepted + 3 * width);
    summary[0] = count, summary[1] = is_finite;
  }
};

}  // namespace yggdrasil
