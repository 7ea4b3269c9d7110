// Gates in the integers that many of them are asked with at once.
#include <algorithm>
#include <cmath>

#include "scan_many.h"

namespace cdr {
namespace scan {
namespace {

double norm_of(const std::vector<double>& x, std::size_t n) {
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return std::sqrt(sum) * kAbove;
}

// At least what float32 rounds away of terms of this size in all (docs/proofs.md, S13).
double rounded_away(double size) { return std::ldexp(size + 1e-20, -18); }

}  // namespace

Coarse::Coarse(const Gate& gate, std::int64_t dim, double alpha, int reach)
    : k(static_cast<std::size_t>((grains_of(dim) + 1) * kGrain)), shift(k.size() / kGrain) {
  const Probe& probe = gate.probe;
  if (probe.z.empty()) return;
  const std::size_t grains = shift.size() - 1, screened = static_cast<std::size_t>(grains_screened(dim));
  std::vector<double> rest = probe.z;  // what the integers leave of it
  rest.resize(grains * kGrain);
  // What is left of the first grain is at most half its step: 2^(shifts - 1) of the last one's. All sums fit 31 bits.
  int shifts = 1 + std::ilogb(static_cast<double>(reach));
  while (std::ldexp(127.0 * reach * kGrain * static_cast<double>(grains + 1), shifts) >= 2147483648.0) --shifts;
  std::vector<double> step(grains + 1);
  for (std::size_t s = grains; s-- > 0;) {  // first the least that each may be
    for (std::size_t i = s * kGrain; i < (s + 1) * kGrain; ++i) step[s] = std::max(step[s], std::fabs(rest[i]));
    step[s] = std::max(step[s] / reach * (1.0 + 1e-12), step[s + 1]);
  }
  double at = std::max(step[0], 1e-30);
  if (!(at < 1e15) || !(std::fabs(gate.below) < 1e30) || !(std::fabs(gate.above) < 1e30)) return;  // beyond float32
  std::uint32_t sum = 0;
  for (std::size_t s = 0; s <= grains; ++s) {
    for (; s && shifts && 0.5 * at >= step[s]; ++shift[s], --shifts) at *= 0.5;
    sum <<= shift[s];
    double* x = rest.data() + s % grains * kGrain;
    for (std::size_t i = 0; i < kGrain; ++i) {
      const double r = std::nearbyint(x[i] / at);
      x[i] -= at * r;
      k[s * kGrain + i] = static_cast<std::int8_t>(r);
      sum += static_cast<std::uint32_t>(static_cast<std::int32_t>(r));
    }
    const bool all = s == grains;
    if (s + 1 != screened && !all) continue;
    const std::size_t n = all ? rest.size() : screened * kGrain;
    const double error = norm_of(rest, n) + probe.rounding;
    const double most = 2.0 * alpha * (norm_of(probe.z, std::min(n, probe.z.size())) + 2.0 * error) * kAbove;
    if (!(most < 1e15)) return;
    const std::int32_t offset = static_cast<std::int32_t>(-128u * sum);
    if (all) {
      const double slack = probe.slack + rounded_away(std::fabs(probe.center) + most);
      narrow = {offset, static_cast<float>(at), round_up(error), static_cast<float>(probe.center), round_up(slack),
                -round_up(-gate.below), round_up(gate.above)};
    } else {
      const double limit = gate.below - probe.center - probe.slack;
      const double below = limit - rounded_away(std::fabs(limit) + most);
      screen = {offset, static_cast<float>(at), round_up(error), round_up(probe.zeta[1]), -round_up(-below)};
    }
  }
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

}  // namespace scan
}  // namespace cdr
