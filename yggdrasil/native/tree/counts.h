// Trees drafted from n-gram counts (features.h), grown best first: nodes are in descending order of score, so the first
// n are the best tree of n nodes. Also extends a tree that a drafter has grown by nodes from counts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "tree/best_first.h"
#include "tree/draws.h"
#include "tree/features.h"

namespace yggdrasil {

constexpr int64_t kBranches = 8;        // most children per node
constexpr double kMaxProbability = 0.98;  // largest sum of the children's probabilities
constexpr double kMinProbability = 1e-6;
constexpr double kMinPathScore = -6.2;  // default of the lowest log-probability of a node, until set from a plan's costs

class Counts {
 public:
  // The weights of the scorer, see `NGramScorer`.
  Counts(const Tensor& counts, const Tensor& totals, const Tensor& bias, const Tensor& out, const Tensor& nothing)
      : features_(NGramScorer(counts, totals, bias, out, nothing)) {}

  void set_table(const Tensor& contexts, const Tensor& continuations) { features_.set_table(contexts, continuations); }

  void forget() { features_.forget(); }

  void append(const std::vector<int64_t>& tokens) { features_.append(tokens); }

  // Returns the tokens that may follow `path` (only its last tokens matter), [n, 1 + 2 K] int64: the token, how often
  // it followed each context, and how often each context was seen.
  std::vector<int64_t> features(const std::vector<int64_t>& path) const {
    CountFeatures::ContextTotals seen;
    const std::vector<Candidate> found = features_.after(path, seen);
    std::vector<int64_t> rows(found.size() * (1 + 2 * kContexts));
    auto row = rows.begin();
    for (const Candidate& each : found) {
      *row++ = each.token;
      row = std::copy(each.counts.begin(), each.counts.end(), row);
      row = std::copy(seen.begin(), seen.end(), row);
    }
    return rows;
  }

  // Sets the lowest log-probability of the path of a grown node.
  void leave_out_below(double score) { min_path_score_ = score; }

  // Sets the draws of the target by which candidates of later trees are reweighed; `noise` 0: they are not.
  void follow_draws(int64_t key, double noise, double others) { draws_ = Draws(key, noise, others); }

  // Registers the buffers of N nodes in which later trees are grown, and the mailbox.
  void grow_in(Tensor tokens, Tensor parents, Tensor depths, Tensor scores, Tensor edges,
               Tensor ancestors, Tensor mail) {
    grown_buffers_ = {tokens, parents, depths, scores, edges, ancestors, mail};
  }

  // Appends new committed tokens to the counts, and grows a tree whose root is the text's last token. Returns the
  // tree's size. The mailbox holds the largest depth, the root's position in the request's text, the number of new
  // tokens, and these tokens. Every row of the buffers that a step may read is written.
  int64_t grow() {
    const auto* mail = grown_buffers_.at(6).const_data_ptr<int64_t>();
    const int64_t depth = mail[0];
    Nodes nodes(grown_buffers_[0], grown_buffers_[1], grown_buffers_[2], grown_buffers_[3], grown_buffers_[4], grown_buffers_[5]);
    root_ = mail[1];
    append({mail + 3, mail + 3 + mail[2]});
    YGG_CHECK(!features_.text().empty(), "no text to grow a tree from");
    nodes.put(0, {0.0, 0.0, 0, 0, features_.text().back()});
    std::priority_queue<OpenNode> open;
    int64_t serial = 0;
    if (nodes.capacity > 1) push_children(nodes, 0, 0.0, depth, serial, open);
    return complete(nodes, 1, depth, serial, open);
  }

  // Registers the buffers of N nodes in which trees of a drafter are extended, and the mailbox.
  void fill_in(Tensor tokens, Tensor parents, Tensor depths, Tensor scores, Tensor edges,
               Tensor ancestors, Tensor pool_tokens, Tensor pool_scores, Tensor mail) {
    drafted_buffers_ = {tokens, parents, depths, scores, edges, ancestors, pool_tokens, pool_scores, mail};
  }

  // Extends a tree that a drafter has grown from the text's last token. Returns its size. New nodes fill the free
  // places, below any node. If a drafter has read a node, whose candidates are then in the pool, both estimates are
  // combined, weighted by the sum of their probabilities. Of other equal candidates, the higher estimate is taken. The
  // mailbox holds the largest depth and the root's position in the request's text.
  int64_t fill() {
    YGG_CHECK(!features_.text().empty(), "no text to fill a tree from");
    const auto* mail = drafted_buffers_.at(8).const_data_ptr<int64_t>();
    const int64_t depth = mail[0];
    root_ = mail[1];
    Nodes nodes(drafted_buffers_[0], drafted_buffers_[1], drafted_buffers_[2], drafted_buffers_[3], drafted_buffers_[4], drafted_buffers_[5]);
    const Pool pool(drafted_buffers_[6], drafted_buffers_[7], nodes.capacity);
    int64_t size = nodes.capacity;
    while (size > 1 && !std::isfinite(nodes.score[size - 1])) --size;
    const std::vector<float> drafted(nodes.score, nodes.score + size);
    std::vector<double> edges(size);  // log-probability of each node given its parent
    std::vector<std::vector<int64_t>> children(size);
    for (int64_t node = 1; node < size; ++node) {
      edges[node] = double(drafted[node]) - double(drafted[nodes.parent[node]]);
      if (std::isfinite(drafted[node])) children[nodes.parent[node]].push_back(node);
    }
    std::priority_queue<OpenNode> open;
    std::vector<Candidate> found;
    int64_t serial = 0;
    for (int64_t node = 0; node < size; ++node) {  // parents come first
      if (!std::isfinite(nodes.score[node]) || (node && !std::isfinite(edges[node]))) continue;
      if (node) nodes.score[node] = float(double(nodes.score[nodes.parent[node]]) + edges[node]);
      if (nodes.score[node] < min_path_score_) continue;
      below(nodes, node, found);
      auto pool_entries = pool.candidates_of(node, drafted[node]);
      const bool is_read = !pool_entries.empty() || pool.is_exhausted(children[node].size());
      for (const int64_t child : children[node])  // n-gram statistics may have attached its candidates
        std::erase_if(pool_entries, [&](const Pool::PoolEntry& each) { return each.token == int32_t(nodes.token[child]); });
      const double weight = is_read ? drafter_weight(pool_entries, children[node], edges, found) : 0.0;
      double left = kMaxProbability;
      for (const int64_t child : children[node]) {
        Candidate* same = find(found, int32_t(nodes.token[child]));
        const double counted = same == nullptr ? 0.0 : std::min(same->probability, kMaxProbability), drafted_probability = std::exp(edges[child]);
        const double combined = is_read ? weight * drafted_probability + (1.0 - weight) * counted : std::max(drafted_probability, counted);
        edges[child] = std::log(std::min(combined, kMaxProbability));
        if (same != nullptr) same->probability = 0.0;  // it is attached already
        left -= std::exp(edges[child]);
      }
      for (Candidate& each : found) each.probability *= 1.0 - weight;
      for (const auto& [token, probability] : pool_entries) {
        Candidate* same = find(found, token);
        if (same == nullptr) found.push_back({token, {}, weight * probability});
        else same->probability += weight * probability;
      }
      if (nodes.level[node] < depth) push(nodes, node, nodes.score[node], left, found, serial, open);
    }
    return complete(nodes, size, depth, serial, open);
  }

 private:
  // Attaches the best of `open` and their continuations, until the tree is full or none is left. Returns its size.
  int64_t complete(Nodes& nodes, int64_t size, int64_t depth, int64_t serial,
                   std::priority_queue<OpenNode>& open) const {
    while (size < nodes.capacity && !open.empty()) {
      const OpenNode next = open.top();
      if (next.score < min_path_score_) break;
      open.pop();
      nodes.put(size, next);
      if (size + 1 < nodes.capacity) push_children(nodes, size, next.score, depth, serial, open);
      ++size;
    }
    nodes.clear(size);
    return size;
  }

  void push_children(const Nodes& nodes, int64_t node, double score, int64_t depth, int64_t& serial,
                     std::priority_queue<OpenNode>& open) const {
    if (nodes.level[node] >= depth) return;
    std::vector<Candidate> found;
    below(nodes, node, found);
    push(nodes, node, score, kMaxProbability, found, serial, open);
  }

  void below(const Nodes& nodes, int64_t node, std::vector<Candidate>& found) const {
    features_.below(nodes, node, found);
    draws_.reweigh(found, root_ + nodes.level[node] + 1);
  }

  // Returns the weight of a drafter's probabilities below a node, against those of `found`.
  static double drafter_weight(const std::vector<Pool::PoolEntry>& pool_entries, const std::vector<int64_t>& children,
                         const std::vector<double>& edges, const std::vector<Candidate>& found) {
    double drafted_probability = 0.0, counted = 0.0;
    for (const auto& each : pool_entries) drafted_probability += each.probability;
    for (const int64_t child : children) drafted_probability += std::exp(edges[child]);
    for (const Candidate& each : found) counted += each.probability;
    drafted_probability = std::min(drafted_probability, 1.0), counted = std::min(counted, 1.0);
    return drafted_probability / (drafted_probability + counted);
  }

  // Adds the likeliest candidates below `node` to the open ones; their probabilities sum to at most `left`.
  void push(const Nodes& nodes, int64_t node, double score, double left, std::vector<Candidate>& found, int64_t& serial,
            std::priority_queue<OpenNode>& open) const {
    std::stable_sort(found.begin(), found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.probability > b.probability; });
    for (int64_t i = 0; i < std::min<int64_t>(kBranches, found.size()); ++i) {
      const double probability = std::min(found[i].probability, left);
      if (probability < kMinProbability) break;
      left -= probability;
      const double edge = std::log(probability);
      if (score + edge < min_path_score_) break;
      open.push({score + edge, edge, serial++, node, found[i].token});
      features_.prefetch_contexts(nodes, node, found[i].token);
    }
  }

  CountFeatures features_;
  Draws draws_;
  int64_t root_ = 0;  // position of the tree's root in its request's text
  double min_path_score_ = kMinPathScore;
  std::vector<Tensor> grown_buffers_;    // buffers of the trees that are grown here, and the mailbox
  std::vector<Tensor> drafted_buffers_;  // buffers of a drafter's tree, its pool, and the mailbox
};

}  // namespace yggdrasil
