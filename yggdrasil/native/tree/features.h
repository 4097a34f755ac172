// Features of candidate tokens: tokens that followed the last few tokens before, in the text or in a static n-gram
// table.
//
// Continuations of a context are ranked by count, the newer first among equals. The features of a candidate are its
// counts after each context of the text and of the table that ends here. A scorer (scorer.h) computes probabilities
// from them.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "tree/scorer.h"
#include "tree/best_first.h"
#include "tree/continuations.h"

namespace yggdrasil {

constexpr int64_t kMaxContinuations = 16;  // continuations read per context of the text
constexpr int64_t kTokenBits = 21;      // bits per token in a table's key

inline Candidate* find(std::vector<Candidate>& found, int32_t token) {
  for (Candidate& each : found)
    if (each.token == token) return &each;
  return nullptr;
}

class CountFeatures {
 public:
  using ContextTotals = std::array<int64_t, kContexts>;  // number of occurrences of each context

  explicit CountFeatures(NGramScorer scorer) : scorer_(std::move(scorer)) {}

  // Contexts of one to three tokens, whose keys are `extended_key`, and their ranked continuations; see `CountedTable`.
  void set_table(const Tensor& contexts, const Tensor& continuations) { table_.set(contexts, continuations); }

  void forget() {
    contexts_.forget();
    text_.clear();
  }

  void append(const std::vector<int64_t>& tokens) {
    static thread_local std::vector<std::pair<uint64_t, int32_t>> seen;  // contexts and their next tokens
    seen.clear();
    prefetch_end(tokens);
    for (const int64_t token : tokens) {
      uint64_t key = 0;
      for (int64_t length = 1; length <= std::min<int64_t>(kLongest, text_.size()); ++length) {
        seen.emplace_back(key = text_key(key, text_[text_.size() - length]), int32_t(token));
        contexts_.prefetch_slot(key);
      }
      text_.push_back(int32_t(token));
    }
    for (const auto& [context, token] : seen) contexts_.add(context, token);
  }

  const std::vector<int32_t>& text() const { return text_; }

  // Returns the tokens that may follow `path` (only its last tokens matter), without probabilities; `seen` receives the
  // counts of its contexts.
  std::vector<Candidate> after(const std::vector<int64_t>& path, ContextTotals& seen) const {
    std::vector<Candidate> found;
    gather({path.rbegin(), path.rend()}, seen, found);
    return found;
  }

  // Writes the tokens that may follow the text and the path to `node` to `found`.
  void below(const Nodes& nodes, int64_t node, std::vector<Candidate>& found) const {
    static thread_local std::vector<int32_t> reversed;
    last_tokens(nodes, node, reversed);
    found.clear();
    ContextTotals seen;
    gather(reversed, seen, found);
    scorer_.score(seen, found);
  }

  // Prefetches the table's context of `token` below `node`.
  void prefetch_contexts(const Nodes& nodes, int64_t node, int64_t token) const {
    const int64_t before = node ? nodes.token[nodes.parent[node]] : text_.size() > 1 ? text_[text_.size() - 2] : -1;
    prefetch_contexts(before, nodes.token[node], token);
  }

 private:
  // Prefetches the table's context of the text extended by `tokens`.
  void prefetch_end(const std::vector<int64_t>& tokens) const {
    if (tokens.empty()) return;
    const auto last = [&](size_t distance) -> int64_t {  // token at this distance from the end of the extended text; -1 for none
      if (distance < tokens.size()) return tokens[tokens.size() - 1 - distance];
      distance -= tokens.size();
      return distance < text_.size() ? text_[text_.size() - 1 - distance] : -1;
    };
    prefetch_contexts(last(2), last(1), last(0));
    scorer_.prefetch();
  }

  void prefetch_contexts(int64_t first, int64_t second, int64_t third) const {
    table_.prefetch_slot(table_key(0, third));
    if (second < 0) return;
    table_.prefetch_slot(table_key(table_key(0, second), third));
    if (first >= 0) table_.prefetch_slot(table_key(table_key(table_key(0, first), second), third));
  }

  // Returns the table's key of a context extended by one token.
  static int64_t table_key(int64_t key, int64_t token) { return key << kTokenBits | (token + 1); }

  static uint64_t text_key(uint64_t key, int64_t token) {
    uint64_t mixed = (key ^ (uint64_t(token) + 0x9e3779b97f4a7c15ull)) * 0xbf58476d1ce4e5b9ull;
    return mixed ^ (mixed >> 29);
  }

  // Writes the last tokens of the path to `node`, in reverse order.
  void last_tokens(const Nodes& nodes, int64_t node, std::vector<int32_t>& reversed) const {
    reversed.clear();
    for (; node && int64_t(reversed.size()) < kLongest; node = nodes.parent[node])
      reversed.push_back(int32_t(nodes.token[node]));
    for (size_t end = text_.size(); end > 0 && int64_t(reversed.size()) < kLongest; --end)
      reversed.push_back(text_[end - 1]);
  }

  void gather(const std::vector<int32_t>& reversed, ContextTotals& seen, std::vector<Candidate>& found) const {
    seen.fill(0);
    if (reversed.empty()) return;
    const int64_t num_text_contexts = std::min<int64_t>(kLongest, reversed.size());
    uint64_t keys[kLongest], key = 0;
    for (int64_t i = 0; i < num_text_contexts; ++i) contexts_.prefetch_slot(keys[i] = key = text_key(key, reversed[i]));
    int64_t in_table[kTableLength], num_table_contexts = std::min<int64_t>(kTableLength, reversed.size());
    for (int64_t length = 1; length <= num_table_contexts; ++length) {
      int64_t context = 0;
      for (int64_t i = length; i > 0; --i) context = table_key(context, reversed[i - 1]);
      table_.prefetch_context(in_table[length - 1] = context);
    }
    for (int64_t i = 0; i < num_table_contexts; ++i)
      if ((in_table[i] = table_.find(in_table[i])) >= 0) table_.prefetch_continuations(in_table[i]);
    gather_text(keys, num_text_contexts, seen, found);
    for (int64_t i = num_table_contexts - 1; i >= 0; --i)
      if (in_table[i] >= 0) gather_table(in_table[i], kLongest + i, seen, found);
  }

  void gather_text(const uint64_t* keys, int64_t num_text_contexts, ContextTotals& seen, std::vector<Candidate>& found) const {
    const CountedText::Context* contexts[kLongest];
    int64_t longest = 0;  // if a context was never seen, no longer context was
    while (longest < num_text_contexts && (contexts[longest] = contexts_.find(keys[longest]))) ++longest;
    for (int64_t i = longest - 1; i >= 0; --i) {
      const Continuation* ranked = contexts_.ranked(*contexts[i]);
      seen[i] = contexts[i]->total;
      add(ranked, ranked + std::min<int64_t>(kMaxContinuations, contexts[i]->size), i, found);
    }
  }

  // Adds the continuations of a context of the table.
  void gather_table(int64_t number, int64_t context, ContextTotals& seen, std::vector<Candidate>& found) const {
    seen[context] = table_.total(number);
    add(table_.begin(number), table_.end(number), context, found);
  }

  static void add(const Continuation* continuation, const Continuation* end, int64_t context, std::vector<Candidate>& found) {
    for (; continuation != end; ++continuation) candidate(found, continuation->token).counts[context] = continuation->count;
  }

  static Candidate& candidate(std::vector<Candidate>& found, int32_t token) {
    Candidate* num_text_contexts = find(found, token);
    return num_text_contexts == nullptr ? found.emplace_back(Candidate{token, {}, 0.0}) : *num_text_contexts;
  }

  NGramScorer scorer_;
  std::vector<int32_t> text_;
  CountedText contexts_;
  CountedTable table_;
};

}  // namespace yggdrasil
