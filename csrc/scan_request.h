// What sets of columns ask of a scan, and where its rows are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "scan_probe.h"

namespace cdr {
namespace scan {

struct Gate {
  Probe probe;
  double below, above;  // q.u under the one fails, at or above the other passes
};

// What one set of columns asks of the scan.
struct Request {
  Scorer scorer;
  std::vector<Gate> gates;
  bool open = false;  // every row passes
  bool tells = false;  // the one gate is on the query's cosine

  Request(const Index& index, const Rows& rows, const Columns& columns) : scorer(rows, columns) {
    std::vector<std::int64_t> wanted;
    std::vector<bool> flip;
    for (std::int64_t j : scorer.gated()) {
      const double scale = columns.scale[j];
      if (columns.gate[j] == -INFINITY || (scale == 0 && columns.shift[j] >= columns.gate[j])) open = true;
      if (scale == 0) continue;  // the value is the shift
      wanted.push_back(j);
      flip.push_back(scale < 0);
    }
    if (open) return;
    std::vector<Probe> probes = make_probes(index.rotation, index.alpha, columns, wanted, flip);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const std::int64_t j = wanted[i];
      const double scale = std::fabs(columns.scale[j]);
      const double gate = (columns.gate[j] - columns.shift[j]) / scale;
      const double size = std::fabs(columns.gate[j]) + std::fabs(columns.shift[j]);
      // docs/proofs.md, S10.
      const double off = (16.0 * kUlp * size + 4.0 * kLeast) / scale + 16.0 * kUlp;
      gates.push_back({std::move(probes[i]), gate - off, gate + off});
    }
    tells = wanted.size() == 1 && wanted[0] == 0 && !flip[0];
  }
};

// Where a row of the index is.
struct Place {
  const Codes* codes;
  std::int64_t row;
};

// The bits that are set in 0 .. 15.
struct BitsOf4 {
  std::int16_t at[4], count;
};
constexpr BitsOf4 kBitsOf4[16] = {
    {{0, 0, 0, 0}, 0}, {{0, 0, 0, 0}, 1}, {{1, 0, 0, 0}, 1}, {{0, 1, 0, 0}, 2}, {{2, 0, 0, 0}, 1}, {{0, 2, 0, 0}, 2},
    {{1, 2, 0, 0}, 2}, {{0, 1, 2, 0}, 3}, {{3, 0, 0, 0}, 1}, {{0, 3, 0, 0}, 2}, {{1, 3, 0, 0}, 2}, {{0, 1, 3, 0}, 3},
    {{2, 3, 0, 0}, 2}, {{0, 2, 3, 0}, 3}, {{1, 2, 3, 0}, 3}, {{0, 1, 2, 3}, 4}};

// What the bounds say of a relevance, which is in -1 .. 1 (docs/proofs.md, S15).
constexpr float kToldPad = 1e-7f;
inline float told_low(double low) {
  return low > -1.0 ? static_cast<float>(std::min(low, 1.0) - static_cast<double>(kToldPad)) : -1.0f;
}
inline float told_high(double high) {
  return high < 1.0 ? static_cast<float>(std::max(high, -1.0) + static_cast<double>(kToldPad)) : 1.0f;
}
inline void tell(Found& found, double low, double high) {
  found.low.push_back(told_low(low));
  found.high.push_back(told_high(high));
}

}  // namespace scan
}  // namespace cdr
