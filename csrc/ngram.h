// N-grams of tokens as 64-bit hashes: tokens, rolling hash, a set of hashes, counts of distinct matches.
//
// Rows are ragged: row i of M is values[offsets[i]] .. values[offsets[i + 1]), offsets has M + 1 entries.
// Every function is pure and takes a pointer to the first of the rows to do, so blocks of rows can run
// on several threads. Callers have checked offsets with valid_offsets() and n with 1 <= n <= kMaxN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cdr::ngram {

inline constexpr int kMaxN = 32;

struct Ragged {
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint64_t> values;
};

// Whether offsets[0..count) is 0 <= ... <= end without a step back, starting at 0 and ending at end.
bool valid_offsets(const std::int64_t* offsets, std::size_t count, std::int64_t end);

// SipHash-1-3 with the 128-bit key (key, mix(key)): a keyed hash whose collisions cannot be made
// without the key. Key 0 is the all-zero key.
std::uint64_t hash_bytes(const char* bytes, std::size_t size, std::uint64_t key);

// Hashes of the tokens of each text: runs of ASCII letters and digits, folded to lower case, and of
// bytes >= 0x80, taken as they are. So ASCII texts come as they are, and a text with other characters
// comes as its tokens (folded, UTF-8) parted by spaces. Offsets count bytes of blob.
Ragged hash_texts(const char* blob, const std::int64_t* offsets, std::size_t texts, std::uint64_t key);

// out[i] is the hash of token i, whatever bytes it holds.
void hash_tokens(const char* blob, const std::int64_t* offsets, std::size_t tokens, std::uint64_t key,
                 std::uint64_t* out);

// Hashes of the n-grams of each row of token hashes, in order, repeats kept.
Ragged ngrams(const std::int64_t* offsets, const std::uint64_t* tokens, std::size_t rows, int n);

// A set of 64-bit hashes, open addressing, at most half full.
class HashSet {
 public:
  HashSet() = default;

  void insert(const std::uint64_t* values, std::size_t count);
  bool contains(std::uint64_t value) const {
    if (value == 0) return zero_;
    if (slots_.empty()) return false;
    for (std::size_t i = home(value);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i] == value) return true;
      if (slots_[i] == 0) return false;
    }
  }
  std::size_t size() const { return used_ + (zero_ ? 1 : 0); }
  std::size_t bytes() const { return slots_.size() * sizeof(std::uint64_t); }

  // Ascending.
  std::vector<std::uint64_t> values() const;

 private:
  // Multiplied, because the values of a caller need not be spread over their high bits.
  std::size_t home(std::uint64_t value) const {
    return static_cast<std::size_t>((value * 0x9E3779B97F4A7C15u) >> shift_);
  }
  void place(std::uint64_t value);
  void grow(std::size_t slots);

  std::vector<std::uint64_t> slots_;  // 0 is an empty slot; size is a power of two or 0
  std::size_t used_ = 0;
  int shift_ = 64;
  bool zero_ = false;
};

// out[i] is the number of distinct values of row i that are in the set.
void overlap(const HashSet& set, const std::int64_t* offsets, const std::uint64_t* values, std::size_t rows,
             std::int32_t* out);

// The same over the n-grams of rows of token hashes, which are never stored.
void overlap_tokens(const HashSet& set, const std::int64_t* offsets, const std::uint64_t* tokens,
                    std::size_t rows, int n, std::int32_t* out);

}  // namespace cdr::ngram
