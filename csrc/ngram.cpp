#include "ngram.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "pool.h"

namespace cdr::ngram {
namespace {

constexpr std::uint64_t kBase = 0x9E3779B97F4A7C15u;
constexpr std::size_t kFirstSlots = 64;
constexpr int kFilterBitsPerSlot = 3;        // as a power of two
constexpr std::size_t kRowsPerBlock = 512;   // what one thread takes at a time
constexpr std::size_t kAhead = 8;            // rows that are on their way to the cache
constexpr std::int64_t kPrefetchBytes = 1024;

constexpr std::uint64_t rotate(std::uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

// SipHash-1-3 (Aumasson and Bernstein 2012), fed with bytes already packed into little-endian words.
class SipHash {
 public:
  explicit SipHash(Key key)
      : start_{key.first ^ 0x736F6D6570736575u, key.second ^ 0x646F72616E646F6Du, key.first ^ 0x6C7967656E657261u,
               key.second ^ 0x7465646279746573u} {
    restart();
  }

  void restart() {
    v0_ = start_[0];
    v1_ = start_[1];
    v2_ = start_[2];
    v3_ = start_[3];
  }

  void compress(std::uint64_t word) {
    v3_ ^= word;
    round();
    v0_ ^= word;
  }

  // last: the size % 8 bytes that fill no word.
  std::uint64_t finish(std::uint64_t last, std::uint64_t size) {
    compress(last | (size << 56));
    v2_ ^= 0xFF;
    round();
    round();
    round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
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

  std::array<std::uint64_t, 4> start_;
  std::uint64_t v0_, v1_, v2_, v3_;
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

std::uint64_t mask(Key key) { return (std::uint64_t{1} << key.bits) - 1; }

std::uint64_t load(const std::uint8_t* token) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  std::uint64_t value = 0;
  for (int i = 0; i < kTokenBytes; ++i) value |= std::uint64_t{token[i]} << (8 * i);
  return value;
#else
  static_assert(kTokenBytes == 7);
  std::uint32_t low, high;  // they share a byte, so that nothing beyond the token is read
  std::memcpy(&low, token, sizeof(low));
  std::memcpy(&high, token + 3, sizeof(high));
  return low | std::uint64_t{high >> 8} << 32;
#endif
}

void store(std::uint64_t value, std::uint8_t* token) {
  for (int i = 0; i < kTokenBytes; ++i) token[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

std::int64_t count_tokens(std::string_view text) {
  std::int64_t count = 0;
  bool open = false;
  for (const char c : text) {
    const bool inside = kFold[static_cast<unsigned char>(c)] != 0;
    count += inside && !open;
    open = inside;
  }
  return count;
}

void hash_text(std::string_view text, SipHash hash, std::uint64_t kept, std::uint8_t* out) {
  const auto* at = reinterpret_cast<const unsigned char*>(text.data());
  const unsigned char* const end = at + text.size();
  for (;;) {
    while (at != end && kFold[*at] == 0) ++at;
    if (at == end) return;
    hash.restart();
    std::uint64_t word = 0, size = 0;
    for (; at != end && kFold[*at] != 0; ++at) {
      word |= std::uint64_t{kFold[*at]} << (8 * (size & 7));
      if ((++size & 7) == 0) {
        hash.compress(word);
        word = 0;
      }
    }
    store(hash.finish(word, size) & kept, out);
    out += kTokenBytes;
  }
}

// Calls sink with the hash of each n-gram: the sum of its tokens' hashes times kBase^n .. kBase^1, modulo 2^64. The
// last factor spreads the tokens over the high bits, which the bitmap of a HashSet looks at.
template <class Sink>
void roll(TokenRow row, int n, Sink sink) {
  if (row.count < n) return;
  std::uint64_t hash = 0, leaving = 1;
  for (int i = 0; i < n; ++i) {
    hash = (hash + load(row.tokens + i * kTokenBytes)) * kBase;
    leaving *= kBase;
  }
  sink(hash);
  const std::uint8_t* out = row.tokens;
  const std::uint8_t* const end = row.tokens + row.count * kTokenBytes;
  for (const std::uint8_t* in = out + n * kTokenBytes; in != end; in += kTokenBytes, out += kTokenBytes) {
    hash = (hash + (load(in) - load(out) * leaving)) * kBase;
    sink(hash);
  }
}

std::int32_t distinct(std::vector<std::uint64_t>& found) {
  if (found.size() < 2) return static_cast<std::int32_t>(found.size());
  std::sort(found.begin(), found.end());
  return static_cast<std::int32_t>(std::unique(found.begin(), found.end()) - found.begin());
}

std::int64_t row_of(const std::int64_t* index, std::size_t i) {
  return index ? index[i] : static_cast<std::int64_t>(i);
}

void prefetch(const void* address) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(address);
#else
  static_cast<void>(address);
#endif
}

// Calls body(first, last) for ranges that together are [0, count), on the threads of the pool.
template <class Body>
void for_ranges(std::size_t count, Body body) {
  parallel_for((count + kRowsPerBlock - 1) / kRowsPerBlock, [&](std::size_t block) {
    const std::size_t first = block * kRowsPerBlock;
    body(first, std::min(count, first + kRowsPerBlock));
  });
}

// offsets[i + 1] holds the length of i; afterwards where i + 1 starts.
void add_up(std::int64_t* offsets, std::size_t count) {
  offsets[0] = 0;
  for (std::size_t i = 0; i < count; ++i) offsets[i + 1] += offsets[i];
}

}  // namespace

std::uint64_t sip_hash(std::string_view bytes, Key key) {
  SipHash hash(key);
  std::uint64_t word = 0, size = 0;
  for (const char c : bytes) {
    word |= std::uint64_t{static_cast<unsigned char>(c)} << (8 * (size & 7));
    if ((++size & 7) == 0) {
      hash.compress(word);
      word = 0;
    }
  }
  return hash.finish(word, size);
}

void count_tokens(const std::string_view* texts, std::size_t count, std::int64_t* offsets) {
  for_ranges(count, [=](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) offsets[i + 1] = count_tokens(texts[i]);
  });
  add_up(offsets, count);
}

void hash_texts(const std::string_view* texts, std::size_t count, Key key, const std::int64_t* offsets,
                std::uint8_t* out) {
  const SipHash hash(key);
  for_ranges(count, [=](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) hash_text(texts[i], hash, mask(key), out + offsets[i] * kTokenBytes);
  });
}

void hash_tokens(const std::string_view* tokens, std::size_t count, Key key, std::uint8_t* out) {
  for_ranges(count, [=](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) store(sip_hash(tokens[i], key) & mask(key), out + i * kTokenBytes);
  });
}

TokenRow TokenRows::at(std::int64_t row) const {
  std::size_t b = 0;
  std::int64_t local = row;
  while (local >= blocks[b].rows) local -= blocks[b++].rows;
  const std::int64_t first = blocks[b].offsets[local], last = blocks[b].offsets[local + 1];
  if (first < 0 || last < first || last > blocks[b].count) {
    throw std::invalid_argument("tokens: row " + std::to_string(row) + " is damaged, it spans " + std::to_string(first) +
                             " to " + std::to_string(last) + " of " + std::to_string(blocks[b].count) + " tokens");
  }
  const std::uint8_t* tokens = blocks[b].tokens + first * kTokenBytes;
  if (blocks[b].file) blocks[b].file->check_at(tokens, static_cast<std::uint64_t>(last - first) * kTokenBytes);
  return {tokens, last - first};
}

void take_offsets(const TokenRows& rows, const std::int64_t* index, std::size_t count, std::int64_t* offsets) {
  for (std::size_t i = 0; i < count; ++i) offsets[i + 1] = rows.at(row_of(index, i)).count;
  add_up(offsets, count);
}

void take_tokens(const TokenRows& rows, const std::int64_t* index, std::size_t count, const std::int64_t* offsets,
                 std::uint8_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const TokenRow row = rows.at(row_of(index, i));
    if (row.count > 0) {
      std::memcpy(out + offsets[i] * kTokenBytes, row.tokens, static_cast<std::size_t>(row.count) * kTokenBytes);
    }
  }
}

void ngram_offsets(const TokenRows& rows, int n, std::int64_t* offsets) {
  const auto count = static_cast<std::size_t>(rows.size());
  for (std::size_t i = 0; i < count; ++i) {
    offsets[i + 1] = std::max<std::int64_t>(0, rows.at(static_cast<std::int64_t>(i)).count - n + 1);
  }
  add_up(offsets, count);
}

void ngrams(const TokenRows& rows, int n, const std::int64_t* offsets, std::uint64_t* out) {
  for_ranges(static_cast<std::size_t>(rows.size()), [&](std::size_t first, std::size_t last) {
    std::uint64_t* at = out + offsets[first];
    for (std::size_t i = first; i < last; ++i) {
      roll(rows.at(static_cast<std::int64_t>(i)), n, [&](std::uint64_t hash) { *at++ = hash; });
    }
  });
}

Key process_key() {
  static const Key key = [] {
    std::random_device source;
    const auto word = [&source] { return std::uint64_t{source()} << 32 | source(); };
    const std::uint64_t first = word();
    return Key{first, word()};
  }();
  return key;
}

std::size_t HashSet::home(std::uint64_t value) const {
  return static_cast<std::size_t>(SipHash(key_).finish(value, 0) >> shift_);  // one word, and every time: no length
}

bool HashSet::find(std::uint64_t value) const {
  if (value == 0) return zero_;
  for (std::size_t i = home(value);; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i] == value) return true;
    if (slots_[i] == 0) return false;
  }
}

void HashSet::place(std::uint64_t value) {
  const std::uint64_t bit = value >> filter_shift_;
  filter_[bit >> 6] |= std::uint64_t{1} << (bit & 63);
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
  filter_shift_ = shift_ - kFilterBitsPerSlot;
  filter_.assign((slots << kFilterBitsPerSlot) / 64, 0);
  if (zero_) filter_[0] |= 1;
  used_ = 0;
  for (const std::uint64_t value : old) {
    if (value != 0) place(value);
  }
}

void HashSet::insert(const std::uint64_t* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (values[i] == 0) {
      zero_ = true;
      if (!filter_.empty()) filter_[0] |= 1;
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

void overlap(const HashSet& set, const TokenRows& rows, const std::int64_t* index, std::size_t count, int n,
             std::int32_t* out) {
  if (set.size() == 0) {
    std::fill_n(out, count, 0);
    return;
  }
  for_ranges(count, [&](std::size_t first, std::size_t last) {
    std::vector<std::uint64_t> found;
    std::array<TokenRow, kAhead> ahead{};
    const auto fetch = [&](std::size_t i) {
      const TokenRow row = rows.at(row_of(index, i));
      const std::int64_t bytes = std::min<std::int64_t>(row.count * kTokenBytes, kPrefetchBytes);
      for (std::int64_t at = 0; at < bytes; at += 64) prefetch(row.tokens + at);
      ahead[i % kAhead] = row;
    };
    for (std::size_t i = first; i < std::min(last, first + kAhead); ++i) fetch(i);
    for (std::size_t i = first; i < last; ++i) {
      const TokenRow row = ahead[i % kAhead];
      if (i + kAhead < last) fetch(i + kAhead);
      found.clear();
      roll(row, n, [&](std::uint64_t hash) {
        if (set.contains(hash)) found.push_back(hash);
      });
      out[i] = distinct(found);
    }
  });
}

}  // namespace cdr::ngram
