// Byte-pair encoding of words, over sorted tables that the caller keeps: a tenth of the memory of maps.
//
// The order of merges is that of the `tokenizers` library: the lowest rank first, among equals the leftmost pair.

#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <string_view>
#include <vector>

namespace yggdrasil {

// Dims: L letters (characters that are tokens), V tokens, M merges.
struct BytePairs {
  const int32_t* letters;        // [L] code points, ascending
  const int32_t* letter_tokens;  // [L]
  const int32_t* bytes;          // [256] tokens of bytes, -1: none
  const int32_t* starts;         // [V + 1] merges of each left token are entries starts[i] .. starts[i + 1] - 1
  const int32_t* rights;         // [M] right tokens, ascending below each left token
  const int32_t* ranks;          // [M]
  const int32_t* merged;         // [M] the token that a pair becomes
  int64_t num_letters;
  int64_t unknown;        // token of unknown characters, -1: they are left out
  int64_t fuses_unknown;  // whether unknown characters side by side are one token
};

class WordEncoder {
 public:
  explicit WordEncoder(const BytePairs& pairs) : pairs_(pairs) {}

  // Writes the tokens of a word (UTF-8) to `tokens`, at most one a byte, and returns the end of what was written.
  int32_t* encode(std::string_view word, int32_t* tokens) {
    symbols_.clear();
    read(word);
    merge_all();
    for (const Symbol& each : symbols_)
      if (each.token >= 0) *tokens++ = each.token;
    return tokens;
  }

 private:
  struct Symbol {
    int32_t token;  // -1: merged into the one before
    int32_t previous, next;
  };
  struct Merge {
    int32_t rank, index, token;
    bool operator<(const Merge& other) const {  // the queue's top is the largest
      return rank != other.rank ? rank > other.rank : index > other.index;
    }
  };

  void add(int64_t token) {
    const auto index = int32_t(symbols_.size());
    symbols_.push_back({int32_t(token), index - 1, index + 1});
  }

  // Splits a word into symbols: characters that are tokens, else their bytes, else the unknown token.
  void read(std::string_view word) {
    bool is_unknown_open = false;
    for (size_t begin = 0, end; begin < word.size(); begin = end) {
      const auto first = uint8_t(word[begin]);
      end = std::min(begin + (first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4), word.size());
      int32_t code = first < 0x80 ? first : first < 0xe0 ? first & 31 : first < 0xf0 ? first & 15 : first & 7;
      for (size_t i = begin + 1; i < end; ++i) code = code << 6 | (uint8_t(word[i]) & 63);
      const int32_t* const found = std::lower_bound(pairs_.letters, pairs_.letters + pairs_.num_letters, code);
      if (found != pairs_.letters + pairs_.num_letters && *found == code) {
        if (is_unknown_open) add(pairs_.unknown), is_unknown_open = false;
        add(pairs_.letter_tokens[found - pairs_.letters]);
        continue;
      }
      const auto has_token = [&](char byte) { return pairs_.bytes[uint8_t(byte)] >= 0; };
      if (std::all_of(word.begin() + begin, word.begin() + end, has_token)) {
        for (size_t i = begin; i < end; ++i) add(pairs_.bytes[uint8_t(word[i])]);
      } else if (pairs_.unknown >= 0) {
        if (is_unknown_open && !pairs_.fuses_unknown) add(pairs_.unknown);
        is_unknown_open = true;
      }
    }
    if (is_unknown_open) add(pairs_.unknown);
    if (!symbols_.empty()) symbols_.back().next = -1;
  }

  // Returns the entry of a pair, -1 if it does not merge.
  int32_t find(int32_t left, int32_t right) const {
    const int32_t *begin = pairs_.rights + pairs_.starts[left], *end = pairs_.rights + pairs_.starts[left + 1];
    const int32_t* const found = std::lower_bound(begin, end, right);
    return found == end || *found != right ? -1 : int32_t(found - pairs_.rights);
  }

  void propose(int32_t index) {
    const Symbol& left = symbols_[index];
    const int32_t entry = find(left.token, symbols_[left.next].token);
    if (entry >= 0) queue_.push({pairs_.ranks[entry], index, pairs_.merged[entry]});
  }

  void merge_all() {
    for (int32_t index = 0; index + 1 < int32_t(symbols_.size()); ++index) propose(index);
    while (!queue_.empty()) {
      const Merge merge = queue_.top();
      queue_.pop();
      Symbol& left = symbols_[merge.index];
      if (left.token < 0 || left.next < 0) continue;
      Symbol& right = symbols_[left.next];
      const int32_t entry = find(left.token, right.token);
      if (entry < 0 || pairs_.merged[entry] != merge.token) continue;  // one of both has changed meanwhile
      left.token = merge.token;
      left.next = right.next;
      right.token = -1;
      if (left.next >= 0) symbols_[left.next].previous = merge.index;
      if (left.previous >= 0) propose(left.previous);
      if (left.next >= 0) propose(merge.index);
    }
  }

  BytePairs pairs_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Merge> queue_;
};

}  // namespace yggdrasil
