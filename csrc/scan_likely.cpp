// likely(): of rows that a scan found, with bounds of their relevance, those that may be among the k best.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "pool.h"
#include "scan.h"

namespace cdr {
namespace scan {
namespace {

// From how many sets the largest strength is worth a pass over all rows.
constexpr std::size_t kMany = 8;
constexpr std::int64_t kRows = 65536;  // in one unit of that pass
constexpr std::int64_t kChunk = 64;    // bounds that are looked at together

// Calls body(i) for i < n, but for chunks of bounds that are all below what least() is at their beginning.
template <class Least, class Body>
void for_bounds(const float* bounds, std::int64_t n, const Least& least, const Body& body) {
  for (std::int64_t from = 0; from < n; from += kChunk) {
    const std::int64_t to = std::min(n, from + kChunk);
    const float at_least = least();
    int enough = 0;
    for (std::int64_t i = from; i < to; ++i) enough += bounds[i] >= at_least;
    for (std::int64_t i = from; enough && i < to; ++i) body(i);
  }
}

}  // namespace

std::vector<Likely> likely(const std::vector<Bounded>& all, std::int64_t rows, const std::uint8_t* alive,
                           const double* importance, const double* multiplier, std::int64_t k) {
  std::vector<Likely> out(all.size());
  const auto strength = [&](std::int64_t row) {
    return multiplier ? importance[row] * multiplier[row] : importance[row];
  };
  // Where a relevance times the largest strength is too little, the row's own need not be fetched from far.
  double most = std::numeric_limits<double>::infinity();
  if (all.size() >= kMany) {
    std::vector<double> parts(static_cast<std::size_t>((rows + kRows - 1) / kRows), 0.0);
    parallel_for(parts.size(), [&](std::size_t u) {
      const std::int64_t from = static_cast<std::int64_t>(u) * kRows, to = std::min(rows, from + kRows);
      double largest[8] = {};  // so that one need not wait for the other
      for (std::int64_t row = from; row < to; ++row)
        largest[row % 8] = std::max(largest[row % 8], strength(row));
      parts[u] = *std::max_element(largest, largest + 8);
    });
    most = parts.empty() ? 0.0 : *std::max_element(parts.begin(), parts.end());
  }
  const bool all_live = rows == 0 || !std::memchr(alive, 0, static_cast<std::size_t>(rows));
  parallel_for(all.size(), [&](std::size_t s) {
    const Bounded found = all[s];
    const auto lives = [&](std::int64_t i) { return all_live || alive[found.rows[i]]; };
    const auto score = [&](std::int64_t i, float bound) {
      return strength(found.rows[i]) * static_cast<double>(std::max(bound, 0.0f));
    };
    out[s].living = found.n;
    for (std::int64_t i = 0; !all_live && i < found.n; ++i) out[s].living -= !alive[found.rows[i]];
    if (k == 0) return;
    std::vector<double> best;  // the k largest lower bounds, the smallest first
    // A relevance below this is too little for any strength; with room for the rounding of scores that are no smaller
    // than the least normal number. Below it many relevances round to the same score.
    const auto least = [&] {
      if (best.size() < static_cast<std::size_t>(k) || best.front() < std::numeric_limits<double>::min()) return -2.0f;
      const double relevance = best.front() / most * (1.0 - 1e-6);
      return relevance > 1e-30 ? static_cast<float>(relevance) : -2.0f;
    };
    for_bounds(found.low, found.n, least, [&](std::int64_t i) {
      if (!lives(i)) return;
      const double low = score(i, found.low[i]);
      if (best.size() == static_cast<std::size_t>(k)) {
        if (!(low > best.front())) return;
        std::pop_heap(best.begin(), best.end(), std::greater<double>());
        best.pop_back();
      }
      best.push_back(low);
      std::push_heap(best.begin(), best.end(), std::greater<double>());
    });
    const bool all_of_them = out[s].living <= k;
    for_bounds(found.high, found.n, [&] { return all_of_them ? -2.0f : least(); }, [&](std::int64_t i) {
      if (lives(i) && (all_of_them || !(score(i, found.high[i]) < best.front()))) out[s].positions.push_back(i);
    });
  });
  return out;
}

}  // namespace scan
}  // namespace cdr
