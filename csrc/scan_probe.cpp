#include "scan_probe.h"

#include <algorithm>

#include "pool.h"

namespace cdr {
namespace scan {
namespace {

// t = V'q for several unit vectors q [count, dim]; a unit of work is a range of directions.
void rotate(const Rotation& rotation, const std::vector<double>& q, std::int64_t count, std::vector<double>& t) {
  const std::int64_t dim = rotation.dim;
  t.assign(static_cast<std::size_t>(count * dim), 0.0);
  constexpr std::int64_t kWidth = 64;
  const auto part = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t c = 0; c < count; ++c) {
      double* out = t.data() + c * dim;
      for (std::int64_t r = 0; r < dim; ++r) {
        const double x = q[static_cast<std::size_t>(c * dim + r)];
        const float* v = rotation.matrix + r * dim;
        for (std::int64_t i = from; i < to; ++i) out[i] += x * static_cast<double>(v[i]);
      }
    }
  };
  parallel_for(units(dim, kWidth), [&](std::size_t unit) {
    const std::int64_t from = static_cast<std::int64_t>(unit) * kWidth;
    part(from, std::min(dim, from + kWidth));
  });
}

}  // namespace

std::vector<Probe> make_probes(const Rotation& rotation, double alpha, const Columns& columns,
                               const std::vector<std::int64_t>& wanted, const std::vector<bool>& flip) {
  const std::int64_t dim = rotation.dim, count = static_cast<std::int64_t>(wanted.size());
  std::vector<Probe> probes(wanted.size());
  std::vector<double> q(static_cast<std::size_t>(count * dim), 0.0), t, z(static_cast<std::size_t>(dim));
  for (std::int64_t c = 0; c < count; ++c) {
    const double* v = columns.vector(wanted[static_cast<std::size_t>(c)]);
    double* unit = q.data() + c * dim;
    double most = 0, sum = 0;
    for (std::int64_t i = 0; i < dim; ++i) most = std::max(most, std::fabs(v[i]));
    if (most == 0) continue;  // a coverage that covers nothing: all bounds are zero
    const int exponent = std::ilogb(most);
    for (std::int64_t i = 0; i < dim; ++i) {
      unit[i] = std::ldexp(v[i], -exponent);
      sum += unit[i] * unit[i];
    }
    const double norm = std::sqrt(sum), over = (flip[static_cast<std::size_t>(c)] ? -1.0 : 1.0) / norm;
    for (std::int64_t i = 0; i < dim; ++i) unit[i] *= over;
    probes[static_cast<std::size_t>(c)].norm = std::ldexp(norm, exponent);
  }
  rotate(rotation, q, count, t);
  const double gamma = static_cast<double>(dim + 16) * kUlp;
  for (std::int64_t c = 0; c < count; ++c) {
    Probe& probe = probes[static_cast<std::size_t>(c)];
    for (int b = 0; b < kBlocks; ++b) probe.k[b].assign(static_cast<std::size_t>(block_width(dim, b)), 0);
    if (probe.norm == 0) continue;
    const double* unit = q.data() + c * dim;
    const double* turned = t.data() + c * dim;
    double most = 0, zz = 0, sum = 0, outside[kBlocks] = {};
    for (std::int64_t i = 0; i < dim; ++i) {
      z[static_cast<std::size_t>(i)] = static_cast<double>(rotation.weight[i]) * turned[i];
      const double a = std::fabs(z[static_cast<std::size_t>(i)]);
      most = std::max(most, a);
      zz += a * a;
      sum += a;
      for (int b = 0; b + 1 < kBlocks; ++b)
        if (i >= block_begin(dim, b + 1)) outside[b] += turned[i] * turned[i];
      probe.center += static_cast<double>(rotation.mean[i]) * unit[i];
    }
    // docs/proofs.md, S5: |k| <= 32639 = 127 * 256 + 127, and 127 sum |k| <= 127 (sum |z| / s + D) < 2^31
    const double room = 2147483647.0 / 127.0 - static_cast<double>(dim) - 1.0;
    probe.step = std::max(most / 32638.0, sum / room * (1.0 + 1e-9));
    if (!(probe.step > 1e-290)) probe.step = 1.0;  // then every k is 0 and all of z is left over
    double left = 0;
    for (int b = 0; b < kBlocks; ++b) {
      const std::int64_t from = block_begin(dim, b);
      for (std::int64_t i = from; i < block_begin(dim, b + 1); ++i) {
        const double r = std::nearbyint(z[static_cast<std::size_t>(i)] / probe.step);
        const double e = z[static_cast<std::size_t>(i)] - probe.step * r;
        probe.k[b][static_cast<std::size_t>(i - from)] = static_cast<std::int16_t>(r);
        left += e * e;
      }
      if (b + 1 < kBlocks) probe.zeta[b] = std::sqrt(outside[b]) * kAbove + gamma * rotation.frobenius;
    }
    // docs/proofs.md: S7, S8 and S9.
    const double eps = std::sqrt(left) * kAbove + gamma * rotation.most_weight * rotation.frobenius;
    const double size = 1.0 + std::fabs(probe.center) + rotation.mean_norm + alpha * (std::sqrt(zz) + eps);
    probe.z = z;
    probe.rounding = gamma * rotation.most_weight * rotation.frobenius;
    probe.slack = 4.0 * (gamma + 16.0 * kUlp) * size + 1e-200;
    probe.error = alpha * eps * kAbove + probe.slack;
  }
  return probes;
}

}  // namespace scan
}  // namespace cdr
