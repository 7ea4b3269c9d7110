// The loops of many queries as every machine has them.
#include <cmath>
#include <cstring>

#include "scan_many.h"

namespace cdr {
namespace scan {
namespace {

void lay_generic(const std::int8_t* codes, std::int64_t width, std::int64_t n, std::uint8_t* to, std::int32_t* squares,
                 float* norms) {
  std::memset(to, 128, static_cast<std::size_t>(kTile * width));
  for (std::int64_t i = 0; i < n; ++i, codes += width)
    for (std::int64_t d = 0; d < width; ++d) {
      to[d / 4 * kTile * 4 + i * 4 + d % 4] = static_cast<std::uint8_t>(codes[d] + 128);
      squares[i] += codes[d] * codes[d];
    }
  for (std::int64_t i = 0; i < kTile; ++i) norms[i] = std::sqrt(static_cast<float>(squares[i])) * kUp;
}

// The sums go on with one grain; unsigned: they may run over until the offset is added.
void add_grain(const std::uint8_t* codes, const Coarse& gate, int grain, std::uint32_t* sums) {
  const std::int8_t* k = gate.k.data() + grain * kGrain;
  for (std::int64_t i = 0; i < kTile; ++i) sums[i] <<= gate.shift[static_cast<std::size_t>(grain)];
  for (int d = 0; d < kGrain; d += 4, codes += 4 * kTile)
    for (std::int64_t i = 0; i < kTile; ++i)
      for (int l = 0; l < 4; ++l) sums[i] += static_cast<std::uint32_t>(codes[4 * i + l] * k[d + l]);
}

void screen_generic(const std::uint8_t* codes, int grains, const RowNumbers& numbers, std::int64_t row,
                    const Coarse* gates, std::size_t count, std::int32_t* sums, std::uint32_t* masks) {
  for (std::size_t g = 0; g < count; ++g, sums += kTile, masks += kTiles) {
    const auto& gate = gates[g].screen;
    std::uint32_t all[kTile] = {}, mask = 0;
    for (int s = 0; s < grains; ++s) add_grain(codes + s * kGrain * kTile, gates[g], s, all);
    for (std::int64_t i = 0; i < kTile; ++i) {
      const std::int64_t at = row + i;
      sums[i] = static_cast<std::int32_t>(all[i]);
      const std::int32_t sum = static_cast<std::int32_t>(all[i] + static_cast<std::uint32_t>(gate.offset));
      const float error = (numbers.rho[at] + gate.zeta * numbers.beta[at]) + gate.eps * numbers.screened[at];
      if (!(numbers.scale[at] * (gate.step * static_cast<float>(sum)) + error < gate.below)) mask |= 1u << i;
    }
    *masks = mask;
  }
}

void narrow_generic(const std::uint8_t* codes, int screened, int grains, const RowNumbers& numbers, std::int64_t row,
                    Narrowing* all, std::size_t count) {
  for (Narrowing* each = all; each < all + count; ++each) {
    const auto& gate = each->gate->narrow;
    std::uint32_t sums[kTile];
    std::memcpy(sums, each->sums, sizeof sums);
    for (int s = screened; s <= grains; ++s) add_grain(codes + s % grains * kGrain * kTile, *each->gate, s, sums);
    each->may = each->sure = 0;
    for (std::int64_t i = 0; i < kTile; ++i) {
      const std::int64_t at = row + i;
      const std::int32_t sum = static_cast<std::int32_t>(sums[i] + static_cast<std::uint32_t>(gate.offset));
      const float middle = gate.center + numbers.scale[at] * (gate.step * static_cast<float>(sum));
      const float error = (numbers.rho[at] + gate.eps * numbers.whole[at]) + gate.slack;
      const float low = middle - error, high = middle + error;
      if (!(high < gate.below)) each->may |= 1u << i;
      if (low >= gate.above) each->sure |= 1u << i;
      if (!each->low) continue;
      each->low[i] = told_low(static_cast<double>(low));
      each->high[i] = told_high(static_cast<double>(high));
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

ManyLoops many_loops_generic() {
  return {63, 1, false, lay_generic, screen_generic, narrow_generic, list_generic, whole_generic};
}

}  // namespace scan
}  // namespace cdr
