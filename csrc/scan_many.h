// The scan for many sets of columns at once: the codes are read once for all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "scan_request.h"

namespace cdr {
namespace scan {

// Queries from which threshold() screens them together, and the rows of a block then.
constexpr std::size_t kTogether = 4;
constexpr std::int64_t kBlockTogether = 512, kTile = 32;

// The screen of many queries reads rows that stand side by side, four dimensions of 8 rows to a register.
struct Laid {
  std::int64_t rows = 0, widths[2] = {};
  // [tile][width / 4][kTile][4] per block; beyond the rows zeros.
  alignas(32) std::int8_t codes[2][kBlockTogether * 64];
  alignas(32) std::int32_t bias[2][kBlockTogether];  // kBias times the sum of the row's codes
  alignas(32) float scale[kBlockTogether], rho[kBlockTogether], beta[2][kBlockTogether];
  alignas(32) float norm[2][kBlockTogether];  // of the row's codes in the block
  std::uint32_t living[kBlockTogether / kTile];
};
// Fills block b of the rows that are laid side by side, from codes [n, widths[b]].
using Lay = void (*)(const std::int8_t* codes, std::int64_t n, int b, Laid& laid);
// masks[t]: the bits of the living rows of tile t of which the bounds of stages 1 and 2 do not say that they are below.
using Together = void (*)(const Laid& laid, const Coarse& gate, std::uint32_t* masks);
// low[i], high[i]: the bounds of stage 3 of the row first + rows[i]; bit i % 4 of may[i / 4] is set where it is not
// below. rows, low and high have room for a multiple of 4, rows with rows in it.
using Whole = void (*)(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                       std::int64_t n, const Probe& probe, double below, double* low, double* high, std::uint8_t* may);

struct ManyLoops {
  Lay lay;
  Together together;
  Whole whole;
};
// Those of this processor.
ManyLoops many_loops();

// The same for many requests at once, n <= kBlockTogether: first the screen with all of them, the codes side by side;
// then stage 3 for what it keeps of each; then the stored rows that are left of all.
class TogetherScan {
 public:
  TogetherScan(const Index& index, const Rows& rows, const double* squared_norms, const std::uint8_t* alive,
               const std::vector<Request>& requests, const std::vector<Coarse>& coarse, const ManyLoops& loops, bool bounds)
      : rows_(rows), squared_norms_(squared_norms), alive_(alive), requests_(requests), coarse_(coarse),
        loops_(loops), bounds_(bounds), laid_(new Laid()) {
    for (int b = 0; b < kBlocks; ++b) widths_[b] = block_width(index.rotation.dim, b);
    for (int b = 0; b < 2; ++b) laid_->widths[b] = widths_[b];
    std::size_t most = 0;
    for (const Request& request : requests) most = std::max(most, request.gates.size());
    bounds_of_.resize(2 * most * kStride);
  }

  // found: one per request; nothing is added for the open ones.
  void scan(const Place& at, std::int64_t n, std::int64_t first, Found* found) {
    lay(at, n, first);
    left_.clear();
    unsure_.clear();
    const std::int64_t tiles = (n + kTile - 1) / kTile;
    std::uint32_t masks[kBlockTogether / kTile], of_gate[kBlockTogether / kTile];
    std::int16_t list[kStride], open[kStride];
    std::uint8_t may[kStride / 4];
    double *low = bounds_of_.data(), *high = low + bounds_of_.size() / 2;
    const Coarse* coarse = coarse_.data();
    for (std::size_t s = 0; s < requests_.size(); ++s) {
      const Request& request = requests_[s];
      if (request.open) continue;
      fetch_next(at, n, s);
      std::fill_n(masks, tiles, 0u);
      for (std::size_t g = 0; g < request.gates.size(); ++g) {
        loops_.together(*laid_, *coarse++, of_gate);
        for (std::int64_t t = 0; t < tiles; ++t) masks[t] |= of_gate[t];
      }
      std::int64_t count = 0;
      for (std::int64_t t = 0; t < tiles; ++t)
        for (std::int64_t i = 0; i < kTile; i += 4) {
          const BitsOf4& set = kBitsOf4[masks[t] >> i & 15u];
          for (int j = 0; j < 4; ++j) list[count + j] = static_cast<std::int16_t>(t * kTile + i + set.at[j]);
          count += set.count;
        }
      if (!count) continue;
      for (std::int64_t i = count; i % 4; ++i) list[i] = list[count - 1];
      std::fill_n(may, (count + 3) / 4, std::uint8_t{0});
      for (std::size_t g = 0; g < request.gates.size(); ++g)
        loops_.whole(*at.codes, widths_, at.row, list, count, request.gates[g].probe, request.gates[g].below,
                     low + g * kStride, high + g * kStride, may);
      if (count % 4) may[count / 4] = static_cast<std::uint8_t>(may[count / 4] & ((1u << (count % 4)) - 1));
      std::int64_t rest = 0;
      for (std::int64_t i = 0; i < count; i += 4) {
        const BitsOf4& set = kBitsOf4[may[i / 4]];
        for (int j = 0; j < 4; ++j) open[rest + j] = static_cast<std::int16_t>(i + set.at[j]);
        rest += set.count;
      }
      for (std::int64_t o = 0; o < rest; ++o) {
        const std::size_t i = static_cast<std::size_t>(open[o]);
        bool passes = false;
        for (std::size_t g = 0; g < request.gates.size(); ++g)
          passes = passes || low[g * kStride + i] >= request.gates[g].above;
        if (!passes) unsure_.push_back(left_.size());
        left_.push_back({list[i], passes, static_cast<std::uint32_t>(s), low[i], high[i]});
      }
    }
    const std::int64_t row_bytes = rows_.dim * static_cast<std::int64_t>(size_of(rows_.dtype));
    const std::size_t ahead = static_cast<std::size_t>(kRowsAhead), rest = unsure_.size();
    const auto stored = [&](std::size_t i) { return rows_.at(first + left_[unsure_[i]].row); };
    for (std::size_t i = 0; i < std::min(rest, ahead); ++i) prefetch(stored(i), row_bytes);
    for (std::size_t i = 0; i < rest; ++i) {
      if (i + ahead < rest) prefetch(stored(i + ahead), row_bytes);
      Left& left = left_[unsure_[i]];
      const bool passes = requests_[left.request].scorer.passes(first + left.row, squared_norms_[first + left.row]);
      left.passes = passes;
    }
    for (const Left& left : left_) {
      if (!left.passes) continue;
      Found& to = found[left.request];
      to.rows.push_back(first + left.row);
      if (!bounds_) continue;
      if (requests_[left.request].tells)
        tell(to, left.low, left.high);
      else
        tell(to, -1.0, 1.0);
    }
  }

 private:
  struct Left {
    std::int16_t row;
    bool passes;
    std::uint32_t request;
    double low, high;
  };
  static constexpr std::size_t kStride = kBlockTogether + 4;

  // A share of the codes that come next, while those of this block are worked on.
  void fetch_next(const Place& at, std::int64_t n, std::size_t s) {
    const std::int64_t share = std::min(kBlockTogether, at.codes->rows - at.row - n);
    const std::int64_t count = static_cast<std::int64_t>(requests_.size()), i = static_cast<std::int64_t>(s);
    const std::int64_t from = at.row + n + share * i / count, rows = share * (i + 1) / count - share * i / count;
    for (int b = 0; b < kBlocks; ++b) prefetch(at.codes->blocks[b] + from * widths_[b], rows * widths_[b]);
    prefetch(at.codes->numbers + from * kNumbers, rows * kNumbers * static_cast<std::int64_t>(sizeof(float)));
  }

  void lay(const Place& at, std::int64_t n, std::int64_t first) {
    Laid& laid = *laid_;
    laid.rows = n;
    const std::int64_t padded = (n + kTile - 1) / kTile * kTile;
    for (int b = 0; b < 2; ++b) loops_.lay(at.codes->blocks[b] + at.row * widths_[b], n, b, laid);
    const float* numbers = at.codes->numbers + at.row * kNumbers;
    for (std::int64_t i = 0; i < padded; ++i) {
      const float* x = i < n ? numbers + i * kNumbers : numbers;
      laid.scale[i] = x[kScale];
      laid.rho[i] = x[kRho] * kUp;
      laid.beta[0][i] = x[kBeta1] * kUp;
      laid.beta[1][i] = x[kBeta2] * kUp;
    }
    for (std::int64_t t = 0; t * kTile < n; ++t) {
      std::uint32_t mask = 0;
      for (std::int64_t i = 0; i < std::min(kTile, n - t * kTile); ++i)
        if (!alive_ || alive_[first + t * kTile + i]) mask |= 1u << i;
      laid.living[t] = mask;
    }
  }

  const Rows& rows_;
  const double* squared_norms_;
  const std::uint8_t* alive_;
  const std::vector<Request>& requests_;
  const std::vector<Coarse>& coarse_;
  const ManyLoops& loops_;
  const bool bounds_;
  std::int64_t widths_[kBlocks];
  std::unique_ptr<Laid> laid_;
  std::vector<Left> left_;
  std::vector<std::size_t> unsure_;
  std::vector<double> bounds_of_;  // low [gates, kStride], then high
};

}  // namespace scan
}  // namespace cdr
