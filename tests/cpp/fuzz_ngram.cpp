// A fuzzer of csrc/ngram against the plainest thing that does the same. Ten minutes of it, from the root:
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Icsrc \
//     tests/cpp/fuzz_ngram.cpp csrc/ngram.cpp csrc/pool.cpp -pthread -o build/fuzz_ngram &&
//   mkdir -p build/fuzz_corpus && build/fuzz_ngram -max_total_time=600 -max_len=4096 build/fuzz_corpus
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ngram.h"
#include "pool.h"

namespace {

namespace ng = cdr::ngram;

void check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_ngram: %s\n", what);
  std::abort();
}

std::vector<std::string> tokens_of(std::string_view text) {
  std::vector<std::string> tokens(1);
  for (const char c : text) {
    const auto b = static_cast<unsigned char>(c);
    if (b >= 'A' && b <= 'Z') {
      tokens.back() += static_cast<char>(b + 32);
    } else if ((b >= 'a' && b <= 'z') || (b >= '0' && b <= '9') || b >= 0x80) {
      tokens.back() += c;
    } else if (!tokens.back().empty()) {
      tokens.emplace_back();
    }
  }
  if (tokens.back().empty()) tokens.pop_back();
  return tokens;
}

using Grams = std::set<std::vector<std::string>>;

Grams grams_of(const std::vector<std::string>& tokens, std::size_t n) {
  Grams grams;
  for (std::size_t i = 0; i + n <= tokens.size(); ++i) grams.emplace(tokens.begin() + i, tokens.begin() + i + n);
  return grams;
}

struct Hashed {
  std::vector<std::int64_t> offsets;
  std::vector<std::uint8_t> tokens;

  Hashed(const std::vector<std::string_view>& texts, ng::Key key) : offsets(texts.size() + 1) {
    ng::count_tokens(texts.data(), texts.size(), offsets.data());
    tokens.resize(static_cast<std::size_t>(offsets.back()) * ng::kTokenBytes);
    ng::hash_texts(texts.data(), texts.size(), key, offsets.data(), tokens.data());
  }

  ng::TokenBlock block() const {
    return {offsets.data(), tokens.data(), static_cast<std::int64_t>(offsets.size()) - 1,
            static_cast<std::int64_t>(tokens.size()) / ng::kTokenBytes};
  }
};

std::vector<std::string_view> split(std::string_view data, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = data.find(at);
    parts.push_back(data.substr(0, end));
    if (end == std::string_view::npos) return parts;
    data.remove_prefix(end + 1);
  }
}

// Texts parted by 0x00; the first third of them was written, the rest are facts in two blocks.
void texts(std::string_view data, int n, ng::Key key) {
  const std::vector<std::string_view> all = split(data, '\0');
  const std::size_t written_count = all.size() / 3, half = written_count + (all.size() - written_count) / 2;
  const std::vector<std::string_view> written(all.begin(), all.begin() + written_count);
  const Hashed first({all.begin() + written_count, all.begin() + half}, key), second({all.begin() + half, all.end()}, key);
  const ng::TokenRows facts{{first.block(), second.block()}};

  const Hashed outputs(written, key);
  const ng::TokenRows output_rows{{outputs.block()}};
  std::vector<std::int64_t> offsets(written.size() + 1);
  ng::ngram_offsets(output_rows, n, offsets.data());
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(offsets.back()));
  ng::ngrams(output_rows, n, offsets.data(), hashes.data());
  ng::HashSet set;
  set.insert(hashes.data(), hashes.size());

  Grams blacklist;
  for (const std::string_view text : written) blacklist.merge(grams_of(tokens_of(text), static_cast<std::size_t>(n)));
  std::vector<std::int32_t> expected;
  for (std::size_t i = written_count; i < all.size(); ++i) {
    const std::vector<std::string> tokens = tokens_of(all[i]);
    const ng::TokenRow row = facts.at(static_cast<std::int64_t>(i - written_count));
    check(row.count == static_cast<std::int64_t>(tokens.size()), "another number of tokens");
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const std::uint64_t hash = ng::sip_hash(tokens[t], key) & ((std::uint64_t{1} << key.bits) - 1);
      check(std::memcmp(row.tokens + t * ng::kTokenBytes, &hash, ng::kTokenBytes) == 0, "another token hash");
    }
    std::int32_t count = 0;
    for (const auto& gram : grams_of(tokens, static_cast<std::size_t>(n))) count += blacklist.count(gram) ? 1 : 0;
    expected.push_back(count);
  }

  const std::size_t rows = expected.size();
  std::vector<std::int32_t> found(rows, -1);
  ng::overlap(set, facts, nullptr, rows, n, found.data());
  std::vector<std::int64_t> index(rows * 600);
  for (std::size_t i = 0; i < index.size(); ++i) index[i] = static_cast<std::int64_t>((i * 7) % rows);
  std::vector<std::int32_t> many(index.size(), -1);
  ng::overlap(set, facts, index.data(), index.size(), n, many.data());
  for (std::size_t i = 0; i < index.size(); ++i) check(many[i] == found[static_cast<std::size_t>(index[i])], "index");
  if (key.bits == ng::kTokenBits) {
    check(set.size() == blacklist.size(), "another blacklist");
    check(found == expected, "other counts");
  }

  std::vector<std::int64_t> taken_offsets(rows + 1);
  ng::take_offsets(facts, nullptr, rows, taken_offsets.data());
  std::vector<std::uint8_t> taken(static_cast<std::size_t>(taken_offsets.back()) * ng::kTokenBytes);
  ng::take_tokens(facts, nullptr, rows, taken_offsets.data(), taken.data());
  std::vector<std::uint8_t> both = first.tokens;
  both.insert(both.end(), second.tokens.begin(), second.tokens.end());
  check(taken == both, "other tokens taken");
}

// Values of a set, 8 bytes each, against std::set.
void values(std::string_view data) {
  std::vector<std::uint64_t> given(data.size() / 8);
  if (!given.empty()) std::memcpy(given.data(), data.data(), given.size() * 8);
  ng::HashSet set;
  std::set<std::uint64_t> truth;
  for (std::size_t i = 0; i < given.size(); ++i) {
    check(set.contains(given[i]) == (truth.count(given[i]) > 0), "contains, before");
    set.insert(&given[i], 1);
    truth.insert(given[i]);
  }
  ng::HashSet at_once;
  at_once.insert(given.data(), given.size());
  const std::vector<std::uint64_t> sorted(truth.begin(), truth.end());
  check(set.values() == sorted && at_once.values() == sorted, "values");
  for (const std::uint64_t value : given) {
    check(set.contains(value) && at_once.contains(value), "contains");
    check(at_once.contains(value + 1) == (truth.count(value + 1) > 0), "contains another");
  }
}

// Offsets as they come: an error or an answer, and no byte read that is not there.
void damaged(std::string_view data, int n) {
  const std::size_t words = data.size() / 2 / 8;
  std::vector<std::int64_t> offsets(words);
  if (words) std::memcpy(offsets.data(), data.data(), words * 8);
  for (std::int64_t& offset : offsets) {
    if ((offset & 3) != 0) offset = (offset >> 8) & 63;
  }
  const std::vector<std::uint8_t> tokens(data.begin() + static_cast<std::ptrdiff_t>(words * 8), data.end());
  if (words == 0) return;
  const ng::TokenRows rows{{{offsets.data(), tokens.data(), static_cast<std::int64_t>(words) - 1,
                             static_cast<std::int64_t>(tokens.size()) / ng::kTokenBytes}}};
  const auto count = static_cast<std::size_t>(rows.size());
  ng::HashSet set;
  const std::uint64_t one = 1;
  set.insert(&one, 1);
  std::vector<std::int32_t> out(count);
  try {
    ng::overlap(set, rows, nullptr, count, n, out.data());
    std::vector<std::int64_t> taken(count + 1);
    ng::take_offsets(rows, nullptr, count, taken.data());
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(taken.back()) * ng::kTokenBytes);
    ng::take_tokens(rows, nullptr, count, taken.data(), bytes.data());
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  if (size < 3) return 0;
  cdr::set_threads(1 + (bytes[0] & 1));
  const int n = 1 + bytes[1] % (bytes[1] & 0x80 ? ng::kMaxN : 4);
  const ng::Key key{bytes[2], std::uint64_t{bytes[2]} << 40, bytes[2] % 4 == 3 ? 1 + bytes[2] % ng::kTokenBits : 56};
  const std::string_view data(reinterpret_cast<const char*>(bytes) + 3, size - 3);
  switch (bytes[0] >> 1 & 3) {
    case 0:
      values(data);
      break;
    case 1:
      damaged(data, n);
      break;
    default:
      texts(data, n, key);
  }
  return 0;
}
