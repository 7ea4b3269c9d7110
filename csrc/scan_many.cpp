#include "scan_many.h"

#include <algorithm>
#include <cstring>

namespace cdr {
namespace scan {
namespace {

constexpr std::int64_t kTilesAhead = 2;  // whose codes are brought nearer

// Brings a share of the codes of the tile that begins at this row nearer: from the part `from` of `of` to the next.
CDR_INLINE void fetch(const Codes& codes, const std::int64_t* widths, std::int64_t row, std::size_t from,
                      std::size_t to, std::size_t of) {
  const std::int64_t n = std::min(kTile, codes.rows - row);
  if (n <= 0) return;
  const std::int64_t begin = n * static_cast<std::int64_t>(from) / static_cast<std::int64_t>(of);
  const std::int64_t rows = n * static_cast<std::int64_t>(to) / static_cast<std::int64_t>(of) - begin;
  for (int b = 0; b < kBlocks; ++b) prefetch(codes.blocks[b] + (row + begin) * widths[b], rows * widths[b]);
  prefetch(codes.numbers + (row + begin) * kNumbers, rows * kNumbers * static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace

ManyLoops many_loops() {
#if CDR_X86
  if (simd() == Simd::avx512) return many_loops_avx512();
  if (simd() == Simd::avx2) return many_loops_avx2();
#endif
  return many_loops_generic();
}

Many::Many(const Index& index_, const std::vector<Request>& requests_)
    : index(index_), requests(requests_), loops(many_loops()) {
  for (const Request& request : requests)
    for (const Gate& gate : request.gates) {
      coarse.emplace_back(gate, index.rotation.dim, index.alpha, loops.reach);
      if (loops.planes) planes.emplace_back(gate.probe);
    }
}

ManyScan::ManyScan(const Many& many, const Rows& rows, const double* squared_norms, const std::uint8_t* alive,
                   bool bounds)
    : many_(many), rows_(rows), squared_norms_(squared_norms), alive_(alive), bounds_(bounds),
      screened_(grains_screened(many.index.rotation.dim)), grains_(grains_of(many.index.rotation.dim)),
      row_bytes_(rows.row_bytes()), numbers_(new RowNumbers()) {
  std::size_t most = 0, telling = 0;
  for (std::size_t s = 0; s < many.requests.size(); ++s) {
    const Request& request = many.requests[s];
    most = std::max(most, request.gates.size());
    request_of_.insert(request_of_.end(), request.gates.size(), s);
    telling_.push_back(bounds && request.tells ? static_cast<std::int64_t>(telling++) : -1);
  }
  known_.reset(new float[telling * static_cast<std::size_t>(2 * kBlockMany)]);
  for (int b = 0; b < kBlocks; ++b) widths_[b] = block_width(many.index.rotation.dim, b);
  room_.resize(static_cast<std::size_t>(grains_ * kGrain * kTile) + 64);
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(room_.data());
  codes_ = room_.data() + (64 - start % 64) % 64;
  sums_.resize(many.coarse.size() * static_cast<std::size_t>(kTile));
  may_.resize(many.coarse.size() * static_cast<std::size_t>(kTiles));
  sure_.resize(may_.size());
  narrowings_.resize(many.coarse.size());
  narrowed_.resize(many.coarse.size());
  low_.resize(most * kRoom);
  high_.resize(most * kRoom);
  left_.end.resize(many.requests.size());
}

void ManyScan::scan(const Place& at, std::int64_t n, std::int64_t first, Pieces& found) {
  all_live_ = !alive_ || !std::memchr(alive_ + first, 0, static_cast<std::size_t>(n));
  std::memset(sure_.data(), 0, sure_.size() * sizeof sure_[0]);
  for (std::int64_t t = 0; t * kTile < n; ++t) tile(at, n, first, t);
  unsure_.clear();
  asks_.clear();
  left_.size = 0;
  std::size_t gate = 0;
  for (std::size_t s = 0; s < many_.requests.size(); ++s) {
    if (!many_.requests[s].open && !many_.requests[s].gates.empty()) settle(at, n, s, gate);
    left_.end[s] = left_.size;
    gate += many_.requests[s].gates.size();
  }
  decide(first);
  append(first, found);
}

// Which rows of tile t may pass, and which do.
void ManyScan::tile(const Place& at, std::int64_t block_rows, std::int64_t first, std::int64_t t) {
  const std::int64_t begin = t * kTile, n = std::min(kTile, block_rows - begin), row = at.row + begin;
  const Codes& codes = *at.codes;
  const float* number = codes.numbers + row * kNumbers;
  RowNumbers& numbers = *numbers_;
  for (std::int64_t i = begin; i < begin + n; ++i, number += kNumbers) {
    numbers.scale[i] = number[kScale];
    numbers.rho[i] = number[kRho] * kUp;
    numbers.beta[i] = number[kBeta2] * kUp;
  }
  std::memset(squares_, 0, sizeof squares_);
  lay(codes, row, n, 0, 2, numbers.scale + begin, numbers.screened + begin);
  const std::size_t gates = many_.coarse.size();
  for (std::size_t g = 0; g < gates; g += kSide) {
    const std::size_t to = std::min(gates, g + kSide);
    fetch(codes, widths_, row + kTilesAhead * kTile, g, to, gates);
    many_.loops.screen(codes_, screened_, numbers, begin, many_.coarse.data() + g, to - g,
                       sums_.data() + g * static_cast<std::size_t>(kTile),
                       may_.data() + g * static_cast<std::size_t>(kTiles) + t);
  }
  const std::uint32_t alive = living(first + begin, n);
  std::size_t count = 0;
  for (std::size_t g = 0; g < gates; ++g) {
    std::uint32_t& may = may_[g * static_cast<std::size_t>(kTiles) + static_cast<std::size_t>(t)];
    std::uint32_t left = may &= alive;
    for (int i = 1; i < many_.loops.several; ++i) left &= left - 1;  // one bit less
    narrowed_[count] = g;
    count += left != 0;
  }
  if (!count) return;
  lay(codes, row, n, 2, kBlocks, numbers.scale + begin, numbers.whole + begin);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t g = narrowed_[i];
    float *low = low_of(request_of_[g]), *high = high_of(request_of_[g]);
    narrowings_[i] = {&many_.coarse[g], sums_.data() + g * static_cast<std::size_t>(kTile), low ? low + begin : low,
                      high ? high + begin : high, 0, 0};
  }
  many_.loops.narrow(codes_, screened_, grains_, numbers, begin, narrowings_.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t to = narrowed_[i] * static_cast<std::size_t>(kTiles) + static_cast<std::size_t>(t);
    may_[to] &= narrowings_[i].may;
    sure_[to] = may_[to] & narrowings_[i].sure;
  }
}

// The blocks from .. to of a tile's codes; norms: of these and what was laid before, times the scales.
void ManyScan::lay(const Codes& codes, std::int64_t row, std::int64_t n, int from, int to, const float* scales,
                   float* norms) {
  for (int b = from; b < to; ++b)
    many_.loops.lay(codes.blocks[b] + row * widths_[b], widths_[b], n,
                    codes_ + block_begin(many_.index.rotation.dim, b) * kTile, squares_, norms);
  for (std::int64_t i = 0; i < kTile; ++i) norms[i] *= scales[i];
}

// Which of the rows first .. first + n, n <= kTile, are alive.
std::uint32_t ManyScan::living(std::int64_t first, std::int64_t n) const {
  std::uint32_t mask = n == kTile ? 0xffffffffu : (1u << n) - 1;
  for (std::int64_t i = 0; !all_live_ && i < n; ++i)
    if (!alive_[first + i]) mask &= ~(1u << i);
  return mask;
}

// Stage 3 of what is open of a request, whose first gate is `gate`; then all that may pass goes to left_.
void ManyScan::settle(const Place& at, std::int64_t n, std::size_t s, std::size_t gate) {
  const std::int64_t tiles = (n + kTile - 1) / kTile;
  std::uint32_t* may = may_.data() + gate * static_cast<std::size_t>(kTiles);
  std::uint32_t* sure = sure_.data() + gate * static_cast<std::size_t>(kTiles);
  std::uint32_t open[kTiles];
  for (std::int64_t t = 0; t < tiles; ++t) {
    for (std::size_t g = 1; g < many_.requests[s].gates.size(); ++g) {
      may[t] |= may[g * static_cast<std::size_t>(kTiles) + static_cast<std::size_t>(t)];
      sure[t] |= sure[g * static_cast<std::size_t>(kTiles) + static_cast<std::size_t>(t)];
    }
    open[t] = may[t] & ~sure[t];
  }
  const std::int64_t asked = many_.loops.list(open, tiles, list_);
  if (asked) ask_codes(at, s, gate, asked);
  const std::size_t count = static_cast<std::size_t>(many_.loops.list(may, tiles, list_));
  const std::size_t room = left_.size + count + 1;
  if (left_.row.size() < room) {
    left_.row.resize(2 * room);
    left_.passes.resize(2 * room);
    left_.low.resize(2 * room);
    left_.high.resize(2 * room);
  }
  const float *low = low_of(s), *high = high_of(s);
  std::size_t to = left_.size, unsure = unsure_.size();
  unsure_.resize(unsure + count + 1);
  for (std::size_t i = 0; i < count; ++i, ++to) {
    const std::int16_t row = list_[i];
    const bool passes = sure[row / kTile] >> (row % kTile) & 1u;
    left_.row[to] = row;
    left_.passes[to] = passes;
    left_.low[to] = low ? low[row] : -1.0f;
    left_.high[to] = high ? high[row] : 1.0f;
    unsure_[unsure] = static_cast<std::uint32_t>(to);
    unsure += !passes;
  }
  unsure_.resize(unsure);
  asks_.resize(unsure, static_cast<std::uint32_t>(s));
  left_.size = to;
}

// Stage 3 of the rows in list_.
void ManyScan::ask_codes(const Place& at, std::size_t s, std::size_t gate, std::int64_t count) {
  const std::vector<Gate>& gates = many_.requests[s].gates;
  std::uint32_t* may = may_.data() + gate * static_cast<std::size_t>(kTiles);
  std::uint32_t* sure = sure_.data() + gate * static_cast<std::size_t>(kTiles);
  std::uint8_t says[kRoom / 4] = {};
  for (std::int64_t i = count; i % 4; ++i) list_[i] = list_[count - 1];
  for (std::size_t g = 0; g < gates.size(); ++g)
    many_.loops.whole(*at.codes, widths_, at.row, list_, count, gates[g].probe,
                      many_.loops.planes ? &many_.planes[gate + g] : nullptr, gates[g].below,
                      low_.data() + g * kRoom, high_.data() + g * kRoom, says);
  float *low = low_of(s), *high = high_of(s);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int16_t row = list_[i];
    const std::uint32_t bit = 1u << (row % kTile);
    bool passes = false;
    for (std::size_t g = 0; g < gates.size(); ++g)
      passes |= low_[g * kRoom + static_cast<std::size_t>(i)] >= gates[g].above;
    if (!(says[i / 4] >> (i % 4) & 1u)) may[row / kTile] &= ~bit;
    if (passes) sure[row / kTile] |= bit;
    if (!low) continue;
    low[row] = told_low(low_[static_cast<std::size_t>(i)]);
    high[row] = told_high(high_[static_cast<std::size_t>(i)]);
  }
}

// The stored rows that are left of all, each for all who ask.
void ManyScan::decide(std::int64_t first) {
  std::uint32_t begin[kBlockMany + 1] = {};
  for (const std::uint32_t i : unsure_) ++begin[left_.row[i] + 1];
  for (std::int64_t i = 0; i < kBlockMany; ++i) begin[i + 1] += begin[i];
  by_row_.resize(unsure_.size());
  for (std::size_t i = 0; i < unsure_.size(); ++i)
    by_row_[begin[left_.row[unsure_[i]]]++] = static_cast<std::uint32_t>(i);
  const std::size_t rest = unsure_.size(), ahead = static_cast<std::size_t>(kRowsAhead);
  const auto row_of = [&](std::size_t i) { return first + left_.row[unsure_[by_row_[i]]]; };
  for (std::size_t i = 0; i < std::min(rest, ahead); ++i) prefetch(rows_.at(row_of(i)), row_bytes_);
  for (std::size_t i = 0; i < rest; ++i) {
    if (i + ahead < rest && row_of(i + ahead) != row_of(i + ahead - 1))
      prefetch(rows_.at(row_of(i + ahead)), row_bytes_);
    const std::int64_t row = row_of(i);
    left_.passes[unsure_[by_row_[i]]] = many_.requests[asks_[by_row_[i]]].scorer.passes(row, squared_norms_[row]);
  }
}

void ManyScan::append(std::int64_t first, Pieces& found) const {
  std::size_t to = found.rows.size();
  found.rows.resize(to + left_.size + 1);
  found.low.resize(bounds_ ? found.rows.size() : 0);
  found.high.resize(found.low.size());
  std::size_t i = 0;
  for (const std::size_t end : left_.end) {
    for (; i < end; ++i) {
      found.rows[to] = first + left_.row[i];
      if (bounds_) {
        found.low[to] = left_.low[i];
        found.high[to] = left_.high[i];
      }
      to += left_.passes[i];
    }
    found.end.push_back(to);
  }
  found.rows.resize(to);
  found.low.resize(bounds_ ? to : 0);
  found.high.resize(found.low.size());
}

}  // namespace scan
}  // namespace cdr
