// What may follow a text: tokens that have followed its last few, in the text so far and in a table of earlier text.
//
// A context's followers are kept by count, the newer first among equals. Evidence for a candidate is the longest
// context of the text that it has followed, the longest of the table, its counts in both, and how many candidates come
// before it; a belief (one weight a kind of evidence, added up as log-odds) makes a probability of it.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "best_first.h"
#include "followers.h"

namespace yggdrasil {

constexpr int64_t kMostFollowers = 16;  // of a context that are looked at
constexpr int64_t kRanks = 13;
constexpr int64_t kLongest = 64;
constexpr int64_t kRunnersUp = 8;

struct Candidate {
  int32_t token;
  int32_t text, table, recycled;  // kinds of evidence
  double likely;
};

inline Candidate* find(std::vector<Candidate>& found, int32_t token) {
  for (Candidate& each : found)
    if (each.token == token) return &each;
  return nullptr;
}

class CountedEvidence {
 public:
  // `longest`: tokens of the longest context of the text. `weights_text` [1 + longest * 20] and `weights_table`
  // [1 + 2 * 20] float64: log-odds that a kind of evidence adds; `weights_recycled` [1 + 8]: by place among the runners-up;
  // `weights_rank` [13]: by place among the candidates, the longest contexts of the text first, runners-up last.
  CountedEvidence(int64_t longest, const at::Tensor& weights_text, const at::Tensor& weights_table,
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
    contexts_.forget();
    recycled_.clear();
    text_.clear();
  }

  void append(const std::vector<int64_t>& tokens) {
    static thread_local std::vector<std::pair<uint64_t, int32_t>> seen;  // contexts, and what followed
    seen.clear();
    expect_end(tokens);
    for (const int64_t token : tokens) {
      uint64_t key = 0;
      for (int64_t length = 1; length <= std::min<int64_t>(longest_, text_.size()); ++length) {
        seen.emplace_back(key = extended(key, text_[text_.size() - length]), int32_t(token));
        contexts_.expect(key);
      }
      text_.push_back(int32_t(token));
    }
    for (const auto& [context, token] : seen) contexts_.add(context, token);
  }

  const std::vector<int32_t>& text() const { return text_; }

  // What may follow `path` (its last tokens count), without its probabilities.
  std::vector<Candidate> after(const std::vector<int64_t>& path) const {
    std::vector<Candidate> found;
    gather({path.rbegin(), path.rend()}, found);
    return found;
  }

  // What may follow the text and the path to `node`, into `found`.
  void below(const Nodes& nodes, int64_t node, std::vector<Candidate>& found) const {
    static thread_local std::vector<int32_t> reversed;
    behind(nodes, node, reversed);
    found.clear();
    gather(reversed, found);
    believe(found);
  }

  // The table is asked soon what follows `token`, and what follows both.
  void expect(int64_t last, int64_t token) const {
    table_.expect(token);
    table_.expect(pair_key(last, token));
  }

 private:
  // It will be asked what follows the text with these `tokens`.
  void expect_end(const std::vector<int64_t>& tokens) const {
    if (tokens.empty()) return;
    if (tokens.size() > 1 || !text_.empty()) expect(tokens.size() > 1 ? tokens[tokens.size() - 2] : text_.back(), tokens.back());
    for (const auto* weights : {&text_weights_, &table_weights_, &recycled_weights_, &rank_weights_})
      fetch(weights->data(), weights->size() * sizeof(double));
  }

  template <class T>
  static std::vector<T> values(const at::Tensor& tensor) {
    const at::Tensor whole = tensor.contiguous();
    return {whole.const_data_ptr<T>(), whole.const_data_ptr<T>() + whole.numel()};
  }

  static int64_t pair_key(int64_t first, int64_t second) { return (first + 1) << 32 | second; }

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
    if (reversed.empty()) return;
    const int64_t known = std::min<int64_t>(longest_, reversed.size());
    uint64_t keys[kLongest], key = 0;
    for (int64_t i = 0; i < known; ++i) contexts_.expect(keys[i] = key = extended(key, reversed[i]));
    const bool has_two = reversed.size() > 1;
    const int64_t one = reversed[0], two = has_two ? pair_key(reversed[1], one) : 0;
    table_.approach(one);
    if (has_two) table_.approach(two);
    const int64_t after_two = has_two ? table_.find(two) : -1, after_one = table_.find(one);
    for (const int64_t context : {after_two, after_one})
      if (context >= 0) table_.approach_followers(context);
    gather_text(keys, known, found);
    gather_table(after_two, 2, found);
    gather_table(after_one, 1, found);
    if (!recycled_.empty()) gather_recycled(reversed[0], found);
  }

  void gather_text(const uint64_t* keys, int64_t known, std::vector<Candidate>& found) const {
    const CountedText::Context* seen[kLongest];
    int64_t longest = 0;  // a context that was never seen has no longer one that was
    while (longest < known && (seen[longest] = contexts_.find(keys[longest]))) ++longest;
    for (int64_t length = longest; length > 0; --length) {
      const CountedText::Context& context = *seen[length - 1];
      const Follower* ranked = contexts_.ranked(context);
      const int64_t looked = std::min<int64_t>(kMostFollowers, context.size);
      for (int64_t i = 0; i < looked; ++i) {
        const auto [token, count] = ranked[i];
        if (yggdrasil::find(found, token) == nullptr)
          found.push_back({token, int32_t(evidence_kind(length, count, context.total)), 0, 0, 0.0});
      }
    }
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

  // What follows a `context` of the table, if it has that.
  void gather_table(int64_t context, int64_t length, std::vector<Candidate>& found) const {
    if (context < 0) return;
    for (const Follower* follower = table_.begin(context); follower != table_.end(context); ++follower) {
      const int32_t token = follower->token;
      const int32_t kind = int32_t(evidence_kind(length, follower->count, table_.total(context)));
      Candidate* known = find(found, token);
      if (known == nullptr) found.push_back({token, 0, kind, 0, 0.0});
      else if (known->table == 0) known->table = kind;
    }
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

  int64_t longest_;
  std::vector<double> text_weights_, table_weights_, recycled_weights_, rank_weights_;
  std::vector<int32_t> text_;
  CountedText contexts_;
  CountedTable table_;
  std::unordered_map<int32_t, std::vector<int32_t>> recycled_;  // token -> its runners-up the last time, best first
};

}  // namespace yggdrasil
