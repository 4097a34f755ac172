// Counted contexts: which tokens have followed the last few tokens, in the text so far and in a table of earlier text,
// and the tree of what they make likely.
//
// A context's followers are kept by count, the newer first among equals. Evidence for a candidate is the longest
// context of the text that it has followed, the longest of the table, its counts in both, and how many candidates come
// before it; a belief (one weight a kind of evidence, added up as log-odds) makes a probability of it. A tree is grown
// best first, so its nodes come in falling order of score and the first n of them are the best tree of n.
//
// `counted.py` is the same in Python, for machines without a compiler and as the tests' reference.

#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <unordered_map>
#include <vector>

#include "best_first.h"
#include "followers.h"
#include "race.h"

namespace yggdrasil {

constexpr int64_t kMostFollowers = 16;  // of a context that are looked at
constexpr int64_t kBranches = 8;        // children that a node may get
constexpr int64_t kRanks = 13;
constexpr double kMostLikely = 0.98;  // of all children together: none is certain
constexpr double kLeastLikely = 1e-6;
constexpr double kLeastPath = -6.2;  // log-probability of a node that is worth no row of any pass, until it is said
constexpr int64_t kLongest = 64;
constexpr int64_t kRunnersUp = 8;

class Counts : public torch::CustomClassHolder {
 public:
  // `longest`: tokens of the longest context of the text. `weights_text` [1 + longest * 20] and `weights_table`
  // [1 + 2 * 20] float64: log-odds that a kind of evidence adds; `weights_recycled` [1 + 8]: by place among the runners-up;
  // `weights_rank` [13]: by place among the candidates, the longest contexts of the text first, runners-up last.
  Counts(int64_t longest, const at::Tensor& weights_text, const at::Tensor& weights_table,
         const at::Tensor& weights_recycled, const at::Tensor& weights_rank)
      : longest_(longest), text_weights_(values<double>(weights_text)), table_weights_(values<double>(weights_table)),
        recycled_weights_(values<double>(weights_recycled)), rank_weights_(values<double>(weights_rank)) {
    TORCH_CHECK(longest > 0 && longest <= kLongest, "contexts of 1 to ", kLongest, " tokens");
    TORCH_CHECK(int64_t(text_weights_.size()) == 1 + longest * kTotals * kShares &&
                    int64_t(table_weights_.size()) == 1 + 2 * kTotals * kShares &&
                    int64_t(recycled_weights_.size()) == 1 + kRunnersUp && int64_t(rank_weights_.size()) == kRanks,
                "weights do not fit the kinds of evidence");
  }

  // Contexts of one or two tokens, as keys (first + 1) << 32 | second (one token: first is -1); the followers of
  // context i are entries starts[i] .. starts[i + 1] - 1, ranked. All int64.
  void set_table(const at::Tensor& keys, const at::Tensor& totals, const at::Tensor& starts, const at::Tensor& tokens,
                 const at::Tensor& counts) {
    table_.set(keys, totals, starts, tokens, counts);
  }

  // After tokens[i] the target found followers[i] likeliest, best first; int64 [R] and [R, K], K <= 8.
  void recycle(const std::vector<int64_t>& tokens, const at::Tensor& followers) {
    const at::Tensor rows = followers.contiguous();
    TORCH_CHECK(rows.dim() == 2 && rows.size(0) == int64_t(tokens.size()) && rows.size(1) <= kRunnersUp,
                "runners-up must be [tokens, ", kRunnersUp, "] at most");
    const auto* row = rows.const_data_ptr<int64_t>();
    for (size_t i = 0; i < tokens.size(); ++i, row += rows.size(1))
      recycled_[int32_t(tokens[i])].assign(row, row + rows.size(1));
  }

  void forget() {
    contexts_.clear();
    recycled_.clear();
    text_.clear();
  }

  void append(const std::vector<int64_t>& tokens) {
    for (const int64_t token : tokens) {
      uint64_t key = 0;
      for (int64_t length = 1; length <= std::min<int64_t>(longest_, text_.size()); ++length) {
        key = extended(key, text_[text_.size() - length]);
        contexts_[key].add(int32_t(token));
      }
      text_.push_back(int32_t(token));
    }
  }

  // What may follow `path` (its last tokens count): rows (token, kind in the text, kind in the table, place among the
  // runners-up from 1 on), [n, 4] int64.
  at::Tensor evidence(const std::vector<int64_t>& path) const {
    std::vector<int32_t> reversed(path.rbegin(), path.rend());
    std::vector<Candidate> found;
    gather(reversed, found);
    at::Tensor rows = at::empty({int64_t(found.size()), 4}, at::kLong);
    auto* row = rows.mutable_data_ptr<int64_t>();
    for (const Candidate& each : found)
      *row++ = each.token, *row++ = each.text, *row++ = each.table, *row++ = each.recycled;
    return rows;
  }

  // No node is grown whose path has a lower log-probability.
  void leave_out_below(double score) { least_path_ = score; }

  int64_t address() { return reinterpret_cast<int64_t>(this); }

  // From now on trees of N nodes are grown in these buffers, as `mail` says, and as far as `stakes` float64 do (race.h).
  void grow_in(at::Tensor tokens, at::Tensor parents, at::Tensor depths, at::Tensor scores, at::Tensor edges,
               at::Tensor ancestors, at::Tensor mail, at::Tensor stakes) {
    bed_ = {tokens, parents, depths, scores, edges, ancestors, mail, stakes};
  }

  // Counts more certain tokens, plants the text's last one and grows a tree from it (see direct.h); returns its size.
  // The mail holds the tree's greatest depth, how many tokens are new, and which. Every row of the buffers is written
  // that a step may read.
  int64_t grow() {
    const auto* mail = bed_.at(6).const_data_ptr<int64_t>();
    const int64_t depth = mail[0];
    append({mail + 2, mail + 2 + mail[1]});
    TORCH_CHECK(!text_.empty(), "no text to grow a tree from");
    Nodes nodes(bed_[0], bed_[1], bed_[2], bed_[3], bed_[4], bed_[5]);
    nodes.put(0, {0.0, 0.0, 0, 0, text_.back()});
    std::priority_queue<Guess> open;
    int64_t serial = 0;
    if (nodes.capacity > 1) push_children(nodes, 0, 0.0, depth, serial, open);
    Race race(bed_[7].const_data_ptr<double>());
    race.add(0.0);
    return complete(nodes, 1, depth, serial, open, &race);
  }

  // Goes on with a tree that somebody else has grown from the text's last token: where it says the same as a node, the
  // more confident of both is believed, and what it says beyond takes the places that are left, below any node.
  // Returns the tree's size.
  int64_t fill(at::Tensor tokens, at::Tensor parents, at::Tensor depths, at::Tensor scores, at::Tensor edges,
               at::Tensor ancestors, int64_t depth) const {
    TORCH_CHECK(!text_.empty(), "no text to fill a tree from");
    Nodes nodes(tokens, parents, depths, scores, edges, ancestors);
    int64_t size = nodes.capacity;
    while (size > 1 && !std::isfinite(nodes.score[size - 1])) --size;
    std::vector<double> falls(size);  // of each node's score from its parent's
    std::vector<std::vector<int64_t>> children(size);
    for (int64_t node = 1; node < size; ++node) {
      falls[node] = double(nodes.score[node]) - double(nodes.score[nodes.parent[node]]);
      if (std::isfinite(nodes.score[node])) children[nodes.parent[node]].push_back(node);
    }
    std::priority_queue<Guess> open;
    std::vector<Candidate> found;
    std::vector<int32_t> reversed;
    int64_t serial = 0;
    for (int64_t node = 0; node < size; ++node) {  // parents come first
      if (!std::isfinite(nodes.score[node])) continue;
      if (node) nodes.score[node] = float(double(nodes.score[nodes.parent[node]]) + falls[node]);
      if (nodes.score[node] < least_path_) continue;
      behind(nodes, node, reversed);
      found.clear();
      gather(reversed, found);
      believe(found);
      double left = kMostLikely;
      for (const int64_t child : children[node]) {
        Candidate* same = find(found, int32_t(nodes.token[child]));
        if (same != nullptr) {
          falls[child] = std::max(falls[child], std::log(std::min(same->likely, kMostLikely)));
          same->likely = 0.0;  // it is there
        }
        left -= std::exp(falls[child]);
      }
      if (nodes.level[node] < depth) push(node, nodes.token[node], nodes.score[node], left, found, serial, open);
    }
    return complete(nodes, size, depth, serial, open);
  }

 private:
  struct Candidate {
    int32_t token;
    int32_t text, table, recycled;  // kinds of evidence
    double likely;
  };

  template <class T>
  static std::vector<T> values(const at::Tensor& tensor) {
    const at::Tensor whole = tensor.contiguous();
    return {whole.const_data_ptr<T>(), whole.const_data_ptr<T>() + whole.numel()};
  }

  static uint64_t extended(uint64_t key, int64_t token) {
    uint64_t mixed = (key ^ (uint64_t(token) + 0x9e3779b97f4a7c15ull)) * 0xbf58476d1ce4e5b9ull;
    return mixed ^ (mixed >> 29);
  }

  // The last `longest_` tokens at `node`, last first.
  void behind(const Nodes& nodes, int64_t node, std::vector<int32_t>& reversed) const {
    reversed.clear();
    for (; node && int64_t(reversed.size()) < longest_; node = nodes.parent[node])
      reversed.push_back(int32_t(nodes.token[node]));
    for (size_t place = text_.size(); place > 0 && int64_t(reversed.size()) < std::max<int64_t>(longest_, 2); --place)
      reversed.push_back(text_[place - 1]);
  }

  void gather(const std::vector<int32_t>& reversed, std::vector<Candidate>& found) const {
    const int64_t known = std::min<int64_t>(longest_, reversed.size());
    const Followers* followers[kLongest];
    uint64_t key = 0;
    int64_t longest = 0;
    for (; longest < known; ++longest) {  // a context that was never seen has no longer one that was
      key = extended(key, reversed[longest]);
      const auto place = contexts_.find(key);
      if (place == contexts_.end()) break;
      followers[longest] = &place->second;
    }
    for (int64_t length = longest; length > 0; --length) {
      const Followers& those = *followers[length - 1];
      const int64_t looked = std::min<int64_t>(kMostFollowers, those.ranked.size());
      for (int64_t i = 0; i < looked; ++i) {
        const auto [token, count] = those.ranked[i];
        if (find(found, token) == nullptr)
          found.push_back({token, int32_t(evidence_kind(length, count, those.total)), 0, 0, 0.0});
      }
    }
    if (!reversed.empty() && !table_.empty()) {
      if (reversed.size() > 1) gather_table((int64_t(reversed[1]) + 1) << 32 | reversed[0], 2, found);
      gather_table(reversed[0], 1, found);
    }
    if (!reversed.empty() && !recycled_.empty()) gather_recycled(reversed[0], found);
  }

  void gather_recycled(int32_t token, std::vector<Candidate>& found) const {
    const auto place = recycled_.find(token);
    if (place == recycled_.end()) return;
    for (size_t i = 0; i < place->second.size(); ++i) {
      Candidate* known = find(found, place->second[i]);
      if (known == nullptr) found.push_back({place->second[i], 0, 0, int32_t(1 + i), 0.0});
      else known->recycled = int32_t(1 + i);
    }
  }

  void gather_table(int64_t key, int64_t length, std::vector<Candidate>& found) const {
    const int64_t context = table_.find(key);
    if (context < 0) return;
    for (const Follower* follower = table_.begin(context); follower != table_.end(context); ++follower) {
      const int32_t token = follower->token;
      const int32_t kind = int32_t(evidence_kind(length, follower->count, table_.total(context)));
      Candidate* known = find(found, token);
      if (known == nullptr) found.push_back({token, 0, kind, 0, 0.0});
      else if (known->table == 0) known->table = kind;
    }
  }

  static Candidate* find(std::vector<Candidate>& found, int32_t token) {
    for (Candidate& each : found)
      if (each.token == token) return &each;
    return nullptr;
  }

  // Attaches the best of `open` and what follows them, until the tree is full or the race over; returns its size.
  int64_t complete(Nodes& nodes, int64_t size, int64_t depth, int64_t serial, std::priority_queue<Guess>& open,
                   Race* race = nullptr) const {
    while (size < nodes.capacity && !open.empty()) {
      const Guess next = open.top();
      if (next.score < least_path_ || (race && race->is_over(next.score))) break;
      open.pop();
      nodes.put(size, next);
      if (race) race->add(next.score);
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
    std::vector<int32_t> reversed;
    behind(nodes, node, reversed);
    gather(reversed, found);
    believe(found);
    push(node, nodes.token[node], score, kMostLikely, found, serial, open);
  }

  // The probability of each candidate.
  void believe(std::vector<Candidate>& found) const {
    for (size_t i = 0; i < found.size(); ++i) {
      Candidate& each = found[i];
      const double rank = rank_weights_[std::min<int64_t>(i, kRanks - 1)];
      const double odds = text_weights_[each.text] + table_weights_[each.table] + recycled_weights_[each.recycled];
      each.likely = 1.0 / (1.0 + std::exp(-(rank + odds)));
    }
  }

  // The likeliest candidates below `node`, which holds the token `last`; together they get no more than `left`.
  void push(int64_t node, int64_t last, double score, double left, std::vector<Candidate>& found, int64_t& serial,
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
      table_.expect(found[i].token);
      table_.expect((last + 1) << 32 | found[i].token);
    }
  }

  int64_t longest_;
  double least_path_ = kLeastPath;
  std::vector<double> text_weights_, table_weights_, recycled_weights_, rank_weights_;
  std::vector<int32_t> text_;
  std::unordered_map<uint64_t, Followers> contexts_;
  CountedTable table_;
  std::unordered_map<int32_t, std::vector<int32_t>> recycled_;  // token -> its runners-up the last time, best first
  std::vector<at::Tensor> bed_;  // buffers of the tree that is grown, the mail and the stakes
};

}  // namespace yggdrasil
