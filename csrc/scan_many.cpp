#include "scan_many.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pool.h"

namespace cdr {
namespace scan {
namespace {

void lay_generic(const Codes& codes, const std::int64_t* widths, std::int64_t first, std::int64_t n, Laid& laid) {
  std::memset(laid.codes, 128, static_cast<std::size_t>((n + kTile - 1) / kTile * kTile * kScreened));
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint8_t* to = laid.codes + i / kTile * kTile * kScreened + i % kTile * 4;
    std::int32_t squares = 0;
    for (int b = 0; b < 2; ++b) {
      const std::int8_t* row = codes.blocks[b] + (first + i) * widths[b];
      for (std::int64_t d = 0; d < widths[b]; ++d) {
        const std::int64_t at = (b ? widths[0] : 0) + d;
        to[at / 4 * kTile * 4 + at % 4] = static_cast<std::uint8_t>(row[d] + 128);
        squares += row[d] * row[d];
      }
    }
    laid.norm[i] = std::sqrt(static_cast<float>(squares)) * kUp;
  }
}

void screen_generic(const Laid& laid, const Coarse* gates, std::size_t count, std::uint32_t* masks) {
  for (std::int64_t t = 0; t * kTile < laid.rows; ++t) {
    for (std::size_t g = 0; g < count; ++g) {
      const Coarse& gate = gates[g];
      const std::uint8_t* codes = laid.codes + t * kTile * kScreened;
      std::uint32_t sums[kTile] = {}, mask = 0;  // unsigned: they may run over until the offset is added
      for (int s = 0; s < laid.grains; ++s) {
        for (std::int64_t i = 0; i < kTile; ++i) sums[i] <<= gate.shift[s];
        for (int d = s * kGrain; d < (s + 1) * kGrain; d += 4, codes += 4 * kTile)
          for (std::int64_t i = 0; i < kTile; ++i)
            for (int l = 0; l < 4; ++l) sums[i] += static_cast<std::uint32_t>(codes[4 * i + l] * gate.k[d + l]);
      }
      for (std::int64_t i = 0; i < kTile; ++i) {
        const std::int64_t row = t * kTile + i;
        const std::int32_t sum = static_cast<std::int32_t>(sums[i] + static_cast<std::uint32_t>(gate.offset));
        const float error = (laid.rho[row] + gate.zeta * laid.beta[row]) + gate.eps * laid.norm[row];
        if (!(laid.scale[row] * (gate.step * static_cast<float>(sum)) + error < gate.below)) mask |= 1u << i;
      }
      masks[static_cast<std::int64_t>(g) * kTiles + t] = mask;
    }
  }
}

std::int64_t list_generic(const std::uint32_t* masks, std::int64_t tiles, std::int16_t* out) {
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < tiles; ++t) {
    if (!masks[t]) continue;
    for (std::int64_t i = 0; i < kTile; i += 4) {
      const BitsOf4& set = kBitsOf4[masks[t] >> i & 15u];
      for (int j = 0; j < 4; ++j) out[count + j] = static_cast<std::int16_t>(t * kTile + i + set.at[j]);
      count += set.count;
    }
  }
  return count;
}

void whole_generic(const Codes& codes, const std::int64_t* widths, std::int64_t first, const std::int16_t* rows,
                   std::int64_t n, const Probe& probe, const Planes*, double below, double* low, double* high,
                   std::uint8_t* may) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t row = first + rows[i];
    const float* numbers = codes.numbers + row * kNumbers;
    std::int32_t dot = 0;
    for (int b = 0; b < kBlocks; ++b)
      dot += dot_generic(codes.blocks[b] + row * widths[b], widths[b], probe.k[b].data());
    const double center = probe.center + probe.step * scaled(numbers, dot);
    const double error = static_cast<double>(numbers[kRho]) + probe.error;
    low[i] = center - error;
    high[i] = center + error;
    if (!(high[i] < below)) may[i / 4] = static_cast<std::uint8_t>(may[i / 4] | (1u << (i % 4)));
  }
}

}  // namespace

ManyLoops many_loops_generic() { return {63, false, lay_generic, screen_generic, list_generic, whole_generic}; }

ManyLoops many_loops() {
#if CDR_X86
  if (simd() == Simd::avx512) return many_loops_avx512();
  if (simd() == Simd::avx2) return many_loops_avx2();
#endif
  return many_loops_generic();
}

Coarse::Coarse(const Gate& gate, double alpha, int reach) {
  constexpr int kMostShifts = 9;  // 4 grains of 32 products of 127 * 127, shifted by no more, fit 31 bits
  const Probe& probe = gate.probe;
  const std::vector<double>& z = probe.leading;
  std::memset(k, 0, sizeof k);
  std::fill_n(shift, kGrains, 0);
  offset = 0;
  step = eps = 0.0f;
  zeta = round_up(probe.zeta[1]);
  below = -std::numeric_limits<float>::infinity();
  const auto end = [&](int s) { return std::min(z.size(), static_cast<std::size_t>((s + 1) * kGrain)); };
  const int grains = static_cast<int>(units(static_cast<std::int64_t>(z.size()), kGrain));
  double least[kGrains + 1] = {};  // what the step of a grain and those before must be
  for (int s = grains - 1; s >= 0; --s) {
    double largest = 0;
    for (std::size_t i = static_cast<std::size_t>(s * kGrain); i < end(s); ++i)
      largest = std::max(largest, std::fabs(z[i]));
    least[s] = std::max(least[s + 1], largest / reach * (1.0 + 1e-12));
  }
  double of_grain = std::max(least[0], 1e-30), sum = 0, squares = 0, left = 0;
  int shifts = 0;
  for (int s = 0; s < grains; ++s) {
    if (s)
      while (shifts + shift[s] < kMostShifts && 0.5 * of_grain >= least[s]) {
        of_grain *= 0.5;
        ++shift[s];
      }
    shifts += shift[s];
    sum = std::ldexp(sum, shift[s]);
    for (std::size_t i = static_cast<std::size_t>(s * kGrain); i < end(s); ++i) {
      const double r = std::nearbyint(z[i] / of_grain), e = z[i] - of_grain * r;
      k[i] = static_cast<std::int8_t>(r);
      sum += r;
      squares += of_grain * of_grain * r * r;
      left += e * e;
    }
  }
  offset = static_cast<std::int32_t>(-128.0 * sum);
  const double error = std::sqrt(left) * kAbove + probe.rounding;
  const double most = 2.0 * alpha * (std::sqrt(squares) + error) * kAbove;
  const double limit = gate.below - probe.center - probe.slack;
  const double lower = limit - std::ldexp(std::fabs(limit) + most + 1e-20, -18);
  // Beyond these the roundings are other ones: every row is kept.
  if (z.empty() || !(most < 1e15) || !(std::fabs(lower) < 1e30) || !(of_grain < 1e15)) return;
  step = static_cast<float>(of_grain);
  eps = round_up(error);
  below = -round_up(-lower);
}

Planes::Planes(const Probe& probe) {
  std::int64_t sum = 0;
  for (int b = 0; b < kBlocks; ++b) {
    const std::size_t width = (probe.k[b].size() + 63) / 64 * 64;
    high[b].assign(width, 0);
    low[b].assign(width, 0);
    for (std::size_t i = 0; i < probe.k[b].size(); ++i) {
      const int k = probe.k[b][i];
      const int rest = (k + 32768 + 128) % 256 - 128;  // -128 .. 127
      low[b][i] = static_cast<std::int8_t>(rest);
      high[b][i] = static_cast<std::int8_t>((k - rest) / 256);
      sum += k;
    }
  }
  offset = static_cast<std::int32_t>(-128 * sum);
}

Many::Many(const Index& index_, const std::vector<Request>& requests_)
    : index(index_), requests(requests_), loops(many_loops()) {
  for (const Request& request : requests)
    for (const Gate& gate : request.gates) {
      coarse.emplace_back(gate, index.alpha, loops.reach);
      if (loops.planes) planes.emplace_back(gate.probe);
    }
}

void lay_numbers(const Codes& codes, std::int64_t first, std::int64_t n, Laid& laid) {
  const float* numbers = codes.numbers + first * kNumbers;
  for (std::int64_t i = 0; i < n; ++i, numbers += kNumbers) {
    laid.scale[i] = numbers[kScale];
    laid.rho[i] = numbers[kRho] * kUp;
    laid.beta[i] = numbers[kBeta2] * kUp;
    laid.norm[i] *= numbers[kScale];
  }
}

ManyScan::ManyScan(const Many& many, const Rows& rows, const double* squared_norms, const std::uint8_t* alive,
                   bool bounds)
    : many_(many), rows_(rows), squared_norms_(squared_norms), alive_(alive), bounds_(bounds), laid_(new Laid) {
  std::size_t most = 0;
  for (const Request& request : many.requests) most = std::max(most, request.gates.size());
  for (int b = 0; b < kBlocks; ++b) widths_[b] = block_width(many.index.rotation.dim, b);
  laid_->grains = static_cast<int>((widths_[0] + widths_[1]) / kGrain);
  masks_.resize(many.coarse.size() * static_cast<std::size_t>(kTiles));
  low_.resize(most * kRoom);
  high_.resize(most * kRoom);
  left_.end.resize(many.requests.size());
}

void ManyScan::scan(const Place& at, std::int64_t n, std::int64_t first, Found* found) {
  lay(at, n, first);
  many_.loops.screen(*laid_, many_.coarse.data(), many_.coarse.size(), masks_.data());
  unsure_.clear();
  asks_.clear();
  const std::int64_t tiles = (n + kTile - 1) / kTile;
  std::size_t gate = 0, size = 0;
  for (std::size_t s = 0; s < many_.requests.size(); ++s) {
    const Request& request = many_.requests[s];
    const std::size_t gates = request.gates.size();
    left_.end[s] = size;
    if (request.open || !gates) continue;
    fetch_next(at, n, s);
    std::uint32_t* masks = masks_.data() + gate * static_cast<std::size_t>(kTiles);
    for (std::int64_t t = 0; t < tiles; ++t) {
      for (std::size_t g = 1; g < gates; ++g) masks[t] |= masks[g * static_cast<std::size_t>(kTiles) + t];
      masks[t] &= laid_->living[t];
    }
    const std::int64_t count = many_.loops.list(masks, tiles, list_);
    if (count) {
      const std::size_t room = size + static_cast<std::size_t>(count) + 4;
      if (left_.row.size() < room) {
        left_.row.resize(2 * room);
        left_.passes.resize(2 * room);
        left_.low.resize(2 * room);
        left_.high.resize(2 * room);
      }
      bound(at, s, gate, count);
      size = left_.end[s];
    }
    gate += gates;
  }
  decide(first);
  append(first, found);
}

// Stage 3 of what the screen left of a request, whose first gate is `gate`.
void ManyScan::bound(const Place& at, std::size_t s, std::size_t gate, std::int64_t count) {
  const Request& request = many_.requests[s];
  const std::size_t gates = request.gates.size();
  std::uint8_t may[kRoom / 4] = {};
  for (std::int64_t i = count; i % 4; ++i) list_[i] = list_[count - 1];
  for (std::size_t g = 0; g < gates; ++g)
    many_.loops.whole(*at.codes, widths_, at.row, list_, count, request.gates[g].probe,
                      many_.loops.planes ? &many_.planes[gate + g] : nullptr, request.gates[g].below,
                      low_.data() + g * kRoom, high_.data() + g * kRoom, may);
  if (count % 4) may[count / 4] = static_cast<std::uint8_t>(may[count / 4] & ((1u << (count % 4)) - 1));
  const bool tells = bounds_ && request.tells;
  std::size_t size = left_.end[s], unsure = unsure_.size();
  unsure_.resize(unsure + static_cast<std::size_t>(count) + 1);
  for (std::int64_t i = 0; i < count; i += 4) {
    const BitsOf4& set = kBitsOf4[may[i / 4]];
    for (int j = 0; j < set.count; ++j) {
      const std::size_t from = static_cast<std::size_t>(i + set.at[j]);
      bool passes = false;
      for (std::size_t g = 0; g < gates; ++g) passes |= low_[g * kRoom + from] >= request.gates[g].above;
      left_.row[size] = list_[from];
      left_.passes[size] = passes;
      left_.low[size] = tells ? told_low(low_[from]) : -1.0f;
      left_.high[size] = tells ? told_high(high_[from]) : 1.0f;
      unsure_[unsure] = static_cast<std::uint32_t>(size);
      unsure += !passes;
      ++size;
    }
  }
  unsure_.resize(unsure);
  asks_.resize(unsure, static_cast<std::uint32_t>(s));
  left_.end[s] = size;
}

// The stored rows that are left of all.
void ManyScan::decide(std::int64_t first) {
  const std::int64_t row_bytes = rows_.dim * static_cast<std::int64_t>(size_of(rows_.dtype));
  const std::size_t ahead = static_cast<std::size_t>(kRowsAhead), rest = unsure_.size();
  const auto stored = [&](std::size_t i) { return rows_.at(first + left_.row[unsure_[i]]); };
  for (std::size_t i = 0; i < std::min(rest, ahead); ++i) prefetch(stored(i), row_bytes);
  for (std::size_t i = 0; i < rest; ++i) {
    if (i + ahead < rest) prefetch(stored(i + ahead), row_bytes);
    const std::int64_t row = first + left_.row[unsure_[i]];
    left_.passes[unsure_[i]] = many_.requests[asks_[i]].scorer.passes(row, squared_norms_[row]);
  }
}

void ManyScan::append(std::int64_t first, Found* found) const {
  std::size_t from = 0;
  for (std::size_t s = 0; s < many_.requests.size(); ++s) {
    const std::size_t to = left_.end[s];
    if (from == to) continue;
    Found& out = found[s];
    const std::size_t before = out.rows.size();
    std::size_t size = before;
    out.rows.resize(before + (to - from));
    for (std::size_t i = from; i < to; ++i) {
      out.rows[size] = first + left_.row[i];
      size += left_.passes[i];
    }
    out.rows.resize(size);
    if (bounds_) {
      std::size_t at = before;
      out.low.resize(before + (to - from));
      out.high.resize(before + (to - from));
      for (std::size_t i = from; i < to; ++i) {
        out.low[at] = left_.low[i];
        out.high[at] = left_.high[i];
        at += left_.passes[i];
      }
      out.low.resize(size);
      out.high.resize(size);
    }
    from = to;
  }
}

// A share of the codes that come next, while those of this block are worked on.
void ManyScan::fetch_next(const Place& at, std::int64_t n, std::size_t request) const {
  const std::int64_t share = std::min(kBlockMany, at.codes->rows - at.row - n);
  const std::int64_t count = static_cast<std::int64_t>(many_.requests.size()), i = static_cast<std::int64_t>(request);
  const std::int64_t from = at.row + n + share * i / count, rows = share * (i + 1) / count - share * i / count;
  for (int b = 0; b < kBlocks; ++b) prefetch(at.codes->blocks[b] + from * widths_[b], rows * widths_[b]);
  prefetch(at.codes->numbers + from * kNumbers, rows * kNumbers * static_cast<std::int64_t>(sizeof(float)));
}

void ManyScan::lay(const Place& at, std::int64_t n, std::int64_t first) {
  Laid& laid = *laid_;
  laid.rows = n;
  many_.loops.lay(*at.codes, widths_, at.row, n, laid);
  lay_numbers(*at.codes, at.row, n, laid);
  const bool all = !alive_ || !std::memchr(alive_ + first, 0, static_cast<std::size_t>(n));
  for (std::int64_t t = 0; t * kTile < n; ++t) {
    const std::int64_t here = std::min(kTile, n - t * kTile);
    std::uint32_t mask = here == kTile ? 0xffffffffu : (1u << here) - 1;
    for (std::int64_t i = 0; !all && i < here; ++i)
      if (!alive_[first + t * kTile + i]) mask &= ~(1u << i);
    laid.living[t] = mask;
  }
}

}  // namespace scan
}  // namespace cdr
