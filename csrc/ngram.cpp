#include "ngram.h"

#include <algorithm>
#include <array>

namespace cdr::ngram {
namespace {

constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15u;
constexpr std::size_t kFirstSlots = 16;

// The finaliser of splitmix64, a bijection that takes 0 to 0.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t rotate(std::uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

// SipHash-1-3, fed one byte at a time (Aumasson and Bernstein 2012).
class SipHash {
 public:
  explicit SipHash(std::uint64_t key) : key0_(key), key1_(mix(key)) { restart(); }

  void restart() {
    v0_ = key0_ ^ 0x736F6D6570736575u;
    v1_ = key1_ ^ 0x646F72616E646F6Du;
    v2_ = key0_ ^ 0x6C7967656E657261u;
    v3_ = key1_ ^ 0x7465646279746573u;
    word_ = 0;
    size_ = 0;
  }

  void add(unsigned char byte) {
    word_ |= std::uint64_t{byte} << (8 * (size_ & 7));
    if ((++size_ & 7) == 0) {
      compress(word_);
      word_ = 0;
    }
  }

  std::uint64_t finish() {
    compress(word_ | (std::uint64_t{size_} << 56));
    v2_ ^= 0xFF;
    round();
    round();
    round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  void compress(std::uint64_t word) {
    v3_ ^= word;
    round();
    v0_ ^= word;
  }

  void round() {
    v0_ += v1_;
    v1_ = rotate(v1_, 13) ^ v0_;
    v0_ = rotate(v0_, 32);
    v2_ += v3_;
    v3_ = rotate(v3_, 16) ^ v2_;
    v0_ += v3_;
    v3_ = rotate(v3_, 21) ^ v0_;
    v2_ += v1_;
    v1_ = rotate(v1_, 17) ^ v2_;
    v2_ = rotate(v2_, 32);
  }

  std::uint64_t key0_, key1_, v0_, v1_, v2_, v3_, word_, size_;
};

// The folded byte of a token's byte, 0 for a byte that parts tokens.
constexpr std::array<unsigned char, 256> token_bytes() {
  std::array<unsigned char, 256> fold{};
  for (int b = '0'; b <= '9'; ++b) fold[b] = static_cast<unsigned char>(b);
  for (int b = 'a'; b <= 'z'; ++b) {
    fold[b] = static_cast<unsigned char>(b);
    fold[b - 'a' + 'A'] = static_cast<unsigned char>(b);
  }
  for (int b = 0x80; b <= 0xFF; ++b) fold[b] = static_cast<unsigned char>(b);
  return fold;
}
constexpr auto kFold = token_bytes();

// Calls sink with the hash of each n-gram: a polynomial in kBase over the token hashes, mixed with n.
template <class Sink>
void roll(const std::uint64_t* tokens, std::int64_t count, int n, Sink sink) {
  if (count < n) return;
  const auto length = static_cast<std::uint64_t>(n);
  std::uint64_t hash = 0;
  std::uint64_t leading = 1;
  for (int i = 0; i < n; ++i) {
    hash = hash * kBase + tokens[i];
    if (i > 0) leading *= kBase;
  }
  sink(mix(hash + length));
  for (std::int64_t i = n; i < count; ++i) {
    hash = (hash - tokens[i - n] * leading) * kBase + tokens[i];
    sink(mix(hash + length));
  }
}

std::int32_t distinct(std::vector<std::uint64_t>& found) {
  if (found.size() < 2) return static_cast<std::int32_t>(found.size());
  std::sort(found.begin(), found.end());
  return static_cast<std::int32_t>(std::unique(found.begin(), found.end()) - found.begin());
}

}  // namespace

bool valid_offsets(const std::int64_t* offsets, std::size_t count, std::int64_t end) {
  return count > 0 && offsets[0] == 0 && offsets[count - 1] == end &&
         std::is_sorted(offsets, offsets + count);
}

std::uint64_t hash_bytes(const char* bytes, std::size_t size, std::uint64_t key) {
  SipHash hash(key);
  for (std::size_t i = 0; i < size; ++i) hash.add(static_cast<unsigned char>(bytes[i]));
  return hash.finish();
}

Ragged hash_texts(const char* blob, const std::int64_t* offsets, std::size_t texts, std::uint64_t key) {
  Ragged result;
  result.offsets.reserve(texts + 1);
  result.values.reserve(static_cast<std::size_t>(offsets[texts] - offsets[0]) / 5);
  SipHash hash(key);
  for (std::size_t row = 0; row < texts; ++row) {
    bool open = false;
    for (std::int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      const unsigned char byte = kFold[static_cast<unsigned char>(blob[i])];
      if (byte != 0) {
        if (!open) hash.restart();
        open = true;
        hash.add(byte);
      } else if (open) {
        result.values.push_back(hash.finish());
        open = false;
      }
    }
    if (open) result.values.push_back(hash.finish());
    result.offsets.push_back(static_cast<std::int64_t>(result.values.size()));
  }
  return result;
}

void hash_tokens(const char* blob, const std::int64_t* offsets, std::size_t tokens, std::uint64_t key,
                 std::uint64_t* out) {
  for (std::size_t i = 0; i < tokens; ++i) {
    out[i] = hash_bytes(blob + offsets[i], static_cast<std::size_t>(offsets[i + 1] - offsets[i]), key);
  }
}

Ragged ngrams(const std::int64_t* offsets, const std::uint64_t* tokens, std::size_t rows, int n) {
  Ragged result;
  result.offsets.reserve(rows + 1);
  std::int64_t total = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    total += std::max<std::int64_t>(0, offsets[row + 1] - offsets[row] - n + 1);
    result.offsets.push_back(total);
  }
  result.values.resize(static_cast<std::size_t>(total));
  std::uint64_t* out = result.values.data();
  for (std::size_t row = 0; row < rows; ++row) {
    roll(tokens + offsets[row], offsets[row + 1] - offsets[row], n, [&](std::uint64_t hash) { *out++ = hash; });
  }
  return result;
}

void HashSet::place(std::uint64_t value) {
  std::size_t i = home(value);
  while (slots_[i] != 0 && slots_[i] != value) i = (i + 1) & (slots_.size() - 1);
  if (slots_[i] == 0) {
    slots_[i] = value;
    ++used_;
  }
}

void HashSet::grow(std::size_t slots) {
  std::vector<std::uint64_t> old(slots);
  old.swap(slots_);
  shift_ = 64;
  for (std::size_t s = slots; s > 1; s /= 2) --shift_;
  used_ = 0;
  for (const std::uint64_t value : old) {
    if (value != 0) place(value);
  }
}

void HashSet::insert(const std::uint64_t* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (values[i] == 0) {
      zero_ = true;
      continue;
    }
    if (2 * (used_ + 1) > slots_.size()) grow(std::max(kFirstSlots, 2 * slots_.size()));
    place(values[i]);
  }
}

std::vector<std::uint64_t> HashSet::values() const {
  std::vector<std::uint64_t> result;
  result.reserve(size());
  if (zero_) result.push_back(0);
  for (const std::uint64_t value : slots_) {
    if (value != 0) result.push_back(value);
  }
  std::sort(result.begin(), result.end());
  return result;
}

void overlap(const HashSet& set, const std::int64_t* offsets, const std::uint64_t* values, std::size_t rows,
             std::int32_t* out) {
  std::vector<std::uint64_t> found;
  for (std::size_t row = 0; row < rows; ++row) {
    found.clear();
    for (std::int64_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      if (set.contains(values[i])) found.push_back(values[i]);
    }
    out[row] = distinct(found);
  }
}

void overlap_tokens(const HashSet& set, const std::int64_t* offsets, const std::uint64_t* tokens,
                    std::size_t rows, int n, std::int32_t* out) {
  std::vector<std::uint64_t> found;
  for (std::size_t row = 0; row < rows; ++row) {
    found.clear();
    roll(tokens + offsets[row], offsets[row + 1] - offsets[row], n, [&](std::uint64_t hash) {
      if (set.contains(hash)) found.push_back(hash);
    });
    out[row] = distinct(found);
  }
}

}  // namespace cdr::ngram
