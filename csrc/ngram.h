// N-grams of tokens as 64-bit hashes: token hashes of texts, rolling hash, a set of hashes, and how many
// distinct n-grams of a text are in the set.
//
// A token is hashed once; its hash takes kTokenBytes bytes, little-endian. Rows of tokens are ragged: row i of a
// block is tokens offsets[i] .. offsets[i + 1), and a store has one or two blocks, read one after the other.
// Callers have checked n with 1 <= n <= kMaxN and rows against TokenRows::size(); damaged offsets are found when
// their row is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "checked_file.h"

namespace cdr::ngram {

inline constexpr int kMaxN = 32;
inline constexpr int kTokenBytes = 7;
inline constexpr int kTokenBits = 8 * kTokenBytes;

// 128 bits; bits < kTokenBits keeps that many of each token's hash, for tests of collisions.
struct Key {
  std::uint64_t first;
  std::uint64_t second;
  int bits = kTokenBits;
};

// SipHash-1-3: a keyed hash whose collisions cannot be made without the key.
std::uint64_t sip_hash(std::string_view bytes, Key key);

// offsets[0 .. texts], where tokens are runs of ASCII letters and digits and of bytes >= 0x80.
void count_tokens(const std::string_view* texts, std::size_t count, std::int64_t* offsets);

// The hashes of these tokens, ASCII letters folded to lower case and bytes >= 0x80 taken as they are. So ASCII
// texts come as they are, and a text with other characters comes as its tokens (folded, UTF-8) parted by spaces.
void hash_texts(const std::string_view* texts, std::size_t count, Key key, const std::int64_t* offsets,
                std::uint8_t* out);

// The hash of each token, whatever bytes it holds.
void hash_tokens(const std::string_view* tokens, std::size_t count, Key key, std::uint8_t* out);

struct TokenBlock {
  const std::int64_t* offsets;  // rows + 1
  const std::uint8_t* tokens;
  std::int64_t rows;
  std::int64_t count;  // tokens that there are
  CheckedFile* file;   // that the tokens lie in, while some of it is unchecked; else null
};

struct TokenRow {
  const std::uint8_t* tokens;
  std::int64_t count;
};

struct TokenRows {
  std::vector<TokenBlock> blocks;

  std::int64_t size() const {
    std::int64_t n = 0;
    for (const TokenBlock& b : blocks) n += b.rows;
    return n;
  }

  // Throws std::invalid_argument where the offsets of the row do not lie in its block, Damage where its tokens are not
  // as they were written, ReadError where the disk cannot give them.
  TokenRow at(std::int64_t row) const;
};

// offsets[0 .. count] of these rows (all rows, in order, where index is null) put one after the other.
void take_offsets(const TokenRows& rows, const std::int64_t* index, std::size_t count, std::int64_t* offsets);

// Their tokens.
void take_tokens(const TokenRows& rows, const std::int64_t* index, std::size_t count, const std::int64_t* offsets,
                 std::uint8_t* out);

// offsets[0 .. rows] of the n-grams of all rows.
void ngram_offsets(const TokenRows& rows, int n, std::int64_t* offsets);

// Hashes of the n-grams of each row, in order, repeats kept.
void ngrams(const TokenRows& rows, int n, const std::int64_t* offsets, std::uint64_t* out);

// A key that this process has drawn at random, once.
Key process_key();

// A set of 64-bit hashes: open addressing, at most half full, behind a bitmap that says "no" to nearly all others.
// Where a value stands is a keyed hash of it: who knows the values but not the key cannot have many stand in one run.
// No answer depends on the key.
class HashSet {
 public:
  explicit HashSet(Key key = process_key()) : key_(key) {}

  void insert(const std::uint64_t* values, std::size_t count);
  bool contains(std::uint64_t value) const {
    if (slots_.empty()) return zero_ && value == 0;
    const std::uint64_t bit = value >> filter_shift_;
    if ((filter_[bit >> 6] >> (bit & 63) & 1) == 0) return false;
    return find(value);
  }
  std::size_t size() const { return used_ + (zero_ ? 1 : 0); }
  std::size_t bytes() const { return (slots_.size() + filter_.size()) * sizeof(std::uint64_t); }

  // Ascending.
  std::vector<std::uint64_t> values() const;

 private:
  std::size_t home(std::uint64_t value) const;
  bool find(std::uint64_t value) const;
  void place(std::uint64_t value);
  void grow(std::size_t slots);

  Key key_;
  std::vector<std::uint64_t> slots_;   // 0 is an empty slot; size is a power of two or 0
  std::vector<std::uint64_t> filter_;  // bit value >> filter_shift_ is set for each value, 8 bits for each slot
  std::size_t used_ = 0;
  int shift_ = 64;
  int filter_shift_ = 64;
  bool zero_ = false;
};

// out[i] is the number of distinct n-grams of row index[i] (row i where index is null) that are in the set.
void overlap(const HashSet& set, const TokenRows& rows, const std::int64_t* index, std::size_t count, int n,
             std::int32_t* out);

}  // namespace cdr::ngram
