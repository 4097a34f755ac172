// Trees drafted from n-gram counts (features.h), grown best first: nodes are in descending order of score, so the first n
// are the best tree of n nodes. Also extends a tree that a drafter has grown by nodes from counts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "tree/best_first.h"
#include "tree/draws.h"
#include "tree/features.h"
#include "tree/early_stopping.h"

namespace yggdrasil {

constexpr int64_t kBranches = 8;        // children that a node may get
constexpr double kMostLikely = 0.98;  // of all children together: none is certain
constexpr double kLeastLikely = 1e-6;
constexpr double kLeastPath = -6.2;  // log-probability of a node below which no pass verifies it, until the costs of a plan say so

class Counts {
 public:
  // The weights of the scorer, see `NGramScorer`.
  Counts(const Tensor& counts, const Tensor& totals, const Tensor& bias, const Tensor& out, const Tensor& nothing)
      : features_(NGramScorer(counts, totals, bias, out, nothing)) {}

  void set_table(const Tensor& keys, const Tensor& totals, const Tensor& starts, const Tensor& tokens,
                 const Tensor& counts) {
    features_.set_table(keys, totals, starts, tokens, counts);
  }

  void forget() { features_.forget(); }

  void append(const std::vector<int64_t>& tokens) { features_.append(tokens); }

  // Returns the tokens that may follow `path` (only its last tokens matter), [n, 1 + 2 K] int64: the token, how often
  // it followed each context, and how often each context was seen.
  std::vector<int64_t> features(const std::vector<int64_t>& path) const {
    CountFeatures::Seen seen;
    const std::vector<Candidate> found = features_.after(path, seen);
    std::vector<int64_t> rows(found.size() * (1 + 2 * kContexts));
    auto row = rows.begin();
    for (const Candidate& each : found) {
      *row++ = each.token;
      row = std::copy(each.followed.begin(), each.followed.end(), row);
      row = std::copy(seen.begin(), seen.end(), row);
    }
    return rows;
  }

  // Sets the lowest log-probability of the path of a grown node.
  void leave_out_below(double score) { least_path_ = score; }

  // Sets the draws of the target by which candidates of later trees are reweighed; `noise` 0: they are not.
  void follow_draws(int64_t key, double noise, double others) { draws_ = Draws(key, noise, others); }

  // Registers the buffers of N nodes in which later trees are grown, and the mailbox.
  void grow_in(Tensor tokens, Tensor parents, Tensor depths, Tensor scores, Tensor edges,
               Tensor ancestors, Tensor mail) {
    bed_ = {tokens, parents, depths, scores, edges, ancestors, mail};
  }

  // Sets the early-stopping bound of later trees (early_stopping.h): float64 values, which the caller owns and may
  // change.
  void grow_for(int64_t bound, int64_t count) { bound_ = numbers(bound, count); }

  // Appends new committed tokens to the counts, plants the text's last token and grows a tree from it (see direct.h).
  // Returns the tree's size. The mailbox holds the largest depth, the root's position in the request's text, the number
  // of new tokens, and these tokens. Every row of the buffers that a step may read is written.
  int64_t grow() {
    const auto* mail = bed_.at(6).const_data_ptr<int64_t>();
    const int64_t depth = mail[0];
    Nodes nodes(bed_[0], bed_[1], bed_[2], bed_[3], bed_[4], bed_[5]);
    root_ = mail[1];
    append({mail + 3, mail + 3 + mail[2]});
    YGG_CHECK(!features_.text().empty(), "no text to grow a tree from");
    nodes.put(0, {0.0, 0.0, 0, 0, features_.text().back()});
    std::priority_queue<Guess> open;
    int64_t serial = 0;
    if (nodes.capacity > 1) push_children(nodes, 0, 0.0, depth, serial, open);
    EarlyStopping stopping(bound_);
    stopping.add(0.0);
    return complete(nodes, 1, depth, serial, open, stopping);
  }

  // Registers the buffers of N nodes in which trees of a drafter are extended, and the mailbox.
  void fill_in(Tensor tokens, Tensor parents, Tensor depths, Tensor scores, Tensor edges,
               Tensor ancestors, Tensor pool_tokens, Tensor pool_scores, Tensor mail) {
    given_ = {tokens, parents, depths, scores, edges, ancestors, pool_tokens, pool_scores, mail};
  }

  // Extends a tree that a drafter has grown from the text's last token. Returns its size. New nodes fill the free
  // places, below any node. If a drafter has read a node, whose candidates are then in the pool, both estimates are
  // combined, weighted by the sum of their probabilities. Of other equal candidates, the higher estimate is taken. The
  // mailbox holds the largest depth, the root's position in the request's text, and the address and size of the bound.
  int64_t fill() {
    YGG_CHECK(!features_.text().empty(), "no text to fill a tree from");
    const auto* mail = given_.at(8).const_data_ptr<int64_t>();
    const int64_t depth = mail[0];
    root_ = mail[1];
    Nodes nodes(given_[0], given_[1], given_[2], given_[3], given_[4], given_[5]);
    const Pool pool(given_[6], given_[7], nodes.capacity);
    int64_t size = nodes.capacity;
    while (size > 1 && !std::isfinite(nodes.score[size - 1])) --size;
    const std::vector<float> drafted(nodes.score, nodes.score + size);
    std::vector<double> falls(size);  // of each node's score from its parent's
    std::vector<std::vector<int64_t>> children(size);
    for (int64_t node = 1; node < size; ++node) {
      falls[node] = double(drafted[node]) - double(drafted[nodes.parent[node]]);
      if (std::isfinite(drafted[node])) children[nodes.parent[node]].push_back(node);
    }
    std::priority_queue<Guess> open;
    std::vector<Candidate> found;
    int64_t serial = 0;
    for (int64_t node = 0; node < size; ++node) {  // parents come first
      if (!std::isfinite(nodes.score[node]) || (node && !std::isfinite(falls[node]))) continue;
      if (node) nodes.score[node] = float(double(nodes.score[nodes.parent[node]]) + falls[node]);
      if (nodes.score[node] < least_path_) continue;
      below(nodes, node, found);
      auto offered = pool.offered(node, drafted[node]);
      const bool is_read = !offered.empty() || pool.is_used_up(children[node].size());
      for (const int64_t child : children[node])  // others may have attached what it says
        std::erase_if(offered, [&](const Pool::Offer& each) { return each.token == int32_t(nodes.token[child]); });
      const double share = is_read ? share_of(offered, children[node], falls, found) : 0.0;
      double left = kMostLikely;
      for (const int64_t child : children[node]) {
        Candidate* same = find(found, int32_t(nodes.token[child]));
        const double ours = same == nullptr ? 0.0 : std::min(same->likely, kMostLikely), theirs = std::exp(falls[child]);
        const double both = is_read ? share * theirs + (1.0 - share) * ours : std::max(theirs, ours);
        falls[child] = std::log(std::min(both, kMostLikely));
        if (same != nullptr) same->likely = 0.0;  // it is there
        left -= std::exp(falls[child]);
      }
      for (Candidate& each : found) each.likely *= 1.0 - share;
      for (const auto& [token, likely] : offered) {
        Candidate* same = find(found, token);
        if (same == nullptr) found.push_back({token, {}, share * likely});
        else same->likely += share * likely;
      }
      if (nodes.level[node] < depth) push(nodes, node, nodes.score[node], left, found, serial, open);
    }
    std::vector<double> existing;
    std::copy_if(nodes.score, nodes.score + size, std::back_inserter(existing), [](float s) { return std::isfinite(s); });
    EarlyStopping stopping(numbers(mail[2], mail[3]), std::move(existing));
    return complete(nodes, size, depth, serial, open, stopping);
  }

 private:
  static std::span<const double> numbers(int64_t address, int64_t count) {
    return {reinterpret_cast<const double*>(address), size_t(count)};
  }

  // Attaches the best of `open` and their continuations, until the tree is full or growth stops. Returns its size.
  int64_t complete(Nodes& nodes, int64_t size, int64_t depth, int64_t serial, std::priority_queue<Guess>& open,
                   EarlyStopping& stopping) const {
    while (size < nodes.capacity && !open.empty()) {
      const Guess next = open.top();
      if (next.score < least_path_ || stopping.is_over(next.score)) break;
      open.pop();
      nodes.put(size, next);
      stopping.add(next.score);
      if (size + 1 < nodes.capacity) push_children(nodes, size, next.score, depth, serial, open);
      ++size;
    }
    nodes.clear(size);
    return size;
  }

  void push_children(const Nodes& nodes, int64_t node, double score, int64_t depth, int64_t& serial,
                     std::priority_queue<Guess>& open) const {
    if (nodes.level[node] >= depth) return;
    std::vector<Candidate> found;
    below(nodes, node, found);
    push(nodes, node, score, kMostLikely, found, serial, open);
  }

  void below(const Nodes& nodes, int64_t node, std::vector<Candidate>& found) const {
    features_.below(nodes, node, found);
    draws_.reweigh(found, root_ + nodes.level[node] + 1);
  }

  // Returns the weight of a drafter's probabilities below a node, against those of `found`.
  static double share_of(const std::vector<Pool::Offer>& offered, const std::vector<int64_t>& children,
                         const std::vector<double>& falls, const std::vector<Candidate>& found) {
    double theirs = 0.0, ours = 0.0;
    for (const auto& each : offered) theirs += each.likely;
    for (const int64_t child : children) theirs += std::exp(falls[child]);
    for (const Candidate& each : found) ours += each.likely;
    theirs = std::min(theirs, 1.0), ours = std::min(ours, 1.0);
    return theirs / (theirs + ours);
  }

  // Adds the likeliest candidates below `node` to the open ones; their probabilities sum to at most `left`.
  void push(const Nodes& nodes, int64_t node, double score, double left, std::vector<Candidate>& found, int64_t& serial,
            std::priority_queue<Guess>& open) const {
    std::stable_sort(found.begin(), found.end(),
                     [](const Candidate& a, const Candidate& b) { return a.likely > b.likely; });
    for (int64_t i = 0; i < std::min<int64_t>(kBranches, found.size()); ++i) {
      const double likely = std::min(found[i].likely, left);
      if (likely < kLeastLikely) break;
      left -= likely;
      const double edge = std::log(likely);
      if (score + edge < least_path_) break;
      open.push({score + edge, edge, serial++, node, found[i].token});
      features_.expect(nodes, node, found[i].token);
    }
  }

  CountFeatures features_;
  Draws draws_;
  int64_t root_ = 0;  // position of the tree's root in its request's text
  double least_path_ = kLeastPath;
  std::vector<Tensor> bed_;    // buffers of the tree that is grown, and the mail
  std::vector<Tensor> given_;  // of one that a drafter grows, with its pool, and the mail
  std::span<const double> bound_;
};

}  // namespace yggdrasil
